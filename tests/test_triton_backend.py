"""The Triton kernels against the float64 reference: in Triton's interpreter on the CPU, compiled on a GPU.

Triton decides when it is imported whether kernels are interpreted, so checks on the CPU run in a process of their own,
one for the whole session: `on(device, check, ...)` calls a `check_...` function there, or here for a GPU.
"""

from __future__ import annotations

import atexit
import dataclasses
import math
import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from problems import WEIGHTS, Problem, as_ragged, make_problem
from test_centered_loss import hard_head, in_float32
from torch import Tensor

from megatron_sc import VocabShard, centered_loss
from megatron_sc.objective import Draws, SamplerDistribution, Support, TopKHead
from megatron_sc.vocab_parallel import backend, torch_backend
from megatron_sc.vocab_parallel.centering import Sums
from megatron_sc.vocab_parallel.loss import make_problem as checked_problem
from megatron_sc.vocab_parallel.problem import Problem as Call
from megatron_sc.vocab_parallel.statistics import combine

ESTIMATORS = ("head", "recorded tail", "support", "draws", "none")
SEVERAL_TILES = 200  # columns: three tiles of 64 in the interpreter, and a part of one
NAN, INF = math.nan, math.inf

devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def on(device: str, check: Callable[..., None], *args: Any) -> None:
    """Call `check(device, *args)`: for the CPU in the interpreter's process."""
    if device == "cuda":
        check(device, *args)
    else:
        _interpreter().submit(check, device, *args).result(timeout=240)


@cache
def _interpreter() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        pool.submit(_is_interpreted).result(timeout=180)
    atexit.register(pool.shutdown)
    return pool


def _is_interpreted() -> None:
    import triton

    torch.set_num_threads(1)
    assert triton.knobs.runtime.interpret


# Running a problem on the kernels ------------------------------------------------------------------------------------


def moved(value: Any, device: str) -> Any:
    """A tensor, a sampler's distribution or a problem on a device, in float32; offsets stay on the CPU."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32 if value.is_floating_point() else value.dtype)
    if isinstance(value, TopKHead | Support | Draws):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return type(value)(**{n: v if n == "offsets" else moved(v, device) for n, v in fields.items()})
    return value


def run(problem: Problem, device: str, dtype: torch.dtype, **options: Any) -> tuple[Any, Tensor]:
    """The op's output and the gradient of the summed loss `[n, columns]`, computed by the kernels; on the CPU again."""
    arguments = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem) if f.name != "q"} | options
    arguments = {name: moved(value, device) for name, value in arguments.items()}
    leaf = arguments.pop("logits").to(dtype).requires_grad_()
    logits = leaf * 1 if arguments.get("reuse_logits") else leaf
    with mock.patch.object(backend, "select_backend", _kernels):
        out = centered_loss(logits, **arguments)
        (gradient,) = torch.autograd.grad(out.loss.sum(), leaf)
    return (out.loss.detach().cpu(), {name: v.cpu() for name, v in out.metrics.items()}), gradient.cpu()


def _kernels(logits: Tensor, problem: Call) -> Any:
    from megatron_sc.vocab_parallel import triton_backend

    assert triton_backend.serves(logits, problem)
    return triton_backend


