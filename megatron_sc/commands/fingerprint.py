"""``megatron-sc fingerprint``: do the numerics of two sides contradict each other?"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import Subcommands


def add(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "fingerprint",
        help="compare the numerics of a trainer and a sampler (exit status 1: training would be wrong), or of two of a "
        "kind (1: they differ)",
    )
    parser.add_argument("sides", nargs="+", metavar="SIDE", help="a rollout buffer, or a trainer's fingerprint (JSON)")
    parser.add_argument("--trainer", metavar="FLAGS", help="the trainer's launch flags, quoted, as one side")
    parser.add_argument("--temperature", type=float, help="what the trainer of --trainer divides all logits by")
    parser.add_argument("--save", metavar="FILE", help="write the fingerprint of --trainer here")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Its exit status."""
    from ..precision.fingerprint import TrainerFingerprint, contradictions, print_table

    try:
        sides = [_read(side) for side in arguments.sides]
        if arguments.trainer is not None:
            sides.insert(0, _trainer(arguments))
    except (OSError, ValueError) as error:
        print(f"megatron-sc fingerprint: {error}", file=sys.stderr)
        return 2
    if len(sides) != 2:
        print(f"megatron-sc fingerprint: compares 2 sides, got {len(sides)}", file=sys.stderr)
        return 2
    sides.sort(key=lambda side: not isinstance(side, TrainerFingerprint))
    first, second = sides
    if not isinstance(first, TrainerFingerprint) or isinstance(second, TrainerFingerprint):
        return _print_differences(first, second, arguments.json)
    found = contradictions(first, second)
    if arguments.json:
        print(json.dumps({"contradictions": [asdict(item) for item in found]}))
    else:
        print_table(first, second, found)
    return int(any(item.severity == "refuse" for item in found))


def _trainer(arguments: argparse.Namespace) -> Any:
    from ..precision.fingerprint import TrainerFingerprint
    from .trainer_flags import parse_trainer_flags

    trainer = TrainerFingerprint.from_args(parse_trainer_flags(arguments.trainer), arguments.temperature)
    if arguments.save is not None:
        Path(arguments.save).write_text(trainer.to_json())
    return trainer


def _read(side: str) -> Any:
    """A trainer's fingerprint, or a buffer's manifest.

    Raises:
        ValueError: for anything else.
    """
    from ..precision.fingerprint import TrainerFingerprint
    from ..rollouts.ledger import Ledger
    from ..rollouts.problem import BufferRefusedError
    from ..rollouts.storage import open_storage

    if side.endswith(".json") and Path(side).is_file():
        return TrainerFingerprint.from_json(Path(side).read_text(), side)
    try:
        return Ledger(open_storage(side)).manifest
    except BufferRefusedError as error:
        raise ValueError(str(error)) from error


def _print_differences(first: Any, second: Any, as_json: bool) -> int:
    """Two of a kind: fields that are not the same."""
    left, right = (_flat(side) for side in (first, second))
    differing = {key: (left.get(key), right.get(key)) for key in {**left, **right} if left.get(key) != right.get(key)}
    if as_json:
        print(json.dumps({"differences": {key: list(pair) for key, pair in differing.items()}}))
    else:
        for key, (ours, theirs) in differing.items():
            print(f"{key}: {ours!r} and {theirs!r}")
        print(f"{len(left)} fields compared: {len(differing)} differ")
    return int(bool(differing))


def _flat(side: Any) -> dict[str, Any]:
    """Nested fields by dotted names."""
    found: dict[str, Any] = {}
    for key, value in asdict(side).items():
        if isinstance(value, dict):
            found |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        else:
            found[key] = value
    return found
