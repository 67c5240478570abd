"""Float32 logits in both heads, refused head flags, and what rounding the sampler's weights alike saves."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_sc.precision.head_dtype import as_sent, check_head
from megatron_sc.vocab_parallel import VocabShard, centered_lm_head_loss, centered_loss
from megatron_sc.vocab_parallel.float32_product import float32_product
from tests.distributed import run_ranks
from tests.problems import make_problem
from tests.train_fixed import TINY, train_fixed

ROWS, VOCAB, COLUMNS, WIDTH = 12, 21, 24, 64
HALF_ULP = 2.0**-9  # largest relative error of rounding to bfloat16


def operands(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """bfloat16 hidden states and weight whose logits are about 8 in size."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator)
    weight = torch.randn(COLUMNS, WIDTH, generator=generator)
    return hidden.bfloat16(), weight.bfloat16()


def test_float32_logits_have_no_rounding_to_half_precision():
    hidden, weight = operands()
    exact = hidden.double() @ weight.double().t()
    logits = float32_product(hidden, weight)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < WIDTH * 2**-24 * (hidden.abs().double() @ weight.abs().double().t()).max()
    rounded = ((hidden @ weight.t()).double() - exact).abs().max()
    assert rounded > 100 * (logits - exact).abs().max()


def test_backward_rounds_the_gradient_once_and_nothing_else():
    hidden, weight = operands()
    hidden.requires_grad_()
    weight.requires_grad_()
    upstream = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    float32_product(hidden, weight).backward(upstream)
    rounded = upstream.bfloat16().double()
    torch.testing.assert_close(hidden.grad, (rounded @ weight.detach().double()).bfloat16(), rtol=HALF_ULP * 2, atol=0)
    torch.testing.assert_close(
        weight.grad, (rounded.t() @ hidden.detach().double()).bfloat16(), rtol=HALF_ULP * 2, atol=0
    )


def test_gradient_is_added_to_main_grad_where_megatron_keeps_one():
    hidden, weight = operands()
    weight = torch.nn.Parameter(weight)
    weight.main_grad = torch.ones(COLUMNS, WIDTH)
    weight.grad_added_to_main_grad = False
    upstream = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).bfloat16()
    float32_product(hidden, weight).backward(upstream.float())
    expected = 1.0 + upstream.double().t() @ hidden.double()
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_float64_operands_stay_float64():
    hidden, weight = (value.double().requires_grad_() for value in operands(3))
    assert torch.autograd.gradcheck(lambda h, w: float32_product(h, w), (hidden, weight))


def product_on_rank(sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, weight = operands()
    hidden = (hidden.chunk(ranks)[rank] if sequence_parallel else hidden).float().requires_grad_()
    weight = weight.chunk(ranks)[rank].float().requires_grad_()
    logits = float32_product(hidden, weight, dist.group.WORLD, sequence_parallel)
    upstream = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    logits.backward(upstream.chunk(ranks, dim=1)[rank])
    return logits.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_vocabulary_shards_give_one_ranks_product(sequence_parallel):
    hidden, weight = (value.double().requires_grad_() for value in operands())
    expected = hidden @ weight.t()
    expected.backward(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).double())
    results = run_ranks(product_on_rank, 2, sequence_parallel)
    for rank, (logits, grad_hidden, grad_weight) in enumerate(results):
        close = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
        torch.testing.assert_close(logits, expected.detach().chunk(2, dim=1)[rank], **close)
        assert hidden.grad is not None
        assert weight.grad is not None
        torch.testing.assert_close(
            grad_hidden, hidden.grad.chunk(2)[rank] if sequence_parallel else hidden.grad, **close
        )
        torch.testing.assert_close(grad_weight, weight.grad.chunk(2)[rank], **close)


def losses_of(hidden: Tensor, weight: Tensor, problem: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    arguments = (
        problem.sampled_ids, problem.advantages, problem.sampler, problem.sampled_logprobs, problem.weight, 1.0, None,
        VocabShard(0, COLUMNS, VOCAB),
    )  # fmt: skip
    if options:
        out = centered_lm_head_loss(hidden, weight, *arguments, **options)
        out.loss_sum.backward()
        loss = out.loss
    else:
        out = centered_loss(float32_product(hidden, weight), *arguments)
        out.loss.sum().backward()
        loss = out.loss.detach()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss, hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [5, 12])
def test_fused_head_with_float32_logits_equals_the_unfused_one(chunk):
    hidden, weight = operands()
    problem = make_problem("head", "tis", rows=ROWS, vocab=VOCAB)
    expected = losses_of(hidden, weight, problem)
    fused = losses_of(hidden, weight, problem, float32_logits=True, chunk_tokens=chunk)
    half = losses_of(hidden, weight, problem, float32_logits=False, chunk_tokens=chunk)
    exact = centered_loss(
        hidden.double() @ weight.double().t(), problem.sampled_ids, problem.advantages, problem.sampler,
        problem.sampled_logprobs, problem.weight, 1.0, None, VocabShard(0, COLUMNS, VOCAB),
    ).loss  # fmt: skip
    torch.testing.assert_close(fused[0], expected[0], rtol=1e-5, atol=1e-5)
    for got, want in zip(fused[1:], expected[1:], strict=True):
        torch.testing.assert_close(got, want, rtol=2 * HALF_ULP, atol=1e-3)
    assert (fused[0] - exact).abs().max() < 1e-4
    assert (half[0] - exact).abs().max() > 20 * (fused[0] - exact).abs().max()


