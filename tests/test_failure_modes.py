"""Failures that others reported in public, each with its right answer: the ones that concern the loss."""

import math

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sc import VocabShard, centered_loss
from megatron_sc.objective import (
    Draws,
    ImportanceSampling,
    Support,
    TopKHead,
    TruncatedImportanceSampling,
)
from megatron_sc.vocab_parallel.entries import Entries

ONE = torch.ones(1)


def log(values):
    return torch.tensor(values, dtype=torch.float64).log()


# What the engine hands over ------------------------------------------------------------------------------------------

MENU_P = [0.64, 0.15, 0.07, 0.04, 0.06, 0.04]
"""Trainer probabilities of tokens 42, 7, 9, 11, which are ids 0 to 3 here, and of a tail of mass 0.1."""


def test_the_sampled_token_prepended_to_the_list_is_refused():
    """With 42 listed twice Q = 1.6 and the sign is wrong; with distinct ids rho = 1 and c = (.06, -.03, -.02, -.01)."""
    twice = TopKHead(torch.tensor([[0, 0, 1, 2, 3]]), log([[0.70, 0.70, 0.12, 0.05, 0.03]]))
    with pytest.raises(
        ValueError, match=r"row 0: TopKHead.logprobs have a mass above 1 \(repeated ids\?\).*1\.(6|59999)"
    ):
        centered_loss(log([MENU_P]), torch.tensor([0]), ONE, twice)

    once = TopKHead(torch.tensor([[0, 1, 2, 3]]), log([[0.70, 0.12, 0.05, 0.03]]))
    logits = log([MENU_P]).requires_grad_()
    out = centered_loss(logits, torch.tensor([0]), ONE, once)
    assert out.metrics["tail_mass_sampler"].item() == pytest.approx(0.1)
    assert out.metrics["tail_mass_trainer"].item() == pytest.approx(0.1)
    c = (0.06, -0.03, -0.02, -0.01)
    expected = -(math.log(0.64) - sum(c_v * math.log(p) for c_v, p in zip(c, MENU_P[:4], strict=True)))
    assert out.loss.item() == pytest.approx(expected, rel=1e-12)
    assert out.metrics["coefficient_l1"].item() == pytest.approx(0.12)


def test_a_repeated_id_is_refused_even_where_the_mass_stays_below_one():
    """A sampled token of probability 0.01 prepended to its list leaves Q below 1."""
    ids, q = [3, 0, 1, 2, 3], [0.01, 0.5, 0.2, 0.1, 0.01]
    row = TopKHead(torch.tensor([ids]), log([q]))
    ragged = TopKHead.ragged(torch.tensor([4, *ids]), log([0.5, *q]), torch.tensor([0, 1, 6]))
    with pytest.raises(ValueError, match=r"row 0: TopKHead.ids must be distinct within a row, got 3"):
        centered_loss(torch.zeros(1, 6), torch.tensor([3]), ONE, row)
    with pytest.raises(ValueError, match=r"row 1: TopKHead.ids must be distinct within a row, got 3"):
        centered_loss(torch.zeros(2, 6), torch.tensor([4, 3]), torch.ones(2), ragged)


def test_every_alternative_with_the_id_of_the_chosen_token_is_refused():
    same = TopKHead(torch.full((1, 4), 5), log([[0.5, 0.2, 0.1, 0.05]]))
    with pytest.raises(ValueError, match=r"row 0: TopKHead.ids must be distinct within a row, got 5"):
        centered_loss(torch.zeros(1, 6), torch.tensor([5]), ONE, same)


def test_one_id_in_two_rows_is_not_a_repetition():
    two = TopKHead.ragged(torch.tensor([1, 2, 2, 1]), log([0.5, 0.2, 0.3, 0.1]), torch.tensor([0, 2, 4]))
    assert centered_loss(torch.zeros(2, 6), torch.tensor([1, 1]), torch.ones(2), two).loss.shape == (2,)


