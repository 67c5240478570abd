"""The estimators of the average score, each as the local arithmetic that the op calls. No communication here.

With C_u the weighted sampler mass of token u (q_u f_u, or its estimate), W = sum C over recorded tokens, and w = w_y:

    dl/dz_u = -(A/T) ( w [u=y] - C_u - (w - sum C) p_u )

On recorded tokens C_u is known one by one: ``entry_mass``. Elsewhere it is proportional to exp(x_u), so the gradient of
all other columns is one coefficient a row times exp(x_u - dense_maximum): ``RowState.dense``.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, override

import torch
from torch import Tensor

from ..objective.distributions import Draws, FullVocabulary, SamplerDistribution, Support, TopKHead
from ..objective.weights import MAX_LOG_RATIO, ImportanceWeight
from .entries import Entries
from .statistics import NOTHING, Normalizer

SUMMED = 6
"""Numbers a token that a rank contributes to the second exchange: the fields of ``Sums``."""

TAIL_RATIO_LIMIT = 4.0
"""Tokens whose sampler tail is this many times the trainer's are counted: the sign of a collapse (1.2 -> 52)."""


class Sums(NamedTuple):
    """Sums over a row's recorded tokens (all tokens for the full vocabulary); each ``[n]``, over all ranks."""

    mass: Tensor
    """W = sum C."""
    mass_logp: Tensor
    """sum C log p."""
    plogp: Tensor
    """sum p log p."""
    l1: Tensor
    """sum |c| with c the coefficient of the logged loss."""
    kl: Tensor
    """sum q (log q - log p)."""
    drift: Tensor
    """sum |q - p|."""


class RowState(NamedTuple):
    """What backward needs of a row beside the logits; each ``[n]``."""

    maximum: Tensor
    log_normalizer: Tensor
    dense_maximum: Tensor
    weight: Tensor
    """w = w_y."""
    dense: Tensor
    """Coefficient of exp(x - dense_maximum), in units of -(A/T)."""
    dense_kl: Tensor
    """The same of the KL term, in units of 1/T."""
    entry_p: Tensor
    """Coefficient of p at recorded tokens, in units of -(A/T)."""
    entropy: Tensor
    shift_factor: Tensor
    """What an in-place pass left in the storage, times this, is exp(x - dense_maximum)."""


class Outcome(NamedTuple):
    """The forward result of all rows, ``[n]`` each; ``metrics`` are those named in ``metric_names``."""

    loss: Tensor
    kl: Tensor
    metrics: dict[str, Tensor]
    state: RowState


class Row(NamedTuple):
    """The per-position inputs; each ``[n]``, in the compute dtype. Masked rows hold harmless values."""

    advantage: Tensor
    sampled_logq: Tensor | None

    def of(self, rows: slice) -> Row:
        """The inputs of some rows."""
        return Row(self.advantage[rows], None if self.sampled_logq is None else self.sampled_logq[rows])


