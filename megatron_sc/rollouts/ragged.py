"""Rows of different length in two flat arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Ragged:
    """n rows one after the other.

    Attributes:
        values: ``[m]`` all entries.
        offsets: int64 ``[n + 1]``; row i is ``values[offsets[i] : offsets[i + 1]]``. Starts at 0, ends at m.
    """

    values: Array
    offsets: Int64

    @classmethod
    def from_rows(cls, rows: Sequence[Array], dtype: npt.DTypeLike) -> Self:
        """Copy the rows, in any shape, one after the other."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([row.size for row in rows], out=offsets[1:])
        values = np.concatenate([row.reshape(-1) for row in rows]) if rows else np.empty(0)
        return cls(values.astype(dtype, copy=False), offsets)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """All rows of all parts."""
        starts = np.cumsum([0] + [len(part.values) for part in parts])
        offsets = [part.offsets[1:] + start for part, start in zip(parts, starts[:-1], strict=True)]
        return cls(np.concatenate([part.values for part in parts]), np.concatenate([np.zeros(1, np.int64), *offsets]))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        """A view of one row."""
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def sizes(self) -> Int64:
        """``[n]`` entries a row."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> Int64:
        """``[m]`` the row of each entry."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def slice(self, start: int, stop: int) -> Self:
        """Rows [start, stop), as views."""
        first, last = self.offsets[start], self.offsets[stop]
        return type(self)(self.values[first:last], self.offsets[start : stop + 1] - first)

    def select(self, keep: npt.NDArray[np.bool_]) -> Self:
        """The rows where ``keep`` is True, copied."""
        return type(self)(self.values[np.repeat(keep, self.sizes)], offsets_of(self.sizes[keep]))


def offsets_of(sizes: Array) -> Int64:
    """int64 ``[n + 1]`` offsets of rows of these sizes."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def row_sums(values: Array, offsets: Int64) -> npt.NDArray[np.float64]:
    """float64 ``[n]`` sum of each row; 0 for an empty one. Rows do not share rounding, as with a global cumsum."""
    sums = np.zeros(len(offsets) - 1)
    filled = np.flatnonzero(np.diff(offsets))
    if filled.size:
        sums[filled] = np.add.reduceat(values, offsets[filled], dtype=np.float64)
    return sums


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows as a rectangle ``[b, w]``, padded at the end.

    Attributes:
        rows: ``[b]`` which.
        valid: ``[b, w]`` False where padded.
        index: ``[b, w]`` entries in the flat array; a slice where the rows stand side by side without padding.
    """

    rows: Int64
    valid: npt.NDArray[np.bool_]
    index: Int64 | slice

    def gather(self, values: Array, padding: Array | float) -> Array:
        """``[b, w]`` of a flat array; a view where nothing is padded."""
        if isinstance(self.index, slice):
            return values[self.index].reshape(self.valid.shape)
        return np.where(self.valid, values[self.index], np.asarray(padding, values.dtype))

    def entries(self, row: int) -> Array:
        """``[w]`` where a row of the rectangle lies in the flat array."""
        if isinstance(self.index, slice):
            width = self.valid.shape[1]
            return self.index.start + row * width + np.arange(width)
        return self.index[row]


def blocks(offsets: Int64, elements: int = 1 << 20) -> Iterator[Block]:
    """Non-empty rows as rectangles, so that a row-wise operation is one call and little of it is padding.

    Yields:
        Rectangles of about ``elements``, whose rows are between w/2 and w long.
    """
    sizes = np.diff(offsets)
    width = 1
    largest = int(sizes.max(initial=0))
    while width < 2 * largest:
        chosen = np.flatnonzero((sizes <= width) & (sizes > width // 2))
        widest = min(width, largest)
        step = max(elements // widest, 1)
        columns = np.arange(widest)
        for start in range(0, len(chosen), step):
            rows = chosen[start : start + step]
            first, last = rows[0], rows[-1] + 1
            valid = columns < sizes[rows, None]
            if last - first == len(rows) and offsets[last] - offsets[first] == valid.size:
                yield Block(rows, valid, slice(int(offsets[first]), int(offsets[last])))
            else:
                yield Block(rows, valid, offsets[rows, None] + np.minimum(columns, sizes[rows, None] - 1))
        width *= 2


def prefixes(offsets: Int64, sizes: Int64) -> Int64:
    """Indices of the first ``sizes[i]`` entries of each row, one row after the other."""
    return np.arange(int(sizes.sum())) + np.repeat(offsets[:-1] - offsets_of(sizes)[:-1], sizes)
