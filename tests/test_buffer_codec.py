"""The codec: lossless is bit-exact, the default is small, and its error is within the bound that is proven for it."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from benchmarks.buffer_faults import make_group
from benchmarks.rollouts import SHARES, bytes_a_token, make_table, measure_errors
from megatron_sc.objective import TopKHead
from megatron_sc.objective.reference import reference_position
from megatron_sc.rollouts import (
    HeadPolicy,
    Manifest,
    Rollout,
    RolloutError,
    RolloutReader,
    RolloutTable,
    RolloutWriter,
)
from megatron_sc.rollouts.codec import encode_heads, head_error_bound
from megatron_sc.rollouts.ragged import row_sums
from megatron_sc.rollouts.schema import ExpertRoutes
from tests.rollouts import make_rollouts, make_routes


def assert_same(found: Rollout, wanted: Rollout) -> None:
    for field in fields(Rollout):
        a, b = getattr(found, field.name), getattr(wanted, field.name)
        if isinstance(b, np.ndarray):
            assert a is not None, field.name
            assert a.dtype == b.dtype, field.name
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            assert a == b, field.name


def varied() -> list[Rollout]:
    """Rollouts with every combination of what may be missing; heads of different widths."""
    rollouts = make_rollouts(4, 2, vocab=96, head=8)
    rollouts[0] = replace(rollouts[0], head_ids=None, head_logprobs=None, log_tail_mass=None)
    rollouts[1] = replace(rollouts[1], draw_ids=None, draw_logprobs=None, advantage=-0.5, finish_reason="stop")
    rollouts[2] = replace(rollouts[2], draw_logprobs=None, metadata={"accuracy": 1.0, "name": "ä"})
    rollouts[3] = replace(rollouts[3], log_tail_mass=None)
    # Row 0 keeps 8 entries, the others end earlier.
    ids, logprobs = rollouts[4].head_ids.copy(), rollouts[4].head_logprobs.copy()
    for row in range(1, len(ids)):
        ids[row, 2 + row % 6 :], logprobs[row, 2 + row % 6 :] = -1, -np.inf
    rollouts[4] = replace(rollouts[4], head_ids=ids, head_logprobs=logprobs, log_tail_mass=None)
    return rollouts


def test_lossless_is_bit_exact(tmp_path):
    rollouts = varied()
    with RolloutWriter(tmp_path, Manifest(96, heads=HeadPolicy.lossless()), row_group_tokens=16) as writer:
        writer.write(rollouts)
    with RolloutReader(tmp_path) as reader:
        found = [rollout for group in reader.take(4, 0) for rollout in group.rollouts()]
    assert len(found) == len(rollouts)
    for a, b in zip(found, rollouts, strict=True):
        assert_same(a, b)


def test_expert_routes_come_back(tmp_path):
    rollouts = make_rollouts(1, 2, vocab=96, head=8)
    routes = [make_routes(len(r), 3, 2, 16, np.random.default_rng(i)) for i, r in enumerate(rollouts)]
    with RolloutWriter(tmp_path, Manifest(96, expert_routes=ExpertRoutes(3, 2, 16))) as writer:
        writer.write([replace(r, expert_routes=route) for r, route in zip(rollouts, routes, strict=True)])
    with RolloutReader(tmp_path) as reader:
        found = reader.take(1, 0)[0].rollouts()
    for rollout, wanted in zip(found, routes, strict=True):
        np.testing.assert_array_equal(rollout.expert_routes, wanted)


def test_expert_routes_of_another_length_are_refused():
    rollout = make_rollouts(1, 1, vocab=96, head=8)[0]
    with pytest.raises(RolloutError, match=r"expert_routes has shape \(3, 2, 2\) but must be \[\d+ tokens"):
        replace(rollout, expert_routes=np.zeros((3, 2, 2), np.int16))


def test_size_and_error_on_the_mixture():
    """At most 96 bytes a token; gradient below 1e-3 and correction below 2e-2 of lossless, by the loss itself."""
    assert bytes_a_token(HeadPolicy(), SHARES, jitter=0.3, tokens=16384) <= 96
    for gradient, correction in measure_errors(HeadPolicy(), rows=48, jitter=0.0).values():
        assert gradient < 1e-3
        assert correction < 2e-2


def test_bench_sees_a_codec_that_is_too_coarse():
    errors = measure_errors(HeadPolicy(dropped_norm=0.3, target_mass=0.9), rows=32, jitter=0.0)
    assert errors["mixture"][1] > 2e-2


@pytest.mark.parametrize("recorded", [True, False])
def test_dropped_mass_is_in_the_tail(recorded):
    table, _ = make_table(2, 64, 128, seed=1, jitter=0.3)
    if not recorded:
        none = table.log_tail_mass.slice(0, 0)
        table = replace(table, log_tail_mass=replace(none, offsets=np.zeros(3, np.int64)))
    before = row_sums(np.exp(table.head_logprobs.values.astype(np.float64)), table.head_offsets)
    encoded = encode_heads(table, HeadPolicy(precision="float32"))
    heads = encoded.head_offsets
    after = row_sums(np.exp(encoded.head_logprobs.values.astype(np.float64)), heads)
    assert len(encoded.head_ids.values) < len(table.head_ids.values) / 4
    assert (np.diff(heads) >= 1).all()
    wanted = np.exp(table.log_tail_mass.values.astype(np.float64)) if recorded else 1 - before
    np.testing.assert_allclose(
        np.exp(encoded.log_tail_mass.values.astype(np.float64)), wanted + before - after, rtol=1e-5
    )


def test_kept_heads_are_prefixes_and_obey_the_policy():
    table, _ = make_table(2, 64, 128, seed=2, jitter=0.5)
    policy = HeadPolicy(dropped_norm=0.05, target_mass=0.999, precision="float32")
    sizes = np.diff(encode_heads(table, policy).head_offsets)
    q = np.exp(table.head_logprobs.values.astype(np.float64)).reshape(-1, 128)
    for row, size in zip(q, sizes, strict=True):
        scale = (row**2).sum() - 2 * (row**3).sum() + (row**2).sum() ** 2

        def suffices(kept, row=row, scale=scale):
            norm = np.sqrt((row[kept:] ** 2).sum())
            return norm <= 0.05 * np.sqrt(scale) * 1.0001 or row[:kept].sum() >= 0.999 - 1e-6

        assert size == 128 or suffices(size)
        assert size == 1 or not suffices(size - 1) or (row[: size - 1].sum() < 0.999 + 1e-6)


def test_supports_keep_every_token():
    table = RolloutTable.from_rollouts([replace(r, head_is_support=True) for r in make_group(0, head=96)])
    encoded = encode_heads(table, HeadPolicy(dropped_norm=0.9, target_mass=0.1))
    np.testing.assert_array_equal(encoded.head_ids.values, table.head_ids.values)


@pytest.mark.parametrize("seed", range(4))
def test_error_is_within_the_bound(seed):
    """|q^ - q|_1 by the dense distributions of the reference, and the gradient's 1-norm, at most twice as large."""
    rng = np.random.default_rng(seed)
    vocab, k = 300, 64
    logits = 2.5 * rng.normal(size=(20, vocab))
    logq = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    order = np.argsort(-logq, axis=1)
    ranked = np.take_along_axis(logq, order, axis=1)
    rollout = Rollout(
        np.zeros(1, np.int32), order[:, 3].astype(np.int32), np.ones(20, bool), ranked[:, 3].astype(np.float32),
        np.zeros(20, np.int32), 0.0, 0, head_ids=order[:, :k].astype(np.int32),
        head_logprobs=ranked[:, :k].astype(np.float32),
        log_tail_mass=np.log(np.exp(ranked[:, k:]).sum(axis=1)).astype(np.float32),
    )  # fmt: skip
    policy = HeadPolicy(k=k, dropped_norm=0.1)
    table = RolloutTable.from_rollouts([rollout])
    encoded = encode_heads(table, policy)
    assert len(encoded.head_ids.values) < len(table.head_ids.values)

    def head(columns: RolloutTable) -> TopKHead:
        return TopKHead.ragged(
            *(torch.from_numpy(a) for a in (columns.head_ids.values, columns.head_logprobs.values.astype(np.float64),
                                            columns.head_offsets, columns.log_tail_mass.values)),
        )  # fmt: skip

    for row in range(20):
        trainer = torch.from_numpy(logits[row] + 0.1 * rng.normal(size=vocab))
        exact, coded = (reference_position(trainer, int(order[row, 3]), 1.0, head(t), row) for t in (table, encoded))
        p = torch.softmax(trainer, 0).numpy()
        kept = set(encoded.head_ids.values[encoded.head_offsets[row] : encoded.head_offsets[row + 1]].tolist())
        outside = np.array([v not in kept for v in range(vocab)])
        tail_q = np.exp(np.float64(encoded.log_tail_mass.values[row]))
        dropped = [v for v in order[row, :k] if v not in kept]
        ratio = np.log(p[dropped]) - logq[row, dropped] - np.log(p[outside].sum() / tail_q)
        bound = head_error_bound(table, encoded, policy, float(np.abs(ratio).max()))[row]
        error = (coded.weighted_sampler - exact.weighted_sampler).abs().sum().item()
        assert error <= bound * (1 + 1e-4) + 1e-6  # the recorded tail mass is a float32
        assert (coded.gradient - exact.gradient).abs().sum().item() <= 2 * bound * (1 + 1e-4) + 2e-6
        assert bound < tail_q  # the trivial bound is 2 tail_q


@pytest.mark.parametrize(
    "arguments",
    [{"k": 0}, {"target_mass": 0.0}, {"target_mass": 1.5}, {"dropped_norm": 1.0}, {"precision": "bfloat16"}],
)
def test_impossible_policies_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        HeadPolicy(**arguments)
