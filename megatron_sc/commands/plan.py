"""``megatron-sc plan``: parameters, memory and traffic of a job, before a node is allocated."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from . import Subcommands
from .job_file import add_job_arguments, require_before_file

if TYPE_CHECKING:
    from ..planning import Plan

NOT_COUNTED = "CUDA context, NCCL and kernel buffers, fragmentation"


def add(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "plan",
        help="parameters, memory and traffic of each rank of a job; exit status 1 if it does not fit the GPUs",
        usage="megatron-sc plan [-h] [--nodes N] [--gpus-per-node N] [--gpu-memory-gib GIB] [--reserve-gib GIB] "
        "[--json] FILE [flag ...]",
    )
    parser.add_argument("--nodes", type=int, help="instead of the file's cluster.nodes")
    parser.add_argument("--gpus-per-node", type=int, help="instead of the file's cluster.gpus-per-node")
    parser.add_argument("--gpu-memory-gib", type=float, help="instead of the file's cluster.gpu-memory-gib")
    parser.add_argument(
        "--reserve-gib", type=float, default=6.0, help=f"kept free for what is not counted: {NOT_COUNTED} (default 6)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    add_job_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Its exit status."""
    from ..training import cpu

    cpu.install()  # before anything of Megatron is imported
    from ..configuration import Cluster, ConfigurationError
    from ..planning import make_plan
    from ..training.config_files import read_command_line

    given = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(Cluster)
        if getattr(arguments, field.name) is not None
    }
    try:
        require_before_file(arguments, "plan")
        for name, value in given.items():
            if value <= 0:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
        configuration, argv, rest = read_command_line([arguments.file], arguments.flags)
        cluster = dataclasses.replace(configuration.cluster, **given)
        plan = make_plan(configuration, [*argv, *rest], cluster)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    too_large = plan.too_large(arguments.reserve_gib)
    if arguments.json:
        print(json.dumps({**plan.as_dict(), "fits": not too_large}))
    else:
        _print(plan, arguments.file, arguments.reserve_gib)
    return 1 if too_large else 0


def _print(plan: Plan, title: str, reserve_gib: float) -> None:
    """Tables for a person."""
    from rich.console import Console
    from rich.table import Table

    from ..planning.plan import GIB

    console = Console()
    print(f"{title}: {_layout(plan)}")

    counts = Table(title="Parameters")
    for column in ("", "embedding", "dense", "expert", "all"):
        counts.add_column(column, justify="right" if column else "left")
    for name, parameters in [("whole model", plan.model)] + [
        (_stage_name(plan, number), stage.stage.parameters) for number, stage in enumerate(plan.stages)
    ]:
        numbers = (parameters.embedding, parameters.dense, parameters.expert, parameters.total)
        counts.add_row(name, *(f"{number:,}" for number in numbers))
    console.print(counts)

    memory = Table(title="Memory of a rank, GiB")
    memory.add_column("")
    for number in range(len(plan.stages)):
        memory.add_column(_stage_name(plan, number), justify="right")
    for part in plan.stages[0].parts:
        memory.add_row(part, *(f"{stage.parts[part] / GIB:.2f}" for stage in plan.stages))
    memory.add_section()
    memory.add_row("total", *(f"{stage.total / GIB:.2f}" for stage in plan.stages))
    if any(stage.state.offloaded for stage in plan.stages):
        memory.add_row("on the host", *(f"{stage.state.offloaded / GIB:.2f}" for stage in plan.stages))
    console.print(memory)

    for line in (*_loss_lines(plan), *_verdict(plan, reserve_gib)):
        print(line)


def _stage_name(plan: Plan, number: int) -> str:
    return f"stage {number}" if len(plan.stages) > 1 else "each rank"


def _layout(plan: Plan) -> str:
    """The job in a line."""
    args, cluster = plan.args, plan.cluster
    sizes = {
        "TP": args.tensor_model_parallel_size,
        "PP": args.pipeline_model_parallel_size,
        "CP": args.context_parallel_size,
        "EP": args.expert_model_parallel_size,
        "ETP": args.expert_tensor_parallel_size if args.num_experts else args.tensor_model_parallel_size,
        "DP": args.data_parallel_size,
    }
    is_named = {name: size > 1 or (name == "ETP" and size != sizes["TP"]) for name, size in sizes.items()}
    layout = " ".join(f"{name}{size}" for name, size in sizes.items() if is_named[name]) or "one rank"
    return (
        f"{cluster.nodes} x {cluster.gpus_per_node} GPUs, {layout}; a step is {args.global_batch_size} rollouts of up "
        f"to {args.seq_length} tokens, in {plan.micro_batches} micro-batches a rank"
    )


def _loss_lines(plan: Plan) -> list[str]:
    loss = plan.loss
    lines = ["loss: nothing on the wire without tensor parallelism"]
    if loss.wire:
        calls = f"{loss.collectives} collectives a micro-batch"
        lines = [f"loss: {loss.wire} bytes a token on the wire from each tensor-parallel rank, in {calls}"]
    if loss.broadcast:
        lines.append(f"batch: {loss.broadcast} bytes a token, broadcast over tensor-parallel ranks")
    if loss.head_bytes:
        lines.append(
            f"buffer: at most {loss.head_bytes:.0f} bytes a generated token before compression, "
            f"{loss.head_step / 2**20:.0f} MiB a step of full-length responses (what the codec leaves of it is "
            "in docs/rollout-schema.md)"
        )
    return lines


def _verdict(plan: Plan, reserve_gib: float) -> list[str]:
    """Whether it fits, what to look at if not, and Megatron's own figures."""
    from ..planning.plan import GIB

    report = plan.megatron
    lines = [
        f"Megatron's own report, most loaded rank: weights, gradients and optimizer {report.state / GIB:.2f} GiB, "
        f"activations {report.activations / GIB:.2f} GiB (its formula; docs/configs.md says what it leaves out)"
    ]
    memory = plan.cluster.gpu_memory_gib
    if memory is None:
        return [*lines, "the GPU's memory is not known: give --gpu-memory-gib, or cluster.gpu-memory-gib in the file"]
    too_large = plan.too_large(reserve_gib)
    for stage in too_large:
        largest = sorted(stage.parts.items(), key=lambda part: -part[1])[:3]
        lines.append(
            f"does not fit: {_stage_name(plan, stage.stage.number)} needs {stage.total / GIB:.1f} GiB of "
            f"{memory - reserve_gib:.1f} ({memory:g} less {reserve_gib:g} for {NOT_COUNTED}); most of it: "
            + ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
        )
    if not too_large:
        most = max(stage.total for stage in plan.stages) / GIB
        lines.append(
            f"fits: {most:.1f} GiB of {memory - reserve_gib:.1f} ({memory:g} less {reserve_gib:g} for {NOT_COUNTED})"
        )
    return lines
