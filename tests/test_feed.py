"""The start of a step on several ranks: what is exchanged, and that all ranks go on together or stop together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_sc.rollouts import Rollout, RolloutError
from megatron_sc.training.agreement import Status, agree
from megatron_sc.training.batch import BatchLayout
from megatron_sc.training.config import ObjectiveConfig
from megatron_sc.training.feed import FedMicroBatches, FeedLayout, Place, RolloutFeed
from megatron_sc.training.source import step_advantages
from tests.distributed import RankError, run_ranks
from tests.rollouts import make_rollouts

CPU = torch.device("cpu")
OBJECTIVE = ObjectiveConfig(loss_correction="score_centering")


class Recorded:
    """Rollouts that are there after some looks."""

    def __init__(self, rollouts: Sequence[Rollout], after: int = 0, ends: bool = False):
        self.taken, self._rollouts, self._after, self._ends = 0, rollouts, after, ends

    def poll(self, step: int) -> str:
        """See ``StepSource``."""
        if self._ends:
            return "ended"
        self._after -= 1
        return "waiting" if self._after >= 0 else "ready"

    def why_ended(self, step: int) -> str:
        """See ``StepSource``."""
        return "there are no more"

    def rollouts(self, step: int) -> Sequence[Rollout]:
        """See ``StepSource``."""
        self.taken += 1
        return self._rollouts


def layout(budget: int | None = 40, rollouts: int | None = None, multiple: int = 1, rows: int = 2) -> FeedLayout:
    return FeedLayout(BatchLayout(rows, 16, "head", 8, 30), budget, 4, multiple, rollouts)


def two_replicas(samples: tuple[int, int], after: tuple[int, int]) -> tuple[int | None, int, list[str], list[int]]:
    """Data parallel: each rank alone in its tensor-parallel group."""
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1])]
    source = Recorded(make_rollouts(1, samples[rank], vocab=30, head=8), after[rank])
    feed = RolloutFeed(source, OBJECTIVE, layout(), Place(rank, 2, groups[rank], CPU, True), 0.01, lambda _: None)
    calls: list[str] = []
    sizes: list[int] = []

    def counted(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        calls.append("all_reduce")
        sizes.append(tensor.nbytes)
        return stock(tensor, *args, **kwargs)

    stock = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", counted):
        count = feed.begin_step(0)
    return count, source.taken, calls, sizes


def test_ranks_run_as_many_micro_batches_as_the_fullest_one():
    results = run_ranks(two_replicas, 2, (2, 9), (0, 0))
    counts = [result[0] for result in results]
    assert counts[0] == counts[1] > 2
    for _, taken, calls, sizes in results:
        assert (taken, calls, sizes) == (1, ["all_reduce"], [8 * (3 + 2 * 2)])


def test_a_rank_that_is_ready_waits_for_one_that_is_not_and_takes_its_share_once():
    results = run_ranks(two_replicas, 2, (2, 2), (0, 3))
    assert [result[1] for result in results] == [1, 1]
    assert [len(result[2]) for result in results] == [4, 4]


def readers_of_one_replica(differ: str) -> int | None:
    """Pipeline parallel: the first and the last stage read the same share, each for itself."""
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1])]
    rollouts = make_rollouts(1, 2, vocab=30, head=8, seed=rank if differ == "tokens" else 0)
    if differ == "reward":
        rollouts[1] = replace(rollouts[1], reward=rollouts[1].reward + rank)
    source = Recorded(rollouts)
    return RolloutFeed(source, OBJECTIVE, layout(), Place(0, 1, groups[rank], CPU, True)).begin_step(0)


def test_readers_of_one_share_that_hold_different_rollouts_are_found():
    assert len(set(run_ranks(readers_of_one_replica, 2, "nowhere"))) == 1
    for differ in ("tokens", "reward"):
        with pytest.raises(RankError, match="ranks that read for data-parallel rank 0 hold different rollouts"):
            run_ranks(readers_of_one_replica, 2, differ)


def one_tensor_group() -> list[tuple[int, int, int]]:
    """Tensor parallel: rank 0 reads, the other learns the shapes."""
    source = Recorded(make_rollouts(2, 3, vocab=30, head=5)) if dist.get_rank() == 0 else None
    feed = RolloutFeed(source, OBJECTIVE, layout(multiple=4), Place(0, 1, dist.group.WORLD, CPU, True))
    count = feed.begin_step(0)
    assert count is not None
    assert count % 4 == 0
    iterator = FedMicroBatches(feed)
    shapes = []
    for _ in range(count):
        batch, found = next(iterator)
        assert (batch is not None) == (dist.get_rank() == 0)
        if batch is not None:
            assert batch.ids.shape == (found.micro_batch_size, found.seq_length, found.width)
        shapes.append((found.micro_batch_size, found.seq_length, found.width))
    with pytest.raises(RuntimeError, match=f"step 0 has {count} micro-batches, but another was asked for"):
        next(iterator)
    return shapes


def test_shapes_are_the_same_on_every_rank_of_a_tensor_parallel_group():
    shapes = run_ranks(one_tensor_group, 2)
    assert shapes[0] == shapes[1]
    assert {width for _, _, width in shapes[0]} == {8}  # heads of 5, padded
    assert all(positions % 4 == 0 and rows * positions <= 40 for rows, positions, _ in shapes[0])


def alone(source: Recorded, chosen: FeedLayout) -> RolloutFeed:
    return RolloutFeed(source, OBJECTIVE, chosen, Place(0, 1, dist.group.WORLD, CPU, True))


def one_rank() -> None:
    rollouts = make_rollouts(2, 2, vocab=30, head=8)
    with pytest.raises(RolloutError, match=r"gave 4 rollouts .* but a step takes 6"):
        alone(Recorded(rollouts), layout(None, 6)).begin_step(0)
    long = [replace(rollouts[0], prompt_ids=rollouts[0].prompt_ids.repeat(4)), *rollouts[1:]]
    with pytest.raises(RolloutError, match=r"group 0 has .* tokens but --seq-length is 16"):
        alone(Recorded(long), layout()).begin_step(0)
    ended = Recorded(rollouts, ends=True)
    with pytest.raises(RolloutError, match="step 0: nothing to train on: there are no more"):
        alone(ended, layout()).begin_step(0)
    said: list[str] = []
    place = Place(0, 1, dist.group.WORLD, CPU, True)
    assert RolloutFeed(ended, OBJECTIVE, layout(), place, notify=said.append, resumed=True).begin_step(4) is None
    assert said == ["> step 4: there are no more; training ends"]
    assert ended.taken == 0
    fixed = alone(Recorded(rollouts[:3]), layout(None))  # dropped ones leave empty rows
    assert fixed.begin_step(0) == 2
    batch, shape = fixed.batch(1)
    assert batch is not None
    assert (shape.micro_batch_size, shape.seq_length) == (2, 16)
    assert batch.mask[0].any()
    assert not batch.mask[1].any()
    assert batch.padding[1].all()
    nothing = alone(Recorded([]), layout())
    assert nothing.begin_step(0) == 1
    batch, _ = nothing.batch(0)
    assert batch is not None
    assert not batch.mask.any()


def every_row_is_a_rollout_with_its_own_values() -> None:
    """Two steps: each rollout once, with its own advantage, and with the staleness at that step."""
    rollouts = make_rollouts(3, 3, vocab=30, head=8)
    feed = alone(Recorded(rollouts), layout())
    iterator = FedMicroBatches(feed)
    expected = step_advantages(rollouts, OBJECTIVE)
    assert len(set(expected.tolist())) > 3
    for step in (7, 8):
        count = feed.begin_step(step)
        assert count is not None
        found = []
        for _ in range(count):
            batch, _ = next(iterator)
            assert batch is not None
            for row in batch.mask.any(dim=1).nonzero().flatten().tolist():
                tokens, mask = batch.tokens[row][batch.padding[row] == 0].numpy(), batch.mask[row].bool()
                whole = [np.concatenate([r.prompt_ids, r.response_ids]) for r in rollouts]
                (index,) = (i for i, each in enumerate(whole) if np.array_equal(each, tokens))
                found.append(index)
                assert set(batch.advantages[row][mask].tolist()) == {expected[index]}
                trained = rollouts[index].weight_version[rollouts[index].response_mask]
                assert batch.staleness[row][mask].tolist() == (step - trained).tolist()
        assert sorted(found) == list(range(9))


@pytest.mark.parametrize("check", [one_rank, every_row_is_a_rollout_with_its_own_values])
def test_one_rank(check):
    run_ranks(check, 1)


def told_to_exit() -> tuple[list[int | None], list[str]]:
    """The second rank is told to exit: at once while both wait, not while both are ready."""
    rank, said = dist.get_rank(), []
    groups = [dist.new_group([0]), dist.new_group([1])]
    results = []
    for after in (0, 10**6):
        feed = RolloutFeed(
            Recorded(make_rollouts(1, 2, vocab=30, head=8), after), OBJECTIVE, layout(),
            Place(rank, 2, groups[rank], CPU, True), 0.01, said.append, lambda: rank == 1,
        )  # fmt: skip
        results.append(feed.begin_step(0))
    return results, said


def test_a_signal_ends_the_wait_on_all_ranks():
    for results, said in run_ranks(told_to_exit, 2):
        assert results[0] is not None
        assert results[1] is None
        assert said[-1] == "> step 0: told to exit while waiting for rollouts"


def statuses(mine: tuple[Status, Status]) -> Status:
    return agree(mine[dist.get_rank()], 1, None, 0, 1, CPU).status


@pytest.mark.parametrize("first", list(Status))
def test_the_highest_status_counts_everywhere(first):
    assert run_ranks(statuses, 2, (first, Status.WAITING)) == [max(first, Status.WAITING)] * 2
