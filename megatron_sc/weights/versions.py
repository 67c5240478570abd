"""The folder of published weights: whole versions, and one file that names the newest.

    weights/
        latest.json                {"version": 120, "directory": "00000120-9f3a1c2e"}
        00000120-9f3a1c2e/         a Hugging Face checkpoint
        00000110-07d4e6b1/         the version before it
        .tmp-00000130-5c21f0aa/    being written

A version is written under a temporary name, synced, renamed, and named in ``latest.json``, which is replaced in one
step: whoever follows that file sees whole versions only. A name is used once, so that a folder never changes under a
reader: version 120 of a run that was interrupted and came back is another folder than the 120 it published before.
Needs a POSIX file system that both sides see.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

POINTER = "latest.json"
TEMPORARY = ".tmp-"
_NAME = re.compile(r"(\d{8,})-[0-9a-f]{8}")


@dataclass(frozen=True)
class PublishedWeights:
    """One published version.

    ``version`` is the number of training steps behind it: the ``weight_version`` of the tokens sampled with it.
    """

    version: int
    path: Path  # a folder that ``transformers``, vLLM and SGLang load


def latest(root: str | os.PathLike[str]) -> PublishedWeights | None:
    """The newest published version, or None where nothing was published yet.

    Args:
        root: the trainer's ``--publish-weights``.

    Raises:
        ValueError: for a ``latest.json`` that this module did not write.
    """
    pointer = Path(root) / POINTER
    try:
        content = pointer.read_text()
    except FileNotFoundError:
        return None
    try:
        record = json.loads(content)
        name = record["directory"]
        if version_of(name) != record["version"]:
            raise ValueError(f"directory {name!r} is not of version {record['version']!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{pointer} does not name published weights: {error!r}; is it another program's?") from error
    return PublishedWeights(record["version"], Path(root) / name)


def wait_for(
    root: str | os.PathLike[str],
    other_than: PublishedWeights | None = None,
    timeout: float | None = None,
    interval: float = 1.0,
) -> PublishedWeights:
    """The newest published version, once it is another one than the sampler holds.

    Other, not newer: a trainer that comes back from a checkpoint publishes an older version again, and what was
    published after that checkpoint is withdrawn.

    Args:
        root: the trainer's ``--publish-weights``. It need not exist yet.
        other_than: what the sampler holds; None: return as soon as anything is published.
        timeout: seconds to wait; None: for ever.
        interval: seconds between two looks.

    Raises:
        TimeoutError: naming the folder and what it holds.
        ValueError: see :func:`latest`.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        found = latest(root)
        if found is not None and found != other_than:
            return found
        if deadline is not None and time.monotonic() >= deadline:
            held = "nothing" if found is None else f"still version {found.version}"
            raise TimeoutError(f"{Path(root)}: {held} is published after {timeout:g} s; does the trainer run?")
        time.sleep(interval)


def begin(root: Path, version: int) -> Path:
    """Make the folder to write a version in; what an interrupted trainer left unfinished is deleted first."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"{TEMPORARY}*"):
        _delete(leftover)
    folder = root / f"{TEMPORARY}{version:08d}-{secrets.token_hex(4)}"
    folder.mkdir()
    return folder


def commit(folder: Path, keep: int) -> PublishedWeights:
    """Publish a folder from :func:`begin`, whose files are synced, and delete versions that are no longer needed.

    Deleted are all but the ``keep`` last versions up to this one, and every version after this one: a run that
    continues from an earlier step publishes its own.

    Args:
        folder: what :func:`begin` returned.
        keep: versions that stay, this one included.
    """
    root, name = folder.parent, folder.name.removeprefix(TEMPORARY)
    published = PublishedWeights(version_of(name), root / name)
    sync_folder(folder)
    folder.rename(published.path)
    sync_folder(root)
    record = {"version": published.version, "directory": name}
    write_synced(root / f"{TEMPORARY}{POINTER}", json.dumps(record) + "\n")
    os.replace(root / f"{TEMPORARY}{POINTER}", root / POINTER)
    sync_folder(root)
    _prune(root, published, keep)
    return published


def version_of(name: str) -> int:
    """The version in a folder's name.

    Raises:
        ValueError: for another name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no name of a published version")
    return int(match[1])


def write_synced(path: Path, content: str) -> None:
    """Write a small file that survives a crash once its folder is synced."""
    with path.open("w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Make a written file's content survive a crash."""
    _sync(path, os.O_RDWR)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a crash."""
    _sync(path, os.O_RDONLY)


def _sync(path: Path, mode: int) -> None:
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(root: Path, published: PublishedWeights, keep: int) -> None:
    names = [path.name for path in root.iterdir() if _NAME.fullmatch(path.name)]
    earlier = sorted((name for name in names if version_of(name) < published.version), reverse=True)
    kept = {published.path.name, *earlier[: keep - 1]}
    for name in names:
        if name not in kept:
            _delete((root / name).rename(root / f"{TEMPORARY}{name}"))  # renamed: nobody sees half a version


def _delete(path: Path) -> None:
    """Delete a file or folder with a temporary name. What a reader on NFS holds open stays until the next time."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