@pytest.mark.parametrize("padding", [0, 100, 5])
def test_only_20_of_128_entries_are_finite(padding):
    """The head is the finite part; the rest repeats some id with a log-probability of -inf."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 300, generator=random, dtype=torch.float64)
    q = torch.softmax(logits + 0.3 * torch.randn(2, 300, generator=random, dtype=torch.float64), dim=1)
    values, ids = q.topk(20, dim=1)
    short = TopKHead(ids, values.log())
    long_ids, long_logprobs = torch.full((2, 128), padding), torch.full((2, 128), -torch.inf, dtype=torch.float64)
    long_ids[:, :20], long_logprobs[:, :20] = ids, values.log()
    results = []
    for head in (short, TopKHead(long_ids, long_logprobs)):
        leaf = logits.clone().requires_grad_()
        out = centered_loss(leaf, ids[:, 3], torch.ones(2), head, values[:, 3].log(), TruncatedImportanceSampling())
        out.loss.sum().backward()
        results.append((out, leaf.grad))
    (expected, expected_gradient), (got, gradient) = results
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-13, atol=1e-14)
    for name in expected.metrics:
        torch.testing.assert_close(got.metrics[name], expected.metrics[name], rtol=1e-12, atol=1e-13)


def test_ids_and_log_probabilities_of_different_lengths_are_refused_with_the_lengths():
    with pytest.raises(ValueError, match=r"ids are \[4\] but logprobs are \[5\]"):
        TopKHead.ragged(torch.zeros(4).long(), torch.zeros(5), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"ids are \[1, 5\] but logprobs are \[1, 4\]"):
        Support(torch.zeros(1, 5).long(), torch.zeros(1, 4))


def test_raw_and_processed_log_probabilities():
    """Logits [2, 1, 0] at T = .5: log q_y is -.1429 processed; the ratio is 1.0. Raw, -.4076, it would be 1.303."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    processed = torch.log_softmax(logits[0] / 0.5, 0)
    raw = torch.log_softmax(logits[0], 0)
    assert processed[0].item() == pytest.approx(-0.1429, abs=1e-4)
    assert raw[0].item() == pytest.approx(-0.4076, abs=1e-4)
    for temperature in (0.5, torch.tensor([0.5])):
        ratio = [
            centered_loss(
                logits, torch.tensor([0]), ONE, None, logq[:1], ImportanceSampling(), temperature
            ).metrics["importance_weight"].item()
            for logq in (processed, raw)
        ]  # fmt: skip
        assert ratio == pytest.approx([1.0, 1.303], abs=1e-3)


def test_top_p_needs_the_trainer_normalized_on_the_support():
    """Top-p 0.8 of (.5, .3, .15, .05): the sampler renormalized, so against the whole vocabulary every ratio is 0.8."""
    p, q = [0.5, 0.3, 0.15, 0.05], [0.625, 0.375]
    y, logq = torch.tensor([0, 1]), log(q)
    logits = log([p, p]).requires_grad_()
    support = Support(torch.tensor([[0, 1], [0, 1]]), log([q, q]))
    out = centered_loss(logits, y, torch.ones(2), support, logq, ImportanceSampling())
    assert out.metrics["importance_weight"].tolist() == pytest.approx([1.0, 1.0])
    out.loss.sum().backward()
    assert (logits.grad[:, 2:] == 0).all()
    for row in (0, 1):
        assert logits.grad[row, :2].tolist() == pytest.approx([q[u] - (u == row) for u in (0, 1)])
    naive = centered_loss(logits, y, torch.ones(2), None, logq, ImportanceSampling())
    assert naive.metrics["importance_weight"].tolist() == pytest.approx([0.8, 0.8])


def test_greedy_rows_are_refused_by_name():
    temperature = torch.tensor([1.0, 1.0, 0.0, 0.7])
    with pytest.raises(ValueError, match=r"row 2: temperature must be positive \(greedy rows"):
        centered_loss(torch.zeros(4, 5), torch.zeros(4).long(), torch.ones(4), None, temperature=temperature)


# Vocabulary-parallel arithmetic --------------------------------------------------------------------------------------

PADDED = [-2.0, -1.0, 0.0, -1.0, -2.0, 0.0, 0.0, 0.0]


def padded_logprob(logits: list[float], size: int) -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    columns = len(logits) // ranks
    shard = VocabShard.of_rank(rank, ranks, columns, size)
    local = torch.tensor([logits[shard.start : shard.stop]])
    out = centered_loss(local, torch.tensor([2]), ONE, None, vocab=shard, group=dist.group.WORLD)
    return out.metrics["logprob"].item()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_padding_columns_are_not_part_of_the_softmax(ranks):
    """With the 3 zero columns log p of the top token would be -1.6107."""
    for got in run_ranks(padded_logprob, ranks, PADDED, 5):
        assert got == pytest.approx(-0.6964, abs=1e-4)
    assert run_ranks(padded_logprob, ranks, PADDED, 8) == pytest.approx([-1.6107] * ranks, abs=1e-4)


@pytest.mark.parametrize(("ranks", "padding"), [(1, 0), (2, 128), (4, 128), (8, 640)])
def test_the_padding_of_a_real_vocabulary(ranks, padding):
    columns = (151936 + padding) // ranks
    assert columns * ranks == 151936 + padding
    shards = [VocabShard.of_rank(rank, ranks, columns, 151936) for rank in range(ranks)]
    assert sum(shard.valid for shard in shards) == 151936
    assert sum(shard.columns for shard in shards) == 151936 + padding


