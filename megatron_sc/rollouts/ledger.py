"""The ledger: which shards are committed, in which order. A shard that it does not name does not exist."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from .problem import BufferRefusedError, Problem
from .schema import MANIFEST, Manifest
from .storage import LEDGER, Storage


@dataclass(frozen=True)
class ShardEntry:
    """A committed shard.

    Attributes:
        shard: its file.
        size: bytes of the file.
        footer: offset at which the Parquet footer begins.
        footer_sha256: of the bytes from there to the end; the footer holds the checksums of all others.
        rows: rollouts.
        groups: groups, never divided between shards.
        tokens: response tokens.
    """

    shard: str
    size: int
    footer: int
    footer_sha256: str
    rows: int
    groups: int
    tokens: int


END = "end"
"""Key of the line that closes a buffer: no shard follows."""


class Ledger:
    """The committed shards of a buffer, in order; ``refresh`` sees what was committed since.

    Each line is a JSON object whose ``check`` is a digest of the line before it, the manifest at first, and of the rest
    of its own: lines cannot be edited, removed, repeated or exchanged unnoticed.

    Args:
        storage: the buffer.

    Attributes:
        manifest: of the buffer.
        shards: that are committed, in order.
        checks: of each shard's line: a digest of the ledger up to it.
        closed: whether no shard will follow.

    Raises:
        BufferRefusedError: if there is no buffer, or its manifest or ledger is damaged.
    """

    def __init__(self, storage: Storage):
        self._storage = storage
        try:
            self.manifest = Manifest.from_json(storage.read(MANIFEST))
        except FileNotFoundError as error:
            rule = f"no such file in {storage.url}: not a rollout buffer"
            raise BufferRefusedError(Problem(rule, MANIFEST)) from error
        self.shards: list[ShardEntry] = []
        self.checks: list[str] = []
        self.closed = False
        self._check = self.manifest.digest
        self._lines = 0
        self._seen = 0
        self.refresh()

    @classmethod
    def create(cls, storage: Storage, manifest: Manifest) -> Ledger:
        """Open a buffer, making it first where it does not exist.

        Raises:
            BufferRefusedError: if it exists with another manifest.
        """
        if MANIFEST not in storage.names():  # a ledger that is missing beside a manifest was lost: never start anew
            storage.start_ledger()
            storage.create(MANIFEST, manifest.to_json())
        ledger = cls(storage)
        if ledger.manifest != manifest:
            for name in (field.name for field in fields(Manifest)):
                found, wanted = getattr(ledger.manifest, name), getattr(manifest, name)
                if found != wanted:
                    rule = f"this writer has {wanted!r}: one buffer, one manifest"
                    raise BufferRefusedError(Problem(rule, MANIFEST, field=name, value=repr(found)))
        return ledger

    def refresh(self) -> None:
        """Read what was committed since the last call.

        Raises:
            BufferRefusedError: if a line is damaged, naming it.
        """
        try:
            lines, seen = self._storage.ledger(self._seen)
        except FileNotFoundError as error:
            raise BufferRefusedError(Problem("missing, but the manifest exists", self._storage.ledger_name)) from error
        except ValueError as error:
            raise BufferRefusedError(Problem(str(error), self._storage.ledger_name)) from error
        self._apply(lines)
        self._seen = seen

    def commit(self, entry: ShardEntry) -> None:
        """Append a shard: from now on readers see it.

        Raises:
            BufferRefusedError: if the buffer was closed.
        """
        self._append(asdict(entry))

    def close(self) -> None:
        """Append the end: following readers stop after the last shard. Nothing can be committed afterwards."""
        self._append({END: True})

    def torn_bytes(self) -> int:
        """Bytes after the last complete line: a writer is at work, or died."""
        return max(self._storage.size(LEDGER) - self._seen, 0) if self._storage.ledger_name == LEDGER else 0

    def _append(self, body: dict[str, Any]) -> None:
        def line_after(lines: list[bytes], seen: int) -> bytes:
            self._apply(lines)
            self._seen = seen
            if self.closed:
                rule = f"{self._storage.url} was ended (finish_buffer): write to another buffer"
                raise BufferRefusedError(Problem(rule, self._storage.ledger_name))
            return json.dumps({**body, "check": _check(self._check, body)}, separators=(",", ":")).encode()

        self._storage.append(line_after, self._seen)
        self.refresh()

    def _apply(self, lines: list[bytes]) -> None:
        for line in lines:
            file, row = self._storage.ledger_name, self._lines
            try:
                body = json.loads(line)
                check = body.pop("check")
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise BufferRefusedError(Problem(f"line {row}: not a ledger line: {error!r}", file)) from error
            if check != _check(self._check, body):
                rule = f"line {row} does not follow from the line before: edited, moved or lost"
                raise BufferRefusedError(Problem(rule, file, field="check", value=repr(check)))
            if self.closed:
                raise BufferRefusedError(Problem(f"line {row}: follows the end", file))
            if body == {END: True}:
                self.closed = True
            else:
                try:
                    self.shards.append(ShardEntry(**body))
                    self.checks.append(check)
                except TypeError as error:
                    raise BufferRefusedError(Problem(f"line {row}: {error}", file)) from error
            self._check = check
            self._lines += 1


def _check(previous: str, body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{previous}{text}".encode()).hexdigest()[:32]
