"""What is compared: each method is a function (logits, positions, group) -> loss, ``[n]`` or its sum.

    megatron    (a) ``vocab_parallel_cross_entropy``, the loss that every Megatron user pays for
    listing     (b) the paper's listing: log-softmax over the vocabulary, the head gathered from it
    common      (c) the scheme of the public Megatron and FSDP integrations, see ``_common``
    ours        ``centered_loss``

All but (a), and draws, compute the same loss: the head with the trainer's tail, TIS. The sampler's tail is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_sc import centered_loss
from megatron_sc.objective.reference import reference_position

from .positions import CAP, Positions

COMMON_CHUNK = 128
"""Rows a chunk of the common scheme: 74 MiB of float32 workspace at V = 151936."""

Loss = Callable[[Tensor, Positions, dist.ProcessGroup], Tensor]
Reference = Callable[[Tensor, Positions, int], Tensor]


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    loss: Loss
    reference: Reference
    """(float64 logits ``[V]`` of a row, positions, row) -> its exact gradient ``[V]``."""


def methods(device: torch.device) -> list[Method]:
    """All that run here, Megatron's cross-entropy first."""
    found = [
        Method("(a) Megatron cross-entropy", _megatron, cross_entropy_gradient),
        Method("(b) paper's listing", _listing, head_gradient),
        Method("(c) common scheme", _common_plain, head_gradient),
        Method("(c) with entropy", _common_entropy, head_gradient),
        Method("ours", _ours(), head_gradient),
        Method("ours, no entropy", _ours(entropy_metric=False), head_gradient),
        Method("ours, logits kept", _ours(reuse_logits=False), head_gradient),
        Method("ours, 8 draws", _our_draws, draws_gradient),
    ]
    if device.type == "cuda":
        try:
            from liger_kernel.transformers.functional import liger_cross_entropy
        except ImportError:
            return found
        found.append(Method("Liger cross-entropy", _liger(liger_cross_entropy), cross_entropy_gradient))
    return found


# The losses ----------------------------------------------------------------------------------------------------------


def _megatron(logits: Tensor, at: Positions, group: dist.ProcessGroup) -> Tensor:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    return vocab_parallel_cross_entropy(logits, at.sampled_ids, tp_group=group)


def _liger(function: Any) -> Loss:
    def loss(logits: Tensor, at: Positions, group: dist.ProcessGroup) -> Tensor:
        return function(logits, at.sampled_ids, reduction="sum")

    return loss


def _ours(**options: Any) -> Loss:
    options = {"reuse_logits": True} | options

    def loss(logits: Tensor, at: Positions, group: dist.ProcessGroup) -> Tensor:
        return centered_loss(
            logits, at.sampled_ids, at.advantages, at.head, at.sampled_logprobs, at.weight, vocab=at.shard, group=group,
            **options,
        ).loss  # fmt: skip

    return loss


def _our_draws(logits: Tensor, at: Positions, group: dist.ProcessGroup) -> Tensor:
    return centered_loss(
        logits, at.sampled_ids, at.advantages, at.draws, vocab=at.shard, group=group, reuse_logits=True
    ).loss


def _listing(logits: Tensor, at: Positions, group: dist.ProcessGroup) -> Tensor:
    """``score_centering_loss`` of the paper, with the weight of Eq. (14). It needs all columns: they are gathered."""
    logp = torch.log_softmax(_GatherColumns.apply(logits, at.shard.size, group).float(), dim=-1)
    head_logp = logp.gather(1, at.head.ids)
    sampled_logp = logp.gather(1, at.sampled_ids.unsqueeze(1)).squeeze(1)
    return _centered(head_logp, sampled_logp, at)


def _common_plain(logits: Tensor, at: Positions, group: dist.ProcessGroup) -> Tensor:
    return _common(logits, at, group, with_entropy=False)


def _common_entropy(logits: Tensor, at: Positions, group: dist.ProcessGroup) -> Tensor:
    return _common(logits, at, group, with_entropy=True)


def _common(logits: Tensor, at: Positions, group: dist.ProcessGroup, with_entropy: bool) -> Tensor:
    """Chunks of rows, a vocabulary-parallel gather with autograd in each, plain autograd on top.

    The gather gives log-probabilities ``[m, k + 1]`` of head and sampled token; it all-reduces the maximum, the sum and
    the picked logits. The chunk's softmax is recomputed in backward from the logits, as the best of them do.
    """
    losses = []
    ids = torch.cat([at.head.ids, at.sampled_ids.unsqueeze(1)], dim=1)
    for first, chunk in zip(range(0, len(ids), COMMON_CHUNK), logits.split(COMMON_CHUNK), strict=True):
        rows = slice(first, first + len(chunk))
        logp, _ = _GatherLogprobs.apply(chunk, ids[rows], at.shard.start, with_entropy, group)
        losses.append(_centered(logp[:, :-1], logp[:, -1], at, rows))
    return torch.cat(losses)


