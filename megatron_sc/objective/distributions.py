"""What is known of the sampler's distribution q at each position: the estimators of the average score.

    TopKHead        the k most likely tokens; the tail is the trainer's, rescaled (Eq. 7)
    Support         all tokens that a truncating sampler (top-p, top-k, min-p) could sample: exact
    Draws           K tokens drawn from q, independently of the sampled token: unbiased (StableReinforce)
    FullVocabulary  q itself: exact

Rows are positions. Head and support are rectangular, ``[n, k]`` with padding ids < 0, or ragged: all rows' entries
one after the other, ``[m]``, with ``offsets[i] : offsets[i + 1]`` the entries of row i. Ids are global, distinct within
a row (draws may repeat), and inside the true vocabulary. Nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor


@dataclass(frozen=True, eq=False)
class TopKHead:
    """The sampler's head H and, where it was recorded, the mass outside it.

    Args:
        ids: int ``[n, k]``, or ``[m]`` when ragged. Entries with an id < 0 or a log-probability of -inf are not in H.
        logprobs: float, like ``ids``: log q_v after temperature.
        log_tail_mass: float ``[n]`` or None: log of the sampler's mass outside H. NaN, or None for all rows: it was not
            recorded, and log(1 - sum_H q_v), summed in float64, stands for it.
        offsets: int64 ``[n + 1]`` on the CPU, or None when rectangular.

    Raises:
        ValueError: if shapes disagree.
    """

    ids: Tensor
    logprobs: Tensor
    log_tail_mass: Tensor | None = None
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        _check_layout("TopKHead", self.ids, self.logprobs, self.offsets)
        if self.log_tail_mass is not None and tuple(self.log_tail_mass.shape) != (self.rows,):
            raise ValueError(
                f"TopKHead: log_tail_mass must be [{self.rows}], one entry a row, got {list(self.log_tail_mass.shape)}"
            )

    @classmethod
    def ragged(cls, ids: Tensor, logprobs: Tensor, offsets: Tensor, log_tail_mass: Tensor | None = None) -> Self:
        """Rows of different length: ``ids`` and ``logprobs`` ``[m]``, ``offsets`` ``[n + 1]`` on the CPU."""
        return cls(ids, logprobs, log_tail_mass, offsets)

    @property
    def rows(self) -> int:
        """Number of positions."""
        return _rows(self.ids, self.offsets)

    def slice_rows(self, start: int, stop: int) -> Self:
        """Positions [start, stop); nothing is copied."""
        ids, logprobs, offsets = _slice(self.ids, self.logprobs, self.offsets, start, stop)
        tail = None if self.log_tail_mass is None else self.log_tail_mass[start:stop]
        return type(self)(ids, logprobs, tail, offsets)


@dataclass(frozen=True, eq=False)
class Support:
    """All that the sampler could sample: p is normalized on the support before it is compared with q.

    Args:
        ids: int ``[n, k]``, or ``[m]`` when ragged; padding as in ``TopKHead``. The sampled token must be among them.
        logprobs: float, like ``ids``: log q_v after truncation; a row sums to one.
        offsets: int64 ``[n + 1]`` on the CPU, or None when rectangular.

    Raises:
        ValueError: if shapes disagree.
    """

    ids: Tensor
    logprobs: Tensor
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        _check_layout("Support", self.ids, self.logprobs, self.offsets)

    @classmethod
    def ragged(cls, ids: Tensor, logprobs: Tensor, offsets: Tensor) -> Self:
        """Rows of different length: ``ids`` and ``logprobs`` ``[m]``, ``offsets`` ``[n + 1]`` on the CPU."""
        return cls(ids, logprobs, offsets)

    @property
    def rows(self) -> int:
        """Number of positions."""
        return _rows(self.ids, self.offsets)

    def slice_rows(self, start: int, stop: int) -> Self:
        """Positions [start, stop); nothing is copied."""
        return type(self)(*_slice(self.ids, self.logprobs, self.offsets, start, stop))


@dataclass(frozen=True, eq=False)
class Draws:
    """K tokens a row drawn from the sampler, independently of the sampled token; they may repeat.

    Args:
        ids: int ``[n, K]``, none negative.
        logprobs: float ``[n, K]`` or None: log q of the draws; every weight but ``Uniform`` needs them.

    Raises:
        ValueError: if shapes disagree or K is 0.
    """

    ids: Tensor
    logprobs: Tensor | None = None

    def __post_init__(self) -> None:
        if self.ids.dim() != 2 or self.ids.shape[1] == 0:
            raise ValueError(f"Draws: ids must be [n, K] with K >= 1, got {list(self.ids.shape)}")
        if self.ids.is_floating_point():
            raise ValueError(f"Draws: ids must be integers, got {self.ids.dtype}")
        if self.logprobs is not None and self.logprobs.shape != self.ids.shape:
            raise ValueError(f"Draws: ids are {list(self.ids.shape)} but logprobs are {list(self.logprobs.shape)}")

    @property
    def rows(self) -> int:
        """Number of positions."""
        return self.ids.shape[0]

    def slice_rows(self, start: int, stop: int) -> Self:
        """Positions [start, stop); nothing is copied."""
        return type(self)(self.ids[start:stop], None if self.logprobs is None else self.logprobs[start:stop])


@dataclass(frozen=True, eq=False)
class FullVocabulary:
    """The sampler's whole distribution: for small vocabularies and for tests.

    Args:
        logprobs: float ``[n, V]``, V the true vocabulary size; the same on every tensor-parallel rank.

    Raises:
        ValueError: if it is not two-dimensional.
    """

    logprobs: Tensor

    def __post_init__(self) -> None:
        if self.logprobs.dim() != 2:
            raise ValueError(f"FullVocabulary: logprobs must be [n, V], got {list(self.logprobs.shape)}")

    @property
    def rows(self) -> int:
        """Number of positions."""
        return self.logprobs.shape[0]

    def slice_rows(self, start: int, stop: int) -> Self:
        """Positions [start, stop); nothing is copied."""
        return type(self)(self.logprobs[start:stop])


SamplerDistribution = TopKHead | Support | Draws | FullVocabulary


def _rows(ids: Tensor, offsets: Tensor | None) -> int:
    return ids.shape[0] if offsets is None else offsets.shape[0] - 1


def _slice(
    ids: Tensor, logprobs: Tensor, offsets: Tensor | None, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    if offsets is None:
        return ids[start:stop], logprobs[start:stop], None
    first, last = int(offsets[start]), int(offsets[stop])
    return ids[first:last], logprobs[first:last], offsets[start : stop + 1] - first


def _check_layout(name: str, ids: Tensor, logprobs: Tensor, offsets: Tensor | None) -> None:
    if ids.shape != logprobs.shape:
        raise ValueError(f"{name}: ids are {list(ids.shape)} but logprobs are {list(logprobs.shape)}")
    if ids.is_floating_point():
        raise ValueError(f"{name}: ids must be integers, got {ids.dtype}")
    if not logprobs.is_floating_point():
        raise ValueError(f"{name}: logprobs must be floating point, got {logprobs.dtype}")
    if offsets is None:
        if ids.dim() != 2:
            raise ValueError(
                f"{name}: ids must be [n, k], got {list(ids.shape)}; rows of different length: {name}.ragged"
            )
        return
    if ids.dim() != 1 or offsets.dim() != 1 or len(offsets) == 0:
        raise ValueError(
            f"{name}.ragged: ids must be [m] and offsets [n + 1], got {list(ids.shape)}, {list(offsets.shape)}"
        )
    if offsets.device.type != "cpu":
        raise ValueError(
            f"{name}.ragged: offsets must be on the CPU; reading them on {offsets.device} would synchronize"
        )
    if offsets[0] != 0 or offsets[-1] != ids.shape[0] or (offsets.diff() < 0).any():
        raise ValueError(f"{name}.ragged: offsets must rise from 0 to {ids.shape[0]}, got {offsets.tolist()[:8]}...")
