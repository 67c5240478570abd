"""The local passes in PyTorch. No communication here.

    statistics   one read of the logits: what ``combine`` needs of this shard
    sums         the recorded tokens this shard holds: what ``Centering.finish`` needs
    gradient     one read and one write of the logits

Rows go in blocks (bounding what is allocated per recorded token) of chunks (bounding the workspace in the compute
dtype). On the CPU logits whose storage may be reused are worked on in place: the forward pass leaves this shard's
softmax in their storage, as Megatron's cross-entropy does, and the backward pass scales it: one exponential a column in
all. In bfloat16 that rounds twice, half a unit of the last place each.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..objective.distributions import Draws, FullVocabulary
from .centering import SUMMED, FullModel, RowState, Sums
from .entries import Entries
from .problem import Problem, compute_dtype
from .statistics import EXCHANGED, NOTHING, Normalizer, local_statistics


class LocalStatistics(NamedTuple):
    """What the first pass finds on this shard."""

    values: Tensor
    """``[n, EXCHANGED]``, see ``local_statistics``."""
    recorded_mass: Tensor
    """float64 ``[n]``, sum q over the recorded tokens; the same on every rank."""
    sampled_recorded: Tensor
    """``[n]``, 1 where the sampled token is among the recorded ones; the same on every rank."""
    stored_scale: Tensor
    """``[n]``, what the values left in the logits' storage must be multiplied by to be exp(x - local maximum)."""


def works_in_place(logits: Tensor, problem: Problem) -> bool:
    """Whether the logits' storage holds intermediate values between the passes.

    Only on the CPU, where selecting the entries that this shard holds costs no synchronization.
    """
    return (
        problem.reuse_logits
        and logits.device.type == "cpu"
        and problem.centering.dense_columns
        and not isinstance(problem.centering, FullModel)
        and not problem.entropy_coef
    )


def statistics(logits: Tensor, problem: Problem, block_type: type[Block] | None = None) -> LocalStatistics:
    """First pass. With ``works_in_place`` the logits are overwritten."""
    dtype, n = compute_dtype(logits), logits.shape[0]
    values = torch.empty((n, EXCHANGED), dtype=dtype, device=logits.device)
    recorded_mass = torch.zeros(n, dtype=torch.float64, device=logits.device)
    sampled_recorded = torch.zeros(n, dtype=dtype, device=logits.device)
    stored_scale = torch.ones(n, dtype=dtype, device=logits.device)
    for start, stop in problem.blocks(n):
        block = (block_type or Block)(logits, problem, start, stop)
        if block.entries is not None:
            sampled_recorded[start:stop] = block.sampled_recorded().to(dtype)
            if block.entries.logprobs is not None:
                q = torch.where(block.entries.kept, block.entries.logprobs.double().exp(), 0.0)
                recorded_mass[start:stop] = block.entries.row_sum(q)
        values[start:stop], stored_scale[start:stop] = block.statistics()
    return LocalStatistics(values, recorded_mass, sampled_recorded, stored_scale)


def sums(
    logits: Tensor, problem: Problem, normalizer: Normalizer, alpha: Tensor, block_type: type[Block] | None = None
) -> Tensor:
    """``[n, SUMMED]``: this rank's part of ``Sums``; ``alpha`` is ``[n]``."""
    parts = torch.empty((logits.shape[0], SUMMED), dtype=compute_dtype(logits), device=logits.device)
    for start, stop in problem.blocks(logits.shape[0]):
        rows = slice(start, stop)
        block = (block_type or Block)(logits, problem, start, stop)
        at = Normalizer(*(field[rows] for field in normalizer))
        parts[rows] = torch.stack(block.sums(at, alpha[rows]), dim=1)
    return parts


