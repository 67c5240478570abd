"""``megatron-sc weights``: the newest published weights, for a sampler that a shell script starts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import Subcommands


def add(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "weights",
        help="print the folder of the newest published weights; exit status 1 if there are none",
    )
    parser.add_argument("path", help="the trainer's --publish-weights")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="wait so long for them (inf: for ever)")
    parser.add_argument("--other-than", metavar="FOLDER", help="a folder printed before: wait for another one")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Its exit status."""
    from ..weights import PublishedWeights, wait_for
    from ..weights.versions import version_of

    try:
        held = None
        if arguments.other_than is not None:
            name = Path(arguments.other_than).name
            held = PublishedWeights(version_of(name), Path(arguments.path) / name)
        print(wait_for(arguments.path, held, timeout=arguments.wait or 0.0).path)
    except (TimeoutError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
