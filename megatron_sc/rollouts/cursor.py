"""Where a reader stands, and the order in which it reads: both the same for every data-parallel size."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Cursor:
    """How far the groups of a buffer have been used. Save it with the checkpoint of the step that used them.

    Groups are numbered in the order in which they were committed. They are used window by window, shuffled within each.
    Nothing here depends on ranks, so a run may resume with other parallelism.

    Attributes:
        manifest: digest of the buffer's manifest.
        seed: of the shuffle.
        window_start: first group of the current window.
        window_size: groups in it; 0: the window is not begun.
        taken: groups of the window that were used or skipped.
        skipped: groups that were skipped as too stale, all in all.
        ledger: digest of the buffer's ledger up to the window's last group: it tells apart buffers of one manifest.
    """

    manifest: str
    seed: int = 0
    window_start: int = 0
    window_size: int = 0
    taken: int = 0
    skipped: int = 0
    ledger: str = ""

    def __post_init__(self) -> None:
        counts = (self.window_start, self.window_size, self.taken, self.skipped)
        if any(not isinstance(count, int) or count < 0 for count in counts) or self.taken > self.window_size:
            raise ValueError(f"not a cursor: {self}")

    @property
    def used(self) -> int:
        """Groups used or skipped since the buffer's beginning."""
        return self.window_start + self.taken

    def to_json(self) -> str:
        """One line of text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse.

        Raises:
            ValueError: if it is none.
        """
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"not a cursor: {text!r}") from error


def window_order(seed: int, start: int, size: int) -> npt.NDArray[np.int64]:
    """Groups ``start`` to ``start + size`` in the order in which they are used; a function of its arguments only."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, start], np.uint64)))
    return start + generator.permutation(size)
