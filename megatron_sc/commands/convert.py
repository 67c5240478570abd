"""``megatron-sc convert``: from files of other stacks to a rollout buffer."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from . import Subcommands

if TYPE_CHECKING:
    from ..rollouts.capture.sampling import Sampling
    from ..rollouts.capture.sources import Source
    from ..rollouts.schema import Manifest

SHOWN = 20
"""Errors of dropped groups that are printed."""


def add(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "convert",
        help="write a rollout buffer from JSON lines or Parquet of other stacks; all of it or nothing",
        description="Formats: columns (one rollout a record: slime, miles, verl, prime-rl, ...), vllm and sglang (one "
        "reply of a server a line). docs/capture.md describes them.",
    )
    parser.add_argument("files", nargs="+", help=".jsonl, .json (one object a line), either with .gz, or .parquet")
    parser.add_argument("path", help="directory of the buffer; must not exist, or be empty")
    parser.add_argument("--format", choices=("columns", "vllm", "sglang"), default="columns")
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="FIELD=NAME",
        help="a column whose name is not one of the known ones; repeatable",
    )
    parser.add_argument("--group-size", type=int, help="rollouts of a group, where no column tells")
    parser.add_argument("--weight-version", type=int, help="the trainer's step, where the files do not tell")
    parser.add_argument("--drop", action="store_true", help="leave out groups with a bad rollout and list them")
    parser.add_argument("--keep-open", action="store_true", help="let other writers go on with the buffer")
    manifest = parser.add_argument_group("manifest")
    manifest.add_argument("--true-vocab-size", type=int, required=True, help="tokens of the softmax, without padding")
    manifest.add_argument("--tokenizer-hash", default="", help="any stable digest")
    manifest.add_argument("--k", type=int, help="top log-probabilities that were asked for")
    manifest.add_argument("--lossless", action="store_true", help="float32 and all k")
    manifest.add_argument(
        "--expert-routes", type=int, nargs=3, metavar=("LAYERS", "TOPK", "EXPERTS"), help="shape of recorded routes"
    )
    sampler = parser.add_argument_group("sampler")
    sampler.add_argument(
        "--logprobs-mode",
        choices=("processed", "raw"),
        help="of the log-probabilities: after temperature and truncation, or before; required but for sglang",
    )
    sampler.add_argument("--temperature", type=float, help="required, unless a column has it")
    sampler.add_argument("--top-p", type=float, default=1.0)
    sampler.add_argument("--top-k", type=int, default=0)
    sampler.add_argument("--min-p", type=float, default=0.0)
    sampler.add_argument("--repetition-penalty", type=float, default=1.0)
    sampler.add_argument("--presence-penalty", type=float, default=0.0)
    sampler.add_argument("--frequency-penalty", type=float, default=0.0)
    for name in ("engine", "engine-version", "weight-dtype", "activation-dtype", "kv-cache-dtype", "quantization"):
        sampler.add_argument(f"--{name}", default="")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Its exit status."""
    from pathlib import Path

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from ..rollouts.convert import convert
    from ..rollouts.rollout import RolloutError

    try:
        source, manifest = _settings(arguments)
        files = [Path(file) for file in arguments.files]
        sizes = {file: file.stat().st_size for file in files}
        console = Console(stderr=True)
        with Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
            console=console, disable=not console.is_terminal, transient=True,
        ) as bar:  # fmt: skip
            tasks = {file: bar.add_task(file.name, total=size) for file, size in sizes.items()}
            result = convert(
                files, arguments.path, manifest, source, drop=arguments.drop, keep_open=arguments.keep_open,
                progress=lambda file, done: bar.update(tasks[file], completed=done),
            )  # fmt: skip
    except (RolloutError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for message in result.dropped[:SHOWN]:
        print(f"dropped: {message}", file=sys.stderr)
    if len(result.dropped) > SHOWN:
        print(f"dropped: {len(result.dropped) - SHOWN} more", file=sys.stderr)
    columns = getattr(source, "columns", None)
    if columns is not None:
        pairs = columns.names.items()
        print("columns: " + ", ".join(name if name == column else f"{name} from {column}" for name, column in pairs))
        if columns.unused:
            print("columns that were not used: " + ", ".join(columns.unused))
    print(
        f"{arguments.path}: {result.groups} groups, {result.rollouts} rollouts, {result.tokens} tokens"
        + (f"; {len(result.dropped)} bad rollouts, whose groups were left out" if arguments.drop else "")
    )
    return 0


def _settings(arguments: argparse.Namespace) -> tuple[Source, Manifest]:
    """What the flags say of the files and of the buffer."""
    from ..rollouts.capture.columns import ALIASES
    from ..rollouts.capture.sources import ColumnSource, EngineSource
    from ..rollouts.codec import HeadPolicy
    from ..rollouts.schema import ExpertRoutes, Manifest

    chosen = dict(pair.partition("=")[::2] for pair in arguments.column)
    for name, column in chosen.items():
        if name not in ALIASES or not column:
            raise ValueError(f"--column {name}={column}: must be FIELD=NAME with a FIELD of {', '.join(ALIASES)}")
    if arguments.group_size is not None and arguments.group_size < 1:
        raise ValueError(f"--group-size is {arguments.group_size} but must be at least 1")
    sampling = _sampling(arguments)
    routes = None if arguments.expert_routes is None else ExpertRoutes(*arguments.expert_routes)
    source: Source
    if arguments.format == "columns":
        source = ColumnSource(sampling, chosen, arguments.k, arguments.weight_version, arguments.group_size)
    else:
        if arguments.k is None:
            raise ValueError("--k is needed: the number of top log-probabilities that the requests asked for")
        source = EngineSource(
            arguments.format, sampling, arguments.k, f"{sampling.logprobs}_logprobs", arguments.weight_version, routes
        )
    heads = {} if arguments.k is None else {"k": max(arguments.k, 1)}
    fingerprint = sampling.fingerprint(
        engine=arguments.engine or ("" if arguments.format == "columns" else arguments.format),
        engine_version=arguments.engine_version,
        weight_dtype=arguments.weight_dtype,
        activation_dtype=arguments.activation_dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        quantization=arguments.quantization,
    )
    return source, Manifest(
        arguments.true_vocab_size,
        arguments.tokenizer_hash,
        fingerprint,
        HeadPolicy.lossless(**heads) if arguments.lossless else HeadPolicy(**heads),
        routes,
    )


def _sampling(arguments: argparse.Namespace) -> Sampling:
    from ..rollouts.capture.sampling import NEUTRAL, Sampling

    if arguments.logprobs_mode is None and arguments.format != "sglang":
        raise ValueError(
            "--logprobs-mode is needed: whether log-probabilities are those after temperature and truncation; vLLM's "
            "are raw unless it was started with --logprobs-mode processed_logprobs"
        )
    if arguments.temperature is None and arguments.format != "columns":
        raise ValueError("--temperature is needed: of the sampler")
    given = {name: getattr(arguments, name) for name in NEUTRAL}
    return Sampling(**given, logprobs=arguments.logprobs_mode or "processed")
