"""The autograd operation: two local passes forward with one exchange after each, one local pass backward.

    forward    statistics of the logits -> exchange -> sums over the recorded tokens -> exchange -> loss
    backward   no communication: a few scalars a row and the local logits give every column's gradient

Kept for backward: the logits, the caller's tensors, and ``RowState``, nine numbers a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..objective.weights import MAX_LOG_RATIO
from . import backend
from .centering import SUMMED, RowState, Sums
from .exchange import gather_rows
from .problem import Problem
from .statistics import Normalizer, combine


class CenteredLoss(torch.autograd.Function):
    """(logits, problem) -> loss ``[n]`` and, without gradient, the metrics ``[M, n]`` of ``problem.metric_names``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        """Two local passes, each followed by one exchange."""
        loss, metrics, state = evaluate(logits.detach(), problem)
        ctx.problem = problem
        ctx.spent = False
        ctx.save_for_backward(logits, *state)
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor, None]:
        """One local pass; writes the gradient over the logits when their storage may be reused."""
        if ctx.spent:
            raise RuntimeError("a second backward pass needs reuse_logits=False: the first one overwrote the logits")
        logits, *state = ctx.saved_tensors
        ctx.spent = ctx.problem.reuse_logits
        with torch.autocast(logits.device.type, enabled=False):
            return backend.gradient(logits.detach(), ctx.problem, RowState(*state), grad_loss), None


def evaluate(values: Tensor, problem: Problem) -> tuple[Tensor, Tensor, RowState]:
    """The forward pass without autograd: loss ``[n]``, metrics ``[M, n]`` and what ``backend.gradient`` needs.

    Args:
        values: ``[n, columns]`` logits; overwritten with intermediate values if their storage may be reused.
        problem: the call.
    """
    local = backend.statistics(values, problem)
    normalizer = combine(gather_rows(local.values, problem.group))
    if problem.sampler is None:
        sums = Sums(*values.new_zeros((SUMMED, len(values)), dtype=local.values.dtype))
    else:
        alpha = problem.centering.alpha(normalizer, problem.row, local.recorded_mass)
        parts = backend.sums(values, problem, normalizer, alpha)
        sums = Sums(*gather_rows(parts, problem.group).sum(dim=0).unbind(dim=1))
    outcome = problem.centering.finish(normalizer, problem.row, sums, local.recorded_mass)
    # What an in-place pass left in the storage, times this, is exp(x - dense_maximum).
    shift_factor = (local.values[:, 0] - normalizer.dense_maximum).exp() * local.stored_scale
    state = outcome.state._replace(shift_factor=shift_factor)

    loss = outcome.loss
    if problem.sampler_kl_coef:
        loss = loss + problem.sampler_kl_coef * outcome.kl
    if problem.entropy_coef:
        loss = loss - problem.entropy_coef * state.entropy
    known = {**_observed(problem, normalizer, state, local.sampled_recorded), **outcome.metrics}
    metrics = torch.stack([known[name] for name in problem.metric_names])
    if problem.mask is not None:
        loss = torch.where(problem.mask, loss, 0.0)
        metrics = torch.where(problem.mask, metrics, 0.0)
    return loss, metrics, state


def _observed(problem: Problem, normalizer: Normalizer, state: RowState, sampled_recorded: Tensor) -> dict[str, Tensor]:
    """Metrics of the sampled token and of the trainer, ``[n]`` each."""
    logp, logq = normalizer.sampled_logp, problem.row.sampled_logq
    log_ratio = torch.zeros_like(logp) if logq is None else logp - logq
    return {
        "logprob": logp,
        "log_ratio": log_ratio,
        "log_ratio_abs": log_ratio.abs(),
        "ratio_kl": log_ratio.clamp(max=MAX_LOG_RATIO).expm1() - log_ratio,  # k3: E_q[r - 1 - log r] = KL(q || p)
        "importance_weight": state.weight,
        "entropy": state.entropy,
        "sampled_in_recorded": sampled_recorded,
    }
