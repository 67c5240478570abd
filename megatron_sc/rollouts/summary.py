"""A buffer at a glance: what ``megatron-sc inspect`` prints."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .ledger import Ledger
from .ragged import row_sums
from .reader import read_row_group
from .schema import Manifest
from .shard import Shard
from .storage import open_storage
from .table import RolloutTable
from .validate import find_tokens

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


@dataclass
class Summary:
    """Counts over the first row groups of a buffer.

    Attributes:
        manifest: of the buffer.
        shards: committed.
        rollouts: committed.
        groups: committed.
        tokens: committed, generated.
        size: bytes of the shards.
        sampled_tokens: tokens the statistics below are from.
        trained_tokens: of those, with mask 1.
        head_sizes: quantiles of tokens a head.
        head_mass: quantiles of a head's probability.
        sampled_in_head: share of trained tokens that stand in their head.
        versions: tokens of each weight version.
        finish_reasons: rollouts of each.
        first: the rollout shown token by token, as a table of one.
    """

    manifest: Manifest
    shards: int = 0
    rollouts: int = 0
    groups: int = 0
    tokens: int = 0
    size: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    head_sizes: list[float] = field(default_factory=list)
    head_mass: list[float] = field(default_factory=list)
    sampled_in_head: float = float("nan")
    versions: dict[int, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    first: RolloutTable | None = None


def summarize(path: str | os.PathLike[str], row: int = 0, most_tokens: int = 1_000_000) -> Summary:
    """Statistics of a buffer.

    Args:
        path: a directory or an fsspec URL.
        row: rollout of the buffer to show, in order of commitment.
        most_tokens: statistics are taken from about this many.

    Raises:
        BufferRefusedError: if what is read is damaged.
        IndexError: if there is no such row.
    """
    storage = open_storage(path)
    ledger = Ledger(storage)
    summary = Summary(ledger.manifest, shards=len(ledger.shards))
    for entry in ledger.shards:
        summary.rollouts += entry.rows
        summary.groups += entry.groups
        summary.tokens += entry.tokens
        summary.size += entry.size
    if summary.rollouts and not 0 <= row < summary.rollouts:
        raise IndexError(f"row {row}: the buffer has {summary.rollouts} rollouts")
    sizes: list[npt.NDArray[np.int64]] = []
    masses: list[npt.NDArray[np.float64]] = []
    versions: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    inside = covered = seen = 0
    for entry in ledger.shards:
        if summary.sampled_tokens >= most_tokens and summary.first is not None:
            break
        if summary.sampled_tokens >= most_tokens and seen + entry.rows <= row:
            seen += entry.rows
            continue
        shard = Shard(storage, entry, ledger.manifest)
        for row_group in range(len(shard)):
            rows = int(shard.groups[row_group][0].sum())
            wanted = seen <= row < seen + rows
            if wanted or summary.sampled_tokens < most_tokens:
                table = read_row_group(shard, row_group)
                if wanted:
                    summary.first = table.slice(row - seen, row - seen + 1)
                if summary.sampled_tokens < most_tokens:
                    summary.sampled_tokens += table.tokens
                    summary.trained_tokens += int(table.response_mask.values.sum())
                    values, counts = np.unique(table.weight_version.values, return_counts=True)
                    versions.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
                    reasons.update(table.finish_reason)
                    heads = table.head_offsets
                    filled = np.diff(heads) > 0
                    sizes.append(np.diff(heads)[filled])
                    masses.append(row_sums(np.exp(table.head_logprobs.values), heads)[filled])
                    hit, _ = find_tokens(table.response_ids.values, table.head_ids.values, heads)
                    trained = table.response_mask.values & filled
                    inside += int((hit & trained).sum())
                    covered += int(trained.sum())
            seen += rows
    if covered:
        summary.head_sizes = np.quantile(np.concatenate(sizes), QUANTILES).tolist()
        summary.head_mass = np.quantile(np.concatenate(masses), QUANTILES).tolist()
        summary.sampled_in_head = inside / covered
    summary.versions, summary.finish_reasons = dict(sorted(versions.items())), dict(reasons.most_common())
    return summary
