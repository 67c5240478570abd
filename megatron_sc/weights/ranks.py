"""The process groups that hold a model's parts, and what all ranks must agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Place:
    """One rank's place in a process group."""

    group: ProcessGroup
    rank: int
    size: int

    @classmethod
    def within(cls, group: ProcessGroup) -> Place:
        """This rank's."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def gather(self, shard: Tensor, onto: int) -> list[Tensor] | None:
        """All ranks' shards, of one shape, on rank ``onto`` of the group; None elsewhere. Collective over the group."""
        if self.size == 1:
            return [shard]
        shard = shard.contiguous()
        shards = [torch.empty_like(shard) for _ in range(self.size)] if self.rank == onto else None
        dist.gather(shard, shards, group=self.group, group_dst=onto)
        return shards


@dataclass(frozen=True)
class ModelRanks:
    """A rank's places: in the groups that split matrices and spread experts, and among the holders of equal copies."""

    tensor: Place
    replicas: Place  # of what is not an expert: data- and context-parallel
    expert_tensor: Place
    expert: Place
    expert_replicas: Place

    @classmethod
    def from_megatron(cls) -> ModelRanks:
        """Those that ``megatron.core.parallel_state.initialize_model_parallel`` made."""
        from megatron.core import parallel_state

        return cls(
            tensor=Place.within(parallel_state.get_tensor_model_parallel_group()),
            replicas=Place.within(parallel_state.get_data_parallel_group(with_context_parallel=True)),
            expert_tensor=Place.within(parallel_state.get_expert_tensor_parallel_group()),
            expert=Place.within(parallel_state.get_expert_model_parallel_group()),
            expert_replicas=Place.within(parallel_state.get_expert_data_parallel_group()),
        )


def agree(error: Exception | None) -> None:
    """Raise on every rank what went wrong on any: ranks that go on alone would wait for the others for ever.

    Args:
        error: this rank's, or None.

    Raises:
        RuntimeError: naming the first rank of each different error. A rank's own error is raised as it is.
    """
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else str(error) or repr(error))
    if error is not None:
        raise error
    first = {message: rank for rank, message in reversed(list(enumerate(messages))) if message is not None}
    if first:
        raise RuntimeError("; ".join(f"rank {rank}: {message}" for message, rank in first.items()))


def on_first_rank(function: Callable[[], Any]) -> Any:
    """Call a function on rank 0: its answer, which must be picklable, or its error, on every rank."""
    answer, error = None, None
    if dist.get_rank() == 0:
        try:
            answer = function()
        except Exception as raised:
            error = raised
    agree(error)
    answers = [answer]
    dist.broadcast_object_list(answers, src=0)
    return answers[0]