def assert_accurate(problem: Problem, device: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Gradient, loss and metrics of the trained rows within the bounds of the op; 0 in masked rows and padding."""
    problem = in_float32(problem.replace(logits=problem.logits.to(dtype).double()))
    (loss, metrics), gradient = run(problem, device, dtype, **options)
    expected, _ = problem.run(torch.float64, **{**options, "reuse_logits": False})
    valid, mask = problem.logits.shape[1], options.get("mask")
    assert gradient.dtype == dtype
    assert (gradient[:, valid:] == 0).all()
    for row in range(problem.rows):
        if mask is not None and not mask[row]:
            assert (gradient[row] == 0).all()
            assert loss[row] == 0
            continue
        exact = problem.reference(row)
        unit = abs(float(problem.advantages[row])) * max(1.0, float(exact.weight)) / float(problem.temperature[row])
        error = float((gradient[row, :valid].double() - exact.gradient).abs().max())
        largest = float(exact.gradient.abs().max())
        bound = 4e-6 * unit + (torch.finfo(dtype).eps * largest if dtype != torch.float32 else 0.0)
        assert error <= bound, (row, error, bound)
    torch.testing.assert_close(loss, expected.loss.detach().float(), rtol=1e-5, atol=1e-5)
    for name, value in metrics.items():
        torch.testing.assert_close(value, expected.metrics[name].float(), rtol=2e-5, atol=2e-5, msg=name)


# Against the reference -----------------------------------------------------------------------------------------------


def check_estimator(device: str, estimator: str, weight: str, layout: str) -> None:
    problem = make_problem(estimator, weight, rows=7, vocab=SEVERAL_TILES, k=9, seed=1, temperature=True)
    if layout == "ragged":
        problem = problem.replace(sampler=as_ragged(shortened(problem.sampler)))
    assert_accurate(problem, device)


def shortened(sampler: TopKHead | Support) -> TopKHead | Support:
    """Padded rows of a head: 0, 1, 2, ... entries. A support keeps its entries, and gets more padding."""
    ids = torch.nn.functional.pad(sampler.ids, (0, 3), value=-1)
    logprobs = torch.nn.functional.pad(sampler.logprobs, (0, 3), value=-1.0)
    if isinstance(sampler, Support):
        return Support(ids, logprobs)
    beyond = torch.arange(ids.shape[1]) >= torch.arange(sampler.rows).unsqueeze(1)
    return TopKHead(ids.masked_fill(beyond, -1), logprobs, sampler.log_tail_mass)


@devices
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equals_the_reference(device, estimator, weight):
    on(device, check_estimator, estimator, weight, "rectangular")


@devices
@pytest.mark.parametrize("weight", ["none", "tis"])
@pytest.mark.parametrize("estimator", ["head", "support"])
def test_ragged_rows(device, estimator, weight):
    on(device, check_estimator, estimator, weight, "ragged")


def check_options(device: str, estimator: str) -> None:
    problem = make_problem(estimator, "tis", rows=4, vocab=90, k=5, seed=2, temperature=True)
    for options in ({"center": False}, {"sampler_kl_coef": 0.3}, {"entropy_metric": False}):
        (loss, _), gradient = run(problem, device, torch.float32, **options)
        expected, expected_gradient = problem.run(torch.float64, **options)
        torch.testing.assert_close(loss, expected.loss.detach().float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, expected_gradient.float(), rtol=1e-5, atol=4e-6)


@devices
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_options_of_the_loss(device, estimator):
    on(device, check_options, estimator)


def check_half_precision(device: str, estimator: str, dtype: torch.dtype) -> None:
    assert_accurate(make_problem(estimator, "tis", rows=5, vocab=SEVERAL_TILES, k=9, temperature=True), device, dtype)


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_half_precision_is_rounded_once(device, estimator, dtype):
    on(device, check_half_precision, estimator, dtype)


def check_columns(device: str, columns: int, k: int) -> None:
    for temperature in (False, True):
        problem = make_problem("head", "tis", rows=3, vocab=columns, k=k, seed=columns, temperature=temperature)
        assert_accurate(problem, device)


@devices
@pytest.mark.parametrize(
    ("columns", "k"), [(1, 1), (17, 1), (63, 63), (64, 64), (65, 33), (128, 127), (191, 1), (400, 300)]
)
def test_any_number_of_columns_and_of_recorded_tokens(device, columns, k):
    on(device, check_columns, columns, k)


def check_tail(device: str, tail_p: float, tail_q: float, recorded: bool, sampled: str) -> None:
    for weight in ("none", "tis", "mis"):
        problem = in_float32(hard_head(tail_p, tail_q, sampled, recorded, vocab=300).replace(weight=WEIGHTS[weight]))
        _, gradient = run(problem, device, torch.float32)
        exact = problem.reference(0)
        error = float((gradient[0].double() - exact.gradient).abs().max())
        assert error <= 4e-6 * 1.3 * max(1.0, float(exact.weight)), weight
        if tail_p < 1e-6:
            # On its own: subtracting the head from a sum over all columns would leave nothing of the tail.
            other = torch.arange(8, 300) != problem.sampled_ids
            torch.testing.assert_close(
                gradient[0, 8:][other].double(), exact.gradient[8:][other], rtol=2e-4, atol=1e-30
            )


@devices
@pytest.mark.parametrize("sampled", ["head", "tail"])
@pytest.mark.parametrize(
    ("tail_p", "tail_q", "recorded"), [(1e-12, 0.5, True), (1e-12, 0.5, False), (1e-9, 1e-3, True), (0.5, 1e-12, True)]
)
def test_tails_of_any_size(device, tail_p, tail_q, recorded, sampled):
    on(device, check_tail, tail_p, tail_q, recorded, sampled)


# Masks, storage, layout ----------------------------------------------------------------------------------------------


def check_mask(device: str, estimator: str) -> None:
    problem = make_problem(estimator, "tis", rows=6, vocab=SEVERAL_TILES, k=9, temperature=True)
    mask = torch.tensor([True, False, True, False, False, True])
    assert_accurate(problem, device, mask=mask)
    (loss, metrics), gradient = run(problem, device, torch.float32, mask=mask)
    logits = problem.logits.clone()
    logits[1], logits[3], logits[4, ::2] = NAN, INF, -INF
    for reuse in (False, True):
        (again, again_metrics), again_gradient = run(
            problem, device, torch.float32, logits=logits, mask=mask, reuse_logits=reuse
        )
        assert torch.equal(loss, again)
        assert torch.equal(gradient, again_gradient)
        assert all(torch.equal(metrics[name], again_metrics[name]) for name in metrics)


@devices
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_rows_are_zero_whatever_they_hold(device, estimator):
    on(device, check_mask, estimator)


def check_forbidden_columns(device: str, estimator: str) -> None:
    problem = make_problem(estimator, "tis", rows=4, vocab=SEVERAL_TILES, k=9, temperature=True)
    used = torch.zeros(SEVERAL_TILES, dtype=torch.bool)
    used[problem.sampled_ids] = True
    if problem.sampler is not None:
        used[problem.sampler.ids.flatten()] = True
    forbidden = ~used & (torch.arange(SEVERAL_TILES) % 3 == 0)
    forbidden[-64:] = ~used[-64:]  # a whole tile of nothing but recorded tokens
    logits = problem.logits.masked_fill(forbidden, -INF)
    (loss, metrics), gradient = run(problem, device, torch.float32, logits=logits)
    expected, expected_gradient = problem.run(torch.float64, logits=logits)
    torch.testing.assert_close(loss, expected.loss.detach().float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient.float(), rtol=1e-5, atol=4e-6)
    torch.testing.assert_close(metrics["entropy"], expected.metrics["entropy"].float(), rtol=1e-5, atol=1e-5)
    assert (gradient[:, forbidden] == 0).all()


@devices
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_columns_of_minus_infinity(device, estimator):
    on(device, check_forbidden_columns, estimator)


def check_nan(device: str) -> None:
    problem = make_problem("head", "tis", rows=3, vocab=SEVERAL_TILES, k=9)
    logits = problem.logits.clone()
    outside = int(torch.ones(SEVERAL_TILES).index_fill(0, problem.sampler.ids[1], 0).nonzero()[0])
    logits[1, outside] = NAN
    (loss, _), gradient = run(problem, device, torch.float32, logits=logits)
    assert loss.isnan().tolist() == [False, True, False]
    assert gradient.isnan().any(dim=1).tolist() == [False, True, False]


@devices
def test_nan_logits_in_a_trained_row_are_not_hidden(device):
    on(device, check_nan)


def check_reuse(device: str, estimator: str, dtype: torch.dtype) -> None:
    problem = make_problem(estimator, "tis", rows=6, vocab=SEVERAL_TILES, k=9, temperature=True)
    padded = torch.cat([problem.logits, torch.full((6, 5), 9.0, dtype=torch.float64)], dim=1)
    options = {"mask": torch.tensor([True, False, True, True, False, True]), "logits": padded}
    options["vocab"] = VocabShard(0, SEVERAL_TILES + 5, SEVERAL_TILES)
    (loss, _), expected = run(problem, device, dtype, **options)
    arguments = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem) if f.name != "q"} | options
    arguments = {name: moved(value, device) for name, value in arguments.items()}
    leaf = arguments.pop("logits").to(dtype).requires_grad_()
    logits = leaf * 1
    seen: list[Tensor] = []
    logits.register_hook(seen.append)
    with mock.patch.object(backend, "select_backend", _kernels):
        out = centered_loss(logits, **arguments, reuse_logits=True)
        assert torch.equal(logits, leaf), "the forward pass must not touch the logits"
        out.loss.sum().backward()
    assert seen[0].data_ptr() == logits.data_ptr()
    assert torch.equal(leaf.grad.cpu(), expected)
    assert torch.equal(out.loss.detach().cpu(), loss)
    assert (expected[:, SEVERAL_TILES:] == 0).all()


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_gradient_takes_the_storage_of_the_logits(device, estimator, dtype):
    on(device, check_reuse, estimator, dtype)


def check_layout(device: str) -> None:
    problem = make_problem("head", "tis", rows=4, vocab=SEVERAL_TILES, k=9)
    (loss, _), expected = run(problem, device, torch.float32)
    wide = torch.full((8, SEVERAL_TILES + 7), NAN, dtype=torch.float64)
    wide[::2, 3:-4] = problem.logits
    logits = wide.float().to(device)[::2, 3:-4].detach().requires_grad_()
    arguments = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem) if f.name not in ("q", "logits")}
    with mock.patch.object(backend, "select_backend", _kernels):
        out = centered_loss(logits, **{name: moved(value, device) for name, value in arguments.items()})
        (gradient,) = torch.autograd.grad(out.loss.sum(), logits)
    assert torch.equal(out.loss.detach().cpu(), loss)
    assert torch.equal(gradient.cpu(), expected)


@devices
def test_rows_that_are_not_adjacent_in_memory(device):
    on(device, check_layout)


def check_empty(device: str) -> None:
    for estimator in ESTIMATORS:
        problem = make_problem(estimator, "tis", rows=0, vocab=70)
        (loss, _), gradient = run(problem, device, torch.float32)
        assert loss.shape == (0,)
        assert gradient.shape == (0, 70)
    problem = make_problem("head", "tis", rows=3, vocab=70)
    empty = problem.replace(sampler=TopKHead(torch.empty(3, 0, dtype=torch.int64), torch.empty(3, 0)))
    assert_accurate(empty, device)


@devices
def test_no_rows_and_no_recorded_tokens(device):
    on(device, check_empty)


def check_plain_draws(device: str) -> None:
    problem = make_problem("draws", "none", rows=6, vocab=SEVERAL_TILES, k=10, scale=0.5)
    sampler = problem.sampler
    repeated = problem.replace(sampler=Draws(sampler.ids[:, [0, 0, 0, 1, 1, 2, 3, 4, 5, 0]], None))
    for case in (problem, repeated):
        assert_accurate(case, device)
        _, gradient = run(case, device, torch.float32)
        touched = torch.zeros(6, SEVERAL_TILES, dtype=torch.bool).scatter(1, case.sampler.ids, True)
        touched = touched.scatter(1, case.sampled_ids.unsqueeze(1), True)
        assert (gradient[~touched] == 0).all()
        assert (gradient[touched] != 0).sum() > 6


@devices
def test_plain_draws_leave_every_other_column_exactly_zero(device):
    on(device, check_plain_draws)


def check_bits(device: str) -> None:
    problem = make_problem("head", "tis", rows=9, vocab=SEVERAL_TILES, k=9, temperature=True)
    first, gradient = run(problem, device, torch.float32)
    for _ in range(2):
        again, again_gradient = run(problem, device, torch.float32)
        assert torch.equal(first[0], again[0])
        assert torch.equal(gradient, again_gradient)


@devices
def test_bit_identical_from_run_to_run(device):
    on(device, check_bits)


# Shards of the vocabulary: the local passes of every rank, combined by hand -------------------------------------------


def check_shards(device: str, estimator: str, layout: str) -> None:
    from megatron_sc.vocab_parallel import triton_backend

    size = 150  # of shards of 96 columns: a full one, one with 42 columns of padding, one of nothing else
    problem = in_float32(make_problem(estimator, "tis", rows=5, vocab=size, k=9, seed=3, temperature=True))
    if layout == "ragged":
        problem = problem.replace(sampler=as_ragged(shortened(problem.sampler)))
    fields = {f.name: moved(getattr(problem, f.name), device) for f in dataclasses.fields(problem)}
    mask = torch.tensor([True, True, False, True, True], device=device)
    call = checked_problem(
        5, size, torch.float32, fields["sampled_ids"], fields["advantages"], fields["sampler"],
        fields["sampled_logprobs"], problem.weight, fields["temperature"], mask, None, None,
        center=True, sampler_kl_coef=0.0, entropy_coef=0.0, entropy_metric=True, reuse_logits=False, chunk_rows=None,
    )  # fmt: skip
    padded = torch.nn.functional.pad(fields["logits"], (0, 3 * 96 - size), value=50.0)
    shards = [VocabShard(start, start + 96, size) for start in (0, 96, 192)]
    assert [shard.valid for shard in shards] == [96, 54, 0]
    calls = [dataclasses.replace(call, shard=shard) for shard in shards]
    parts = [padded[:, shard.start : shard.stop].contiguous() for shard in shards]

    statistics = [triton_backend.statistics(*at) for at in zip(parts, calls, strict=True)]
    for found, part, at_rank in zip(statistics, parts, calls, strict=True):
        expected = torch_backend.statistics(part, at_rank).values
        torch.testing.assert_close(found.values[mask], expected[mask], rtol=1e-5, atol=1e-6)
    normalizer = combine(torch.stack([found.values for found in statistics]))
    mass = statistics[0].recorded_mass
    sums = Sums(*torch.zeros(6, 5, device=device))
    if call.sampler is not None:
        alpha = call.centering.alpha(normalizer, call.row, mass)
        added = [triton_backend.sums(p, c, normalizer, alpha) for p, c in zip(parts, calls, strict=True)]
        sums = Sums(*torch.stack(added).sum(dim=0).unbind(dim=1))
    outcome = call.centering.finish(normalizer, call.row, sums, mass)
    upstream = torch.ones(5, device=device)
    gradient = torch.cat(
        [triton_backend.gradient(p, c, outcome.state, upstream) for p, c in zip(parts, calls, strict=True)], dim=1
    ).cpu()
    assert (gradient[:, size:] == 0).all()
    assert (gradient[2] == 0).all()
    for row in (0, 1, 3, 4):
        exact = problem.reference(row)
        unit = abs(float(problem.advantages[row])) * max(1.0, float(exact.weight)) / float(problem.temperature[row])
        assert float((gradient[row, :size].double() - exact.gradient).abs().max()) <= 4e-6 * unit
        assert float(outcome.loss[row]) == pytest.approx(float(exact.loss), rel=1e-5, abs=1e-5)


@devices
@pytest.mark.parametrize("layout", ["rectangular", "ragged"])
@pytest.mark.parametrize("estimator", ["head", "support"])
def test_uneven_shards_and_one_of_padding(device, estimator, layout):
    on(device, check_shards, estimator, layout)


@devices
@pytest.mark.parametrize("estimator", ["recorded tail", "draws", "none"])
def test_uneven_shards_of_other_estimators(device, estimator):
    on(device, check_shards, estimator, "rectangular")


# Which backend serves a call -----------------------------------------------------------------------------------------


def call_for(sampler: SamplerDistribution | None, logits: Tensor, **options: Any) -> Call:
    rows = len(logits)
    defaults = {"center": True, "sampler_kl_coef": 0.0, "entropy_coef": 0.0, "entropy_metric": True}
    defaults |= {"reuse_logits": False, "chunk_rows": None}
    one = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    return checked_problem(
        rows, logits.shape[1], torch.float32, one, one.float(), sampler, one.float(), None, 1.0, None, None, None,
        **{**defaults, **options},
    )  # fmt: skip


def test_unusual_calls_are_left_to_pytorch():
    from megatron_sc.vocab_parallel.triton_backend import serves

    logits = torch.zeros(3, 8)
    plain = call_for(None, logits)
    assert serves(logits, plain)
    assert serves(logits.bfloat16(), plain)
    assert serves(torch.zeros(3, 20)[:, 4:12], plain)
    assert not serves(logits.double(), plain)
    assert not serves(torch.zeros(8, 3).t(), plain)
    assert not serves(logits, call_for(None, logits, entropy_coef=0.1))
    full = make_problem("full", rows=3, vocab=8).sampler
    assert not serves(logits, call_for(full, logits))


def test_logits_on_the_cpu_are_pytorchs():
    assert backend.select_backend(torch.zeros(3, 8), call_for(None, torch.zeros(3, 8))) is torch_backend


@pytest.mark.gpu
def test_logits_on_a_gpu_are_the_kernels_without_waiting_for_it():
    from megatron_sc.vocab_parallel import triton_backend

    for layout in ("rectangular", "ragged"):
        problem = make_problem("head", "tis", rows=64, vocab=5000, k=16, temperature=True)
        sampler = as_ragged(problem.sampler) if layout == "ragged" else problem.sampler
        arguments = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem) if f.name != "q"}
        arguments = {name: moved(value, "cuda") for name, value in (arguments | {"sampler": sampler}).items()}
        logits = arguments.pop("logits").requires_grad_()
        for _ in range(2):  # the first compiles
            torch.cuda.set_sync_debug_mode("error" if _ else "default")
            try:
                centered_loss(logits, **arguments).loss.sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        call = call_for(None, logits.detach())
        assert backend.select_backend(logits, call) is triton_backend


# The compiled kernels, as far as a machine without a GPU can tell -----------------------------------------------------

STATISTICS = {
    "logits": "*{dtype}", "row_stride": "i32", "valid": "i32", "temperature": "*fp32", "mask": "*i1",
    "columns": "*i32", "starts": "*i64", "k": "i32", "bits": "*i32", "words": "i32", "result": "*fp32",
    "result_stride": "i32", "rows": "i32",
}  # fmt: skip
GRADIENT = {
    "logits": "*{dtype}", "row_stride": "i32", "result": "*{dtype}", "result_stride": "i32", "valid": "i32",
    "temperature": "*fp32", "dense_maximum": "*fp32", "dense": "*fp32", "direct": "*fp32", "sampled": "*i32",
    "columns": "*i32", "starts": "*i64", "k": "i32", "values": "*fp32",
}  # fmt: skip


def assembly(kernel: Any, types: dict[str, str], capability: int, dtype: str, **constants: Any) -> str:
    """PTX of a kernel for pointers and strides that are multiples of 16, as Triton finds them at launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_sc.vocab_parallel.triton_backend import STAGES, TILE, WARPS

    constants |= {"TILE": TILE["cuda"], "ENTRIES": 128, "STAGES": STAGES}
    signature = {name: kind.format(dtype=dtype) for name, kind in types.items()} | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = [name for name, kind in signature.items() if kind.startswith("*")] + ["row_stride", "words"]
    if types is GRADIENT:
        aligned.append("result_stride")
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={place[name]: value for name, value in constants.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in aligned if name in place},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": WARPS}).asm["ptx"]


@pytest.mark.parametrize(("capability", "dtype", "ragged"), [(80, "fp32", True), (90, "bf16", False)])
def test_the_forward_kernel_compiles_to_pipelined_vector_loads(capability, dtype, ragged, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from megatron_sc.vocab_parallel.triton_kernels import statistics_kernel

    ptx = assembly(
        statistics_kernel, STATISTICS, capability, dtype,
        HAS_TEMPERATURE=True, HAS_MASK=True, EXCLUDE=True, RAGGED=ragged, WITH_DOT=True,
    )  # fmt: skip
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]+\], \[[^]]+\], 0x10", ptx), (
        "loads of 16 bytes, ahead of use"
    )
    assert "or.b32" in ptx


@pytest.mark.parametrize(("capability", "dtype", "ragged"), [(80, "fp32", True), (90, "bf16", False)])
def test_the_backward_kernel_compiles_to_vector_stores(capability, dtype, ragged, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from megatron_sc.vocab_parallel.triton_kernels import gradient_kernel

    ptx = assembly(
        gradient_kernel, GRADIENT, capability, dtype, HAS_TEMPERATURE=True, RECORDED=True, RAGGED=ragged
    )  # fmt: skip
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]+\], \[[^]]+\], 0x10", ptx), (
        "loads of 16 bytes, ahead of use"
    )
    assert "st.global.v4.b32" in ptx
    assert "bar.sync" in ptx, "recorded tokens are written after the columns"
