"""The files of a buffer, on a POSIX file system or on any store that fsspec knows.

What the buffer needs of a store, and how each gives it:

                            POSIX directory                     fsspec URL (object store)
    a shard appears whole   temporary name, fsync, rename       one upload: an object exists when it is complete
    one order of commits    ledger.jsonl, append under a lock   ledger/0000000000.json, ...: exclusive create
    a commit survives       fsync of file and directory         the store's own promise when the upload returns

Exclusive create is ``pipe_file(mode="create")``: atomic on S3, GCS and Azure (a conditional put), checked and not
atomic on stores without conditional writes; there, one writer at a time. The lock is ``flock``: on NFS it needs version
4, on Lustre the mount option ``flock``.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import fsspec
from filelock import FileLock
from fsspec.implementations.local import LocalFileSystem

LEDGER = "ledger.jsonl"
TEMPORARY = ".tmp-"


class Storage(Protocol):
    """A buffer's directory."""

    url: str
    ledger_name: str

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file. Raises FileNotFoundError."""

    def size(self, name: str) -> int:
        """Bytes of a file. Raises FileNotFoundError."""

    def names(self) -> list[str]:
        """All files of the directory itself, sorted; empty where it does not exist."""

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file whole, unless it exists; True if this call wrote it."""

    def upload(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """Write a new file that appears whole under its name when the context ends without an error."""

    def start_ledger(self) -> None:
        """Make an empty ledger, unless there is one."""

    def ledger(self, seen: int) -> tuple[list[bytes], int]:
        """Committed lines after the first ``seen`` units, and the units seen then (bytes here, objects there)."""

    def append(self, line_after: Callable[[list[bytes], int], bytes], seen: int) -> None:
        """Commit one line. ``line_after`` makes it, given what ``ledger(seen)`` returns at that moment; it is called
        again, with what is new since, where another writer was faster.
        """


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """A local directory, or a URL such as ``s3://bucket/buffer``."""
    filesystem, root = fsspec.core.url_to_fs(os.fspath(path))
    if isinstance(filesystem, LocalFileSystem):
        return LocalStorage(Path(root))
    return ObjectStorage(filesystem, root, os.fspath(path))


class LocalStorage:
    """See the module."""

    ledger_name = LEDGER

    def __init__(self, root: Path):
        self.root = root
        self.url = str(root)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """See ``Storage``."""
        with open(self.root / name, "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def size(self, name: str) -> int:
        """See ``Storage``."""
        return (self.root / name).stat().st_size

    def names(self) -> list[str]:
        """See ``Storage``."""
        return sorted(path.name for path in self.root.iterdir() if path.is_file()) if self.root.is_dir() else []

    def create(self, name: str, content: bytes) -> bool:
        """See ``Storage``."""
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._lock():
            if target.exists():
                return False
            with self.upload(name) as file:
                file.write(content)
        return True

    @contextlib.contextmanager
    def upload(self, name: str) -> Iterator[BinaryIO]:
        """See ``Storage``."""
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{TEMPORARY}{target.name}")
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, target)
            _sync_directory(target.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def start_ledger(self) -> None:
        """See ``Storage``."""
        self.create(LEDGER, b"")

    def ledger(self, seen: int) -> tuple[list[bytes], int]:
        """See ``Storage``. A last line without its end is a torn write: it is not there yet."""
        size = self.size(LEDGER)
        if size < seen:
            raise ValueError(f"{LEDGER} shrank from {seen} to {size} bytes")
        whole, newline, _torn = self.read(LEDGER, seen).rpartition(b"\n")
        return (whole.split(b"\n"), seen + len(whole) + 1) if newline else ([], seen)

    def append(self, line_after: Callable[[list[bytes], int], bytes], seen: int) -> None:
        """See ``Storage``. The torn line of a writer that died is cut off first: nobody else writes meanwhile."""
        with self._lock():
            lines, end = self.ledger(seen)
            line = line_after(lines, end)
            descriptor = os.open(self.root / LEDGER, os.O_RDWR | os.O_APPEND)
            try:
                if os.fstat(descriptor).st_size > end:
                    os.ftruncate(descriptor, end)
                written = os.write(descriptor, line + b"\n")
                if written != len(line) + 1:
                    raise OSError(f"{LEDGER}: wrote {written} of {len(line) + 1} bytes; is the disk full?")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _lock(self) -> FileLock:
        return FileLock(self.root / ".lock")


class ObjectStorage:
    """See the module."""

    ledger_name = "ledger/"

    def __init__(self, filesystem: Any, root: str, url: str):
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self.url = url

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """See ``Storage``."""
        return cast(bytes, self._filesystem.cat_file(f"{self._root}/{name}", start=start, end=stop))

    def size(self, name: str) -> int:
        """See ``Storage``."""
        self._filesystem.invalidate_cache()
        return int(self._filesystem.size(f"{self._root}/{name}"))

    def names(self) -> list[str]:
        """See ``Storage``."""
        return self._names(self._root)

    def create(self, name: str, content: bytes) -> bool:
        """See ``Storage``."""
        self._filesystem.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
        try:
            self._filesystem.pipe_file(f"{self._root}/{name}", content, mode="create")
        except FileExistsError:
            return False
        return True

    @contextlib.contextmanager
    def upload(self, name: str) -> Iterator[BinaryIO]:
        """See ``Storage``. Written to local temporary space first: an upload that fails leaves nothing behind."""
        with tempfile.NamedTemporaryFile() as file:
            yield cast(BinaryIO, file)
            file.flush()
            self._filesystem.makedirs(self._root, exist_ok=True)
            self._filesystem.put_file(file.name, f"{self._root}/{name}")

    def start_ledger(self) -> None:
        """See ``Storage``. A folder without objects is an empty ledger."""

    def ledger(self, seen: int) -> tuple[list[bytes], int]:
        """See ``Storage``."""
        count = len(self._names(f"{self._root}/ledger"))
        return [self.read(f"ledger/{number:010d}.json") for number in range(seen, count)], max(count, seen)

    def append(self, line_after: Callable[[list[bytes], int], bytes], seen: int) -> None:
        """See ``Storage``."""
        while True:
            lines, seen = self.ledger(seen)
            if self.create(f"ledger/{seen:010d}.json", line_after(lines, seen)):
                return

    def _names(self, folder: str) -> list[str]:
        self._filesystem.invalidate_cache()
        try:
            found = self._filesystem.ls(folder, detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rpartition("/")[2] for entry in found if entry["type"] == "file")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
