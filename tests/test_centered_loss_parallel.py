"""`centered_loss` over vocabulary shards: the same numbers at every tensor-parallel size, and what is communicated."""

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from golden import Case, golden_cases
from problems import ESTIMATORS, WEIGHTS, make_problem, run_shard, shard_sizes
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sc import VocabShard, centered_loss
from megatron_sc.objective import Draws, FullVocabulary, Support, TopKHead


def case_shard(case: Case, sizes: tuple[int, ...], dtype: torch.dtype):
    """Loss and local gradient of a golden case on this rank."""
    rank = dist.get_rank()
    start, stop = sum(sizes[:rank]), sum(sizes[: rank + 1])
    columns = torch.full((sum(sizes),), torch.nan, dtype=torch.float64)
    columns[: case.valid] = torch.tensor(case.z[: case.valid], dtype=torch.float64)
    logits = columns[start:stop].unsqueeze(0).to(dtype).requires_grad_()
    out = centered_loss(
        logits,
        torch.tensor([case.y]),
        torch.tensor([case.A], dtype=torch.float64),
        case.sampler(),
        torch.tensor([case.q_y], dtype=torch.float64).log(),
        case.weight,
        case.T,
        vocab=VocabShard(start, stop, case.valid),
        group=dist.group.WORLD,
    )
    (gradient,) = torch.autograd.grad(out.loss.sum(), logits)
    return out.loss[0].detach(), gradient[0]


def golden_on_ranks(every: int, uneven: bool) -> dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]]:
    ranks = dist.get_world_size()
    cases = golden_cases()[::every]
    return {
        dtype: [case_shard(case, shard_sizes(case.valid, ranks, uneven), dtype) for case in cases]
        for dtype in (torch.float64, torch.float32)
    }


@pytest.mark.parametrize(
    ("ranks", "every", "uneven"),
    [(1, 25, False), (2, 1, False), (4, 1, False), (2, 3, True), (4, 3, True), (8, 7, True)],
)
def test_golden_cases(ranks, every, uneven):
    results = run_ranks(golden_on_ranks, ranks, every, uneven)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        for index, case in enumerate(golden_cases()[::every]):
            losses, gradients = zip(*(of_rank[dtype][index] for of_rank in results), strict=True)
            assert all(torch.equal(loss, losses[0]) for loss in losses), "every rank has the same bits"
            whole = torch.cat(gradients)
            assert (whole[case.valid :] == 0).all(), str(case)
            padded = torch.zeros(len(case.z), dtype=torch.float64)
            padded[: case.valid] = whole[: case.valid]
            assert case.gradient_error(padded) < tolerance, (str(case), dtype)
            assert case.loss_error(losses[0]) < tolerance, (str(case), dtype)


OPTIONS = {
    "plain": {},
    "optional terms": {"sampler_kl_coef": 0.1, "entropy_coef": 0.2},
    "chunks": {"chunk_rows": 2},
    "reused storage": {"reuse_logits": True},
    "reused storage, no entropy": {"reuse_logits": True, "entropy_metric": False},
    "no centering": {"center": False},
    "mask": {"mask": torch.tensor([True, False, False, True, True])},
}
COMBINATIONS = [(e, w, "plain") for e in ESTIMATORS for w in WEIGHTS]
COMBINATIONS += [(e, "tis", o) for e in ESTIMATORS for o in OPTIONS]


def combinations_on_ranks(uneven: bool):
    ranks, results = dist.get_world_size(), []
    for seed, (estimator, weight, options) in enumerate(COMBINATIONS):
        problem = make_problem(estimator, weight, seed=seed, temperature=True)
        sizes = shard_sizes(problem.logits.shape[1], ranks, uneven)
        out, gradient = run_shard(problem, dist.get_rank(), sizes, **OPTIONS[options])
        if weight == "tis" and options == "plain":
            again, same_gradient = run_shard(problem, dist.get_rank(), sizes)
            assert torch.equal(out.loss, again.loss), "bit-identical from run to run"
            assert torch.equal(gradient, same_gradient)
        results.append((out.loss.detach(), gradient, out.metrics))
    return results


