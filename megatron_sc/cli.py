"""The command ``megatron-sc``. Its subcommands are in ``commands``, one file each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .commands import audit, config, convert, fingerprint, inspect, mismatch, plan, selfcheck, validate, weights

SUBCOMMANDS = (validate, inspect, convert, selfcheck, fingerprint, audit, weights, mismatch, config, plan)
"""In the order of ``--help``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status: 0 fine, 1 a finding, 2 a wrong call."""
    parser = argparse.ArgumentParser(prog="megatron-sc", description="Score centering for Megatron-Core: tools.")
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    for subcommand in SUBCOMMANDS:
        subcommand.add(subcommands)
    parsed = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    return run(parsed)


if __name__ == "__main__":
    sys.exit(main())
