"""From other stacks' files to a buffer, all of them or nothing."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from .capture.records import records
from .capture.response import to_table
from .capture.sources import Sample, Source
from .problem import BufferRefusedError
from .rollout import RolloutError
from .schema import Manifest
from .writer import RolloutWriter

BATCH_TOKENS = 16384
"""Response tokens that are validated at once."""


@dataclass
class Conversion:
    """What became of the files.

    Attributes:
        groups: written.
        rollouts: written.
        tokens: response tokens written.
        dropped: errors of the groups that were left out.
    """

    groups: int = 0
    rollouts: int = 0
    tokens: int = 0
    dropped: list[str] = field(default_factory=list)


def convert(
    files: Sequence[Path],
    path: str | os.PathLike[str],
    manifest: Manifest,
    source: Source,
    *,
    drop: bool = False,
    keep_open: bool = False,
    progress: Callable[[Path, int], None] | None = None,
) -> Conversion:
    """Write a buffer from files. It appears whole, under its name, when all of them are converted.

    Args:
        files: see ``capture.records``.
        path: of the buffer: a local directory that does not exist yet, or is empty.
        manifest: of the buffer.
        source: what a record of the files means.
        drop: leave out groups with a bad rollout instead of ending; a group's advantages need all of its rewards.
        keep_open: let other writers go on with the buffer; else readers that follow it stop at its end.
        progress: called with the file and the bytes of it that are done.

    Raises:
        RolloutError: for a bad record, naming file and line; a group in two places; a directory that is not empty.
    """
    target = Path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RolloutError(f"{target}: exists; convert into a new directory")
    staging = target.parent / f".{target.name}.{uuid.uuid4().hex[:12]}"
    result = Conversion()
    try:
        with RolloutWriter(staging, manifest) as writer:
            for batch in _batches(_groups(files, source, drop, result.dropped, progress)):
                _write(writer, batch, drop, result)
            if not keep_open:
                writer.finish_buffer()
        if target.exists():
            target.rmdir()
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return result


Group = tuple[int | str, list[Sample]]


def _groups(
    files: Sequence[Path],
    source: Source,
    drop: bool,
    dropped: list[str],
    progress: Callable[[Path, int], None] | None,
) -> Iterator[Group]:
    """Runs of records of one group, without those of which one is bad."""
    ended: set[int | str] = set()
    current: int | str | None = None
    samples: list[Sample] = []
    bad = False
    for file in files:
        for record in records(file):
            group = source.group(record)
            if group != current:
                if samples and not bad:
                    yield cast(int | str, current), samples
                current, samples, bad = group, [], False
                if group in ended:
                    raise RolloutError(
                        f"{record.place}: group {group!r} has ended before; rollouts of a group must stand next to "
                        "each other: sort the file by group"
                    )
                ended.add(group)
            try:
                samples += source.samples(record)
            except RolloutError as error:
                message = str(error) if record.place in str(error) else f"{record.place}: {error}"
                if not drop:
                    raise RolloutError(message) from error
                bad = True
                dropped.append(message)
            if progress is not None:
                progress(file, record.read)
    source.end()
    if samples and not bad:
        yield cast(int | str, current), samples


def _batches(groups: Iterable[Group]) -> Iterator[list[Group]]:
    batch: list[Group] = []
    tokens = 0
    for group in groups:
        batch.append(group)
        tokens += sum(len(sample.response.response_ids) for sample in group[1])
        if tokens >= BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _write(writer: RolloutWriter, batch: list[Group], drop: bool, result: Conversion) -> None:
    samples = [sample for _, group in batch for sample in group]
    # A name of a group becomes its number; ids are kept.
    ids = [name if isinstance(name, int) else result.groups + i for i, (name, group) in enumerate(batch) for _ in group]
    table = to_table(
        [sample.response for sample in samples],
        [sample.reward for sample in samples],
        ids,
        advantages=[float("nan") if sample.advantage is None else sample.advantage for sample in samples],
        metadata=[sample.metadata for sample in samples],
    )
    try:
        writer.write(table)
    except BufferRefusedError as error:
        row = error.problem.row
        message = str(error) if row is None else str(replace(error.problem, file=samples[row].place, row=None))
        if not drop or row is None:
            raise RolloutError(message) from error
        if len(batch) == 1:
            result.dropped.append(message)
            return
        for group in batch:
            _write(writer, [group], drop, result)
        return
    result.groups += len(batch)
    result.rollouts += len(samples)
    result.tokens += table.tokens