def gradient_of_shard(logits: list[float], target: int) -> list[float]:
    shard = VocabShard.of_rank(dist.get_rank(), 2, 2, 4)
    local = torch.tensor([logits[shard.start : shard.stop]], dtype=torch.float64, requires_grad=True)
    centered_loss(local, torch.tensor([target]), ONE, None, vocab=shard, group=dist.group.WORLD).loss.sum().backward()
    return (-local.grad[0]).tolist()


def test_the_gradient_crosses_shards():
    """Through an all-reduce without a derivative it would be None and [0, 1]."""
    first, second = run_ranks(gradient_of_shard, 2, [1.0, 2.0, 3.0, 4.0], 3)
    assert first == pytest.approx([-0.0321, -0.0871], abs=5e-5)
    assert second == pytest.approx([-0.2369, 0.3561], abs=5e-5)


def test_an_entry_of_another_shard_does_not_touch_a_local_column():
    """Shard [0, 2) and head ids [1, 3]: clamping 3 to 1 would overwrite column 1."""
    head = TopKHead(torch.tensor([[1, 3]]), log([[0.5, 0.2]]))
    entries = Entries.of_rows(head, 0, 1, None, torch.float64)
    owned, column = entries.owned(VocabShard(0, 2, 4))
    assert owned.tolist() == [[True, False]]
    assert column[0, 0] == 1
    in_head = [bool((owned & (column == v)).any()) for v in (0, 1)]
    assert in_head == [False, True]


def head_across_shards() -> list[float]:
    shard = VocabShard.of_rank(dist.get_rank(), 2, 2, 4)
    logits = torch.tensor([[0.1, 0.4, -0.3, 0.8]], dtype=torch.float64)
    local = logits[:, shard.start : shard.stop].clone().requires_grad_()
    head = TopKHead(torch.tensor([[3, 1]]), log([[0.2, 0.5]]))
    centered_loss(local, torch.tensor([1]), ONE, head, vocab=shard, group=dist.group.WORLD).loss.sum().backward()
    return local.grad[0].tolist()


