"""One call of the loss, checked: everything but the logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from ..objective.distributions import Draws, FullVocabulary, SamplerDistribution, Support, TopKHead
from .centering import NoCentering, Row, centering_for
from .shard import VocabShard

CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Elements of the workspace in the compute dtype: 8 MiB on the CPU, 256 MiB on a GPU."""

BLOCK_ENTRIES = 1 << 20
"""Recorded tokens that are processed at once: bounds what is allocated per recorded token."""


def compute_dtype(logits: Tensor) -> torch.dtype:
    """float64 for float64 logits, float32 for all others."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class Problem:
    """See ``centered_loss`` for the meaning of the fields."""

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
    def recorded(self) -> TopKHead | Support | Draws | None:
        """The sampler's distribution where it is recorded token by token."""
        return None if isinstance(self.sampler, FullVocabulary) else self.sampler

    @property
    def metric_names(self) -> tuple[str, ...]:
        """They depend on the configuration only, so they are the same on every rank and step."""
        names: tuple[str, ...] = ("logprob", "log_ratio", "log_ratio_abs", "ratio_kl", "importance_weight")
        if self.with_entropy:
            names += ("entropy",)
        if self.recorded is not None:
            names += ("sampled_in_recorded",)
        return names + self.centering.metric_names

    def of_rows(self, start: int, stop: int) -> Self:
        """The same call for rows [start, stop); nothing is copied."""
        rows = slice(start, stop)
        sampler = None if self.sampler is None else self.sampler.slice_rows(start, stop)
        return replace(
            self,
            sampled_ids=self.sampled_ids[rows],
            row=self.row.of(rows),
            temperature=None if self.temperature is None else self.temperature[rows],
            mask=None if self.mask is None else self.mask[rows],
            sampler=sampler,
            centering=centering_for(sampler, self.centering.weight, self.centering.center),
        )

    def blocks(self, rows: int) -> Iterator[tuple[int, int]]:
        """Row ranges [start, stop) with about ``BLOCK_ENTRIES`` recorded tokens each."""
        recorded = self.recorded
        per_row = 1 if recorded is None else max(recorded.ids.numel() // max(rows, 1), 1)
        return _ranges(0, rows, max(BLOCK_ENTRIES // per_row, 1))

    def rows_per_chunk(self, device: torch.device) -> int:
        """Rows of a workspace."""
        return self.chunk_rows or max(CHUNK_ELEMENTS.get(device.type, 1 << 24) // max(self.shard.valid, 1), 1)


def _ranges(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, step):
        yield first, min(first + step, stop)
