"""The dense float64 reference: one position at a time, over the whole vocabulary, as the paper writes it.

Nothing here is shared with the fast implementation but the types of the sampler's distribution. The gradient comes from
autograd through the dense expectation, not from a closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .distributions import Draws, FullVocabulary, SamplerDistribution, Support, TopKHead
from .weights import (
    ClippedSurrogate,
    ImportanceSampling,
    ImportanceWeight,
    MaskedImportanceSampling,
    TruncatedImportanceSampling,
    Uniform,
)


@dataclass(frozen=True)
class ReferencePosition:
    """One position in float64.

    Attributes:
        loss: the value of Eq. (6), weighted as in (14).
        gradient: ``[V]`` its gradient with respect to the logits.
        weight: w_y, the weight of the sampled token.
        weighted_sampler: ``[V]`` q_v f(p_v/q_v) over the vocabulary, the tail written out: what is centered.
    """

    loss: Tensor
    gradient: Tensor
    weight: Tensor
    weighted_sampler: Tensor


def reference_position(
    logits: Tensor,
    sampled_id: int,
    advantage: float,
    sampler: SamplerDistribution | None,
    row: int = 0,
    *,
    sampled_logprob: float | None = None,
    weight: ImportanceWeight | None = None,
    temperature: float = 1.0,
) -> ReferencePosition:
    """The centered loss of one position.

    Args:
        logits: ``[V]`` trainer logits over the true vocabulary (no padding columns).
        sampled_id: y.
        advantage: A.
        sampler: the sampler's distribution, of which row ``row`` is used; None: no centering.
        row: the row of ``sampler``.
        sampled_logprob: log q_y; needed by every weight but ``Uniform``.
        weight: f; None: 1.
        temperature: T.

    Returns:
        See ``ReferencePosition``.
    """
    weight = weight or Uniform()
    z = logits.detach().double().requires_grad_()
    log_p = torch.log_softmax(z / temperature, dim=0)
    in_support = torch.ones_like(z, dtype=torch.bool)
    if isinstance(sampler, Support):
        ids, _ = _recorded(sampler, row)
        in_support = torch.zeros_like(z, dtype=torch.bool).index_fill(0, ids, True)
        log_p = torch.log_softmax((z / temperature).masked_fill(~in_support, -torch.inf), dim=0)
    p = log_p.detach().exp()

    w_y = torch.ones((), dtype=torch.float64)
    if weight.needs_ratio:
        if sampled_logprob is None:
            raise ValueError(f"weight {weight.name} needs sampled_logprob")
        w_y = _f(weight, p[sampled_id] / torch.tensor(sampled_logprob, dtype=torch.float64).exp(), advantage)

    # E_q[f s]: the average of the weighted score under the sampler, a sum over the whole vocabulary.
    expectation = torch.zeros_like(p)  # q_v f(p_v / q_v)
    head_form = None  # the coefficients of Eq. (8), for the value of the loss
    if isinstance(sampler, TopKHead):
        ids, q_head = _recorded(sampler, row)
        tail = torch.ones_like(p, dtype=torch.bool).index_fill(0, ids, False)
        tail_p = p[tail].sum()  # summed, never 1 - P
        if not tail.any():
            tail_q = torch.zeros((), dtype=torch.float64)
        elif sampler.log_tail_mass is not None and not sampler.log_tail_mass[row].isnan():
            tail_q = sampler.log_tail_mass[row].double().exp()
        else:
            tail_q = (1 - q_head.sum()).clamp(min=0)
        q = torch.zeros_like(p)
        q[ids] = q_head
        q[tail] = tail_q * p[tail] / tail_p  # Eq. (7)
        expectation = _weighted(weight, p, q, advantage)
        # Eq. (8): the tail's average score is minus the head's, so alpha p_v is taken off on the head.
        t = expectation[tail].sum()
        alpha = t / tail_p if t > 0 else torch.zeros_like(t)
        head_form = torch.zeros_like(p)
        head_form[ids] = expectation[ids] - alpha * p[ids]
    elif isinstance(sampler, Support):
        ids, q_support = _recorded(sampler, row)
        q = torch.zeros_like(p)
        q[ids] = q_support
        expectation = _weighted(weight, p, q, advantage)
    elif isinstance(sampler, Draws):
        draws = sampler.ids[row].long()
        f = torch.ones(len(draws), dtype=torch.float64)
        if weight.needs_ratio:
            assert sampler.logprobs is not None
            f = _f(weight, p[draws] / sampler.logprobs[row].double().exp(), advantage)
        expectation.index_add_(0, draws, f / len(draws))
    elif isinstance(sampler, FullVocabulary):
        expectation = _weighted(weight, p, sampler.logprobs[row].double().exp(), advantage)

    kept = in_support & ((expectation > 0) | (torch.arange(len(p)) == sampled_id))
    safe_log_p = torch.where(kept, log_p, 0.0)  # 0 log 0 = 0

    def loss_with(coefficients: Tensor) -> Tensor:
        return -advantage * (w_y * log_p[sampled_id] - (coefficients * safe_log_p).sum())  # Eq. (6), weighted: (14)

    (gradient,) = torch.autograd.grad(loss_with(expectation), z)
    if head_form is None:
        value = loss_with(expectation)
    else:
        used = torch.where(head_form != 0, log_p, 0.0)
        value = -advantage * (w_y * log_p[sampled_id] - (head_form * used).sum())
    return ReferencePosition(value.detach(), gradient, w_y, expectation)


def _f(weight: ImportanceWeight, ratio: Tensor, advantage: float) -> Tensor:
    """f(r), written out a second time and naively."""
    if isinstance(weight, Uniform):
        return torch.ones_like(ratio)
    if isinstance(weight, ImportanceSampling):
        return ratio
    if isinstance(weight, TruncatedImportanceSampling):
        return ratio.clamp(max=weight.cap)
    if isinstance(weight, MaskedImportanceSampling):
        return torch.where((ratio >= weight.low) & (ratio <= weight.high), ratio, 0.0)
    if isinstance(weight, ClippedSurrogate):
        if advantage >= 0:
            return torch.where(ratio <= 1 + weight.high, ratio, 0.0)
        upper = torch.inf if weight.dual is None else weight.dual
        return torch.where((ratio >= 1 - weight.low) & (ratio <= upper), ratio, 0.0)
    raise TypeError(f"the reference does not know {type(weight).__name__}")


def _weighted(weight: ImportanceWeight, p: Tensor, q: Tensor, advantage: float) -> Tensor:
    """q f(p/q) where q > 0, else 0: what the sampler never samples is not averaged."""
    safe_q = torch.where(q > 0, q, 1.0)
    return torch.where(q > 0, q * _f(weight, p / safe_q, advantage), 0.0)


def _recorded(sampler: TopKHead | Support, row: int) -> tuple[Tensor, Tensor]:
    """Ids and probabilities of one row, without padding."""
    if sampler.offsets is None:
        ids, logprobs = sampler.ids[row], sampler.logprobs[row]
    else:
        start, stop = sampler.offsets[row], sampler.offsets[row + 1]
        ids, logprobs = sampler.ids[start:stop], sampler.logprobs[start:stop]
    kept = (ids >= 0) & (logprobs > -torch.inf)
    return ids[kept].long(), logprobs[kept].double().exp()