@pytest.mark.parametrize(("ranks", "uneven"), [(2, False), (4, False), (4, True), (8, True)])
def test_every_combination_equals_one_rank(ranks, uneven):
    results = run_ranks(combinations_on_ranks, ranks, uneven)
    for seed, (estimator, weight, options) in enumerate(COMBINATIONS):
        problem = make_problem(estimator, weight, seed=seed, temperature=True)
        expected, expected_gradient = problem.run(**OPTIONS[options])
        label = (estimator, weight, options)
        losses, gradients, metrics = zip(*(of_rank[seed] for of_rank in results), strict=True)
        whole = torch.cat(gradients, dim=1)
        torch.testing.assert_close(whole[:, :17], expected_gradient, rtol=1e-11, atol=1e-12, msg=str(label))
        assert (whole[:, 17:] == 0).all(), label
        for loss, of_rank in zip(losses, metrics, strict=True):
            assert torch.equal(loss, losses[0]), label
            torch.testing.assert_close(loss, expected.loss.detach(), rtol=1e-11, atol=1e-12, msg=str(label))
            assert list(of_rank) == list(expected.metrics)
            for name, values in of_rank.items():
                assert torch.equal(values, metrics[0][name]), (label, name)
                torch.testing.assert_close(values, expected.metrics[name], rtol=1e-9, atol=1e-11, msg=f"{label} {name}")


LARGE = 151936


def large_vocabulary_on_ranks(dtype: torch.dtype, sizes: tuple[int, ...]):
    problem = make_problem("head", "tis", rows=4, vocab=LARGE, k=64, seed=7, temperature=True, scale=3.0)
    out, gradient = run_shard(problem, dist.get_rank(), sizes, dtype)
    return out.loss.detach(), gradient


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float32, (37984, 37984, 37984, 37984)),
        (torch.float32, (1, 100000, 51935, 128)),  # the last shard holds padding only
        (torch.bfloat16, (76096, 76096)),
    ],
)
def test_a_large_vocabulary(dtype, sizes):
    problem = make_problem("head", "tis", rows=4, vocab=LARGE, k=64, seed=7, temperature=True, scale=3.0)
    results = run_ranks(large_vocabulary_on_ranks, len(sizes), dtype, sizes)
    gradient = torch.cat([g for _, g in results], dim=1)[:, :LARGE].double()
    losses, gradients = problem.references(problem.logits.to(dtype).double())
    for row in range(4):
        unit = abs(float(problem.advantages[row])) * 1.3 / float(problem.temperature[row])
        largest = float(gradients[row].abs().max())
        bound = 4e-6 * unit if dtype == torch.float32 else torch.finfo(dtype).eps * largest
        assert float((gradient[row] - gradients[row]).abs().max()) <= bound
    assert all(torch.equal(loss, results[0][0]) for loss, _ in results)
    torch.testing.assert_close(results[0][0].double(), losses, rtol=1e-5, atol=1e-5)


# What is communicated ------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Records the name of every collective and the bytes that this rank contributes."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Called for every operation."""
        if func.namespace == "c10d":
            name = func._schema.name
            sent = args[1] if name == "c10d::_allgather_base_" else args[0]
            tensors = [sent] if isinstance(sent, torch.Tensor) else list(sent)
            self.calls.append((name, sum(t.numel() * t.element_size() for t in tensors)))
        return func(*args, **(kwargs or {}))


def collectives_on_ranks(estimator: str, k: int, dtype: torch.dtype, chunk_rows: int | None):
    n, vocab = 16, 600
    problem = make_problem(estimator, "tis", rows=n, vocab=vocab, k=k)
    rank, columns = dist.get_rank(), vocab // dist.get_world_size()
    logits = problem.logits[:, rank * columns : (rank + 1) * columns].to(dtype).requires_grad_()
    shard = VocabShard(rank * columns, (rank + 1) * columns, vocab)
    with Collectives() as seen:
        dist.all_reduce(torch.zeros(3))
    assert seen.calls == [("c10d::allreduce_", 12)], "the recorder sees collectives"
    with Collectives() as forward:
        out = centered_loss(
            logits, problem.sampled_ids, problem.advantages, problem.sampler, problem.sampled_logprobs, problem.weight,
            vocab=shard, group=dist.group.WORLD, chunk_rows=chunk_rows, sampler_kl_coef=0.1, entropy_coef=0.1,
        )  # fmt: skip
    with Collectives() as backward:
        out.loss.sum().backward()
    assert logits.grad.abs().sum() > 0
    return forward.calls, backward.calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_collectives(estimator, dtype):
    """Forward at most 3 and 64 bytes a token whatever k is, backward none; the number of chunks does not matter."""
    seen = {}
    for k in (8, 512):
        for chunk_rows in (None, 3):
            for forward, backward in run_ranks(collectives_on_ranks, 2, estimator, k, dtype, chunk_rows):
                assert 1 <= len(forward) <= 3
                assert sum(sent for _, sent in forward) <= 64 * 16
                assert backward == []
                seen[k, chunk_rows] = forward
    assert len({tuple(calls) for calls in seen.values()}) == 1, "the same for every k and every chunk size"


