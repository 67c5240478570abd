"""The process groups that the embedded sampler works over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups of one rank; None stands for a group of one.

    tensor splits matrices and the vocabulary; expert_tensor splits the matrices of an expert; expert spreads the
    experts; data spreads the prompts.
    """

    tensor: ProcessGroup | None = None
    expert_tensor: ProcessGroup | None = None
    expert: ProcessGroup | None = None
    data: ProcessGroup | None = None

    @classmethod
    def from_megatron(cls) -> ParallelGroups:
        """The groups that ``megatron.core.parallel_state.initialize_model_parallel`` made.

        Raises:
            ValueError: pipeline or context parallelism is on (see ``check_parallelism``).
        """
        check_parallelism(
            parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_context_parallel_world_size()
        )
        return cls(
            tensor=parallel_state.get_tensor_model_parallel_group(),
            expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
            expert=parallel_state.get_expert_model_parallel_group(),
            data=parallel_state.get_data_parallel_group(),
        )


def check_parallelism(pipeline_size: int, context_size: int) -> None:
    """Refuse the layouts in which no rank can generate by itself.

    Raises:
        ValueError: naming the flag and the way out.
    """
    for flag, size in (
        ("--pipeline-model-parallel-size", pipeline_size),
        ("--context-parallel-size", context_size),
    ):
        if size > 1:
            raise ValueError(
                f"the embedded sampler cannot generate with {flag} {size}: it runs the whole model on the whole "
                f"sequence at every rank. Use {flag} 1, or train from recorded rollouts"
            )


def group_size(group: ProcessGroup | None) -> int:
    """The number of ranks in a group; 1 for None."""
    return 1 if group is None else torch.distributed.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """This rank's place in a group; 0 for None."""
    return 0 if group is None else torch.distributed.get_rank(group)
