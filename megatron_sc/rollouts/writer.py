"""The writer: rollouts in, committed shards out."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from .codec import encode_heads
from .ledger import Ledger
from .problem import BufferRefusedError, Problem
from .quarantine import apply_policy
from .rollout import Rollout
from .schema import Manifest
from .shard import ShardWriter
from .storage import open_storage
from .table import RolloutTable
from .validate import Policy, Trainer, check_fingerprint, find_problems


class RolloutWriter:
    """Appends rollouts to a buffer. Any number of writers may do so at once, in any number of processes.

    ``write`` validates and stages; ``commit`` makes everything staged visible, all or nothing. A writer that dies loses
    what it had not committed, and readers never see any of it. Used as a context manager it commits at the end, unless
    an error leaves the block.

        with RolloutWriter("/shared/buffer", Manifest(true_vocab_size=151936)) as writer:
            for group in groups:
                writer.write(group)

    Args:
        path: a directory or an fsspec URL; made when missing.
        manifest: of the buffer; must equal that of an existing one.
        policy: what happens to rollouts with a problem.
        shard_bytes: a shard is committed once it is this large.
        row_group_tokens: response tokens a row group: the unit that a reader fetches. A group of rollouts is never
            divided, so one larger than this makes a larger row group.

    Attributes:
        dropped: rollouts left out by the policy.

    Raises:
        BufferRefusedError: if the buffer has another manifest, or the fingerprint makes log-probabilities unusable.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        manifest: Manifest,
        *,
        policy: Policy = "refuse",
        shard_bytes: int = 256 << 20,
        row_group_tokens: int = 16384,
    ):
        check_fingerprint(manifest, Trainer())
        self._storage = open_storage(path)
        self._manifest = manifest
        self._policy = policy
        self._shard_bytes = shard_bytes
        self._row_group_tokens = row_group_tokens
        self._ledger = Ledger.create(self._storage, manifest)
        self._name = uuid.uuid4().hex[:12]
        self._shards = 0
        self._shard: ShardWriter | None = None
        self._staged: list[RolloutTable] = []
        self._staged_groups: set[int] = set()
        self.dropped = 0

    def write(self, rollouts: Sequence[Rollout] | RolloutTable) -> None:
        """Validate and stage whole groups. Rollouts are copied; a table's arrays must not change until ``commit``.

        Args:
            rollouts: of one or more groups, those of a group next to each other. A group is what one call says it is:
                the same id in another call is another group.

        Raises:
            BufferRefusedError: naming the row among ``rollouts``, the position, the field and the value. Nothing of
                this call is staged then.
        """
        table = rollouts if isinstance(rollouts, RolloutTable) else RolloutTable.from_rollouts(rollouts)
        kept = []
        for start, stop in _pieces(table, self._row_group_tokens):
            piece = table.slice(start, stop)
            problems, bad_rows = find_problems(piece, self._manifest, encoded=False, first_row=start)
            keep = apply_policy(self._policy, problems, bad_rows, piece, self._manifest, self._storage)
            self.dropped += int((~keep).sum())
            kept.append(piece if keep.all() else piece.select(keep))
        for piece in kept:
            self._stage(encode_heads(piece, self._manifest.heads))

    def commit(self) -> None:
        """Make everything staged visible. On return it survives a crash of this machine."""
        self._write_row_group()
        if self._shard is not None:
            shard, self._shard = self._shard, None
            self._ledger.commit(shard.finish())

    def close(self) -> None:
        """Commit what is staged."""
        self.commit()

    def abort(self) -> None:
        """Forget what is staged."""
        self._staged.clear()
        self._staged_groups.clear()
        if self._shard is not None:
            self._shard.abort()
            self._shard = None

    def finish_buffer(self) -> None:
        """Commit, and end the buffer: following readers stop after it, and no writer can commit to it any more."""
        self.commit()
        self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _stage(self, piece: RolloutTable) -> None:
        groups = set(piece.group_id[piece.group_starts].tolist())
        if groups & self._staged_groups:  # in one row group they would be one group
            self._write_row_group()
        self._staged.append(piece)
        self._staged_groups |= groups
        if sum(staged.tokens for staged in self._staged) >= self._row_group_tokens:
            self._write_row_group()
        if self._shard is not None and self._shard.size >= self._shard_bytes:
            self.commit()

    def _write_row_group(self) -> None:
        staged, self._staged, self._staged_groups = self._staged, [], set()
        if not sum(map(len, staged)):
            return
        if self._shard is None:
            self._shard = ShardWriter(self._storage, f"shard-{self._name}-{self._shards:06d}.parquet", self._manifest)
            self._shards += 1
        self._shard.add(RolloutTable.concatenate(staged))


def _pieces(table: RolloutTable, tokens: int) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) of whole groups with about this many response tokens.

    Raises:
        BufferRefusedError: if a group's rollouts do not stand next to each other.
    """
    starts = table.group_starts
    ids, first = np.unique(table.group_id[starts], return_index=True)
    if len(ids) < len(starts):
        row = int(np.delete(starts, first)[0])
        rule = "rollouts of a group must stand next to each other"
        raise BufferRefusedError(Problem(rule, row=row, field="group_id", value=str(table.group_id[row])))
    stops = np.append(starts[1:], len(table))
    start = 0
    for stop in stops.tolist():
        if table.response_ids.offsets[stop] - table.response_ids.offsets[start] >= tokens or stop == len(table):
            yield start, stop
            start = stop
