"""Which columns of the vocabulary a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class VocabShard:
    """A rank's columns of the (padded) vocabulary.

    Args:
        start: global id of the first local column.
        stop: global id after the last local column; may lie beyond ``size``, where the columns are padding.
        size: the TRUE vocabulary size. Columns with a global id >= ``size`` are never part of the softmax.

    Raises:
        ValueError: unless 0 <= start <= stop and size >= 1.
    """

    start: int
    stop: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"VocabShard: needs 0 <= start <= stop, got start={self.start}, stop={self.stop}")
        if self.size < 1:
            raise ValueError(f"VocabShard: the true vocabulary size must be positive, got {self.size}")

    @classmethod
    def of_rank(cls, rank: int, world_size: int, local_columns: int, size: int) -> Self:
        """Equal shards, as Megatron lays them out: rank r holds columns [r, r + 1) * ``local_columns``.

        Raises:
            ValueError: if the shards together are smaller than the true vocabulary.
        """
        if world_size * local_columns < size:
            raise ValueError(
                f"--true-vocab-size {size} is larger than the model's {world_size} x {local_columns} output columns"
            )
        return cls(rank * local_columns, (rank + 1) * local_columns, size)

    @property
    def columns(self) -> int:
        """Local columns, padding included."""
        return self.stop - self.start

    @property
    def valid(self) -> int:
        """Local columns that are not padding: they come first."""
        return max(min(self.stop, self.size) - self.start, 0)

    @property
    def is_whole(self) -> bool:
        """Whether the shard holds the whole true vocabulary."""
        return self.start == 0 and self.stop >= self.size
