"""Shift, padding, broadcast and context-parallel slices of a micro-batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_sc.objective import Draws, FullVocabulary, Support, TopKHead
from megatron_sc.rollouts import Rollout, RolloutError
from megatron_sc.training.batch import (
    Batch,
    BatchLayout,
    broadcast,
    collate,
    position_ids,
    sampler_distribution,
    slice_context,
)
from tests.distributed import run_ranks
from tests.rollouts import make_rollouts

HEAD = BatchLayout(micro_batch_size=2, seq_length=16, distribution="head", width=8)


def tokens_only(prompt: list[int], response: list[int], **fields: object) -> Rollout:
    length = len(response)
    values: dict[str, object] = {
        "prompt_ids": np.array(prompt, np.int32),
        "response_ids": np.array(response, np.int32),
        "response_mask": np.ones(length, bool),
        "sampled_logprobs": np.full(length, -0.5, np.float32),
        "weight_version": np.zeros(length, np.int32),
        "reward": 1.0,
        "group_id": 0,
    }
    return Rollout(**(values | fields))  # type: ignore[arg-type]


def test_response_token_is_predicted_one_position_before_it():
    layout = BatchLayout(1, 8, "none", 0)
    batch = collate([tokens_only([10, 11, 12], [20, 21])], [0.5], 0, layout)
    assert batch.tokens.tolist() == [[10, 11, 12, 20, 21, 0, 0, 0]]
    assert batch.mask.tolist() == [[0, 0, 1, 1, 0, 0, 0, 0]]
    assert batch.sampled_ids.tolist() == [[0, 0, 20, 21, 0, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0, 0, 0.5, 0.5, 0, 0, 0, 0]]
    assert batch.sampled_logprobs.tolist() == [[0, 0, -0.5, -0.5, 0, 0, 0, 0]]


def test_every_field_of_a_position_describes_the_same_token():
    rollouts = make_rollouts(1, 2, vocab=30, head=8)
    batch = collate(rollouts, [1.0, -1.0], 5, HEAD)
    for i, rollout in enumerate(rollouts):
        for j in range(len(rollout.response_ids)):
            at = (i, len(rollout.prompt_ids) - 1 + j)
            assert batch.tokens[at[0], at[1] + 1] == rollout.response_ids[j] == batch.sampled_ids[at]
            assert batch.mask[at] == rollout.response_mask[j]
            assert batch.ids[at].tolist() == rollout.head_ids[j].tolist()
            assert batch.logprobs[at].tolist() == rollout.head_logprobs[j].tolist()
            assert batch.log_tail_mass[at] == rollout.log_tail_mass[j]
            assert batch.staleness[at] == 5
    assert batch.mask.sum() == sum(r.response_mask.sum() for r in rollouts)


def test_narrow_heads_are_padded_not_guessed():
    rollout = dataclasses.replace(
        tokens_only([1], [2]), head_ids=np.array([[2, 3]], np.int32), head_logprobs=np.log([[0.6, 0.3]]).astype("f4")
    )
    batch = collate([rollout], [1.0], 0, BatchLayout(1, 4, "head", 4))
    assert batch.ids[0, 0].tolist() == [2, 3, -1, -1]
    assert batch.logprobs[0, 0, 2:].tolist() == [-np.inf, -np.inf]
    assert batch.log_tail_mass.isnan().all()


def test_positions_flatten_in_the_order_of_megatron_activations():
    batch = collate(make_rollouts(1, 2, vocab=30, head=8), [1.0, 2.0], 0, HEAD)
    rows = batch.by_position()
    s, b = 16, 2
    assert rows.ids.shape == (s * b, 8)
    for position in range(s):
        for i in range(b):
            assert rows.tokens[position * b + i] == batch.tokens[i, position]
            assert (rows.ids[position * b + i] == batch.ids[i, position]).all()


@pytest.mark.parametrize(
    ("distribution", "width", "kind"),
    [("head", 8, TopKHead), ("draws", 4, Draws), ("none", 0, type(None))],
)
def test_distribution_types(distribution, width, kind):
    layout = BatchLayout(2, 16, distribution, width)
    batch = collate(make_rollouts(1, 2, vocab=30, head=8), [1.0, 2.0], 0, layout)
    assert isinstance(sampler_distribution(batch.by_position(), distribution), kind)


def test_support_needs_a_truncating_sampler_and_head_refuses_one():
    rollouts = make_rollouts(1, 2, vocab=30, head=8)
    with pytest.raises(RolloutError, match="did not truncate"):
        collate(rollouts, [1.0, 1.0], 0, BatchLayout(2, 16, "support", 8))
    truncated = [dataclasses.replace(r, head_is_support=True) for r in rollouts]
    batch = collate(truncated, [1.0, 1.0], 0, BatchLayout(2, 16, "support", 8))
    assert isinstance(sampler_distribution(batch.by_position(), "support"), Support)
    with pytest.raises(RolloutError, match="--sampler-distribution support"):
        collate(truncated, [1.0, 1.0], 0, HEAD)


def test_full_vocabulary_is_put_in_the_order_of_ids():
    rollouts = make_rollouts(1, 2, vocab=12, head=12)
    batch = collate(rollouts, [1.0, 1.0], 0, BatchLayout(2, 16, "full", 12))
    at = len(rollouts[0].prompt_ids) - 1
    expected = np.empty(12, np.float32)
    expected[rollouts[0].head_ids[0]] = rollouts[0].head_logprobs[0]
    assert batch.logprobs[0, at].tolist() == expected.tolist()
    assert isinstance(sampler_distribution(batch.by_position(), "full"), FullVocabulary)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (BatchLayout(2, 8, "head", 8), "rollout of group 0 has .* tokens but --seq-length is 8"),
        (BatchLayout(2, 16, "head", 4), "heads of 8 tokens, but --head-size is 4"),
        (BatchLayout(2, 16, "draws", 3), "records 4 draws, but --num-draws is 3"),
        (BatchLayout(2, 16, "full", 30), "full needs all: --head-size 30"),
        (BatchLayout(1, 16, "head", 8), "a micro-batch has 1 rows, got 2 rollouts"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(layout, message):
    rollouts = make_rollouts(1, 2, vocab=30, head=8, longest=9, seed=3)
    with pytest.raises(ValueError, match=message):
        collate(rollouts, [1.0] * 2, 0, layout)


@pytest.mark.parametrize("distribution", ["head", "draws", "none"])
def test_rollouts_that_lack_what_is_asked_are_refused(distribution):
    layout = BatchLayout(1, 8, distribution, 4)
    if distribution == "none":
        collate([tokens_only([1], [2])], [1.0], 0, layout)
        return
    with pytest.raises(RolloutError, match=f"records no {distribution}"):
        collate([tokens_only([1], [2])], [1.0], 0, layout)


def test_context_parallel_slices_follow_the_shift():
    layout = BatchLayout(1, 8, "none", 0)
    batch = collate([tokens_only([0], [1, 2, 3, 4, 5, 6, 7])], [1.0], 0, layout)
    first, second = slice_context(batch, 0, 2), slice_context(batch, 1, 2)
    assert first.tokens.tolist() == [[0, 1, 6, 7]]
    assert first.sampled_ids.tolist() == [[1, 2, 7, 0]]
    assert first.mask.tolist() == [[1, 1, 1, 0]]
    assert second.tokens.tolist() == [[2, 3, 4, 5]]
    assert second.sampled_ids.tolist() == [[3, 4, 5, 6]]
    assert position_ids(first, 0, 2).tolist() == [[0, 1, 6, 7]]
    assert position_ids(second, 1, 2).tolist() == [[2, 3, 4, 5]]
    assert first.per_rollout.shape == batch.per_rollout.shape
    with pytest.raises(ValueError, match="--seq-length 8 must be a multiple of"):
        slice_context(batch, 0, 3)


def megatron_slices(size: int) -> list[bool]:
    """Whether our slices are those of Megatron's own function, for each rank of a context-parallel group."""
    from unittest import mock

    from megatron.core.utils import get_batch_on_this_cp_rank

    batch = collate(make_rollouts(1, 2, vocab=30, head=8), [1.0, 2.0], 0, HEAD)
    same = []
    for rank in range(size):
        with (
            mock.patch.object(dist, "get_world_size", return_value=size),
            mock.patch.object(dist, "get_rank", return_value=rank),
        ):
            theirs = get_batch_on_this_cp_rank({"ids": batch.ids, "tokens": batch.tokens}, False, cp_group=None)
        ours = slice_context(batch, rank, size)
        same.append(torch.equal(ours.ids, theirs["ids"]) and torch.equal(ours.tokens, theirs["tokens"]))
    return same


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_slices_match_megatron(size):
    assert run_ranks(megatron_slices, 1, size, megatron=True) == [[True] * size]


