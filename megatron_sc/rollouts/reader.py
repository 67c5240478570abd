"""The reader: a buffer's groups, step by step, to each data-parallel rank its share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Self

import numpy as np

from .cursor import Cursor, window_order
from .ledger import Ledger
from .prefetch import Prefetcher
from .problem import BufferRefusedError, Problem
from .quarantine import apply_policy
from .rollout import Bool, Rollout
from .schema import ExpertRoutes
from .shard import Shard, group_sizes
from .storage import open_storage
from .table import RolloutTable
from .validate import Policy, Trainer, check_fingerprint, find_problems


@dataclass(frozen=True)
class GroupRef:
    """A group that a step will use, not loaded.

    Attributes:
        index: its number in the buffer, in order of commitment.
        rollouts: in it.
        tokens: of prompts and responses.
        oldest_version: weight version of its oldest trained token; -1: none trains.
    """

    index: int
    rollouts: int
    tokens: int
    oldest_version: int


@dataclass(frozen=True, eq=False)
class Group:
    """A group, loaded.

    Attributes:
        ref: which.
        table: its rollouts, in columns.
        routes: shape of its expert routes, where they are recorded.
    """

    ref: GroupRef
    table: RolloutTable
    routes: ExpertRoutes | None = None

    def rollouts(self) -> list[Rollout]:
        """As objects. Their ``group_id`` is the group's number in the buffer, so that writers' ids cannot collide."""
        routes = None if self.routes is None else (self.routes.layers, self.routes.topk)
        return [self.table.as_rollout(row, self.ref.index, routes) for row in range(len(self.table))]


Share = Callable[[Sequence[GroupRef], int], Sequence[Sequence[GroupRef]]]
"""Divides a step's groups among ranks: (groups, ranks) to one sequence a rank. Every rank computes the same."""


def equal_shares(groups: Sequence[GroupRef], ranks: int) -> list[Sequence[GroupRef]]:
    """Consecutive groups to consecutive ranks, the same number to each.

    Raises:
        ValueError: if they do not divide.
    """
    share, rest = divmod(len(groups), ranks)
    if rest:
        raise ValueError(f"{len(groups)} groups a step do not divide over {ranks} data-parallel ranks")
    return [groups[rank * share : (rank + 1) * share] for rank in range(ranks)]


def balanced_shares(groups: Sequence[GroupRef], ranks: int) -> list[Sequence[GroupRef]]:
    """The same number of groups to each rank, with about as many tokens: the longest groups are dealt out first.

    Each group goes to the rank with the fewest tokens so far among those that still lack groups. A rank's groups stay
    in the order of use.

    Raises:
        ValueError: if they do not divide.
    """
    share = len(equal_shares(groups, ranks)[0])
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for place in sorted(range(len(groups)), key=lambda i: (-groups[i].tokens, i)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < share), key=lambda r: (tokens[r], r))
        dealt[rank].append(place)
        tokens[rank] += groups[place].tokens
    return [[groups[place] for place in sorted(places)] for places in dealt]


Availability = Literal["ready", "waiting", "ended"]
"""Whether a step's groups are there, may come, or will never come."""


class EndOfBufferError(Exception):
    """Fewer groups are left than a step needs. Nothing was taken.

    Attributes:
        left: groups that are left and fresh enough.
    """

    def __init__(self, needed: int, left: int):
        super().__init__(f"a step needs {needed} groups, but the buffer has {left} left")
        self.left = left