def gradient(
    logits: Tensor, problem: Problem, state: RowState, grad_loss: Tensor, block_type: type[Block] | None = None
) -> Tensor:
    """Last pass: ``[n, columns]`` in the logits' dtype, in their storage if it may be reused.

    Args:
        logits: as the forward pass left them.
        problem: the call.
        state: ``[n]`` each.
        grad_loss: ``[n]`` the gradient of the losses.
        block_type: what works on a block of rows; default ``Block``.
    """
    dtype = compute_dtype(logits)
    result = logits if problem.reuse_logits else torch.empty_like(logits)
    if problem.shard.valid < problem.shard.columns:
        result[:, problem.shard.valid :].zero_()
    upstream = grad_loss.to(dtype)
    if problem.mask is not None:
        upstream = torch.where(problem.mask, upstream, 0.0)
    if problem.temperature is not None:
        upstream = upstream / problem.temperature
    scale = Scale(
        -upstream * problem.row.advantage, upstream * problem.sampler_kl_coef, upstream * problem.entropy_coef
    )
    for start, stop in problem.blocks(logits.shape[0]):
        rows = slice(start, stop)
        block = (block_type or Block)(logits, problem, start, stop)
        block.gradient(
            result[rows, : problem.shard.valid],
            RowState(*(field[rows] for field in state)),
            Scale(*(field[rows] for field in scale)),
        )
    return result


class Scale(NamedTuple):
    """What multiplies the parts of the gradient; each ``[rows]``, 0 in masked rows."""

    policy: Tensor
    """-(A/T) times the incoming gradient."""
    kl: Tensor
    """Coefficient of the KL term / T, times the incoming gradient."""
    entropy: Tensor
    """Coefficient of the entropy / T, times the incoming gradient."""


