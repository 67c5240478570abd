"""One Parquet shard: written once, every byte checksummed, read a row group at a time.

A row group holds whole groups of rollouts. The footer's metadata (key ``megatron_sc``) holds the sha256 of each row
group's bytes and the groups' sizes; the ledger holds the footer's sha256. So a reader fetches the footer and the row
groups it needs, and has verified every byte that it parses.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from contextlib import ExitStack
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from .ledger import ShardEntry
from .problem import BufferRefusedError, Problem
from .schema import PLAIN_BYTES, SCHEMA_VERSION, Manifest, arrow_schema, from_arrow, to_arrow
from .storage import Storage
from .table import RolloutTable

METADATA = b"megatron_sc"


class ShardWriter:
    """Writes one shard; it is visible in the directory after ``finish``, to readers after the ledger names it.

    Args:
        storage: the buffer.
        name: of the file.
        manifest: of the buffer.
    """

    def __init__(self, storage: Storage, name: str, manifest: Manifest):
        self._name = name
        self._manifest = manifest
        self._schema = arrow_schema(manifest)
        self._stack = ExitStack()
        self._sink = _HashingSink(self._stack.enter_context(storage.upload(name)))
        self._writer = pq.ParquetWriter(
            cast(Any, self._sink),
            self._schema,
            compression="zstd",
            compression_level=3,
            use_dictionary=["finish_reason"],
            column_encoding={f"{column}.list.element": "BYTE_STREAM_SPLIT" for column in PLAIN_BYTES},
            write_statistics=False,
        )
        self._chunks: list[tuple[int, str]] = []
        self._groups: list[GroupSizes] = []
        self._rows = self._tokens = 0

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._sink.position

    def add(self, table: RolloutTable) -> None:
        """Append a row group: whole groups, validated and encoded, at least one."""
        self._writer.write_table(to_arrow(table, self._schema), row_group_size=max(len(table), 1))
        self._chunks.append((self._sink.position, self._sink.end_chunk()))
        self._groups.append(group_sizes(table))
        self._rows += len(table)
        self._tokens += table.tokens

    def finish(self) -> ShardEntry:
        """Complete the file under its name.

        Returns:
            What the ledger must say for readers to see it.
        """
        with self._stack:
            footer = self._sink.position
            about = {
                "schema_version": SCHEMA_VERSION,
                "manifest": self._manifest.digest,
                "row_groups": [
                    {
                        "stop": stop,
                        "sha256": digest,
                        **{name: column.tolist() for name, column in zip(_SIZES, sizes, strict=True)},
                    }
                    for (stop, digest), sizes in zip(self._chunks, self._groups, strict=True)
                ],
            }
            self._writer.add_key_value_metadata({METADATA: json.dumps(about, separators=(",", ":"))})
            self._writer.close()
            groups = sum(len(group[0]) for group in self._groups)
            return ShardEntry(
                self._name, self._sink.position, footer, self._sink.end_chunk(), self._rows, groups, self._tokens
            )

    def abort(self) -> None:
        """Leave no file behind."""
        self._sink.discard = True
        self._writer.close()
        with contextlib.suppress(_AbortedError), self._stack:
            raise _AbortedError


GroupSizes = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""For each group: rollouts, tokens of prompts and responses, the oldest weight version among the trained tokens."""


def group_sizes(table: RolloutTable) -> GroupSizes:
    """What a reader must know of groups that it does not load; see ``GroupSizes``. -1: no trained token."""
    starts = table.group_starts
    rows = np.diff(np.append(starts, len(table)))
    tokens = np.add.reduceat(table.prompt_ids.sizes + table.response_ids.sizes, starts)
    oldest = np.full(len(table), _NONE)
    filled = np.flatnonzero(table.response_ids.sizes)
    if filled.size and np.array_equal(table.response_mask.sizes, table.weight_version.sizes):
        versions = np.where(table.response_mask.values, table.weight_version.values.astype(np.int64), _NONE)
        oldest[filled] = np.minimum.reduceat(versions, table.weight_version.offsets[filled])
    oldest = np.minimum.reduceat(oldest, starts)
    return rows, tokens, np.where(oldest == _NONE, -1, oldest)


_NONE = np.iinfo(np.int64).max
_SIZES = ("rows", "tokens", "oldest")


