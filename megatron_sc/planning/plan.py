"""A job on paper: the memory of every pipeline stage, and whether it fits."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..configuration import Cluster, Configuration, ConfigurationError
from .activations import Activations, stage_activations
from .arguments import refusals, validated_arguments
from .known import refuse_unknown
from .memory import ModelState, model_state
from .stages import Parameters, Stage, build_stages
from .traffic import LossCost, loss_cost

GIB = 2**30


@dataclass(frozen=True)
class StagePlan:
    """A rank of one pipeline stage, in bytes.

    Attributes:
        stage: what it holds.
        state: weights, gradients, optimizer.
        activations: at the worst moment of a step.
        logits: of the loss, 0 on stages that compute none.
        batch: of the rollouts' numbers, on the last stage.
    """

    stage: Stage
    state: ModelState
    activations: Activations
    logits: float
    batch: float

    @property
    def parts(self) -> dict[str, float]:
        """What adds up to the total, by name, in bytes."""
        return {
            "weights": self.state.weights,
            "gradients": self.state.gradients,
            "optimizer": self.state.optimizer,
            "activations": self.activations.layers,
            "recomputed at once": self.activations.recomputed,
            "embedding, last norm": self.activations.embedding,
            "logits": self.logits,
            "heads and token numbers": self.batch,
        }

    @property
    def total(self) -> float:
        """Bytes on the GPU."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MegatronReport:
    """Megatron's own report (``theoretical_memory_usage``) for its most loaded rank, bytes.

    Attributes:
        state: weights, gradients and optimizer. It divides optimizer state by the data-parallel size alone, where the
            distributed optimizer divides it by that times the context-parallel size.
        activations: it knows neither routed nor gated MLPs, nor context parallelism, nor full recomputation, and counts
            float32 logits of Megatron's own loss.
    """

    state: float
    activations: float


@dataclass(frozen=True)
class Plan:
    """See ``make_plan``.

    Attributes:
        args: Megatron's, validated.
        cluster: what it is planned for.
        micro_batches: of a step on each data-parallel rank.
        model: parameters of the whole model, tied embeddings once, vocabulary padding included.
        stages: one rank of each pipeline stage.
        loss: logits, wire and heads.
        megatron: Megatron's own figures.
    """

    args: argparse.Namespace
    cluster: Cluster
    micro_batches: int
    model: Parameters
    stages: tuple[StagePlan, ...]
    loss: LossCost
    megatron: MegatronReport

    def too_large(self, reserve_gib: float) -> list[StagePlan]:
        """Stages that do not fit the GPU's memory beside ``reserve_gib``; none where it is not known."""
        if self.cluster.gpu_memory_gib is None:
            return []
        limit = (self.cluster.gpu_memory_gib - reserve_gib) * GIB
        return [stage for stage in self.stages if stage.total > limit]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in bytes and numbers of parameters."""
        return {
            "cluster": asdict(self.cluster),
            "micro_batches": self.micro_batches,
            "model": asdict(self.model),
            "stages": [
                {
                    "parameters": asdict(stage.stage.parameters),
                    "bytes": stage.parts,
                    "total": stage.total,
                    "offloaded": stage.state.offloaded,
                }
                for stage in self.stages
            ],
            "loss": asdict(self.loss),
            "megatron": asdict(self.megatron),
        }


def make_plan(configuration: Configuration, argv: Sequence[str], cluster: Cluster | None = None) -> Plan:
    """Validate a job as Megatron would, build its model without memory, and add up.

    Args:
        configuration: of the files, for their cluster and for messages.
        argv: the whole command line, flags of the files included.
        cluster: instead of the files'.

    Raises:
        ConfigurationError: where Megatron refuses the flags, or where a figure is not known here.
    """
    cluster = cluster or configuration.cluster
    args = validated_arguments(argv, cluster.world_size, configuration)
    refuse_unknown(args)
    step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % step:
        raise ConfigurationError(
            f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size "
            f"{args.micro_batch_size} times {args.data_parallel_size} data-parallel ranks"
        )
    micro_batches = args.global_batch_size // step  # with --micro-batch-tokens at most so many
    with refusals(configuration):
        stages = build_stages(args)
    moe_layers = sum(chunk.moe for stage in stages for chunk in stage.chunks)
    loss = loss_cost(args, padded_vocab_size(args), moe_layers)
    model = sum((stage.unsharded for stage in stages), Parameters(0, 0, 0))
    plans = tuple(
        StagePlan(
            stage,
            model_state(args, stage),
            stage_activations(args, stage, micro_batches),
            loss.logits if stage.has_output else 0.0,
            loss.batch if stage.has_output else 0.0,
        )
        for stage in stages
    )
    return Plan(args, cluster, micro_batches, model, plans, loss, _report(args, micro_batches))


def padded_vocab_size(args: argparse.Namespace) -> int:
    """Rows of the output layer over all ranks: Megatron's padding."""
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    size: int = calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
    )
    return size


def _report(args: argparse.Namespace, micro_batches: int) -> MegatronReport:
    """Megatron's own figures, which it otherwise prints after the first step."""
    from megatron.training import theoretical_memory_usage as megatron

    copy = argparse.Namespace(**vars(args))  # it writes to the arguments
    copy.padded_vocab_size = padded_vocab_size(args)
    with contextlib.redirect_stdout(io.StringIO()):
        state, activations, _ = megatron.report_theoretical_memory(copy, num_microbatches=micro_batches)
    unit = megatron.NUM_BYTES_IN_MEGABYTE
    return MegatronReport(state * unit, activations * unit)