def broadcast_on_rank(distribution: str, width: int) -> tuple[bool, int]:
    """Rank 0 has a batch, rank 1 has none; how many collectives it takes."""
    layout = BatchLayout(2, 16, distribution, width)
    expected = collate(make_rollouts(1, 2, vocab=30, head=8), [1.0, -2.0], 3, layout)
    calls = []
    original = dist.broadcast

    def counted(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    dist.broadcast = counted
    try:
        mine = expected if dist.get_rank() == 0 else None
        received = broadcast(mine, layout, dist.group.WORLD, torch.device("cpu"))
    finally:
        dist.broadcast = original
    same = all(
        torch.equal(torch.nan_to_num(getattr(received, f.name)), torch.nan_to_num(getattr(expected, f.name)))
        and getattr(received, f.name).dtype == getattr(expected, f.name).dtype
        for f in dataclasses.fields(Batch)
    )
    return same, len(calls)


@pytest.mark.parametrize(("distribution", "width"), [("head", 8), ("draws", 4), ("none", 0)])
def test_broadcast_is_one_collective_and_exact(distribution, width):
    assert run_ranks(broadcast_on_rank, 2, distribution, width) == [(True, 1), (True, 1)]


@pytest.mark.parametrize(
    ("field", "at", "value", "message"),
    [
        ("prompt_ids", (1,), 40, "position 1: prompt_ids is 40, outside the true vocabulary"),
        ("response_ids", (0,), -3, "position 0: response_ids is -3, outside the true vocabulary"),
        ("head_ids", (0, 2), 30, "position 0: head_ids is 30, outside the true vocabulary"),
        ("draw_ids", (0, 1), -1, "position 0: draw_ids is -1, outside the true vocabulary"),
        ("head_logprobs", (0, 2), np.nan, "position 0, entry 2: head_logprobs is nan"),
        ("draw_logprobs", (0, 1), 0.5, "position 0, entry 1: draw_logprobs is 0.5"),
    ],
)
def test_a_bad_value_is_named_by_rollout_position_and_field(field, at, value, message):
    (rollout,) = make_rollouts(1, 1, vocab=30, head=8, seed=1)
    rollout.response_mask[:] = True
    layout = BatchLayout(1, 16, "head", 8, true_vocab_size=30)
    collate([rollout], [1.0], 0, layout)
    values = getattr(rollout, field).copy()
    values[at] = value
    with pytest.raises(RolloutError, match=f"rollout of group 0, {message}"):
        collate([dataclasses.replace(rollout, **{field: values})], [1.0], 0, layout)


def test_what_a_masked_position_records_is_not_looked_at():
    (rollout,) = make_rollouts(1, 1, vocab=30, head=8, seed=1)
    rollout.response_mask[0] = False
    rollout.head_ids[0], rollout.head_logprobs[0] = 99, np.nan
    collate([rollout], [1.0], 0, BatchLayout(1, 16, "head", 8, true_vocab_size=30))