class NoCentering:
    """No distribution of the sampler: the policy gradient itself. Also the base of the estimators.

    Args:
        weight: f.
        center: False: measure the sampler's distribution, but subtract nothing.
    """

    dense_columns: ClassVar[bool] = True
    """Whether columns that are not recorded are part of the softmax."""
    entries_apart: ClassVar[bool] = False
    """Whether recorded tokens are left out of the dense statistics and counted on their own."""
    metric_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, weight: ImportanceWeight, center: bool):
        self.weight = weight
        self.center = center

    def local_sums(self, entries: Entries, owned: Tensor, logp: Tensor, row: Row, alpha: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of ``Sums`` for a range of rows; ``logp`` and ``owned`` are per entry."""
        raise NotImplementedError

    def alpha(self, normalizer: Normalizer, row: Row, recorded_mass: Tensor) -> Tensor:
        """Coefficient of p_v in the logged loss (Eq. 8); 0 where no tail is modeled."""
        return torch.zeros_like(normalizer.log_normalizer)

    def entry_mass(self, entries: Entries, logp: Tensor, advantage: Tensor) -> Tensor:
        """C of each recorded token; 0 without centering."""
        raise NotImplementedError

    def finish(self, normalizer: Normalizer, row: Row, sums: Sums, recorded_mass: Tensor) -> Outcome:
        """Loss, metrics and row state from what both exchanges brought. ``recorded_mass`` is sum q in float64."""
        weight = _sampled_weight(self.weight, normalizer, row)
        reciprocal = (-normalizer.log_normalizer).exp()  # here dense_maximum is the maximum of all columns
        zero = torch.zeros_like(weight)
        entropy = normalizer.log_normalizer - normalizer.dense_dot * reciprocal
        # E_q[-score] is the gradient of KL(q || p); the sampled token is the only known draw from q.
        kl = zero if row.sampled_logq is None else row.sampled_logq - normalizer.sampled_logp
        state = RowState(
            normalizer.maximum,
            normalizer.log_normalizer,
            normalizer.dense_maximum,
            weight,
            dense=-weight * reciprocal,
            dense_kl=reciprocal,
            entry_p=zero,
            entropy=entropy,
            shift_factor=zero,
        )
        return Outcome(-row.advantage * weight * normalizer.sampled_logp, kl, {}, state)


class _Recorded(NoCentering):
    """What head and support share: each recorded token with its q."""

    entries_apart: ClassVar[bool] = True

    @override
    def entry_mass(self, entries: Entries, logp: Tensor, advantage: Tensor) -> Tensor:
        assert entries.logprobs is not None
        if not self.center:
            return torch.zeros_like(logp)
        return self.weight.weighted_mass(logp, entries.logprobs, advantage)

    @override
    def local_sums(self, entries: Entries, owned: Tensor, logp: Tensor, row: Row, alpha: Tensor) -> tuple[Tensor, ...]:
        assert entries.logprobs is not None
        logp = torch.where(owned, logp.clamp(min=NOTHING), 0.0)  # 0 log 0 = 0
        mass = torch.where(owned, self.entry_mass(entries, logp, entries.spread(row.advantage)), 0.0)
        p = torch.where(owned, logp.exp(), 0.0)
        logq = torch.where(owned, entries.logprobs, 0.0)
        q = torch.where(owned, logq.exp(), 0.0)
        coefficient = mass - entries.spread(alpha) * p  # c_v of Eq. (8), weighted as in (14)
        parts = (mass, mass * logp, p * logp, coefficient.abs(), q * (logq - logp), (q - p).abs())
        return tuple(entries.row_sum(part) for part in parts)


class TailModel(_Recorded):
    """The head, and the trainer's tail rescaled to the sampler's tail mass: Eq. (7) and (8)."""

    metric_names: ClassVar[tuple[str, ...]] = (
        "sampler_kl",
        "drift_l1",
        "drift_l1_tail",
        "coefficient_l1",
        "head_mass_sampler",
        "head_mass_trainer",
        "tail_mass_sampler",
        "tail_mass_trainer",
        "tail_ratio_above_4",
    )

    def __init__(self, weight: ImportanceWeight, center: bool, log_tail_mass: Tensor | None):
        super().__init__(weight, center)
        self.log_tail_mass = log_tail_mass

    def _tails(self, normalizer: Normalizer, recorded_mass: Tensor) -> tuple[Tensor, Tensor]:
        """log tail_p, summed over the columns outside the head, and log tail_q; both -inf where there is no tail."""
        has_tail = normalizer.dense_sum > 0
        log_p = normalizer.dense_sum.log() + (normalizer.dense_maximum - normalizer.maximum) - normalizer.log_normalizer
        log_q = (1 - recorded_mass).clamp(min=0).log().to(log_p.dtype)
        if self.log_tail_mass is not None:
            log_q = torch.where(self.log_tail_mass.isnan(), log_q, self.log_tail_mass.to(log_p.dtype))
        return torch.where(has_tail, log_p, -torch.inf), torch.where(has_tail, log_q, -torch.inf)

    def _tail_mass(self, log_p: Tensor, log_q: Tensor, row: Row) -> Tensor:
        """t = tail_q f(tail_p / tail_q), the tail's weighted mass."""
        if not self.center:
            return torch.zeros_like(log_p)
        return self.weight.weighted_mass(log_p, log_q, row.advantage)

    @override
    def alpha(self, normalizer: Normalizer, row: Row, recorded_mass: Tensor) -> Tensor:
        """alpha = t / tail_p = rho f(1/rho), rho = tail_q / tail_p; only the logged loss divides."""
        log_p, log_q = self._tails(normalizer, recorded_mass)
        t = self._tail_mass(log_p, log_q, row)
        return torch.where(t > 0, (t.log() - log_p).clamp(max=MAX_LOG_RATIO).exp(), 0.0)

    @override
    def finish(self, normalizer: Normalizer, row: Row, sums: Sums, recorded_mass: Tensor) -> Outcome:
        weight = _sampled_weight(self.weight, normalizer, row)
        log_tail_p, log_tail_q = self._tails(normalizer, recorded_mass)
        tail_p, tail_q = log_tail_p.exp(), log_tail_q.exp()
        t = self._tail_mass(log_tail_p, log_tail_q, row)
        alpha = self.alpha(normalizer, row, recorded_mass)
        has_tail = normalizer.dense_sum > 0
        per_column = torch.where(has_tail, 1 / normalizer.dense_sum, 0.0)  # exp(x - dense_maximum) of it sums to 1

        head_p = normalizer.recorded_p
        residual = weight - sums.mass  # w - W
        entropy_tail = tail_p * (
            normalizer.dense_dot * per_column
            + torch.where(has_tail, normalizer.dense_maximum - normalizer.maximum, 0.0)
            - normalizer.log_normalizer
        )
        entropy = -(sums.plogp + entropy_tail)
        zero = torch.zeros_like(weight)
        tail_kl = torch.where(tail_q > 0, tail_q * (log_tail_q - log_tail_p), 0.0)
        state = RowState(
            normalizer.maximum,
            normalizer.log_normalizer,
            normalizer.dense_maximum,
            weight,
            dense=-(tail_p * residual + t * head_p) * per_column,
            dense_kl=(tail_p - tail_q) * per_column,
            entry_p=t - residual,
            entropy=entropy,
            shift_factor=zero,
        )
        kl = sums.kl + torch.where(has_tail, tail_kl, 0.0)
        metrics = {
            "sampler_kl": kl,
            "drift_l1": sums.drift + (tail_q - tail_p).abs(),
            "drift_l1_tail": (tail_q - tail_p).abs(),
            "coefficient_l1": sums.l1,
            "head_mass_sampler": recorded_mass.to(weight.dtype),
            "head_mass_trainer": head_p,
            "tail_mass_sampler": tail_q,
            "tail_mass_trainer": tail_p,
            "tail_ratio_above_4": (tail_q > TAIL_RATIO_LIMIT * tail_p).to(weight.dtype),
        }
        # l = -A ( w log p_y - sum_H c_v log p_v ), c_v = C_v - alpha p_v: Eq. (6), weighted as in (14).
        loss = -row.advantage * (weight * normalizer.sampled_logp - (sums.mass_logp - alpha * sums.plogp))
        return Outcome(loss, kl, metrics, state)


class SupportModel(_Recorded):
    """The whole support: p is the trainer's softmax over it, and no other column has a gradient."""

    dense_columns: ClassVar[bool] = False
    metric_names: ClassVar[tuple[str, ...]] = ("sampler_kl", "drift_l1", "coefficient_l1")

    @override
    def finish(self, normalizer: Normalizer, row: Row, sums: Sums, recorded_mass: Tensor) -> Outcome:
        weight = _sampled_weight(self.weight, normalizer, row)
        zero = torch.zeros_like(weight)
        state = RowState(
            normalizer.maximum,
            normalizer.log_normalizer,
            zero,
            weight,
            dense=zero,
            dense_kl=zero,
            entry_p=sums.mass - weight,
            entropy=-sums.plogp,
            shift_factor=zero,
        )
        metrics = {"sampler_kl": sums.kl, "drift_l1": sums.drift, "coefficient_l1": sums.l1}
        loss = -row.advantage * (weight * normalizer.sampled_logp - sums.mass_logp)
        return Outcome(loss, sums.kl, metrics, state)


class DrawsModel(NoCentering):
    """K draws from the sampler: c = (1/K) sum_j f(r_j) e_{v_j}. With f = 1 the dense part cancels."""

    metric_names: ClassVar[tuple[str, ...]] = ("sampler_kl", "coefficient_l1")

    @override
    def entry_mass(self, entries: Entries, logp: Tensor, advantage: Tensor) -> Tensor:
        if not self.center:
            return torch.zeros_like(logp)
        if not self.weight.needs_ratio:
            f = torch.ones_like(logp)
        else:
            assert entries.logprobs is not None
            f = self.weight.token_weight(logp - entries.logprobs, advantage)
        return f / entries.ids.shape[1]

    @override
    def local_sums(self, entries: Entries, owned: Tensor, logp: Tensor, row: Row, alpha: Tensor) -> tuple[Tensor, ...]:
        logp = torch.where(owned, logp.clamp(min=NOTHING), 0.0)  # 0 log 0 = 0
        mass = torch.where(owned, self.entry_mass(entries, logp, entries.spread(row.advantage)), 0.0)
        logq = logp if entries.logprobs is None else entries.logprobs
        kl = torch.where(owned, logq - logp, 0.0) / entries.ids.shape[1]
        zero = torch.zeros_like(mass)
        return tuple(entries.row_sum(part) for part in (mass, mass * logp, zero, mass, kl, zero))

    @override
    def finish(self, normalizer: Normalizer, row: Row, sums: Sums, recorded_mass: Tensor) -> Outcome:
        base = super().finish(normalizer, row, sums, recorded_mass)
        reciprocal = (-normalizer.log_normalizer).exp()
        residual = base.state.weight - sums.mass
        if self.center and not self.weight.needs_ratio:
            residual = torch.zeros_like(residual)  # 1 - K (1/K), which rounding would leave at 1e-7 for K = 10
        state = base.state._replace(dense=-residual * reciprocal, entry_p=-residual)
        loss = -row.advantage * (base.state.weight * normalizer.sampled_logp - sums.mass_logp)
        return Outcome(loss, sums.kl, {"sampler_kl": sums.kl, "coefficient_l1": sums.l1}, state)


class FullModel(NoCentering):
    """The sampler's whole distribution, a dense [n, V]: for small vocabularies and tests."""

    metric_names: ClassVar[tuple[str, ...]] = ("sampler_kl", "drift_l1", "coefficient_l1")

    def dense_mass(self, logp: Tensor, logq: Tensor, advantage: Tensor) -> Tensor:
        """C over the local columns, ``[rows, valid]``."""
        if not self.center:
            return torch.zeros_like(logp)
        return self.weight.weighted_mass(logp, logq, advantage.unsqueeze(1))

    def dense_sums(self, logp: Tensor, logq: Tensor, row: Row) -> tuple[Tensor, ...]:
        """This rank's part of ``Sums``."""
        mass = self.dense_mass(logp, logq, row.advantage)
        p, q = logp.exp(), logq.exp()
        logp = logp.clamp(min=NOTHING)  # 0 log 0 = 0, but where p only underflows q log p counts
        kl = torch.where(q > 0, q * (logq - logp), 0.0)
        return tuple(v.sum(dim=1) for v in (mass, mass * logp, p * logp, mass.abs(), kl, (q - p).abs()))

    @override
    def finish(self, normalizer: Normalizer, row: Row, sums: Sums, recorded_mass: Tensor) -> Outcome:
        base = super().finish(normalizer, row, sums, recorded_mass)
        state = base.state._replace(dense=(sums.mass - base.state.weight) * (-normalizer.log_normalizer).exp())
        metrics = {"sampler_kl": sums.kl, "drift_l1": sums.drift, "coefficient_l1": sums.l1}
        loss = -row.advantage * (base.state.weight * normalizer.sampled_logp - sums.mass_logp)
        return Outcome(loss, sums.kl, metrics, state)


def centering_for(sampler: SamplerDistribution | None, weight: ImportanceWeight, center: bool) -> NoCentering:
    """The arithmetic that belongs to a distribution of the sampler."""
    if sampler is None:
        return NoCentering(weight, center)
    if isinstance(sampler, TopKHead):
        return TailModel(weight, center, sampler.log_tail_mass)
    if isinstance(sampler, Support):
        return SupportModel(weight, center)
    if isinstance(sampler, Draws):
        return DrawsModel(weight, center)
    if isinstance(sampler, FullVocabulary):
        return FullModel(weight, center)
    raise TypeError(f"sampler must be TopKHead, Support, Draws, FullVocabulary or None, got {type(sampler).__name__}")


def _sampled_weight(weight: ImportanceWeight, normalizer: Normalizer, row: Row) -> Tensor:
    if row.sampled_logq is None or not weight.needs_ratio:
        return torch.ones_like(normalizer.sampled_logp)
    return weight.token_weight(normalizer.sampled_logp - row.sampled_logq, row.advantage)
