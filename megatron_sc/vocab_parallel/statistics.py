"""The local pass over a shard's logits, and how the ranks' results combine. No communication here.

Everything is kept relative to a maximum: log p = (x - maximum) - log_normalizer with x = z/T, so that float32 keeps
its digits however large the logits are. The columns outside the head have a maximum of their own: their mass may be
1e-13 of the whole and its logarithm is still exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NOTHING = -1e30
"""Stands for log 0 in maxima: finite, so that NOTHING - NOTHING is 0 and 0 * NOTHING is 0."""

LOWEST_EXPONENT = -87.0
"""exp below this is a float32 denormal: slow, and never visible beside a maximum of 1."""

EXCHANGED = 6
"""Numbers a token that a rank contributes to the first exchange: maximum, sum and dot of the dense columns (see
``local_statistics``), maximum and sum of the recorded tokens where they are counted apart, x of the sampled token."""


class Normalizer(NamedTuple):
    """What every rank knows after the first exchange; all ``[n]``."""

    maximum: Tensor
    """The largest x of the row."""
    log_normalizer: Tensor
    """log sum exp(x - maximum)."""
    dense_maximum: Tensor
    """The largest x outside the recorded entries (head), or of all columns."""
    dense_sum: Tensor
    """sum exp(x - dense_maximum) over those columns; 0 where there are none."""
    dense_dot: Tensor
    """sum exp(x - dense_maximum) (x - dense_maximum) over those columns; 0 when it was not asked for."""
    recorded_p: Tensor
    """sum p over the recorded entries, where they are counted on their own."""
    sampled_logp: Tensor
    """log p_y."""


def local_statistics(x: Tensor, shifted: Tensor, softmax: Tensor, with_dot: bool) -> tuple[Tensor, Tensor]:
    """One pass over a shard's columns. PyTorch's softmax is one fused operation, cheaper than exp alone on the CPU.

    Args:
        x: ``[rows, valid]`` scaled logits with ``NOTHING`` in the columns to leave out.
        shifted: like ``x``, overwritten; may be ``x``.
        softmax: like ``x``, overwritten with the softmax of these columns; may be ``x`` where ``shifted`` is not, and
            without ``with_dot`` also ``shifted``.
        with_dot: whether the entropy will be needed; else 0.

    Returns:
        ``[rows, 3]``: maximum, sum of exp(x - maximum), sum of exp(x - maximum) (x - maximum).
        ``[rows]``: what ``softmax`` must be multiplied by to be exp(x - maximum).
    """
    if x.shape[1] == 0:
        none = torch.tensor([NOTHING, 0.0, 0.0], dtype=x.dtype, device=x.device)
        return none.expand(x.shape[0], 3), x.new_zeros(x.shape[0])
    maximum = x.amax(dim=1).clamp(min=NOTHING)
    torch.sub(x, maximum.unsqueeze(1), out=shifted)
    present = maximum > NOTHING
    on_cpu = x.device.type == "cpu"
    # -inf makes 0 * -inf in the dot, and a softmax of nothing where all are: both are rare, and on the CPU looking for
    # them in the results is cheaper than a pass that prevents them.
    if not on_cpu or not present.all():
        shifted.clamp_(min=LOWEST_EXPONENT)
    torch.softmax(shifted, dim=1, out=softmax)
    scale = softmax.amax(dim=1).reciprocal()  # there exp(x - maximum) is 1
    total = softmax.sum(dim=1) * scale  # softmax's own sum is plain; this one keeps float32's digits
    dot = torch.zeros_like(maximum)
    if with_dot:
        dot = shifted.mul_(softmax).sum(dim=1) * scale
        if on_cpu and dot.isnan().any():
            dot = shifted.nan_to_num_(nan=0.0).sum(dim=1) * scale
    values = torch.stack([maximum, torch.where(present, total, 0.0), torch.where(present, dot, 0.0)], dim=1)
    return values, scale


def combine(gathered: Tensor) -> Normalizer:
    """``[ranks, n, EXCHANGED]`` -> the row's normalizer, the same bits on every rank."""
    dense_maxima, dense_sums, dense_dots, entry_maxima, entry_sums, sampled_x = gathered.unbind(dim=2)
    dense_maximum = dense_maxima.amax(dim=0)
    maximum = torch.maximum(dense_maximum, entry_maxima.amax(dim=0))
    shift = dense_maxima - dense_maximum
    scale = shift.exp()
    dense_sum = (dense_sums * scale).sum(dim=0)
    dense_dot = (scale * (dense_dots + dense_sums * shift)).sum(dim=0)
    recorded = (entry_sums * (entry_maxima - maximum).exp()).sum(dim=0)
    total = dense_sum * (dense_maximum - maximum).exp() + recorded
    log_normalizer = total.log()
    sampled_logp = (sampled_x.amax(dim=0).clamp(min=NOTHING) - maximum) - log_normalizer  # 0 log 0 = 0
    return Normalizer(maximum, log_normalizer, dense_maximum, dense_sum, dense_dot, recorded / total, sampled_logp)
