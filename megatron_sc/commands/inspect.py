"""``megatron-sc inspect``: what a rollout buffer holds."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from . import Subcommands

if TYPE_CHECKING:
    from ..rollouts.summary import Summary


def add(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser("inspect", help="what a rollout buffer holds, and one rollout token by token")
    parser.add_argument("path", help="directory or fsspec URL")
    parser.add_argument("--row", type=int, default=0, help="rollout to show, in order of commitment (default 0)")
    parser.add_argument("--positions", type=int, default=20, help="how many of its tokens (default 20)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Its exit status."""
    from rich.console import Console
    from rich.table import Table

    from ..rollouts.problem import BufferRefusedError
    from ..rollouts.summary import summarize

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
    from ..rollouts.summary import QUANTILES

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
