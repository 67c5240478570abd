"""Rollouts into micro-batches: rows of similar length together, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..rollouts import RolloutError


@dataclass(frozen=True)
class PackedMicroBatch:
    """Which rollouts share a micro-batch, and its shape.

    Attributes:
        rollouts: their indices, one a row; rows after them are empty.
        rows: b.
        positions: s, every row's padded length.
    """

    rollouts: tuple[int, ...]
    rows: int
    positions: int


def pack_by_tokens(lengths: Sequence[int], budget: int, multiple: int) -> list[PackedMicroBatch]:
    """As few micro-batches as rows of one padded length each allow.

    Rows are sorted by length, longest first, and a micro-batch takes rows while ``rows x longest`` stays within the
    budget. Sorted, no other division needs fewer micro-batches.

    Args:
        lengths: tokens of each rollout, prompt and response.
        budget: most tokens of a micro-batch, padding included (``--micro-batch-tokens``).
        multiple: a row's padded length is a multiple of this.

    Raises:
        RolloutError: naming a rollout that exceeds the budget alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    packed: list[PackedMicroBatch] = []
    start = 0
    while start < len(order):
        positions = round_up(lengths[order[start]], multiple)
        if positions > budget:
            raise RolloutError(
                f"rollout {order[start]} has {lengths[order[start]]} tokens, padded {positions}, but "
                f"--micro-batch-tokens is {budget}; raise it, or leave the rollout out"
            )
        rows = tuple(order[start : start + budget // positions])
        packed.append(PackedMicroBatch(rows, len(rows), positions))
        start += len(rows)
    return packed


def pack_in_order(count: int, rows: int, positions: int) -> list[PackedMicroBatch]:
    """Micro-batches of one fixed shape, in order; the last may have empty rows."""
    return [
        PackedMicroBatch(tuple(range(start, min(start + rows, count))), rows, positions)
        for start in range(0, count, rows)
    ]


def spread(
    packed: Sequence[PackedMicroBatch], count: int, lengths: Sequence[int], multiple: int
) -> list[PackedMicroBatch]:
    """The same rollouts in exactly ``count`` micro-batches: ranks must run equally many.

    The micro-batch with the most tokens is halved until there are enough. Where every one holds a single rollout, empty
    micro-batches of one row follow; no position of them trains.

    Args:
        packed: at most ``count`` micro-batches.
        count: how many are wanted.
        lengths: as for ``pack_by_tokens``.
        multiple: as for ``pack_by_tokens``.
    """
    result = list(packed)
    while len(result) < count:
        divisible = [i for i, each in enumerate(result) if len(each.rollouts) > 1]
        if not divisible:
            result.append(PackedMicroBatch((), 1, multiple))
            continue
        largest = max(divisible, key=lambda i: result[i].rows * result[i].positions)
        members = result[largest].rollouts
        middle = len(members) // 2
        result[largest : largest + 1] = [
            PackedMicroBatch(half, len(half), round_up(max(lengths[i] for i in half), multiple))
            for half in (members[:middle], members[middle:])
        ]
    return result


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below ``value``."""
    return -(-value // multiple) * multiple