class Shard:
    """A committed shard, opened: its footer is read and verified, its row groups are not yet.

    Args:
        storage: the buffer.
        entry: what the ledger says.
        manifest: of the buffer.

    Attributes:
        groups: ``GroupSizes`` of each row group.

    Raises:
        BufferRefusedError: if the file is missing, was changed, or is not schema v1.
    """

    def __init__(self, storage: Storage, entry: ShardEntry, manifest: Manifest):
        self.entry = entry
        self.name = entry.shard
        self._storage = storage
        self._schema = arrow_schema(manifest)
        footer = self._fetch(entry.footer, entry.size, entry.footer_sha256, "the footer")
        size = storage.size(self.name)
        if size != entry.size:
            raise self._refuse(f"the ledger says {entry.size}", "size in bytes", size)
        try:
            self._metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
            about = json.loads(self._metadata.metadata[METADATA])
            self._chunks = [(group["stop"], group["sha256"]) for group in about["row_groups"]]
            self.groups: list[GroupSizes] = [
                (np.array(g["rows"], np.int64), np.array(g["tokens"], np.int64), np.array(g["oldest"], np.int64))
                for g in about["row_groups"]
            ]
            digest = about["manifest"]
            version = about["schema_version"]
        except (KeyError, TypeError, ValueError, OSError, pa.ArrowException) as error:
            raise self._refuse(f"not a shard of schema v{SCHEMA_VERSION}: {error!r}", "footer") from error
        if version != SCHEMA_VERSION:
            raise self._refuse(f"this release reads {SCHEMA_VERSION} only", "schema_version", version)
        if digest != manifest.digest:
            raise self._refuse("written under another manifest", "manifest", digest)
        rows = [self._metadata.row_group(i).num_rows for i in range(self._metadata.num_row_groups)]
        if rows != [int(group[0].sum()) for group in self.groups] or sum(rows) != entry.rows:
            raise self._refuse(f"footer and ledger ({entry.rows} rows) disagree", "rows per row group", rows)
        if sum(len(group[0]) for group in self.groups) != entry.groups:
            raise self._refuse(f"the ledger says {entry.groups}", "groups", sum(len(group[0]) for group in self.groups))

    def __len__(self) -> int:
        """Number of row groups."""
        return len(self._chunks)

    def first_row(self, row_group: int) -> int:
        """Row of the file at which a row group begins."""
        return sum(int(group[0].sum()) for group in self.groups[:row_group])

    def memory(self, row_group: int) -> int:
        """About how many bytes a row group takes when decoded."""
        return int(self._metadata.row_group(row_group).total_byte_size) * 3 // 2

    def read(self, row_group: int) -> RolloutTable:
        """Fetch, verify and decode a row group.

        Raises:
            BufferRefusedError: if its bytes were changed or its columns are not schema v1.
        """
        start = self._chunks[row_group - 1][0] if row_group else 0
        stop, digest = self._chunks[row_group]
        source = _Bytes(self.entry.size, start, self._fetch(start, stop, digest, f"row group {row_group}"))
        try:
            data = pq.ParquetFile(source, metadata=self._metadata, pre_buffer=False).read_row_group(row_group)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self._refuse(f"row group {row_group} does not decode: {error}", "Parquet") from error
        return from_arrow(data, self._schema, self.name)

    def _fetch(self, start: int, stop: int, digest: str, part: str) -> bytes:
        try:
            content = self._storage.read(self.name, start, stop)
        except FileNotFoundError as error:
            raise self._refuse("the ledger names it, but it is missing", "file") from error
        if len(content) != stop - start:
            raise self._refuse(
                f"{part} needs bytes {start} to {stop}: truncated", "size in bytes", self._storage.size(self.name)
            )
        found = hashlib.sha256(content).hexdigest()
        if found != digest:
            raise self._refuse(f"{part}, bytes {start} to {stop}, must have {digest}: corrupt", "sha256", found)
        return content

    def _refuse(self, rule: str, field: str, value: object = "") -> BufferRefusedError:
        return BufferRefusedError(Problem(rule, self.name, field=field, value=str(value)))


class _AbortedError(Exception):
    """Makes ``Storage.upload`` remove its file."""


class _HashingSink(io.RawIOBase):
    """Passes bytes on and hashes them chunk by chunk."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._hash = hashlib.sha256()
        self.position = 0
        self.discard = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if not self.discard:
            self._file.write(view)
        self._hash.update(view)
        self.position += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.position

    def end_chunk(self) -> str:
        """Digest of what was written since the last call."""
        digest = self._hash.hexdigest()
        self._hash = hashlib.sha256()
        return digest


class _Bytes(io.RawIOBase):
    """A file of which only some bytes, already verified, exist: reading any other is an error."""

    def __init__(self, size: int, start: int, content: bytes):
        self._size, self._start, self._content = size, start, memoryview(content)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        first = self._position - self._start
        last = len(self._content) if size < 0 else first + size
        if first < 0 or last > len(self._content):
            raise OSError(f"bytes {self._position} to {self._position + size} lie outside the verified part")
        self._position += last - first
        return bytes(self._content[first:last])
