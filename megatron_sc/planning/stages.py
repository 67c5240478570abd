"""The model that each rank of a job would hold, built by Megatron itself on the meta device: shapes without memory.

One process plays the ranks one after another. Its process groups are torch's fake ones, as with Megatron's
``--fake-process-group``: they know sizes and ranks and send nothing. Ranks of one pipeline stage hold the same numbers
of parameters, so one rank a stage is built.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .arguments import shape_arguments


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters on one rank.

    Attributes:
        embedding: input embedding and output layer; a tied pair counts once a rank that holds it.
        dense: attention, norms, routers, dense and shared MLPs: sharded by tensor parallelism or replicated.
        expert: experts, sharded by expert and expert-tensor parallelism; their gradients travel in other groups.
    """

    embedding: int
    dense: int
    expert: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.dense + self.expert

    def __add__(self, other: Parameters) -> Parameters:
        """Of two stages together."""
        return Parameters(self.embedding + other.embedding, self.dense + other.dense, self.expert + other.expert)


@dataclass(frozen=True)
class Layers:
    """A model chunk's transformer layers."""

    dense: int
    moe: int

    @property
    def total(self) -> int:
        """Both kinds."""
        return self.dense + self.moe


@dataclass(frozen=True)
class Stage:
    """What a rank of one pipeline stage holds.

    Attributes:
        number: of the stage, from 0.
        parameters: of one rank.
        unsharded: the same ones, before tensor and expert parallelism share them out; a tied output layer that repeats
            another stage's embedding is left out.
        chunks: layers of each model chunk, one chunk unless the schedule is interleaved.
        has_embedding: whether it embeds tokens.
        has_output: whether it computes logits and the loss.
        optimizer_ranks: ranks that share the optimizer state of dense parameters, with the distributed optimizer.
        expert_optimizer_ranks: the same for experts.
    """

    number: int
    parameters: Parameters
    unsharded: Parameters
    chunks: tuple[Layers, ...]
    has_embedding: bool
    has_output: bool
    optimizer_ranks: int
    expert_optimizer_ranks: int


def build_stages(args: argparse.Namespace) -> list[Stage]:
    """One rank of every pipeline stage, in order.

    Args:
        args: validated, see ``validated_arguments``.

    Raises:
        RuntimeError: where torch.distributed is in use in this process.
    """
    return [stage_of_rank(args, rank) for rank in stage_ranks(args)]


def stage_ranks(args: argparse.Namespace) -> Sequence[int]:
    """The first rank of each pipeline stage: stages are the outermost dimension, or inside data parallelism."""
    if args.use_tp_pp_dp_mapping:
        step = args.tensor_model_parallel_size * args.context_parallel_size
    else:
        step = args.world_size // args.pipeline_model_parallel_size
    return range(0, step * args.pipeline_model_parallel_size, step)


def stage_of_rank(args: argparse.Namespace, rank: int) -> Stage:
    """Build the model of one rank and count. See ``build_stages``."""
    with _process_groups(args, rank):
        from megatron.core import mpu

        chunks = _model_chunks(args)
        optimizer_ranks = mpu.get_data_parallel_world_size(with_context_parallel=True, partial_data_parallel=True)
        return Stage(
            number=mpu.get_pipeline_model_parallel_rank(),
            parameters=_count(chunks, lambda kind, parameter: parameter.numel()),
            unsharded=_count(chunks, functools.partial(_unsharded, args)),
            chunks=tuple(_layers(chunk) for chunk in chunks),
            has_embedding=any(chunk.pre_process for chunk in chunks),
            has_output=any(chunk.post_process for chunk in chunks),
            optimizer_ranks=optimizer_ranks,
            expert_optimizer_ranks=mpu.get_expert_data_parallel_world_size(partial_expert_data_parallel=True)
            if _has_expert_groups(chunks)
            else optimizer_ranks,
        )


@contextlib.contextmanager
def _process_groups(args: argparse.Namespace, rank: int) -> Iterator[None]:
    """Megatron's process groups as ``rank`` sees them, without anything to send over."""
    from megatron.core import mpu
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("planning plays the ranks of another job: use a process that has not joined one")
    hook = sys.excepthook  # torch wraps it to name the rank, and does not put it back
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=args.world_size)
    try:
        mpu.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,
        )
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
        sys.excepthook = hook


def _model_chunks(args: argparse.Namespace) -> list[Any]:
    """This rank's GPTModels, on the meta device."""
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.dist_utils import build_virtual_pipeline_stages

    config = gpt_config_from_args(shape_arguments(args))
    config.transformer.perform_initialization = False
    groups = ProcessGroupCollection.use_mpu_process_groups()
    build = config.get_builder_cls()(config).build_model
    deprecation = logging.getLogger("megatron.core.models.gpt.gpt_model")
    level = deprecation.level
    deprecation.setLevel(logging.ERROR)  # pretrain_gpt.py builds a GPTModel, whatever Megatron thinks of it
    try:
        with torch.device("meta"):
            chunks: list[Any] = build_virtual_pipeline_stages(
                build, groups, config.transformer.virtual_pipeline_model_parallel_size, ModelType.encoder_or_decoder
            )
    finally:
        deprecation.setLevel(level)
    return chunks


def _count(chunks: Sequence[Any], size: Callable[[str, Any], int]) -> Parameters:
    """Add up ``size(kind, parameter)`` by kind."""
    counts = {"embedding": 0, "dense": 0, "expert": 0}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            is_embedding = name.startswith(("embedding.", "output_layer."))
            kind = "embedding" if is_embedding else "expert" if ".mlp.experts." in name else "dense"
            counts[kind] += size(kind, parameter)
    return Parameters(**counts)


def _unsharded(args: argparse.Namespace, kind: str, parameter: Any) -> int:
    """Size of the whole tensor, or of all experts like this one; 0 for a copy of another stage's."""
    if getattr(parameter, "shared", False):
        return 0
    size: int = parameter.numel() * (args.expert_model_parallel_size if kind == "expert" else 1)
    shards = args.expert_tensor_parallel_size if kind == "expert" else args.tensor_model_parallel_size
    return size * (shards if getattr(parameter, "tensor_model_parallel", False) else 1)


def _has_expert_groups(chunks: Sequence[Any]) -> bool:
    """Whether experts are reduced apart: only where expert sharding differs from that of other parameters."""
    return any(not getattr(parameter, "allreduce", True) for chunk in chunks for parameter in chunk.parameters())


def _layers(chunk: Any) -> Layers:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    moe = sum(isinstance(layer.mlp, MoELayer) for layer in chunk.decoder.layers)
    return Layers(dense=len(chunk.decoder.layers) - moe, moe=moe)
