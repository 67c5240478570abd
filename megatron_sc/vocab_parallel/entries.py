"""The recorded entries of a range of rows: one set of operations for rectangular and ragged storage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..objective.distributions import Draws, Support, TopKHead
from .shard import VocabShard


@dataclass(frozen=True, eq=False)
class Entries:
    """Recorded tokens of ``rows`` positions, ``[rows, k]`` or, when ragged, ``[m]``.

    Attributes:
        ids: int64 global ids, in any storage order.
        logprobs: log q in the compute dtype; None for draws without log-probabilities.
        kept: bool; False for padding and for rows that are masked.
        row_index: int64, the row of each entry, broadcastable to ``ids``.
        lengths: int64 ``[rows]`` when ragged, else None.
    """

    ids: Tensor
    logprobs: Tensor | None
    kept: Tensor
    row_index: Tensor
    lengths: Tensor | None
    starts: list[int] | None = None
    """Where each row begins in the flat storage when ragged; one more entry than rows."""

    @classmethod
    def of_rows(
        cls,
        sampler: TopKHead | Support | Draws,
        start: int,
        stop: int,
        mask: Tensor | None,
        dtype: torch.dtype,
    ) -> Entries:
        """The entries of rows [start, stop); ``mask`` is bool ``[n]`` or None."""
        offsets = None if isinstance(sampler, Draws) else sampler.offsets
        lengths = starts = None
        if offsets is None:
            ids = sampler.ids[start:stop]
            logprobs = None if sampler.logprobs is None else sampler.logprobs[start:stop]
            row_index = torch.arange(stop - start, device=ids.device).unsqueeze(1)
        else:
            first, last = int(offsets[start]), int(offsets[stop])
            ids, logprobs = sampler.ids[first:last], sampler.logprobs[first:last]  # type: ignore[index]
            starts = (offsets[start : stop + 1] - first).tolist()
            lengths = offsets[start : stop + 1].diff()
            row_index = torch.repeat_interleave(torch.arange(stop - start), lengths).to(ids.device, non_blocking=True)
            lengths = lengths.to(ids.device, non_blocking=True)
        ids = ids.long()
        kept = ids >= 0
        if logprobs is not None:
            logprobs = logprobs.to(dtype)
            if not isinstance(sampler, Draws):
                kept = kept & (logprobs > -torch.inf)
        if mask is not None:
            kept = kept & mask[start:stop][row_index]
        return cls(ids, logprobs, kept, row_index, lengths, starts)

    def of_chunk(self, first: int, last: int) -> slice:
        """Where the entries of rows [first, last) are."""
        return slice(first, last) if self.starts is None else slice(self.starts[first], self.starts[last])

    def spread(self, row_values: Tensor) -> Tensor:
        """One value a row -> one value an entry (broadcastable to ``ids``)."""
        return row_values[self.row_index]

    def row_sum(self, values: Tensor) -> Tensor:
        """Sum of the entries of each row, ``[rows]``; deterministic.

        The offsets were checked on the CPU; unless ``unsafe``, ``segment_reduce`` checks again and waits for the GPU.
        """
        if self.lengths is None:
            return values.sum(dim=1)
        return torch.segment_reduce(values, "sum", lengths=self.lengths, initial=0.0, unsafe=True)

    def row_max(self, values: Tensor, empty: float) -> Tensor:
        """Maximum of the entries of each row, ``[rows]``; ``empty`` for a row without entries."""
        if self.lengths is None:
            if values.shape[1] == 0:
                return values.new_full((values.shape[0],), empty)
            return values.amax(dim=1).clamp(min=empty)
        return torch.segment_reduce(values, "max", lengths=self.lengths, initial=empty, unsafe=True)

    def is_token(self, row_ids: Tensor) -> Tensor:
        """Which entries are the row's token ``row_ids`` (``[rows]``, global)."""
        return self.kept & (self.ids == self.spread(row_ids))

    def owned(self, shard: VocabShard) -> tuple[Tensor, Tensor]:
        """Which entries this shard holds, and their local columns (0 where it does not: read, never write there)."""
        owned = self.kept & (self.ids >= shard.start) & (self.ids < shard.start + shard.valid)
        return owned, torch.where(owned, self.ids - shard.start, 0)
