"""``megatron-sc validate``: check a rollout buffer."""

from __future__ import annotations

import argparse
import json
import sys

from . import Subcommands


def add(subcommands: Subcommands) -> None:
    """Add the subcommand."""
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Its exit status."""
    from ..rollouts.check import validate_buffer
    from ..rollouts.validate import Trainer

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
