"""Rollouts with a problem: refused, left out, or set aside."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence

import numpy as np

from .problem import BufferRefusedError, Problem
from .rollout import Bool
from .schema import Manifest
from .shard import ShardWriter
from .storage import Storage
from .table import RolloutTable
from .validate import Policy

FOLDER = "quarantine"


def apply_policy(
    policy: Policy,
    problems: Sequence[Problem],
    bad_rows: Bool,
    table: RolloutTable,
    manifest: Manifest,
    storage: Storage,
) -> Bool:
    """Decide about rollouts with problems.

    A group loses all its rollouts with one: its baseline needs every reward.

    Args:
        policy: "refuse", "drop" or "quarantine".
        problems: from ``find_problems``.
        bad_rows: ``[n]`` from ``find_problems``.
        table: the n rollouts.
        manifest: of the buffer.
        storage: of the buffer: quarantined groups go to its folder ``quarantine``, as a shard and a JSON file.

    Returns:
        Bool ``[n]``: rollouts to keep.

    Raises:
        BufferRefusedError: with policy "refuse", for the first problem.
    """
    if not problems:
        return np.ones(len(table), np.bool_)
    if policy == "refuse":
        raise BufferRefusedError(problems[0])
    starts = table.group_starts
    bad_groups = np.add.reduceat(bad_rows.astype(np.int64), starts) > 0
    keep = np.repeat(~bad_groups, np.diff(np.append(starts, len(table))))
    if policy == "quarantine":
        name = f"{FOLDER}/{uuid.uuid4().hex[:12]}"
        shard = ShardWriter(storage, f"{name}.parquet", manifest)
        shard.add(table.select(~keep))
        shard.finish()
        storage.create(f"{name}.json", json.dumps([problem.as_dict() for problem in problems], indent=1).encode())
    return keep
