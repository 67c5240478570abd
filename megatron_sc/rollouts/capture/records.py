"""Records of files that other stacks write: one JSON object a line, or a row of Parquet."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ..rollout import RolloutError

BATCH_ROWS = 64
"""Rows of Parquet in memory at once."""


@dataclass(frozen=True)
class Record:
    """One object of a file.

    Attributes:
        place: file and line or row, for errors; lines are counted from 1, rows from 0.
        values: by name. Lists of numbers in Parquet are arrays, lists of such lists ``Rows``.
        read: bytes of the file up to here, about.
    """

    place: str
    values: dict[str, Any]
    read: int


@dataclass(frozen=True, eq=False)
class Rows:
    """A list of lists of numbers, flat.

    Attributes:
        sizes: int32 ``[R]``.
        flat: ``[sum(sizes)]``.
    """

    sizes: npt.NDArray[np.int32]
    flat: npt.NDArray[Any]

    @classmethod
    def of(cls, value: Any) -> Rows:
        """From lists of JSON, a rectangle, or ``Rows``.

        Raises:
            ValueError: if it is no list of lists of numbers.
        """
        if isinstance(value, Rows):
            return value
        if isinstance(value, np.ndarray) and value.ndim == 2:
            return cls(np.full(len(value), value.shape[1], np.int32), value.reshape(-1))
        if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
            raise ValueError("must be a list of lists")
        flat = np.array(list(chain.from_iterable(value)))
        if flat.size and flat.dtype.kind not in "iuf":
            raise ValueError("must hold numbers only")
        return cls(np.fromiter(map(len, value), np.int32, len(value)), flat)


def records(path: Path) -> Iterator[Record]:
    """All objects of a file, in order.

    Args:
        path: ``.jsonl``, ``.json`` (one object a line), the same with ``.gz``, or ``.parquet``.

    Raises:
        RolloutError: for another kind of file, a line that is no JSON object, a file that is no Parquet.
    """
    suffixes = path.suffixes
    if suffixes[-1:] == [".parquet"]:
        yield from _parquet(path)
    elif suffixes[-1:] in ([".jsonl"], [".json"]) or suffixes[-2:] in ([".jsonl", ".gz"], [".json", ".gz"]):
        yield from _json_lines(path)
    else:
        raise RolloutError(f"{path}: must end in .jsonl, .json, .jsonl.gz, .json.gz or .parquet")


def _json_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                values = json.loads(line)
            except ValueError as error:
                raise RolloutError(f"{place}: no JSON ({error}); the file must hold one object a line") from None
            if not isinstance(values, dict):
                raise RolloutError(f"{place}: no JSON object; the file must hold one a line")
            yield Record(place, values, raw.tell())


def _parquet(path: Path) -> Iterator[Record]:
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise RolloutError(f"{path}: no Parquet file ({error})") from None
    with file:
        size, total = path.stat().st_size, max(file.metadata.num_rows, 1)
        row = 0
        for batch in file.iter_batches(BATCH_ROWS):
            columns = {name: _column(batch.column(name)) for name in batch.schema.names}
            for i in range(len(batch)):
                values = {name: column[i] for name, column in columns.items()}
                yield Record(f"{path}, row {row}", values, size * (row + 1) // total)
                row += 1


def _column(array: pa.Array) -> list[Any]:
    """Values of the rows: arrays and ``Rows`` where they are lists of numbers without nulls, else Python objects."""
    outer = _lists(array)
    if outer is None:
        return array.to_pylist()
    offsets, inner = outer
    nested = _lists(inner)
    if nested is None:
        if not _is_number(inner.type) or inner.null_count:
            return array.to_pylist()
        flat = inner.to_numpy(zero_copy_only=False)
        values: list[Any] = [flat[a:b] for a, b in pairwise(offsets)]
    else:
        ends, leaves = nested
        if not _is_number(leaves.type) or leaves.null_count or inner.null_count:
            return array.to_pylist()
        flat, sizes = leaves.to_numpy(zero_copy_only=False), np.diff(ends).astype(np.int32)
        values = [Rows(sizes[a:b], flat[ends[a] : ends[b]]) for a, b in pairwise(offsets)]
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]


def _lists(array: pa.Array) -> tuple[npt.NDArray[np.int64], pa.Array] | None:
    """Offsets and elements of lists of any kind, or None."""
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        array = array.cast(pa.list_(kind.value_type))
    elif not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    return array.offsets.to_numpy().astype(np.int64), array.values


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