def test_a_head_across_shards():
    """The centered gradient is q_hat - e_y whatever shard a head id is on."""
    p = torch.softmax(torch.tensor([0.1, 0.4, -0.3, 0.8], dtype=torch.float64), 0)
    rho = 0.3 / float(p[0] + p[2])
    expected = [rho * float(p[0]), 0.5 - 1, rho * float(p[2]), 0.2]
    first, second = run_ranks(head_across_shards, 2)
    assert first + second == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_gradients_do_not_cancel_to_zero_in_half_precision(dtype):
    """Each entry is rounded once; terms added one by one in bfloat16 would leave zeros and errors of their size."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 512, generator=random).to(dtype)
    p = torch.softmax(logits[0].double(), 0)
    values, ids = p.topk(64)
    q = values * (1 + 1e-4 * torch.randn(64, generator=random, dtype=torch.float64))
    head = TopKHead(ids.unsqueeze(0), q.log().unsqueeze(0))
    y = ids[0]
    leaf = logits.clone().requires_grad_()
    centered_loss(leaf, y.view(1), ONE, head).loss.sum().backward()
    expected = torch.zeros(512, dtype=torch.float64)
    expected[ids] = q
    tail = torch.ones(512, dtype=torch.bool).index_fill(0, ids, False)
    expected[tail] = (1 - q.sum()) * p[tail] / p[tail].sum()
    expected[y] -= 1
    error = (leaf.grad[0].double() - expected).abs()
    assert (leaf.grad != 0).all()
    assert (error <= torch.finfo(dtype).eps * expected.abs() + 2e-7).all()
    repeated = Draws(torch.cat([y.expand(7), ids[1:2]]).unsqueeze(0))
    leaf.grad = None
    centered_loss(leaf, y.view(1), ONE, repeated).loss.sum().backward()
    assert leaf.grad[0, y].item() == -0.125, "1 - 7/8"
    assert leaf.grad[0, ids[1]].item() == 0.125


def test_a_head_mass_above_one_leaves_no_tail():
    """An engine in bfloat16 reports Q = 1.0002; a tail of -0.0002 would flip the sign of every tail gradient."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    head = TopKHead(torch.tensor([[0, 1]]), log([[0.7002, 0.3]]))
    out = centered_loss(logits, torch.tensor([0]), ONE, head)
    assert out.metrics["head_mass_sampler"].item() == pytest.approx(1.0002)
    assert out.metrics["tail_mass_sampler"].item() == 0.0
    out.loss.sum().backward()
    p = torch.softmax(logits.detach()[0], 0)
    # With no sampled tail the correction there is -W p, with W = 1.0002.
    centered = zip((1, 0, 0, 0), (0.7002, 0.3, 0, 0), p.tolist(), strict=True)
    expected = [-(w - c - (1 - 1.0002) * p_u) for w, c, p_u in centered]
    assert logits.grad[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_bfloat16_logits_over_a_large_vocabulary():
    """A log-softmax in bfloat16 over 151936 entries is off by 0.125."""
    logits = torch.randn(1, 151936, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = torch.log_softmax(logits.double(), dim=1)[0]
    for token in (0, 77, 151935):
        out = centered_loss(logits, torch.tensor([token]), ONE, None)
        assert abs(out.metrics["logprob"].double() - exact[token]) < 1e-5


class LargestTensor(TorchDispatchMode):
    """The most elements that any operation's float32 or float64 result had."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Called for every operation."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float32, torch.float64):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_only_a_chunk_is_ever_cast_to_float32(rows):
    """A cast of all logits is the usual way to run out of memory: 11.6k x 248320 x 4 B = 10.8 GB."""
    n, vocab = 32, 4096
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(n, vocab, generator=random).bfloat16().requires_grad_()
    ids = torch.stack([torch.randperm(vocab, generator=random)[:8] for _ in range(n)])
    head = TopKHead(ids, torch.full((n, 8), 0.1).log())
    with LargestTensor() as seen:
        out = centered_loss(
            logits, ids[:, 0], torch.ones(n), head, torch.full((n,), 0.1).log(), TruncatedImportanceSampling(),
            chunk_rows=rows,
        )  # fmt: skip
        out.loss.sum().backward()
    assert seen.elements <= rows * vocab + 1


# Alignment and normalization -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [None, TopKHead(torch.tensor([[0, 1]] * 3), log([[0.5, 0.3]] * 3))])
def test_an_ignored_target_has_exactly_zero_gradient(sampler):
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, -100, 1])
    gradients = []
    for _ in range(2):
        leaf = logits.clone().requires_grad_()
        centered_loss(leaf, targets, torch.ones(3), sampler, mask=targets >= 0).loss.sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert (gradients[0][1] == 0).all()
    assert (gradients[0][0] != 0).any()


def test_masked_samples_do_not_enter_the_mean():
    """4 trained tokens and a masked sample of 4: the sum over all rows is the sum over 4, to be divided by 4."""
    logits = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True] * 4 + [False] * 4)
    ids = torch.arange(8) % 6
    out = centered_loss(logits, ids, torch.ones(8), None, mask=mask)
    alone = centered_loss(logits[:4], ids[:4], torch.ones(4), None)
    assert out.loss.sum().item() == alone.loss.sum().item()
    assert (out.loss.sum() / mask.sum()).item() == pytest.approx(alone.loss.mean().item())


@pytest.mark.parametrize("weight", [None, TruncatedImportanceSampling()])
@pytest.mark.parametrize(
    "sampler",
    [
        None,
        TopKHead(torch.tensor([[0, 1]] * 3), torch.full((3, 2), torch.nan)),
        Support(torch.full((3, 2), -1), torch.zeros(3, 2)),
        Draws(torch.full((3, 2), -1), torch.full((3, 2), torch.nan)),
    ],
)
@pytest.mark.parametrize("content", [0.0, torch.nan])
def test_a_batch_without_a_trainable_token(sampler, weight, content):
    """Loss 0 that stays connected, or other ranks hang in their reduction; gradients 0, neither None nor NaN."""
    parameter = torch.zeros(3, 6, requires_grad=True)
    logits = parameter * 2 + content
    out = centered_loss(
        logits, torch.full((3,), -100), torch.full((3,), torch.nan), sampler, torch.full((3,), torch.nan), weight,
        mask=torch.zeros(3, dtype=torch.bool), sampler_kl_coef=0.1, entropy_coef=0.1,
    )  # fmt: skip
    assert out.loss.sum().item() == 0.0
    assert out.loss.grad_fn is not None
    out.loss.sum().backward()
    assert torch.equal(parameter.grad, torch.zeros(3, 6))


@pytest.mark.parametrize("log_ratio", [-107.0, 107.0, 1e4])
def test_ratios_of_any_size_stay_finite(log_ratio):
    """0.7^300 = e^-107, and its inverse overflows float32."""
    logits = torch.tensor([[0.0, min(-log_ratio, 0.0)]], requires_grad=True)
    logp = torch.log_softmax(logits.detach(), 1)[0, 1]
    sampled_logprobs = (logp - log_ratio).clamp(max=0.0).view(1)
    out = centered_loss(logits, torch.tensor([1]), ONE, None, sampled_logprobs, ImportanceSampling())
    out.loss.sum().backward()
    assert torch.isfinite(out.loss).all()
    assert torch.isfinite(logits.grad).all()
    assert all(torch.isfinite(metric).all() for metric in out.metrics.values())
