"""Draws without a softmax: with f = 1 the normalizer cancels, and only the rows of y and of the draws are needed.

    l = -A ( log p_y - 1/K sum_j log p_{v_j} ) = -(A/T) h . ( W_y - 1/K sum_j W_{v_j} )

The gradient is sparse in W (K + 1 rows a token) and one vector of h numbers a token in the hidden states, so no product
with the vocabulary is needed, forward or backward. A rank adds up the rows that it owns; one number a token is
exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..objective.distributions import Draws
from .exchange import gather_rows
from .hidden_states import HiddenReduction, gather_hidden
from .problem import Problem, compute_dtype
from .shard import VocabShard
from .weight_gradient import has_main_grad, placeholder

WORKSPACE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Numbers gathered at once from the weight: 4 MiB on the CPU, about its cache, and 64 MiB on a GPU."""


def needs_no_softmax(problem: Problem) -> bool:
    """Whether the loss is the one above: draws, f = 1, and no term beside it."""
    return (
        isinstance(problem.sampler, Draws)
        and problem.centering.center
        and not problem.centering.weight.needs_ratio
        and not problem.sampler_kl_coef
        and not problem.entropy_coef
    )


class SparseHeadLoss(torch.autograd.Function):
    """(hidden, weight, ...) -> sum of the losses ``[]`` and, without gradient, the losses ``[n]``.

    Kept for backward: hidden states, their gradient, and one number a token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        problem: Problem,
        logits_scale: float,
        sequence_parallel: bool,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Gathers the rows of the weight that this shard holds; one exchange."""
        tokens = gather_hidden(hidden.detach(), problem.group, sequence_parallel)
        rows, dtype = weight.detach(), compute_dtype(hidden)
        coefficient = -problem.row.advantage * logits_scale  # of h . (W_y - mean W_v); 0 in masked rows
        if problem.temperature is not None:
            coefficient = coefficient / problem.temperature
        part = torch.zeros((len(tokens), 1), dtype=dtype, device=tokens.device)
        keeps_hidden_gradient = with_gradient and ctx.needs_input_grad[0]
        gradient = torch.empty_like(tokens) if keeps_hidden_gradient else None
        for start, stop in _chunks(problem, tokens):
            some = slice(start, stop)
            column, share = _columns(problem, start, stop, dtype)
            if problem.shard.valid == 0:
                direction = torch.zeros((stop - start, tokens.shape[1]), dtype=dtype, device=tokens.device)
            else:
                # [c, 1 + K, h] -> [c, h]: W_y - mean W_v, as far as this shard holds them
                direction = rows[column].to(dtype).mul_(share.unsqueeze(2)).sum(dim=1)
            part[some, 0] = coefficient[some] * torch.linalg.vecdot(
                _trained(tokens[some], problem, some, dtype), direction
            )
            if gradient is not None:
                gradient[some] = direction.mul_(coefficient[some].unsqueeze(1))
        loss = gather_rows(part, problem.group).sum(dim=0).squeeze(1)
        if problem.mask is not None:
            loss = torch.where(problem.mask, loss, 0.0)
        if with_gradient:
            ctx.problem, ctx.sequence_parallel, ctx.spent = problem, sequence_parallel, False
            ctx.weight = weight  # not saved_tensors, which saved-tensor hooks may replace: main_grad is on this object
            ctx.save_for_backward(coefficient, tokens if ctx.needs_input_grad[1] else None, gradient)
        ctx.mark_non_differentiable(loss)
        return loss.sum(), loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Adds K + 1 rows a token to the weight's gradient; no communication beside the hidden states' reduction."""
        if ctx.spent:
            raise RuntimeError(
                "the fused LM head supports one backward pass: the first one reduced its gradient in place"
            )
        ctx.spent = True
        coefficient, tokens, gradient = ctx.saved_tensors
        reduction = None
        if gradient is not None:
            reduction = HiddenReduction(gradient, ctx.problem.group, ctx.sequence_parallel)
        grad_weight = None
        if tokens is not None:
            grad_weight = _weight_gradient(ctx.weight, tokens, ctx.problem, coefficient * grad_sum)
        grad_hidden = None if reduction is None else reduction.wait().mul_(grad_sum)
        return grad_hidden, grad_weight, None, None, None, None


def _weight_gradient(weight: Tensor, tokens: Tensor, problem: Problem, coefficient: Tensor) -> Tensor:
    """Add the sparse gradient to ``main_grad``, or to a dense gradient where there is none; what autograd gets."""
    into_main_grad = has_main_grad(weight)
    if into_main_grad:
        total = weight.main_grad  # type: ignore[attr-defined]
    else:
        total = torch.zeros_like(weight, dtype=compute_dtype(weight), requires_grad=False)
    for start, stop in _chunks(problem, tokens):
        if problem.shard.valid == 0:
            break
        some = slice(start, stop)
        column, share = _columns(problem, start, stop, coefficient.dtype)
        hidden = _trained(tokens[some], problem, some, coefficient.dtype) * coefficient[some].unsqueeze(1)
        rows = (share.unsqueeze(2) * hidden.unsqueeze(1)).flatten(0, 1).to(total.dtype)
        if total.is_cuda:  # sorts, so that the sum is the same in every run; index_add_ would add in any order
            total.index_put_((column.flatten(),), rows, accumulate=True)
        else:
            total.index_add_(0, column.flatten(), rows)
    return placeholder(weight) if into_main_grad else total.to(weight.dtype)


def _columns(problem: Problem, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Local rows of the weight of y and the draws, int64 ``[c, 1 + K]``, and their share: 1 and -1/K, 0 if not owned.

    A token of another shard stands at some row of this one with share 0: spread out, because many additions to one row
    would wait for each other.
    """
    assert isinstance(problem.sampler, Draws)
    shard: VocabShard = problem.shard
    ids = torch.cat([problem.sampled_ids[start:stop].unsqueeze(1), problem.sampler.ids[start:stop].long()], dim=1)
    share = torch.full(ids.shape, -1 / problem.sampler.ids.shape[1], dtype=dtype, device=ids.device)
    share[:, 0] = 1
    local = ids - shard.start
    owned = (local >= 0) & (local < shard.valid)
    if problem.mask is not None:
        owned = owned & problem.mask[start:stop].unsqueeze(1)
    return local.remainder(max(shard.valid, 1)), torch.where(owned, share, 0.0)


def _trained(hidden: Tensor, problem: Problem, rows: slice, dtype: torch.dtype) -> Tensor:
    """Hidden states in the compute dtype, 0 in masked rows, which may hold anything."""
    hidden = hidden.to(dtype)
    return hidden if problem.mask is None else hidden.masked_fill(~problem.mask[rows].unsqueeze(1), 0.0)


def _chunks(problem: Problem, tokens: Tensor) -> Iterator[tuple[int, int]]:
    assert isinstance(problem.sampler, Draws)
    n, width = tokens.shape
    per_token = (1 + problem.sampler.ids.shape[1]) * width
    step = max(WORKSPACE_ELEMENTS.get(tokens.device.type, 1 << 22) // max(per_token, 1), 1)
    for start in range(0, n, step):
        yield start, min(start + step, n)