def test_scaled_logits_are_scaled_in_float32():
    hidden, weight = operands()
    problem = make_problem("head", "tis", rows=ROWS, vocab=VOCAB)
    scaled = losses_of(hidden, weight, problem, float32_logits=True, logits_scale=0.7)
    exact = centered_loss(
        0.7 * hidden.double() @ weight.double().t(), problem.sampled_ids, problem.advantages, problem.sampler,
        problem.sampled_logprobs, problem.weight, 1.0, None, VocabShard(0, COLUMNS, VOCAB),
    ).loss  # fmt: skip
    assert (scaled[0] - exact).abs().max() < 1e-4


TRAIN = "--loss-correction score_centering --micro-batch-size 2 --train-iters 2"


def test_megatron_trains_with_float32_logits_in_both_heads_and_over_shards(tmp_path):
    """From the same weights, in Megatron's loop. With float32 parameters the flag changes nothing, so TP2 is exact."""
    weights = tmp_path / "weights"
    save = f"--train-iters 1 --lr 0 --weight-decay 0 --save {weights} --save-interval 1 --no-save-optim"
    run_ranks(train_fixed, 1, f"{TRAIN} {save}", str(tmp_path / "save.jsonl"), megatron=True)

    def curve(flags: str, world_size: int = 1) -> list[float]:
        path = str(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl")
        flags = f"{TRAIN} --load {weights} --finetune --no-load-optim {flags}"
        lines = run_ranks(train_fixed, world_size, flags, path, megatron=True)[-1]
        return [line[key] for line in lines for key in ("loss", "grad_norm", "logprob")]

    exact = pytest.approx(curve(""), rel=1e-5, abs=1e-6)
    two = "--sc-logits-dtype fp32 --tensor-model-parallel-size 2"
    assert curve(two, 2) == exact
    assert curve(f"{two} --fuse-lm-head", 2) == exact
    plain = curve("--bf16 --sc-logits-dtype fp32")
    assert curve("--bf16 --sc-logits-dtype fp32 --fuse-lm-head") == pytest.approx(plain, rel=2e-3, abs=1e-5)
    assert curve("--bf16") != pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fp8_output_proj": True}, "--fp8-output-proj rounds .* remove the flag"),
        ({"output_logit_dtype": torch.bfloat16, "sc_logits_dtype": "fp32"}, "contradicts --output-logit-dtype"),
    ],
)
def test_head_flags_that_the_loss_cannot_follow_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        check_head(argparse.Namespace(**values))


def test_head_flags_that_agree_pass():
    check_head(argparse.Namespace(fp8_output_proj=False, sc_logits_dtype="fp32"))
    check_head(argparse.Namespace(output_logit_dtype=torch.float32, sc_logits_dtype="fp32"))
    check_head(argparse.Namespace(output_logit_dtype="bf16", sc_logits_dtype="params"))


def parsed(flags: str) -> str:
    """What ``check_head`` says after Megatron's own parser and validation."""
    import sys
    from unittest import mock

    from megatron.training.arguments import parse_args, validate_args

    from megatron_sc.training.arguments import add_arguments

    with mock.patch.object(sys, "argv", ["train", *TINY.split(), *flags.split()]):
        args = parse_args(extra_args_provider=add_arguments)
        validate_args(args)
    try:
        check_head(args)
    except ValueError as error:
        return str(error)
    return args.sc_logits_dtype


def test_fp8_output_projection_of_megatrons_parser_is_refused():
    flags = f"{TRAIN} --bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-output-proj"
    (message,) = run_ranks(parsed, 1, flags, megatron=True)
    assert "--fp8-output-proj" in message
    (dtype,) = run_ranks(parsed, 1, f"{TRAIN} --bf16 --sc-logits-dtype fp32", megatron=True)
    assert dtype == "fp32"


def quantize_rows(weight: Tensor) -> Tensor:
    """e4m3 with a scale a row, written out here: the quantizer is not what is tested."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 448.0
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def k3(trainer: Tensor, sampler: Tensor) -> float:
    """KL(q || p) by the k3 estimate in expectation: sum_v q_v (r - 1 - log r), r = p / q, a mean over rows."""
    logp, logq = trainer.double().log_softmax(-1), sampler.double().log_softmax(-1)
    ratio = logp - logq
    return float((logq.exp() * (ratio.expm1() - ratio)).sum(-1).mean())


def test_rounding_masters_through_bfloat16_saves_k3_kl():
    """A trainer and a sampler that both quantize bfloat16 weights agree exactly; float32 masters make them differ."""
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(3)]
    head = torch.randn(COLUMNS, WIDTH, generator=generator) / 4
    inputs = torch.randn(256, WIDTH, generator=generator)

    def logits(weights: list[Tensor]) -> Tensor:
        hidden = inputs
        for weight in weights:
            hidden = torch.nn.functional.silu(hidden @ weight.t()) + hidden
        return hidden @ head.t()

    trainer = logits([quantize_rows(weight.bfloat16().float()) for weight in masters])
    from_masters = k3(trainer, logits([quantize_rows(weight) for weight in masters]))
    from_sent = k3(trainer, logits([quantize_rows(as_sent(weight)) for weight in masters]))
    assert from_sent == 0.0
    assert from_masters > 1e-6
    unquantized = logits([as_sent(weight) for weight in masters])
    either = [k3(unquantized, logits([quantize_rows(f(weight)) for weight in masters])) for f in (as_sent, torch.clone)]
    assert either[0] == pytest.approx(either[1], rel=0.1), "a trainer that does not quantize gains nothing"
    assert from_masters > 0.05 * either[0]


def test_as_sent_keeps_the_dtype_and_rounds_to_even():
    weight = torch.tensor([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1e-3])
    assert as_sent(weight).tolist() == [1.0, 1.0, 1.0 + 4 * 2**-8, torch.tensor(1e-3).bfloat16().item()]
    assert as_sent(weight.double()).dtype == torch.float64
    assert torch.equal(as_sent(weight, torch.float32), weight)
