"""The autograd operation: two local passes forward with one exchange after each, one local pass backward.

    forward    local statistics of the logits -> exchange -> sums over the recorded tokens -> exchange -> loss
    backward   no communication: a few scalars a row and the local logits give every column's gradient

Kept for backward: the logits, the caller's tensors, and ``RowState``, a few float32 a row. Rows are processed in
chunks, so that the float32 workspace is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..objective.distributions import Draws, FullVocabulary, SamplerDistribution, Support, TopKHead
from ..objective.weights import MAX_LOG_RATIO
from .centering import SUMMED, FullModel, NoCentering, Outcome, Row, RowState, Sums
from .entries import Entries
from .exchange import gather_rows
from .shard import VocabShard
from .statistics import EXCHANGED, NOTHING, combine, local_statistics

CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements of the float32 workspace: about a cache on the CPU, 256 MiB on a GPU."""


@dataclass(frozen=True, eq=False)
class Problem:
    """One call of the loss, checked: everything but the logits. See ``centered_loss`` for the meaning of the fields."""

    sampled_ids: Tensor  # [n] int64, 0 in masked rows
    row: Row  # in the compute dtype, harmless in masked rows
    temperature: Tensor | None  # [n] in the compute dtype; None: 1
    mask: Tensor | None  # [n] bool; None: every row trains
    sampler: SamplerDistribution | None
    centering: NoCentering
    shard: VocabShard
    group: dist.ProcessGroup | None
    sampler_kl_coef: float
    entropy_coef: float
    with_entropy: bool
    reuse_logits: bool
    chunk_rows: int | None

    @property
    def entries(self) -> TopKHead | Support | Draws | None:
        """The sampler's distribution where it is recorded token by token."""
        return None if isinstance(self.sampler, FullVocabulary) else self.sampler

    def chunks(self, logits: Tensor) -> Iterator[tuple[int, int]]:
        """Row ranges [start, stop)."""
        rows = self.chunk_rows or max(CHUNK_ELEMENTS.get(logits.device.type, 1 << 24) // max(self.shard.valid, 1), 1)
        for start in range(0, logits.shape[0], rows):
            yield start, min(start + rows, logits.shape[0])


class _Workspace:
    """A chunk's logits divided by T in the compute dtype, and one more element that takes what is not this shard's.

    Writing an entry that another rank holds must not touch a column here, whatever its id. Redirecting it to the
    element past the end does that without a host synchronization and without two entries competing for one column.
    """

    def __init__(self, problem: Problem, logits: Tensor, dtype: torch.dtype):
        self.problem = problem
        self.logits = logits
        rows = max((stop - start for start, stop in problem.chunks(logits)), default=0)
        self.flat = torch.empty(rows * problem.shard.valid + 1, dtype=dtype, device=logits.device)

    def load(self, start: int, stop: int) -> Tensor:
        """x = z/T of rows [start, stop), ``[rows, valid]``, a view of the workspace."""
        valid = self.problem.shard.valid
        x = self.flat[: (stop - start) * valid].view(stop - start, valid)
        source = self.logits[start:stop, :valid]
        if self.problem.temperature is None:
            x.copy_(source)
        else:
            torch.div(source, self.problem.temperature[start:stop].unsqueeze(1), out=x)
        self.flat[-1] = NOTHING
        return x

    def position(self, row_index: Tensor, column: Tensor, owned: Tensor) -> Tensor:
        """Places in ``flat`` of local columns; the spare element where not ``owned``."""
        return torch.where(owned, row_index * self.problem.shard.valid + column, self.flat.shape[0] - 1)

    def sampled(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Place in ``flat`` of the sampled token of each row, and whether this shard holds it."""
        ids = self.problem.sampled_ids[start:stop]
        shard = self.problem.shard
        owned = (ids >= shard.start) & (ids < shard.start + shard.valid)
        rows = torch.arange(stop - start, device=ids.device)
        return self.position(rows, ids - shard.start, owned), owned


class CenteredLoss(torch.autograd.Function):
    """(logits, problem) -> loss ``[n]`` and metrics ``[M, n]`` (no gradient), in the order of ``metric_names``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        """Two local passes, each followed by one exchange."""
        dtype = compute_dtype(logits)
        outcome, observed = _forward(logits.detach(), problem, dtype)
        state, loss = outcome.state, outcome.loss
        if problem.sampler_kl_coef:
            loss = loss + problem.sampler_kl_coef * outcome.kl
        if problem.entropy_coef:
            loss = loss - problem.entropy_coef * state.entropy
        metrics = torch.stack([{**observed, **outcome.metrics}[name] for name in metric_names(problem)])
        if problem.mask is not None:
            loss = torch.where(problem.mask, loss, 0.0)
            metrics = torch.where(problem.mask, metrics, 0.0)
        ctx.problem = problem
        ctx.save_for_backward(logits, *state)
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor, None]:
        """One local pass; writes the gradient over the logits when their storage may be reused."""
        logits, *state = ctx.saved_tensors
        return _backward(logits.detach(), ctx.problem, RowState(*state), grad_loss), None


def compute_dtype(logits: Tensor) -> torch.dtype:
    """float64 for float64 logits, float32 for all others."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def metric_names(problem: Problem) -> tuple[str, ...]:
    """The metrics of a call: they depend on its configuration only, so they are the same on every rank and step."""
    common: tuple[str, ...] = ("logprob", "log_ratio", "log_ratio_abs", "ratio_kl", "importance_weight")
    if problem.with_entropy:
        common += ("entropy",)
    if problem.entries is not None:
        common += ("sampled_in_recorded",)
    return common + problem.centering.metric_names


def _forward(logits: Tensor, problem: Problem, dtype: torch.dtype) -> tuple[Outcome, dict[str, Tensor]]:
    """The outcome, and the metrics that do not depend on the estimator."""
    centering, entries_of = problem.centering, problem.entries
    work = _Workspace(problem, logits, dtype)
    recorded_mass = torch.zeros(logits.shape[0], dtype=torch.float64, device=logits.device)

    statistics = []
    for start, stop in problem.chunks(logits):
        sampled, _ = work.sampled(start, stop)
        if entries_of is not None and not centering.dense_columns:
            x = None
        else:
            x = work.load(start, stop)
            sampled_x = work.flat[sampled]
        entry_maximum = torch.full((stop - start,), NOTHING, dtype=dtype, device=logits.device)
        entry_sum = torch.zeros_like(entry_maximum)
        if entries_of is not None and centering.entries_apart:
            entries = Entries.of_rows(entries_of, start, stop, problem.mask, dtype)
            owned, column = entries.owned(problem.shard)
            if x is None:
                entry_x = torch.where(owned, _at(logits, problem, entries, column, start, dtype), NOTHING)
                sampled_x = _sampled_at(logits, problem, start, stop, dtype)
            else:
                place = work.position(entries.row_index, column, owned)
                entry_x = work.flat[place]
                work.flat[place] = NOTHING
            entry_maximum = entries.row_max(entry_x, NOTHING)
            entry_sum = entries.row_sum(torch.where(owned, (entry_x - entries.spread(entry_maximum)).exp(), 0.0))
            assert entries.logprobs is not None
            q = torch.where(entries.kept, entries.logprobs.double().exp(), 0.0)
            recorded_mass[start:stop] = entries.row_sum(q)
        statistics.append(local_statistics(x, sampled_x, entry_maximum, entry_sum, problem.with_entropy))
    normalizer = combine(gather_rows(_concatenate(statistics, logits, dtype, EXCHANGED), problem.group))

    sampled_recorded = torch.zeros(logits.shape[0], dtype=dtype, device=logits.device)
    if problem.sampler is None:
        sums = Sums(*torch.zeros((SUMMED, logits.shape[0]), dtype=dtype, device=logits.device))
        outcome = centering.finish(normalizer, problem.row, sums, recorded_mass)
        return outcome, _observed(problem.row, normalizer.sampled_logp, outcome.state, sampled_recorded)

    alpha = centering.alpha(normalizer, problem.row, recorded_mass)
    parts = []
    for start, stop in problem.chunks(logits):
        row = _slice(problem.row, start, stop)
        maximum, log_normalizer = normalizer.maximum[start:stop], normalizer.log_normalizer[start:stop]
        if entries_of is None:
            assert isinstance(centering, FullModel)
            logp = work.load(start, stop).sub_(maximum.unsqueeze(1)).sub_(log_normalizer.unsqueeze(1))
            values = centering.dense_sums(logp, _full_logq(problem, start, stop, dtype), row)
        else:
            entries = Entries.of_rows(entries_of, start, stop, problem.mask, dtype)
            owned, column = entries.owned(problem.shard)
            x_entries = _at(logits, problem, entries, column, start, dtype)
            logp = (x_entries - entries.spread(maximum)) - entries.spread(log_normalizer)
            values = centering.local_sums(entries, owned, logp, row, alpha[start:stop])
            hits = entries.row_sum(entries.is_token(problem.sampled_ids[start:stop]).to(dtype))
            sampled_recorded[start:stop] = (hits > 0).to(dtype)
        parts.append(torch.stack(values, dim=1))
    gathered = gather_rows(_concatenate(parts, logits, dtype, SUMMED), problem.group)
    sums = Sums(*gathered.sum(dim=0).unbind(dim=1))
    outcome = centering.finish(normalizer, problem.row, sums, recorded_mass)
    return outcome, _observed(problem.row, normalizer.sampled_logp, outcome.state, sampled_recorded)


def _backward(logits: Tensor, problem: Problem, state: RowState, grad_loss: Tensor) -> Tensor:
    dtype = compute_dtype(logits)
    centering, shard, entries_of = problem.centering, problem.shard, problem.entries
    work = _Workspace(problem, logits, dtype)
    gradient = logits if problem.reuse_logits else torch.empty_like(logits)
    if shard.valid < shard.columns:
        gradient[:, shard.valid :].zero_()

    upstream = grad_loss.to(dtype)
    if problem.mask is not None:
        upstream = torch.where(problem.mask, upstream, 0.0)
    if problem.temperature is not None:
        upstream = upstream / problem.temperature
    scale = -upstream * problem.row.advantage  # of the policy gradient; kl and entropy: of the optional terms
    kl_scale, entropy_scale = upstream * problem.sampler_kl_coef, upstream * problem.entropy_coef
    dense = scale * state.dense + kl_scale * state.dense_kl

    for start, stop in problem.chunks(logits):
        rows = slice(start, stop)
        at = RowState(*(field[rows] for field in state))
        x = work.load(start, stop)
        sampled, sampled_owned = work.sampled(start, stop)
        sampled_x = work.flat[sampled]
        entry_place = entry_gradient = None
        sampled_recorded = torch.zeros_like(sampled_owned)
        if entries_of is not None:
            entries = Entries.of_rows(entries_of, start, stop, problem.mask, dtype)
            owned, column = entries.owned(shard)
            entry_place = work.position(entries.row_index, column, owned)
            entry_x = work.flat[entry_place]
            entry_gradient, sampled_recorded = _entry_gradient(
                problem, entries, entry_x, at, scale[rows], kl_scale[rows], entropy_scale[rows], start, stop
            )

        # Columns that are not recorded: one coefficient a row times exp(x - dense_maximum).
        sampled_gradient = _dense_value(problem, sampled_x, at, dense[rows], entropy_scale[rows])
        if not centering.dense_columns:
            x.zero_()
        else:
            _dense_gradient_(problem, x, at, dense[rows], entropy_scale[rows])
        if isinstance(centering, FullModel):
            logq = _full_logq(problem, start, stop, dtype)
            logp = _dense_logp(logits, problem, at, start, stop, dtype)
            mass = centering.dense_mass(logp, logq, problem.row.advantage[rows])
            x.addcmul_(mass, -scale[rows].unsqueeze(1))
            x.addcmul_(logq.exp(), -kl_scale[rows].unsqueeze(1))
            sampled_gradient = work.flat[sampled]
        elif entries_of is None:
            sampled_gradient = sampled_gradient - kl_scale[rows]

        # The sampled token where it is not recorded, then the recorded ones: written, never added to the dense value.
        sampled_gradient = sampled_gradient + scale[rows] * at.weight
        work.flat[torch.where(sampled_recorded, work.flat.shape[0] - 1, sampled)] = sampled_gradient
        if entry_place is not None and entry_gradient is not None:
            work.flat[entry_place] = entry_gradient
        if problem.mask is not None:
            x.masked_fill_(~problem.mask[rows].unsqueeze(1), 0.0)
        gradient[rows, : shard.valid].copy_(x)
    return gradient


def _dense_gradient_(problem: Problem, x: Tensor, at: RowState, dense: Tensor, entropy_scale: Tensor) -> None:
    """x -> dense exp(x - dense_maximum), in place; with the entropy bonus also its p (log p + H)."""
    if not problem.entropy_coef:
        x.sub_(at.dense_maximum.unsqueeze(1)).exp_().mul_(dense.unsqueeze(1))
    else:
        x.copy_(_dense_value(problem, x, _column(at), dense.unsqueeze(1), entropy_scale.unsqueeze(1)))


def _dense_value(problem: Problem, x: Tensor, at: RowState, dense: Tensor, entropy_scale: Tensor) -> Tensor:
    value = dense * (x - at.dense_maximum).exp()
    if problem.entropy_coef:
        value = value + entropy_scale * _entropy_slope((x - at.maximum) - at.log_normalizer, at.entropy)
    return value


def _entropy_slope(logp: Tensor, entropy: Tensor) -> Tensor:
    """-dH/dx = p (log p + H); 0 where p is 0."""
    p = logp.exp()
    return torch.where(p > 0, p * (logp + entropy), 0.0)


def _entry_gradient(
    problem: Problem,
    entries: Entries,
    x: Tensor,
    at: RowState,
    scale: Tensor,
    kl_scale: Tensor,
    entropy_scale: Tensor,
    start: int,
    stop: int,
) -> tuple[Tensor, Tensor]:
    """The gradient at each recorded token, and ``[rows]`` whether the sampled token is among them.

    scale (w [u=y] - C_u + entry_p p_u), with draws that repeat collected in every copy, so that all copies write one
    value.
    """
    logp = (x - entries.spread(at.maximum)) - entries.spread(at.log_normalizer)
    p = logp.exp()
    is_sampled = entries.is_token(problem.sampled_ids[start:stop])
    mass = problem.centering.entry_mass(entries, logp, entries.spread(problem.row.advantage[start:stop]))
    if isinstance(problem.sampler, Draws):
        same = (entries.ids.unsqueeze(2) == entries.ids.unsqueeze(1)).to(mass.dtype)  # [rows, K, K]
        mass = torch.linalg.vecdot(same, mass.unsqueeze(1))
        q = same.sum(dim=2) / entries.ids.shape[1]
    else:
        assert entries.logprobs is not None
        q = entries.logprobs.exp()
    sampled_part = torch.where(is_sampled, entries.spread(at.weight), 0.0)
    gradient = entries.spread(scale) * (sampled_part - mass + entries.spread(at.entry_p) * p)
    if problem.sampler_kl_coef:
        gradient = gradient + entries.spread(kl_scale) * (p - q)
    if problem.entropy_coef:
        gradient = gradient + entries.spread(entropy_scale) * _entropy_slope(logp, entries.spread(at.entropy))
    return gradient, entries.row_sum(is_sampled.to(p.dtype)) > 0


def _observed(row: Row, logp: Tensor, state: RowState, sampled_recorded: Tensor) -> dict[str, Tensor]:
    """Metrics of the sampled token and of the trainer, ``[n]`` each."""
    log_ratio = torch.zeros_like(logp) if row.sampled_logq is None else logp - row.sampled_logq
    return {
        "logprob": logp,
        "log_ratio": log_ratio,
        "log_ratio_abs": log_ratio.abs(),
        "ratio_kl": log_ratio.clamp(max=MAX_LOG_RATIO).expm1() - log_ratio,  # k3: E_q[r - 1 - log r] = KL(q || p)
        "importance_weight": state.weight,
        "entropy": state.entropy,
        "sampled_in_recorded": sampled_recorded,
    }


def _at(logits: Tensor, problem: Problem, entries: Entries, column: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    """x at local columns, read from the logits; an entry of another shard reads column 0 and must be ignored."""
    if problem.shard.valid == 0:
        return torch.full_like(column, NOTHING, dtype=dtype)
    x = logits[entries.row_index + start, column].to(dtype)
    return x if problem.temperature is None else x / problem.temperature[start + entries.row_index]


def _sampled_at(logits: Tensor, problem: Problem, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """x of the sampled token, read from the logits; ``NOTHING`` where another shard holds it."""
    shard, ids = problem.shard, problem.sampled_ids[start:stop]
    owned = (ids >= shard.start) & (ids < shard.start + shard.valid)
    if shard.valid == 0:
        return torch.full_like(ids, NOTHING, dtype=dtype)
    rows = torch.arange(start, stop, device=ids.device)
    x = logits[rows, torch.where(owned, ids - shard.start, 0)].to(dtype)
    if problem.temperature is not None:
        x = x / problem.temperature[start:stop]
    return torch.where(owned, x, NOTHING)


def _dense_logp(logits: Tensor, problem: Problem, at: RowState, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """log p of all local columns of rows [start, stop), ``[rows, valid]``: for the full vocabulary only."""
    x = logits[start:stop, : problem.shard.valid].to(dtype)
    if problem.temperature is not None:
        x = x / problem.temperature[start:stop].unsqueeze(1)
    return (x - at.maximum.unsqueeze(1)) - at.log_normalizer.unsqueeze(1)


def _full_logq(problem: Problem, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    assert isinstance(problem.sampler, FullVocabulary)
    shard = problem.shard
    return problem.sampler.logprobs[start:stop, shard.start : shard.start + shard.valid].to(dtype)


def _slice(row: Row, start: int, stop: int) -> Row:
    logq = None if row.sampled_logq is None else row.sampled_logq[start:stop]
    return Row(row.advantage[start:stop], logq)


def _column(state: RowState) -> RowState:
    return RowState(*(field.unsqueeze(1) for field in state))


def _concatenate(parts: list[Tensor], logits: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros((0, width), dtype=dtype, device=logits.device)
