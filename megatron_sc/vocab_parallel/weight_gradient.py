"""How the gradient of the output weight reaches the parameter, as from Megatron's own linear layer.

Megatron's data-parallel wrapper keeps gradients in ``weight.main_grad``, usually float32. A layer may add to it itself:
it then sets ``weight.grad_added_to_main_grad`` and returns a placeholder, because the wrapper's hook (which starts the
overlapped reduction) runs only where autograd delivers a gradient. The hook ignores the placeholder's values, unless
``weight.zero_out_wgrad`` says that the weight has other uses (tied embeddings), whose gradient arrives in the same sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 24
"""Elements of a block of rows where a product needs float32 copies: 64 MiB."""

HAS_FLOAT32_PRODUCT = hasattr(torch.ops.aten.mm, "dtype")
"""Whether torch multiplies half-precision matrices into float32 (2.8 and later, CUDA)."""


def has_main_grad(weight: Tensor) -> bool:
    """Whether Megatron's data-parallel wrapper keeps the gradient of ``weight``."""
    return getattr(weight, "main_grad", None) is not None and hasattr(weight, "grad_added_to_main_grad")


def placeholder(weight: Tensor) -> Tensor:
    """Mark the gradient as added to ``main_grad``, and what autograd gets in its place: like ``weight``."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)


def hand_over(weight: Tensor, gradient: Tensor, scale: Tensor) -> Tensor:
    """Add ``scale * gradient`` to ``main_grad`` if there is one. Returns what autograd gets.

    Args:
        weight: ``[V_local, h]``, the parameter.
        gradient: ``[V_local, h]`` float32 (float64 for a float64 weight); may be overwritten.
        scale: ``[]`` on the gradient's device; it is not read on the host.
    """
    if has_main_grad(weight):
        weight.main_grad.addcmul_(gradient, scale.to(gradient.dtype))  # type: ignore[attr-defined]
        return placeholder(weight)
    return gradient.mul_(scale).to(weight.dtype)


def add_product_(total: Tensor, gradient: Tensor, hidden: Tensor, scale: float) -> None:
    """``total += scale gradient^T hidden`` without rounding the product to half precision.

    Args:
        total: ``[V_local, h]`` float32 or float64.
        gradient: ``[n, V_local]`` of the logits, in ``hidden``'s dtype.
        hidden: ``[n, h]``.
        scale: a number.
    """
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), hidden, alpha=scale)
        return
    in_half = gradient.is_cuda and HAS_FLOAT32_PRODUCT
    other = hidden if in_half else hidden.to(total.dtype)
    step = max(BLOCK_ELEMENTS // max(total.shape[1] if in_half else gradient.shape[0], 1), 1)
    for start in range(0, total.shape[0], step):
        rows = slice(start, start + step)
        block = gradient[:, rows].t()
        if in_half:
            total[rows].add_(torch.mm(block, other, out_dtype=total.dtype), alpha=scale)
        else:
            total[rows].addmm_(block.to(total.dtype), other, alpha=scale)
