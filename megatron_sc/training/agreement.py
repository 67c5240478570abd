"""What all ranks must agree on before a step begins, in one collective of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist


class Status(IntEnum):
    """Of a rank's rollouts for the next step. The highest among all ranks counts."""

    READY = 0
    WAITING = 1
    ENDED = 2
    FAILED = 3


@dataclass(frozen=True)
class Agreement:
    """What all ranks know afterwards.

    Attributes:
        status: the highest of all.
        micro_batches: the most of any rank.
        interrupted: whether any rank was told to exit.
        disagreeing: data-parallel ranks of which two readers hold different rollouts.
    """

    status: Status
    micro_batches: int
    interrupted: bool
    disagreeing: tuple[int, ...]


def agree(
    status: Status,
    micro_batches: int,
    digest: int | None,
    replica: int,
    replicas: int,
    device: torch.device,
    interrupted: bool = False,
) -> Agreement:
    """One all-reduce over all ranks, of ``8 (3 + 2 replicas)`` bytes; waits for its result.

    Args:
        status: this rank's.
        micro_batches: this rank's.
        digest: of this rank's rollouts, in [0, 2^63); None where it reads none.
        replica: this data-parallel rank: ranks of one must hold the same rollouts.
        replicas: data-parallel size.
        device: of the default process group's tensors.
        interrupted: whether this rank was told to exit.
    """
    # A maximum of x and of -x: where both are x and -x, every reader of the replica sent x.
    lowest = -(2**63) + 1
    values = [int(status), micro_batches, int(interrupted), *([lowest] * (2 * replicas))]
    if digest is not None and status == Status.READY:
        values[3 + replica], values[3 + replicas + replica] = digest, -digest
    vector = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    found = vector.tolist()
    return Agreement(Status(found[0]), found[1], bool(found[2]), _unequal(found[3:], replicas, lowest))


def _unequal(pairs: Sequence[int], replicas: int, lowest: int) -> tuple[int, ...]:
    return tuple(i for i in range(replicas) if pairs[i] != lowest and pairs[i] + pairs[replicas + i] != 0)