# Edges ---------------------------------------------------------------------------------------------------------------


def edges_on_ranks():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    problem = make_problem("head", "tis", rows=3)
    sizes = shard_sizes(17, ranks)
    group = dist.group.WORLD

    # A bad value is found by every rank alike, so none waits for the others.
    with pytest.raises(ValueError, match=r"row 1: sampled_ids must be in the true vocabulary \[0, 17\), got 17"):
        run_shard(problem, rank, sizes, sampled_ids=torch.tensor([0, 17, 0]))
    # Ranks that each believe to hold the whole vocabulary would count it once each.
    with pytest.raises(ValueError, match="vocab must say which columns"):
        problem.run(group=group)

    # No trainable token: a loss of 0 that stays connected, and gradients of exactly 0, on every rank.
    shard = VocabShard(sum(sizes[:rank]), sum(sizes[: rank + 1]), 17)
    logits = torch.full((3, sizes[rank]), torch.nan, requires_grad=True)
    out = centered_loss(
        logits, problem.sampled_ids, problem.advantages, problem.sampler, problem.sampled_logprobs, problem.weight,
        mask=torch.zeros(3, dtype=torch.bool), vocab=shard, group=group,
    )  # fmt: skip
    assert out.loss.requires_grad
    assert out.loss.tolist() == [0.0, 0.0, 0.0]
    out.loss.sum().backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))

    # No rows at all.
    empty = torch.zeros(0, sizes[rank], requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    for sampler in (
        None,
        TopKHead(none.view(0, 4), torch.zeros(0, 4)),
        TopKHead.ragged(none, torch.zeros(0), torch.zeros(1, dtype=torch.int64)),
        Support(none.view(0, 4), torch.zeros(0, 4)),
        Draws(none.view(0, 4)),
        FullVocabulary(torch.zeros(0, 17)),
    ):
        out = centered_loss(empty, none, torch.zeros(0), sampler, vocab=shard, group=group)
        out.loss.sum().backward()
        assert out.loss.shape == (0,)
        assert empty.grad.shape == empty.shape

    # A token that the trainer forbids, sampled and in the head: the same on every rank, and not NaN.
    forbidden = problem.replace(logits=problem.logits.scatter(1, problem.sampled_ids.unsqueeze(1), -torch.inf))
    alone, alone_gradient = forbidden.run()
    out, gradient = run_shard(forbidden, rank, sizes)
    torch.testing.assert_close(out.loss, alone.loss)
    torch.testing.assert_close(gradient[:, : shard.valid], alone_gradient[:, shard.start : shard.start + shard.valid])
    assert torch.isfinite(gradient).all()
    assert not out.loss.isnan().any()

    # A shard whose columns are all in the head, and one that holds none of it.
    everything = TopKHead(
        torch.arange(sizes[0]).expand(3, -1), torch.full((3, sizes[0]), 0.9 / sizes[0]).log().double()
    )
    alone, alone_gradient = problem.run(sampler=everything)
    for reuse in (False, True):
        out, gradient = run_shard(problem, rank, sizes, sampler=everything, reuse_logits=reuse)
        torch.testing.assert_close(out.loss, alone.loss)
        local = alone_gradient[:, shard.start : shard.start + shard.valid]
        torch.testing.assert_close(gradient[:, : shard.valid], local)


@pytest.mark.parametrize("ranks", [2, 4])
def test_edges(ranks):
    run_ranks(edges_on_ranks, ranks)


def ragged_on_ranks():
    problem = make_problem("head", "tis", rows=4, k=6, seed=11)
    kept = torch.arange(6) < torch.tensor([[6], [0], [1], [4]])
    ids, logprobs = torch.where(kept, problem.sampler.ids, -1), problem.sampler.logprobs
    offsets = torch.tensor([0, 6, 6, 7, 11])
    sizes = shard_sizes(17, dist.get_world_size())
    rectangular, expected = run_shard(problem, dist.get_rank(), sizes, sampler=TopKHead(ids, logprobs))
    ragged = TopKHead.ragged(ids[kept], logprobs[kept], offsets)
    for options in ({}, {"chunk_rows": 1}, {"reuse_logits": True}):
        out, gradient = run_shard(problem, dist.get_rank(), sizes, sampler=ragged, **options)
        torch.testing.assert_close(out.loss, rectangular.loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_ragged_heads():
    run_ranks(ragged_on_ranks, 2)