class Block:
    """Rows [start, stop): their recorded tokens, and where those are on this shard."""

    def __init__(self, logits: Tensor, problem: Problem, start: int, stop: int):
        self.problem = problem
        self.dtype = compute_dtype(logits)
        self.start, self.stop = start, stop
        self.rows = slice(start, stop)
        self.logits = logits[start:stop, : problem.shard.valid]
        self.in_place = works_in_place(logits, problem)
        self.in_compute_dtype = logits.dtype == self.dtype
        self.mask = None if problem.mask is None else problem.mask[self.rows]
        self.temperature = None if problem.temperature is None else problem.temperature[self.rows]
        self.sampled_ids = problem.sampled_ids[self.rows]
        shard = problem.shard
        self.sampled_owned = (self.sampled_ids >= shard.start) & (self.sampled_ids < shard.start + shard.valid)
        self.sampled_column = torch.where(self.sampled_owned, self.sampled_ids - shard.start, 0)
        self.entries: Entries | None = None
        if problem.recorded is not None:
            self.entries = Entries.of_rows(problem.recorded, start, stop, problem.mask, self.dtype)
            self.owned, self.column = self.entries.owned(shard)

    # --- reading -------------------------------------------------------------------------------------------------

    def _x_at(self, row_index: Tensor, column: Tensor, owned: Tensor) -> Tensor:
        """x = z/T at local columns; ``NOTHING`` where not ``owned``."""
        if self.logits.shape[1] == 0:
            return torch.full(column.shape, NOTHING, dtype=self.dtype, device=column.device)
        x = self.logits[row_index, column].to(self.dtype)
        if self.temperature is not None and not (self.in_place and self.in_compute_dtype):  # there, it was divided
            x = x / self.temperature[row_index]
        return torch.where(owned, x, NOTHING)

    def _sampled_x(self) -> Tensor:
        rows = torch.arange(self.logits.shape[0], device=self.logits.device)
        return self._x_at(rows, self.sampled_column, self.sampled_owned)

    def _entry_x(self) -> Tensor:
        assert self.entries is not None
        return self._x_at(self.entries.row_index, self.column, self.owned)

    def sampled_recorded(self) -> Tensor:
        """bool ``[rows]``: whether the sampled token is among the recorded ones, on whatever rank."""
        assert self.entries is not None
        return self.entries.row_sum(self.entries.is_token(self.sampled_ids).to(self.dtype)) > 0

    def _load(self, workspace: Tensor, first: int, last: int) -> Tensor:
        """x of rows [first, last) of the block, in ``workspace``."""
        valid = self.logits.shape[1]
        x = workspace[: (last - first) * valid].view(last - first, valid)
        if self.temperature is None:
            x.copy_(self.logits[first:last])
        else:
            torch.div(self.logits[first:last], self.temperature[first:last].unsqueeze(1), out=x)
        return x

    def _workspace(self, share: int = 1) -> Tensor:
        """Room for a chunk, and one more element: see ``_place``. ``share``: as of ``_chunks``."""
        rows = min(self._rows_per_chunk(share), self.logits.shape[0])
        return torch.empty(rows * self.logits.shape[1] + 1, dtype=self.dtype, device=self.logits.device)

    def _chunks(self, share: int = 1) -> list[tuple[int, int]]:
        """Row ranges; with ``share`` workspaces at a time, each is that much smaller."""
        rows, step = self.logits.shape[0], self._rows_per_chunk(share)
        return [(first, min(first + step, rows)) for first in range(0, rows, step)]

    def _rows_per_chunk(self, share: int) -> int:
        return max(self.problem.rows_per_chunk(self.logits.device) // share, 1)

    # --- writing recorded tokens ---------------------------------------------------------------------------------

    def _place(self, workspace: Tensor, first: int, last: int) -> tuple[Tensor, slice]:
        """Places in a chunk's workspace of its entries, and which of the block's entries they are.

        An entry that another rank holds must not touch a column here, whatever its id: it is sent to the element past
        the end. That costs no host synchronization, and no two entries compete for a column.
        """
        assert self.entries is not None
        some = self.entries.of_chunk(first, last)
        row_index = self.entries.row_index[some] - first
        spare = workspace.shape[0] - 1
        return torch.where(self.owned[some], row_index * self.logits.shape[1] + self.column[some], spare), some

    @cached_property
    def _owned_entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and place among the block's entries of those that this shard holds (CPU only: this selects)."""
        assert self.entries is not None
        which = self.owned.flatten().nonzero().squeeze(1)
        row_index = self.entries.row_index.expand(self.column.shape).reshape(-1)
        return row_index[which], self.column.flatten()[which], which

    def _owned_logits(self) -> Tensor:
        """What the storage holds at the owned entries."""
        row_index, column, _ = self._owned_entries
        return self.logits[row_index, column]

    def _write_in_place(self, values: Tensor | float) -> None:
        """Write at the owned entries of the logits' own storage, where ``values`` has one of each."""
        row_index, column, _ = self._owned_entries
        self.logits[row_index, column] = values

    # --- the passes ----------------------------------------------------------------------------------------------

    def statistics(self) -> tuple[Tensor, Tensor | float]:
        """``[rows, EXCHANGED]``, and the stored scale."""
        centering, device = self.problem.centering, self.logits.device
        if self.in_place:
            if self.mask is not None:
                self.logits.masked_fill_(~self.mask.unsqueeze(1), 0.0)
            if self.temperature is not None and self.in_compute_dtype:
                self.logits.div_(self.temperature.unsqueeze(1))
        sampled_x = self._sampled_x()
        entry_x = None if self.entries is None else self._entry_x()
        entry_maximum = torch.full_like(sampled_x, NOTHING)
        entry_sum = torch.zeros_like(sampled_x)
        if self.entries is not None and entry_x is not None and centering.entries_apart:
            entry_maximum = self.entries.row_max(entry_x, NOTHING)
            shifted = entry_x - self.entries.spread(entry_maximum)
            entry_sum = self.entries.row_sum(torch.where(self.owned, shifted.exp(), 0.0))
        result = torch.empty((self.logits.shape[0], EXCHANGED), dtype=self.dtype, device=device)
        result[:, 3], result[:, 4], result[:, 5] = entry_maximum, entry_sum, sampled_x
        if not centering.dense_columns:
            result[:, 0], result[:, 1:3] = NOTHING, 0.0
            return result, 1.0
        result[:, :3], scale = self.dense_statistics()
        return result, scale

    def dense_statistics(self) -> tuple[Tensor, Tensor | float]:
        """Maximum, sum and dot of the dense columns, ``[rows, 3]``, and the stored scale."""
        centering, with_dot = self.problem.centering, self.problem.with_entropy
        in_storage = self.in_place and self.in_compute_dtype
        kept = self._owned_logits() if self.in_place and self.entries is not None else None
        if in_storage and centering.entries_apart:
            self._write_in_place(NOTHING)
        share = 2 if with_dot and not in_storage else 1
        workspace = self._workspace(share)
        second = torch.empty_like(workspace) if share == 2 else workspace
        found: list[tuple[Tensor, Tensor]] = []
        for first, last in self._chunks(share):
            stored = self.logits[first:last]
            if in_storage:
                x = softmax = stored
                shifted = workspace[: x.numel()].view(x.shape)
            else:
                x = shifted = self._load(workspace, first, last)
                softmax = second[: x.numel()].view(x.shape)
                if self.entries is not None and centering.entries_apart:
                    place, _ = self._place(workspace, first, last)
                    workspace[place] = NOTHING
            found.append(local_statistics(x, shifted, softmax, with_dot))
            if self.in_place and not in_storage:
                stored.copy_(softmax)
        if kept is not None:
            self._write_in_place(kept)  # the later passes need the logits themselves at recorded tokens
        return torch.cat([values for values, _ in found]), torch.cat([scale for _, scale in found])

    def sums(self, normalizer: Normalizer, alpha: Tensor) -> tuple[Tensor, ...]:
        """This block's part of ``Sums``."""
        centering, row = self.problem.centering, self.problem.row.of(self.rows)
        if self.entries is not None:
            logp = self._logp(self._entry_x(), normalizer, self.entries)
            return centering.local_sums(self.entries, self.owned, logp, row, alpha)
        assert isinstance(centering, FullModel)
        workspace, chunks = self._workspace(), []
        for first, last in self._chunks():
            part = slice(first, last)
            logp = self._load(workspace, first, last)
            logp.sub_(normalizer.maximum[part].unsqueeze(1)).sub_(normalizer.log_normalizer[part].unsqueeze(1))
            chunks.append(torch.stack(centering.dense_sums(logp, self._full_logq(part), row.of(part)), dim=1))
        return Sums(*torch.cat(chunks).unbind(dim=1))

    def gradient(self, result: Tensor, state: RowState, scale: Scale) -> None:
        """Write the gradient to ``result``, ``[rows, valid]``, which may be the logits themselves."""
        entry_gradient, recorded = None, torch.zeros_like(self.sampled_owned)
        if self.entries is not None:
            entry_gradient = self._entry_gradient(self._entry_x(), state, scale)
            recorded = self.sampled_recorded()
        dense = scale.policy * state.dense + scale.kl * state.dense_kl
        if self.mask is not None:
            dense = torch.where(self.mask, dense, 0.0)  # not 0 * NaN
        write_sampled = self.sampled_owned & ~recorded
        direct = scale.policy * state.weight  # of the sampled token, beside its dense part
        if self.problem.sampler is None:
            direct = direct - scale.kl
        self.write_gradient(result, state, scale, dense, direct, write_sampled, entry_gradient)

    def write_gradient(
        self,
        result: Tensor,
        state: RowState,
        scale: Scale,
        dense: Tensor,
        direct: Tensor,
        write_sampled: Tensor,
        entry_gradient: Tensor | None,
    ) -> None:
        """Write dense exp(x - dense_maximum), add ``direct`` at the sampled token, then write the recorded tokens.

        Args:
            result: ``[rows, valid]``.
            state: ``[rows]`` each.
            scale: ``[rows]`` each.
            dense: ``[rows]``.
            direct: ``[rows]``.
            write_sampled: bool ``[rows]``: whether the sampled token is here and not among the recorded ones.
            entry_gradient: like the entries; None: there are none.
        """
        if self.in_place and self.in_compute_dtype:
            result.mul_((dense * state.shift_factor).unsqueeze(1))
            row_index = torch.nonzero(write_sampled).squeeze(1)
            result[row_index, self.sampled_column[row_index]] += direct[row_index]
            if entry_gradient is not None:
                self._write_in_place(entry_gradient.flatten()[self._owned_entries[2]])
            return

        workspace, centering = self._workspace(), self.problem.centering
        for first, last in self._chunks():
            part = slice(first, last)
            x = workspace[: (last - first) * self.logits.shape[1]].view(last - first, -1)
            at = RowState(*(field[part].unsqueeze(1) for field in state))
            if not centering.dense_columns:
                x.zero_()
            elif self.in_place:
                x.copy_(self.logits[first:last]).mul_(dense[part].unsqueeze(1) * at.shift_factor)
            else:
                self._load(workspace, first, last)
                self._dense_gradient_(x, at, dense[part].unsqueeze(1), scale, part)
            index = torch.arange(last - first, device=x.device) * x.shape[1] + self.sampled_column[part]
            index = torch.where(write_sampled[part], index, workspace.shape[0] - 1)
            workspace[index] = workspace[index] + direct[part]
            if entry_gradient is not None:
                place, some = self._place(workspace, first, last)
                workspace[place] = entry_gradient[some]
            if self.mask is not None:
                x.masked_fill_(~self.mask[part].unsqueeze(1), 0.0)
            result[part].copy_(x)

    def _dense_gradient_(self, x: Tensor, at: RowState, dense: Tensor, scale: Scale, part: slice) -> None:
        """x -> the gradient of columns that are not recorded, in place: dense exp(x - dense_maximum), and more."""
        problem, centering = self.problem, self.problem.centering
        added = None
        if problem.entropy_coef or isinstance(centering, FullModel):
            logp = (x - at.maximum) - at.log_normalizer
            added = scale.entropy[part].unsqueeze(1) * _entropy_slope(logp, at.entropy)
            if isinstance(centering, FullModel):
                logq = self._full_logq(part)
                mass = centering.dense_mass(logp, logq, problem.row.advantage[self.rows][part])
                added -= scale.policy[part].unsqueeze(1) * mass + scale.kl[part].unsqueeze(1) * logq.exp()
        x.sub_(at.dense_maximum).exp_().mul_(dense)
        if added is not None:
            x.add_(added)

    def _entry_gradient(self, x: Tensor, state: RowState, scale: Scale) -> Tensor:
        """The gradient at each recorded token: policy (w [u=y] - C_u + entry_p p_u), and the optional terms.

        Draws that repeat are collected in every copy, so that all copies write one value.
        """
        assert self.entries is not None
        entries, problem = self.entries, self.problem
        logp = self._logp(x, state, entries)
        p = logp.exp()
        is_sampled = entries.is_token(self.sampled_ids)
        mass = problem.centering.entry_mass(entries, logp, entries.spread(problem.row.advantage[self.rows]))
        if isinstance(problem.sampler, Draws):
            same = (entries.ids.unsqueeze(2) == entries.ids.unsqueeze(1)).to(mass.dtype)  # [rows, K, K]
            mass = torch.linalg.vecdot(same, mass.unsqueeze(1))
            q = same.sum(dim=2) / entries.ids.shape[1]
        else:
            assert entries.logprobs is not None
            q = entries.logprobs.exp()
        sampled_part = torch.where(is_sampled, entries.spread(state.weight), 0.0)
        value = entries.spread(scale.policy) * (sampled_part - mass + entries.spread(state.entry_p) * p)
        if problem.sampler_kl_coef:
            value = value + entries.spread(scale.kl) * (p - q)
        if problem.entropy_coef:
            value = value + entries.spread(scale.entropy) * _entropy_slope(logp, entries.spread(state.entropy))
        return value

    @staticmethod
    def _logp(x: Tensor, normalizer: Normalizer | RowState, entries: Entries) -> Tensor:
        return (x - entries.spread(normalizer.maximum)) - entries.spread(normalizer.log_normalizer)

    def _full_logq(self, part: slice) -> Tensor:
        assert isinstance(self.problem.sampler, FullVocabulary)
        shard = self.problem.shard
        logq = self.problem.sampler.logprobs[self.rows][part]
        return logq[:, shard.start : shard.start + shard.valid].to(self.dtype)


def _entropy_slope(logp: Tensor, entropy: Tensor) -> Tensor:
    """-dH/dx = p (log p + H); 0 where p is 0."""
    p = logp.exp()
    return torch.where(p > 0, p * (logp + entropy), 0.0)