def _centered(head_logp: Tensor, sampled_logp: Tensor, at: Positions, rows: slice = slice(None)) -> Tensor:
    """The loss from log-probabilities with autograd: Eq. (6) and (14) with TIS; the tail is 1 - P, floored."""
    with torch.no_grad():
        p, q = head_logp.exp(), at.head.logprobs[rows].exp()
        tail_p = (1 - p.sum(1)).clamp(min=1e-6)
        assert at.head.log_tail_mass is not None
        alpha = torch.minimum(tail_p, CAP * at.head.log_tail_mass[rows].exp()) / tail_p
        coefficients = torch.minimum(p, CAP * q) - alpha.unsqueeze(1) * p
        weight = (sampled_logp - at.sampled_logprobs[rows]).clamp(max=math.log(CAP)).exp()
    return -at.advantages[rows] * (weight * sampled_logp - (coefficients * head_logp).sum(1))


class _GatherColumns(torch.autograd.Function):
    """All ranks' columns ``[n, V]``; backward keeps the own ones."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ranks, ctx.rank, ctx.columns = dist.get_world_size(group), dist.get_rank(group), logits.shape[1]
        if ranks == 1:
            return logits.view_as(logits)
        gathered = logits.new_empty(ranks * logits.shape[0], logits.shape[1])
        dist.all_gather_into_tensor(gathered, logits.contiguous(), group=group)
        return torch.cat(gathered.chunk(ranks), dim=1)[:, :size]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        first = ctx.rank * ctx.columns
        local = gradient[:, first : first + ctx.columns]
        padding = ctx.columns - local.shape[1]
        return torch.nn.functional.pad(local, (0, padding)) if padding else local.contiguous(), None, None


class _GatherLogprobs(torch.autograd.Function):
    """Log-probabilities ``[m, j]`` of tokens over vocabulary shards, and the entropy ``[m]`` without gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, start: int, with_entropy: bool, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        x = logits.float()
        maximum = x.amax(dim=1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        exponential = (x - maximum.unsqueeze(1)).exp_()
        total = exponential.sum(dim=1)
        dist.all_reduce(total, group=group)
        owned = (ids >= start) & (ids < start + x.shape[1])
        local = torch.where(owned, ids - start, 0)
        picked = torch.where(owned, x.gather(1, local) - maximum.unsqueeze(1), 0.0)
        dist.all_reduce(picked, group=group)
        log_normalizer = total.log()
        entropy = torch.zeros_like(total)
        if with_entropy:
            dot = (exponential * (x - maximum.unsqueeze(1))).sum(dim=1)
            dist.all_reduce(dot, group=group)
            entropy = log_normalizer - dot / total
        ctx.save_for_backward(logits, maximum, log_normalizer, owned, local)
        ctx.mark_non_differentiable(entropy)
        return picked - log_normalizer.unsqueeze(1), entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, maximum, log_normalizer, owned, local = ctx.saved_tensors
        softmax = (logits.float() - (maximum + log_normalizer).unsqueeze(1)).exp_()
        result = softmax.mul_(-gradient.sum(dim=1, keepdim=True))
        result.scatter_add_(1, local, torch.where(owned, gradient, 0.0))
        return result.to(logits.dtype), None, None, None, None


# What they must equal, in float64 ------------------------------------------------------------------------------------


def head_gradient(logits: Tensor, at: Positions, row: int) -> Tensor:
    """Of the loss with the head, ``[V]``."""
    return reference_position(
        logits, int(at.sampled_ids[row]), float(at.advantages[row]), at.head, row,
        sampled_logprob=float(at.sampled_logprobs[row]), weight=at.weight,
    ).gradient  # fmt: skip


def draws_gradient(logits: Tensor, at: Positions, row: int) -> Tensor:
    """Of the loss with the draws, ``[V]``."""
    return reference_position(logits, int(at.sampled_ids[row]), float(at.advantages[row]), at.draws, row).gradient


def cross_entropy_gradient(logits: Tensor, at: Positions, row: int) -> Tensor:
    """Of -log p_y, ``[V]``."""
    gradient = torch.softmax(logits.double(), dim=0)
    gradient[at.sampled_ids[row]] -= 1
    return gradient
