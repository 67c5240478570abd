"""``megatron-sc validate | inspect | selfcheck``. A subcommand is a function that adds its parser; its
work is imported when it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rollouts.summary import Summary

Subcommands = Any  # argparse's class has no public name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status: 0 fine, 1 a finding, 2 a wrong call."""
    parser = argparse.ArgumentParser(prog="megatron-sc", description="Score centering for Megatron-Core: tools.")
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in SUBCOMMANDS:
        add(subcommands)
    parsed = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    return run(parsed)


def _add_validate(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "validate",
        help="check every byte and every token of a rollout buffer; exit status 1 if a reader would refuse it",
    )
    parser.add_argument("path", help="directory or fsspec URL")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--true-vocab-size", type=int, help="refuse a buffer of another vocabulary")
    parser.add_argument("--temperature", type=float, help="refuse a buffer of another temperature")
    parser.add_argument("--top-p", type=float, help="refuse a buffer of another top-p")
    parser.add_argument("--top-k", type=int, help="refuse a buffer of another top-k")
    parser.add_argument("--tokenizer-hash", help="refuse a buffer of another tokenizer")
    parser.set_defaults(run=_validate)


def _validate(arguments: argparse.Namespace) -> int:
    from .rollouts.check import validate_buffer
    from .rollouts.validate import Trainer

    report = validate_buffer(
        arguments.path,
        Trainer(
            arguments.true_vocab_size, arguments.temperature, arguments.top_p, arguments.top_k, arguments.tokenizer_hash
        ),
    )
    if arguments.json:
        print(json.dumps(report.as_dict()))
        return 0 if report.ok else 1
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for problem in report.problems:
        print(f"error: {problem}", file=sys.stderr)
    verdict = "valid" if report.ok else "refused"
    print(
        f"{arguments.path}: {verdict}; {report.shards} shards, {report.rollouts} rollouts ({report.bad_rollouts} bad), "
        f"{report.tokens} tokens, {report.size} bytes"
    )
    return 0 if report.ok else 1


def _add_inspect(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser("inspect", help="what a rollout buffer holds, and one rollout token by token")
    parser.add_argument("path", help="directory or fsspec URL")
    parser.add_argument("--row", type=int, default=0, help="rollout to show, in order of commitment (default 0)")
    parser.add_argument("--positions", type=int, default=20, help="how many of its tokens (default 20)")
    parser.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from .rollouts.problem import BufferRefusedError
    from .rollouts.summary import summarize

    try:
        summary = summarize(arguments.path, arguments.row)
    except (BufferRefusedError, IndexError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console = Console()
    table = Table(title=str(arguments.path), show_header=False)
    for name, value in _lines(summary):
        table.add_row(name, value)
    console.print(table)
    if summary.first is not None:
        console.print(_token_table(summary, arguments.row, arguments.positions))
    return 0


def _lines(summary: Summary) -> list[tuple[str, str]]:
    from .rollouts.summary import QUANTILES

    def quantiles(values: list[float], form: str) -> str:
        if not values:
            return "no heads"
        return "  ".join(f"{q:.0%}: {value:{form}}" for q, value in zip(QUANTILES, values, strict=True))

    sampler = summary.manifest.sampler
    return [
        ("sampler", f"{sampler.engine or 'unknown engine'} {sampler.engine_version}".strip()),
        ("true vocabulary", str(summary.manifest.true_vocab_size)),
        ("shards", str(summary.shards)),
        ("groups, rollouts", f"{summary.groups}, {summary.rollouts}"),
        ("generated tokens", str(summary.tokens)),
        ("bytes a generated token", f"{summary.size / max(summary.tokens, 1):.1f}"),
        ("trained share", f"{summary.trained_tokens / max(summary.sampled_tokens, 1):.1%}"),
        ("head size", quantiles(summary.head_sizes, ".0f")),
        ("head mass", quantiles(summary.head_mass, ".5f")),
        ("sampled token in head", f"{summary.sampled_in_head:.2%}"),
        ("weight versions", ", ".join(f"{version}: {count}" for version, count in summary.versions.items())),
        ("finish reasons", ", ".join(f"{reason}: {count}" for reason, count in summary.finish_reasons.items())),
    ]


def _token_table(summary: Summary, row: int, positions: int) -> object:
    import numpy as np
    from rich.table import Table

    assert summary.first is not None
    rollout = summary.first.as_rollout(0)
    table = Table(
        title=f"rollout {row}: group {rollout.group_id}, prompt of {len(rollout.prompt_ids)}, response of "
        f"{len(rollout.response_ids)}, reward {rollout.reward:g}, {rollout.finish_reason}"
    )
    for name in ("position", "token", "log q", "trains", "version", "head", "tail mass", "most likely"):
        table.add_column(name, justify="right")
    for position in range(min(positions, len(rollout.response_ids))):
        head = tail = likely = ""
        if rollout.head_ids is not None and rollout.head_logprobs is not None:
            valid = rollout.head_ids[position] >= 0
            head = str(int(valid.sum()))
            first = zip(
                rollout.head_ids[position][valid][:3], np.exp(rollout.head_logprobs[position][:3]), strict=False
            )
            likely = "  ".join(f"{token}: {probability:.4f}" for token, probability in first)
        if rollout.log_tail_mass is not None:
            tail = f"{np.exp(rollout.log_tail_mass[position]):.2e}"
        table.add_row(
            str(position),
            str(rollout.response_ids[position]),
            f"{rollout.sampled_logprobs[position]:.4f}",
            "yes" if rollout.response_mask[position] else "no",
            str(rollout.weight_version[position]),
            head,
            tail,
            likely,
        )
    return table


def _add_selfcheck(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "selfcheck",
        help="check that every loss centers on this device, under torchrun over shards; exit status 1 if one does not",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32")
    parser.set_defaults(run=_selfcheck)


def _selfcheck(arguments: argparse.Namespace) -> int:
    import os

    import torch
    import torch.distributed as dist
    from rich.console import Console
    from rich.table import Table

    from .objective import IMPORTANCE_WEIGHTS
    from .vocab_parallel.self_check import self_check

    device, group = torch.device("cpu"), None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        group = dist.group.WORLD
    ranks = 1 if group is None else dist.get_world_size(group)
    table = Table(title=f"Expected update of a constant advantage, {arguments.dtype} on {device.type}, {ranks} shards")
    for column in ("sampler distribution", "importance weight", "centered", "uncentered", "tolerance", ""):
        table.add_column(column)
    passed = True
    for distribution in ("head", "support", "draws", "full"):
        for name, weight in IMPORTANCE_WEIGHTS.items():
            dtype = getattr(torch, arguments.dtype)
            result = self_check(distribution, weight(), group=group, device=device, dtype=dtype)
            passed &= result.passed
            table.add_row(
                distribution, name, f"{result.centered:.1e}", f"{result.uncentered:.1e}", f"{result.tolerance:.0e}",
                "ok" if result.passed else "FAILED",
            )  # fmt: skip
    if group is None or dist.get_rank(group) == 0:
        Console().print(table)
    if group is not None:
        dist.destroy_process_group()
    return 0 if passed else 1


SUBCOMMANDS: list[Callable[[Subcommands], None]] = [_add_validate, _add_inspect, _add_selfcheck]
"""Add to it to add a subcommand."""

if __name__ == "__main__":
    sys.exit(main())
