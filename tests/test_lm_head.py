"""`centered_lm_head_loss` on one rank, against logits in float64, their reference and dense products."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sc import CenteredLmHeadOutput, VocabShard, centered_lm_head_loss, centered_loss
from megatron_sc.objective import Draws, TopKHead, Uniform
from megatron_sc.training.fused_head import _multiplier, fused_head_loss, loss_with_gradient
from megatron_sc.vocab_parallel import backend, lm_head
from megatron_sc.vocab_parallel.weight_gradient import add_product_
from tests.problems import ESTIMATORS, Problem, as_ragged, make_problem

WIDTH = 24
SCALE = 0.7
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


class Head:
    """A problem, with hidden states and a weight of which its logits are made."""

    def __init__(self, problem: Problem, scale: float = 1.0, padding: int = 0):
        random = torch.Generator().manual_seed(1)
        vocab = problem.logits.shape[1]
        self.problem, self.scale, self.vocab = problem, scale, vocab
        self.weight = torch.randn(vocab + padding, WIDTH, generator=random, dtype=torch.float64)
        # hidden W^T = logits / scale on the true vocabulary
        self.hidden = problem.logits / scale @ torch.linalg.pinv(self.weight[:vocab].t())

    def parameters(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Fresh leaves: hidden states and weight."""
        return self.hidden.to(dtype, copy=True).requires_grad_(), torch.nn.Parameter(self.weight.to(dtype, copy=True))

    def arguments(self, **overrides: object) -> dict[str, object]:
        """What follows the hidden states and the weight."""
        problem = self.problem
        return {
            "sampled_ids": problem.sampled_ids,
            "advantages": problem.advantages,
            "sampler": problem.sampler,
            "sampled_logprobs": problem.sampled_logprobs,
            "importance_weight": problem.weight,
            "temperature": problem.temperature,
            "vocab": VocabShard(0, len(self.weight), self.vocab),
            "logits_scale": self.scale,
            **overrides,
        }

    def run(
        self, dtype: torch.dtype = torch.float64, **overrides: object
    ) -> tuple[CenteredLmHeadOutput, Tensor, Tensor]:
        """The output, and the gradients of hidden states and weight."""
        hidden, weight = self.parameters(dtype)
        out = centered_lm_head_loss(hidden, weight, **self.arguments(**overrides))
        out.loss_sum.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return out, hidden.grad, weight.grad

    def dense(self, dtype: torch.dtype = torch.float64, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Losses `[n]` and both gradients in float64, from the same rounded hidden states and weight."""
        hidden, weight = self.hidden.to(dtype).double(), self.weight.to(dtype).double()
        losses, gradient = self.problem.references(self.scale * (hidden @ weight[: self.vocab].t()))
        if mask is not None:
            losses, gradient = losses * mask, gradient * mask.unsqueeze(1)
        gradient = torch.nn.functional.pad(gradient, (0, len(weight) - self.vocab))
        return losses, self.scale * (gradient @ weight), self.scale * (gradient.t() @ hidden)


def assert_close(value: Tensor, expected: Tensor, relative: float) -> None:
    """Within `relative` of the largest expected entry."""
    error = (value.double() - expected).abs().max()
    assert error <= relative * expected.abs().max(), f"{float(error):.3g} of {float(expected.abs().max()):.3g}"


# Against the reference ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", ["none", "tis", "ppo"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_loss_and_gradients_are_those_of_the_dense_products(estimator: str, weight: str) -> None:
    head = Head(make_problem(estimator, weight, temperature=True), SCALE, padding=3)
    for dtype, tolerance in TOLERANCE.items():
        losses, grad_hidden, grad_weight = head.dense(dtype)
        for chunk in (1, 2, 100):
            out, got_hidden, got_weight = head.run(dtype, chunk_tokens=chunk)
            assert out.loss.dtype == out.loss_sum.dtype == dtype
            assert not out.loss.requires_grad
            assert_close(out.loss, losses, tolerance)
            assert_close(out.loss_sum.detach(), losses.sum(), 10 * tolerance)
            assert_close(got_hidden, grad_hidden, tolerance)
            assert_close(got_weight, grad_weight, tolerance)
            assert (got_weight[head.vocab :] == 0).all()


@pytest.mark.parametrize("estimator", ["head", "draws"])
def test_bfloat16_weight_gradient_is_accumulated_in_float32(estimator: str) -> None:
    """Logits, their gradient and the hidden states' are bfloat16; sums over tokens are not rounded between chunks."""
    head = Head(make_problem(estimator, rows=64, scale=1.0))
    _, grad_hidden, grad_weight = head.dense(torch.bfloat16)
    results = []
    for chunk in (3, 64):
        _, got_hidden, _ = head.run(torch.bfloat16, chunk_tokens=chunk)
        hidden, weight = head.parameters(torch.bfloat16)
        with_main_grad(weight)
        centered_lm_head_loss(hidden, weight, **head.arguments(chunk_tokens=chunk)).loss_sum.backward()
        assert got_hidden.dtype == torch.bfloat16
        assert_close(got_hidden, grad_hidden, 0.03)
        assert_close(weight.main_grad, grad_weight, 0.01)
        results.append(weight.main_grad.double())
    assert_close(results[0], results[1], 1e-5)  # bfloat16 sums of 22 chunks would differ by 1e-2


@pytest.mark.parametrize("estimator", ["head", "support", "draws"])
def test_masked_rows_may_hold_anything(estimator: str) -> None:
    problem = make_problem(estimator, "none")
    mask = torch.tensor([True, False, True, False, True])
    head = Head(problem)
    losses, grad_hidden, grad_weight = head.dense(mask=mask)
    head.hidden[~mask] = torch.nan
    out, got_hidden, got_weight = head.run(mask=mask, chunk_tokens=2)
    for got, expected in ((out.loss, losses), (got_hidden, grad_hidden), (got_weight, grad_weight)):
        assert_close(got, expected, 1e-10)
    assert (got_hidden[~mask] == 0).all()
    assert all((value[~mask] == 0).all() for value in out.metrics.values())


@pytest.mark.parametrize("estimator", ["head", "support"])
def test_ragged_records_are_cut_at_chunks(estimator: str) -> None:
    problem = make_problem(estimator, "tis", rows=7)
    assert isinstance(problem.sampler, TopKHead) or estimator == "support"
    ids, logprobs = problem.sampler.ids.clone(), problem.sampler.logprobs.clone()
    if estimator == "head":
        ids[1, 2:], ids[4, :] = -1, -1
    problem = problem.replace(sampler=type(problem.sampler)(ids, logprobs))
    expected = Head(problem).run()
    got = Head(problem.replace(sampler=as_ragged(problem.sampler))).run(chunk_tokens=3)
    for a, b in zip((got[0].loss, *got[1:]), (expected[0].loss, *expected[1:]), strict=True):
        assert_close(a, b, 1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equals_the_unfused_loss_with_every_option(estimator: str) -> None:
    """Terms, metrics and centering off, where the reference has no answer of its own: through autograd instead."""
    problem = make_problem(estimator, "tis", rows=7)
    for options in ({"sampler_kl_coef": 0.3, "entropy_coef": 0.2}, {"center": False}, {"entropy_metric": False}):
        head = Head(problem)
        hidden, weight = head.parameters(torch.float64)
        arguments = head.arguments(**options)
        arguments["weight"] = arguments.pop("importance_weight")
        arguments.pop("logits_scale")
        expected = centered_loss(hidden @ weight.t(), **arguments)
        expected.loss.sum().backward()
        out, got_hidden, got_weight = head.run(chunk_tokens=3, **options)
        assert_close(out.loss, expected.loss.detach(), 1e-12)
        assert_close(got_hidden, hidden.grad, 1e-12)
        assert_close(got_weight, weight.grad, 1e-12)
        assert tuple(out.metrics) == out.metric_names == tuple(expected.metrics)
        for name, value in expected.metrics.items():
            torch.testing.assert_close(out.metrics[name], value, rtol=1e-10, atol=1e-12)


def test_chunks_do_not_depend_on_each_other() -> None:
    head = Head(make_problem("head", "tis", rows=9))
    whole = head.run(torch.float32, chunk_tokens=9)
    for chunk in (1, 2, 4, 8):
        out, grad_hidden, grad_weight = head.run(torch.float32, chunk_tokens=chunk)
        torch.testing.assert_close(out.loss, whole[0].loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad_hidden, whole[1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad_weight, whole[2], rtol=1e-5, atol=1e-6)
    again = head.run(torch.float32, chunk_tokens=4)
    assert torch.equal(again[2], head.run(torch.float32, chunk_tokens=4)[2])


def test_no_rows() -> None:
    head = Head(make_problem("head", "tis", rows=5))
    problem = head.problem
    head.hidden = head.hidden[:0]
    sampler = problem.sampler.slice_rows(0, 0)
    rows = {
        name: getattr(problem, name)[:0] for name in ("sampled_ids", "advantages", "sampled_logprobs", "temperature")
    }
    out, grad_hidden, grad_weight = head.run(sampler=sampler, **rows)
    assert out.loss.shape == (0,)
    assert out.loss_sum == 0
    assert grad_hidden.shape == (0, WIDTH)
    assert (grad_weight == 0).all()


# Backward -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["head", "draws"])
def test_backward_multiplies_by_its_scalar(estimator: str) -> None:
    head = Head(make_problem(estimator))
    _, grad_hidden, grad_weight = head.dense()
    hidden, weight = head.parameters(torch.float64)
    (-2.5 * centered_lm_head_loss(hidden, weight, **head.arguments()).loss_sum).backward()
    assert_close(hidden.grad, -2.5 * grad_hidden, 1e-10)
    assert_close(weight.grad, -2.5 * grad_weight, 1e-10)


@pytest.mark.parametrize("estimator", ["head", "draws"])
def test_a_second_backward_is_refused(estimator: str) -> None:
    head = Head(make_problem(estimator))
    out = centered_lm_head_loss(*head.parameters(torch.float64), **head.arguments())
    out.loss_sum.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        out.loss_sum.backward()


@pytest.mark.parametrize("estimator", ["head", "draws"])
def test_only_the_gradients_that_are_needed_are_computed(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(make_problem(estimator))
    losses, grad_hidden, grad_weight = head.dense()
    hidden, weight = head.parameters(torch.float64)
    centered_lm_head_loss(hidden.detach(), weight, **head.arguments()).loss_sum.backward()
    assert_close(weight.grad, grad_weight, 1e-10)

    def refuse(*_: object) -> Tensor:
        raise AssertionError("a gradient that nobody asked for")

    monkeypatch.setattr(lm_head, "add_product_", refuse)
    hidden, weight = head.parameters(torch.float64)
    centered_lm_head_loss(hidden, weight.requires_grad_(False), **head.arguments()).loss_sum.backward()
    assert_close(hidden.grad, grad_hidden, 1e-10)
    assert weight.grad is None
    monkeypatch.setattr(backend, "gradient", refuse)
    with torch.no_grad():
        out = centered_lm_head_loss(*head.parameters(torch.float64), **head.arguments())
    assert_close(out.loss, losses, 1e-10)
    assert not out.loss_sum.requires_grad


# The weight's gradient ------------------------------------------------------------------------------------------------


def with_main_grad(weight: Tensor, dtype: torch.dtype = torch.float32, value: float = 0.0) -> None:
    """What Megatron's data-parallel wrapper puts on a parameter."""
    weight.main_grad = torch.full_like(weight, value, dtype=dtype, requires_grad=False)
    weight.grad_added_to_main_grad = False


@pytest.mark.parametrize("estimator", ["head", "draws"])
def test_main_grad_is_added_to_in_backward_only(estimator: str) -> None:
    head = Head(make_problem(estimator))
    _, _, grad_weight = head.dense(torch.float32)
    hidden, weight = head.parameters(torch.float32)
    with_main_grad(weight, value=1.0)
    out = centered_lm_head_loss(hidden, weight, **head.arguments())
    assert (weight.main_grad == 1).all()
    assert not weight.grad_added_to_main_grad
    (3 * out.loss_sum).backward()
    assert weight.grad_added_to_main_grad
    assert weight.grad is not None  # a placeholder: without it the hook that starts the reduction would not run
    assert weight.grad.shape == weight.shape
    assert_close(weight.main_grad - 1, 3 * grad_weight, 1e-5)
    centered_lm_head_loss(hidden, weight, **head.arguments()).loss_sum.backward()  # the next micro-batch
    assert_close(weight.main_grad - 1, 4 * grad_weight, 1e-5)


@pytest.mark.parametrize("estimator", ["head", "draws"])
def test_a_weight_with_other_uses_gets_zeros(estimator: str) -> None:
    """Tied embeddings: Megatron adds the placeholder, summed with the embedding's gradient, to `main_grad`."""
    head = Head(make_problem(estimator))
    _, _, grad_weight = head.dense(torch.float32)
    hidden, weight = head.parameters(torch.float32)
    with_main_grad(weight)
    weight.zero_out_wgrad = True
    embedding = torch.nn.functional.embedding(torch.tensor([2, 2, 5]), weight)
    out = centered_lm_head_loss(hidden, weight, **head.arguments())
    (out.loss_sum + embedding.sum()).backward()
    expected = torch.zeros_like(weight)
    expected[2], expected[5] = 2, 1
    assert torch.equal(weight.grad, expected)
    assert_close(weight.main_grad, grad_weight, 1e-5)


@pytest.mark.parametrize("estimator", ["head", "draws"])
def test_main_grad_may_be_bfloat16(estimator: str) -> None:
    head = Head(make_problem(estimator))
    _, _, grad_weight = head.dense(torch.bfloat16)
    hidden, weight = head.parameters(torch.bfloat16)
    with_main_grad(weight, torch.bfloat16)
    centered_lm_head_loss(hidden, weight, **head.arguments()).loss_sum.backward()
    assert weight.main_grad.dtype == torch.bfloat16
    assert_close(weight.main_grad, grad_weight, 0.03)


def test_products_in_blocks_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_sc.vocab_parallel import weight_gradient

    monkeypatch.setattr(weight_gradient, "BLOCK_ELEMENTS", 40)
    gradient, hidden = torch.randn(6, 33).bfloat16(), torch.randn(6, 4).bfloat16()
    total = torch.ones(33, 4)
    add_product_(total, gradient, hidden, 0.5)
    expected = 1 + 0.5 * gradient.double().t() @ hidden.double()
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)


# Draws without a softmax ----------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Records the largest tensor made, and the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        storages = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in storages:
            self.largest = max(self.largest, out.numel())
        return out


def draws_head(rows: int = 6, vocab: int = 20_000, k: int = 8) -> tuple[Tensor, Tensor, dict[str, object]]:
    """Hidden states, weight and arguments for draws that repeat, and that hold the sampled token."""
    random = torch.Generator().manual_seed(0)
    draws = torch.randint(vocab, (rows, k), generator=random)
    draws[0] = draws[0, 0]
    sampled = draws[:, 0].clone()
    sampled[1] = 3
    hidden = torch.randn(rows, WIDTH, generator=random).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(vocab, WIDTH, generator=random))
    advantages = torch.randn(rows, generator=random)
    return hidden, weight, {"sampled_ids": sampled, "advantages": advantages, "sampler": Draws(draws)}


def test_draws_make_no_product_with_the_vocabulary() -> None:
    hidden, weight, arguments = draws_head()
    with_main_grad(weight)
    vocab = len(weight)
    with Watch() as forward:
        out = centered_lm_head_loss(hidden, weight, **arguments, metrics=False)
    assert out.metrics == {}
    assert "logprob" in out.metric_names
    assert forward.largest < vocab
    with Watch() as backward:
        out.loss_sum.backward()
    assert backward.largest == weight.numel()  # the placeholder
    assert not {"mm", "addmm", "bmm", "addmm_"} & (forward.names | backward.names)
    assert not {"_local_scalar_dense", "nonzero", "is_nonzero", "item"} & backward.names
    with Watch() as with_metrics:  # can this test fail?
        centered_lm_head_loss(hidden, weight, **arguments)
    assert with_metrics.largest >= vocab * len(hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_equal_the_dense_loss(dtype: torch.dtype) -> None:
    hidden, weight, arguments = draws_head(rows=40, vocab=500)
    arguments["advantages"] = arguments["advantages"].to(dtype)
    grads = []
    for one in (torch.float64, dtype):
        h, w = hidden.detach().to(one).requires_grad_(), torch.nn.Parameter(weight.detach().to(one))
        if one == torch.float64 and not grads:
            logp = torch.log_softmax(h @ w.t() / 0.8, dim=1)
            centered = logp.gather(1, arguments["sampled_ids"].unsqueeze(1)).squeeze(1)
            centered = centered - logp.gather(1, arguments["sampler"].ids).mean(dim=1)
            loss = -arguments["advantages"].double() * centered
            loss.sum().backward()
        else:
            out = centered_lm_head_loss(h, w, **arguments, temperature=0.8, metrics=False)
            loss = out.loss
            out.loss_sum.backward()
        grads.append((loss.detach(), h.grad, w.grad))
    for expected, got in zip(*grads, strict=True):
        assert_close(got, expected, 1e-6 if dtype == torch.float32 else 1e-12)


def test_draws_give_the_metrics_when_asked() -> None:
    hidden, weight, arguments = draws_head(vocab=500)
    out = centered_lm_head_loss(hidden, weight, **arguments, chunk_tokens=4)
    expected = centered_loss(hidden @ weight.t(), **arguments)
    assert tuple(out.metrics) == tuple(expected.metrics)
    for name, value in expected.metrics.items():
        torch.testing.assert_close(out.metrics[name], value, rtol=1e-4, atol=1e-5)
    out.loss_sum.backward()
    assert weight.grad.abs().sum() > 0


@pytest.mark.parametrize("options", [{"center": False}, {"entropy_coef": 0.1}])
def test_draws_with_a_dense_part_need_the_softmax(options: dict[str, object]) -> None:
    hidden, weight, arguments = draws_head(vocab=500)
    out = centered_lm_head_loss(hidden, weight, **arguments, **options, metrics=False)
    expected = centered_loss(hidden.detach() @ weight.detach().t(), **arguments, **options)
    assert out.metrics == {}
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-4, atol=1e-5)
    out.loss_sum.backward()
    assert (weight.grad != 0).all(dim=1).all()


# Memory ---------------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, torch
from megatron_sc import centered_lm_head_loss
from megatron_sc.objective import TopKHead, TruncatedImportanceSampling
torch.set_num_threads(1)
n, vocab, width, k = int(sys.argv[1]), int(sys.argv[2]), 256, 32
def run(hidden, weight, n):
    ids = torch.arange(n).unsqueeze(1) * 7 % 1000 + torch.arange(k)
    sampler = TopKHead(ids, torch.full((n, k), -4.0))
    out = centered_lm_head_loss(hidden, weight, ids[:, 0], torch.ones(n), sampler, torch.full((n,), -4.0),
                                TruncatedImportanceSampling())
    out.loss_sum.backward()
def make(n, vocab):
    return torch.randn(n, width).requires_grad_(), torch.nn.Parameter(torch.zeros(vocab, width).normal_(std=0.05))
def memory(field):  # not getrusage, whose peak counts the parent's memory too
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
run(*make(4, 1000), 4)  # libraries and threads
hidden, weight = make(n, vocab)
weight.main_grad, weight.grad_added_to_main_grad = torch.ones(vocab, width), False
before = memory("VmRSS")
run(hidden, weight, n)
print(memory("VmHWM") - before)
"""


def peak(tokens: int, vocab: int) -> float:
    """MiB above inputs, weight and `main_grad`, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURE, str(tokens), str(vocab)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout) / 2**10


def test_peak_memory_does_not_grow_with_the_logits() -> None:
    """At a vocabulary of 16384, 4096 tokens have 256 MiB of logits. Hidden states' gradients are 1 KiB a token."""
    few, many = peak(1024, 1 << 14), peak(4096, 1 << 14)
    chunk, weight_gradient, hidden_gradient = 64, 16, (4096 - 1024) / 2**10
    assert few < 1.5 * (chunk + weight_gradient)
    assert many - few < hidden_gradient + 0.05 * few, (few, many)


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "weight", "options", "complaint"),
    [
        (torch.zeros(5, WIDTH, dtype=torch.float16), torch.zeros(17, WIDTH, dtype=torch.float16), {}, "--fp16"),
        (torch.zeros(5, 1, WIDTH), torch.zeros(17, WIDTH), {}, r"hidden must be \[n, h\]"),
        (torch.zeros(5, WIDTH), torch.zeros(17, WIDTH + 1), {}, r"weight must be \[V_local, 24\]"),
        (torch.zeros(5, WIDTH), torch.zeros(17, WIDTH).bfloat16(), {}, "torch.float32, got"),
        (torch.zeros(4, WIDTH), torch.zeros(17, WIDTH), {}, "must have one entry a row"),
        (torch.zeros(5, WIDTH), torch.zeros(17, WIDTH), {"chunk_tokens": 0}, "chunk_tokens must be at least 1"),
        (torch.zeros(5, WIDTH), torch.zeros(17, WIDTH), {"sampled_logprobs": None}, "needs sampled_logprobs"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    hidden: Tensor, weight: Tensor, options: dict[str, object], complaint: str
) -> None:
    arguments = Head(make_problem("head", "tis")).arguments(**options)
    with pytest.raises(ValueError, match=complaint):
        centered_lm_head_loss(hidden, weight, **arguments)


@pytest.mark.parametrize(
    ("layer", "config", "complaint"),
    [
        ({"bias": torch.zeros(1)}, {}, "a bias"),
        ({}, {"fp8_output_proj": True}, "--fp8-output-proj"),
        ({}, {"fp16": True}, "--fp16"),
        ({}, {"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute"),
        ({"gtp_remat_size": 2}, {}, "gtp_remat"),
    ],
)
def test_layers_that_do_more_are_refused_by_flag(
    layer: dict[str, object], config: dict[str, object], complaint: str
) -> None:
    module = torch.nn.Linear(4, 4, bias=False)
    for name, value in layer.items():
        setattr(module, name, torch.nn.Parameter(value) if isinstance(value, Tensor) else value)
    with pytest.raises(ValueError, match=f"--fuse-lm-head.*{complaint}"):
        fused_head_loss(module, None, torch.zeros(1, 1, 4), lambda x: x, SimpleNamespace(**config))


def test_fsdp_weights_are_refused() -> None:
    module = torch.nn.Linear(4, 4, bias=False)
    module.weight.__fsdp_param__ = True
    with pytest.raises(ValueError, match="--use-megatron-fsdp"):
        fused_head_loss(module, None, torch.zeros(1, 1, 4), lambda x: x, SimpleNamespace())


def test_logits_may_be_multiplied_by_a_number_only() -> None:
    assert _multiplier(lambda logits: logits) == 1
    assert _multiplier(lambda logits: logits * 0.25) == 0.25
    with pytest.raises(ValueError, match="soft cap"):
        _multiplier(torch.tanh)


def test_losses_carry_the_gradient_of_their_sum() -> None:
    parameter = torch.tensor(2.0, requires_grad=True)
    out = CenteredLmHeadOutput(3 * parameter, torch.tensor([1.0, 5.0, 0.0]), {}, ())
    losses = loss_with_gradient(out)
    assert torch.equal(losses.detach(), out.loss)
    (4 * losses.sum()).backward()
    torch.testing.assert_close(parameter.grad, torch.tensor(12.0))


def test_layer_hooks_run_around_the_loss() -> None:
    """A pre-hook gathers the weight (`--overlap-param-gather`); the layer's own forward is back afterwards."""
    head = Head(make_problem("head"))
    layer = torch.nn.Linear(WIDTH, head.vocab, bias=False, dtype=torch.float64)
    layer.sequence_parallel = False
    torch.nn.init.zeros_(layer.weight)

    def gather(module: torch.nn.Module, _: object) -> None:
        module.weight.data.copy_(head.weight)

    layer.register_forward_pre_hook(gather)
    arguments = head.arguments()
    arguments.pop("logits_scale")
    hidden = head.hidden.unsqueeze(1)
    out = fused_head_loss(layer, None, hidden, lambda logits: logits, SimpleNamespace(), **arguments)
    assert_close(out.loss, head.dense()[0], 1e-10)
    assert torch.equal(layer(head.hidden), head.hidden @ head.weight.t())
    assert "forward" not in vars(layer)
    arguments["sampled_ids"] = arguments["sampled_ids"][:2]
    with pytest.raises(ValueError, match="one entry a row"):
        fused_head_loss(layer, None, hidden, lambda logits: logits, SimpleNamespace(), **arguments)
    assert "forward" not in vars(layer)


def test_uniform_is_the_default_importance_weight() -> None:
    head = Head(make_problem("head", "none"))
    out, *_ = head.run(importance_weight=None, sampled_logprobs=None)
    assert torch.equal(out.loss, head.run(importance_weight=Uniform())[0].loss)