class RolloutReader:
    """Reads a buffer, which may be growing.

    Every rank calls ``take`` with the same arguments at every step; together they receive each group once. Which groups
    a step uses follows from the cursor, the step and the buffer alone: not from timing, nor from the number of ranks.

        reader = RolloutReader("/shared/buffer", rank=rank, ranks=ranks, follow=True, cursor=saved)
        for step in range(first_step, last_step):
            groups = reader.take(64, step)
            ...
            saved = reader.cursor  # with the checkpoint of this step

    Args:
        path: a directory or an fsspec URL.
        rank: this data-parallel rank.
        ranks: data-parallel size.
        cursor: where to go on; None: at the beginning.
        shuffle_window: groups that are shuffled among themselves; 1 keeps the order of commitment. A following reader
            waits until a window is full, so a large one adds staleness.
        seed: of the shuffle; a cursor brings its own.
        max_staleness: a group whose oldest trained token is more steps behind than this is skipped; None: none is.
        follow: wait for more when the buffer is used up, until a writer ends it. Otherwise the buffer as it is now is
            all there is; then ``shards`` must be the same on all ranks if writers may be active.
        shards: ignore what was committed after this many; None: all. Only without ``follow``.
        trainer: what the manifest is checked against.
        policy: what happens to rollouts with a problem. With "drop" and "quarantine" a rank may get fewer groups than
            its share: only the rank that loads a group knows.
        share: how a step's groups are divided among ranks.
        prefetch_bytes: most memory for groups loaded ahead.
        poll_seconds: between looks at the ledger.
        timeout_seconds: a following reader gives up when nothing was committed for this long; None: never.

    Attributes:
        manifest: of the buffer.
        dropped: rollouts this rank left out by the policy.

    Raises:
        BufferRefusedError: if the manifest or the ledger is damaged, or is not what the trainer assumes.
        ValueError: if the cursor is another buffer's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int = 0,
        ranks: int = 1,
        cursor: Cursor | None = None,
        shuffle_window: int = 1,
        seed: int = 0,
        max_staleness: int | None = None,
        follow: bool = False,
        shards: int | None = None,
        trainer: Trainer | None = None,
        policy: Policy = "refuse",
        share: Share = equal_shares,
        prefetch_bytes: int = 256 << 20,
        poll_seconds: float = 1.0,
        timeout_seconds: float | None = None,
    ):
        if not 0 <= rank < ranks:
            raise ValueError(f"rank must be in [0, {ranks}), got {rank}")
        if shuffle_window < 1:
            raise ValueError(f"shuffle_window must be >= 1, got {shuffle_window}")
        if follow and shards is not None:
            raise ValueError("a following reader takes all shards")
        self._rank, self._ranks, self._share = rank, ranks, share
        self._window, self._max_staleness, self._follow = shuffle_window, max_staleness, follow
        self._policy: Policy = policy
        self._poll, self._timeout = poll_seconds, timeout_seconds
        self._storage = open_storage(path)
        self._ledger = Ledger(self._storage)
        self._limit = shards if shards is not None or follow else len(self._ledger.shards)
        self.manifest = self._ledger.manifest
        self._trainer = trainer or Trainer()
        check_fingerprint(self.manifest, self._trainer)
        self._cursor = cursor or Cursor(self.manifest.digest, seed)
        if self._cursor.manifest != self.manifest.digest:
            raise ValueError(f"the cursor was saved for another buffer than {self._storage.url}: its manifest differs")
        if self._cursor.used > self._groups():
            raise BufferRefusedError(
                Problem(
                    f"the cursor has used {self._cursor.used} groups, but only {self._groups()} are committed",
                    self._storage.ledger_name,
                )
            )
        if self._cursor.ledger and self._cursor.ledger != self._ledger_check(self._cursor):
            raise ValueError(
                f"the cursor was saved for another buffer than {self._storage.url}: other shards were committed to it"
            )
        self._shards: dict[int, Shard] = {}
        self._places: dict[int, tuple[int, int, int]] = {}
        self._prefetcher: Prefetcher[tuple[int, int], tuple[RolloutTable, Bool]] = Prefetcher(
            self._load_row_group, lambda key: self._shard(key[0]).memory(key[1]), prefetch_bytes
        )
        self._waiting_since: float | None = None
        self.dropped = 0

    @property
    def closed(self) -> bool:
        """Whether nothing will be committed to the buffer any more."""
        return self._ledger.closed

    @property
    def cursor(self) -> Cursor:
        """Everything that was taken is behind it."""
        return self._cursor

    def take(self, groups: int, step: int) -> list[Group]:
        """This rank's share of the next groups, and move on.

        Args:
            groups: of this step, over all ranks.
            step: the trainer's, for staleness.

        Returns:
            In the order of use.

        Raises:
            EndOfBufferError: if fewer are left, and a following reader need not wait for more.
            BufferRefusedError: for data that must not be trained on, with policy "refuse".
            TimeoutError: see ``timeout_seconds``.
        """
        while (there := self.poll(groups, step)) == "waiting":
            time.sleep(self._poll)
        if there == "ended":
            raise EndOfBufferError(groups, self.left(groups, step))
        chosen, cursor = self._plan(groups, step)
        cursor = replace(cursor, ledger=self._ledger_check(cursor))
        mine = self._share(chosen, self._ranks)[self._rank]
        result = [group for ref in mine if (group := self._load(ref)) is not None]
        self._cursor = cursor
        self._forget()
        self._look_ahead(groups, step)
        return result

    def poll(self, groups: int, step: int) -> Availability:
        """Whether ``take(groups, step)`` would return at once; looks at the ledger, takes nothing, never waits.

        Raises:
            TimeoutError: see ``timeout_seconds``.
            BufferRefusedError: for a damaged ledger or footer.
        """
        there = self._availability(groups, step)
        if there != "waiting":
            self._waiting_since = None
            return there
        seen = len(self._ledger.shards)
        self._ledger.refresh()
        if self._waiting_since is None or len(self._ledger.shards) > seen:
            self._waiting_since = time.monotonic()
        elif self._timeout is not None and time.monotonic() > self._waiting_since + self._timeout:
            raise TimeoutError(f"{self._storage.url}: nothing was committed for {self._timeout} s")
        return self._availability(groups, step)

    def left(self, groups: int, step: int) -> int:
        """How many of a step's groups are there: at most ``groups``."""
        return len(self._plan(groups, step)[0])

    def _availability(self, groups: int, step: int) -> Availability:
        if self.left(groups, step) == groups:
            return "ready"
        return "waiting" if self._follow and not self._ledger.closed else "ended"

    def close(self) -> None:
        """Stop prefetching."""
        self._prefetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _plan(self, groups: int, step: int) -> tuple[list[GroupRef], Cursor]:
        """The groups of a step, as many as are there, and the cursor after them."""
        if groups < 1:
            raise ValueError(f"a step needs at least one group, got {groups}")
        chosen: list[GroupRef] = []
        cursor = self._cursor
        order = window_order(cursor.seed, cursor.window_start, cursor.window_size)
        while len(chosen) < groups:
            if cursor.taken == cursor.window_size:
                start = cursor.window_start + cursor.window_size
                size = self._window_size(start)
                if not size:
                    break
                cursor = replace(cursor, window_start=start, window_size=size, taken=0)
                order = window_order(cursor.seed, start, size)
            ref = self._ref(int(order[cursor.taken]))
            stale = self._max_staleness is not None and 0 <= ref.oldest_version < step - self._max_staleness
            cursor = replace(cursor, taken=cursor.taken + 1, skipped=cursor.skipped + stale)
            if not stale:
                chosen.append(ref)
        return chosen, cursor

    def _ledger_check(self, cursor: Cursor) -> str:
        """Digest of the ledger up to the last group of the cursor's window; empty where there is none."""
        ends = np.cumsum([entry.groups for entry in self._ledger.shards])
        known = cursor.window_start + cursor.window_size
        return self._ledger.checks[int(np.searchsorted(ends, known))] if known else ""

    def _groups(self) -> int:
        return sum(entry.groups for entry in self._ledger.shards[: self._limit])

    def _window_size(self, start: int) -> int:
        """Groups of the window that begins at ``start``; 0 where it is not there yet, or ever."""
        there = max(self._groups() - start, 0)
        waiting = self._follow and not self._ledger.closed
        return 0 if waiting and there < self._window else min(there, self._window)

    def _shard(self, number: int) -> Shard:
        shard = self._shards.get(number)
        if shard is None:
            shard = Shard(self._storage, self._ledger.shards[number], self.manifest)
            self._shards[number] = shard
        return shard

    def _ref(self, index: int) -> GroupRef:
        shard_number, row_group, within = self._place(index)
        rows, tokens, oldest = self._shard(shard_number).groups[row_group]
        return GroupRef(index, int(rows[within]), int(tokens[within]), int(oldest[within]))

    def _place(self, index: int) -> tuple[int, int, int]:
        """Shard, row group and place in the row group of a group."""
        found = self._places.get(index)
        if found is None:
            ends = np.cumsum([entry.groups for entry in self._ledger.shards])
            shard_number = int(np.searchsorted(ends, index, side="right"))
            group = int(ends[shard_number]) - self._ledger.shards[shard_number].groups
            for row_group, (rows, _, _) in enumerate(self._shard(shard_number).groups):
                for within in range(len(rows)):
                    self._places[group] = (shard_number, row_group, within)
                    group += 1
            found = self._places[index]
        return found

    def _load(self, ref: GroupRef) -> Group | None:
        shard_number, row_group, within = self._place(ref.index)
        table, keep = self._prefetcher.get((shard_number, row_group))
        rows = self._shard(shard_number).groups[row_group][0]
        start = int(rows[:within].sum())
        stop = start + int(rows[within])
        if not keep[start]:
            self.dropped += stop - start
            return None
        return Group(ref, table.slice(start, stop), self.manifest.expert_routes)

    def _load_row_group(self, key: tuple[int, int]) -> tuple[RolloutTable, Bool]:
        shard = self._shard(key[0])
        table = read_row_group(shard, key[1])
        problems, bad_rows = find_problems(
            table, self.manifest, encoded=True, file=shard.name, first_row=shard.first_row(key[1]),
            max_tokens=self._trainer.max_tokens,
        )  # fmt: skip
        return table, apply_policy(self._policy, problems, bad_rows, table, self.manifest, self._storage)

    def _look_ahead(self, groups: int, step: int) -> None:
        """Prefetch this rank's share of the next step, as far as it can be known now."""
        refs, _ = self._plan(groups, step + 1)
        if len(refs) == groups:
            refs = list(self._share(refs, self._ranks)[self._rank])
        self._prefetcher.want([self._place(ref.index)[:2] for ref in refs])

    def _forget(self) -> None:
        """Drop what lies before the window."""
        first = self._place(self._cursor.window_start)[0]
        if any(number < first for number in self._shards):
            self._shards = {number: shard for number, shard in self._shards.items() if number >= first}
            self._places = {index: place for index, place in self._places.items() if place[0] >= first}


def read_row_group(shard: Shard, row_group: int) -> RolloutTable:
    """Decode a row group and compare it with what the footer says of its groups.

    Raises:
        BufferRefusedError: where they differ.
    """
    table = shard.read(row_group)
    for name, said, found in zip(
        ("rollouts", "tokens", "oldest weight version"), shard.groups[row_group], group_sizes(table), strict=True
    ):
        if not np.array_equal(said, found):
            raise BufferRefusedError(
                Problem(
                    f"the footer says {said.tolist()[:8]} for the groups of row group {row_group}",
                    shard.name, field=name, value=str(found.tolist()[:8]),
                )
            )  # fmt: skip
    return table
