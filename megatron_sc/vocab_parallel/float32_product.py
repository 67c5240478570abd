"""The output layer's product with float32 logits: operands as they are, sums and results not rounded to half precision.

    forward     z = h W^T, half-precision operands (their products are exact in float32), float32 sums and results
    backward    the gradient of z, rounded once to the operands' dtype; products as in Megatron's own layer

Rounding logits of size 20 to bfloat16 moves them by up to 0.06, and log-probabilities with them. Float32 logits take
twice the memory of the output layer's result; the backward pass adds one half-precision copy of their gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .hidden_states import HiddenReduction, gather_hidden
from .weight_gradient import HAS_FLOAT32_PRODUCT, add_product_, hand_over, has_main_grad, placeholder


def float32_product(
    hidden: Tensor, weight: Tensor, group: dist.ProcessGroup | None = None, sequence_parallel: bool = False
) -> Tensor:
    """float32 ``[n, V_local]`` logits (float64 for float64 operands).

    The weight's gradient goes to ``weight.main_grad`` where Megatron's data-parallel wrapper keeps one, as in
    ``lm_head``.

    Args:
        hidden: ``[n, h]``; under sequence parallelism this rank's ``[n / ranks, h]``.
        weight: ``[V_local, h]``, of the same dtype.
        group: tensor-parallel process group.
        sequence_parallel: whether ``hidden`` is this rank's share of the tokens.
    """
    logits: Tensor = _Float32Product.apply(hidden, weight, group, sequence_parallel)
    return logits


def product_into(out: Tensor, hidden: Tensor, weight: Tensor, scale: float = 1.0) -> None:
    """``out = scale hidden weight^T`` in float32 (float64).

    Args:
        out: ``[n, V_local]`` float32; float64 for float64 operands.
        hidden: ``[n, h]``.
        weight: ``[V_local, h]``, of the same dtype.
        scale: a number.
    """
    if hidden.dtype == out.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.is_cuda and HAS_FLOAT32_PRODUCT:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:
        torch.mm(hidden.to(out.dtype), weight.t().to(out.dtype), out=out)
    if scale != 1.0:
        out.mul_(scale)


class _Float32Product(torch.autograd.Function):
    """(hidden, weight, group, sequence_parallel) -> logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool
    ) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.weight = weight  # not saved_tensors, which saved-tensor hooks may replace: main_grad is on this object
        ctx.save_for_backward(hidden)
        tokens = gather_hidden(hidden.detach(), group, sequence_parallel)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logits = torch.empty((len(tokens), weight.shape[0]), dtype=dtype, device=tokens.device)
        product_into(logits, tokens, weight.detach())
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Two products in the operands' dtype; the hidden states' gradient is reduced meanwhile."""
        (hidden,) = ctx.saved_tensors
        weight = ctx.weight
        gradient = grad.to(weight.dtype)
        reduction = returned = None
        if ctx.needs_input_grad[0]:
            reduction = HiddenReduction(gradient @ weight.detach(), ctx.group, ctx.sequence_parallel)
        if ctx.needs_input_grad[1]:
            tokens = gather_hidden(hidden, ctx.group, ctx.sequence_parallel)
            if has_main_grad(weight) and weight.main_grad.dtype == grad.dtype:
                add_product_(weight.main_grad, gradient, tokens, 1.0)
                returned = placeholder(weight)
            else:
                total = torch.zeros_like(weight, dtype=grad.dtype, requires_grad=False)
                add_product_(total, gradient, tokens, 1.0)
                returned = hand_over(weight, total, torch.ones((), device=total.device))
        return (None if reduction is None else reduction.wait()), returned, None, None
