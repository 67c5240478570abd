"""``megatron-sc audit``: do trainer and sampler quantize the same matrices?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from . import Subcommands


def add(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "audit",
        help="list the matrices that one of trainer and sampler quantizes and the other does not; exit status 1 if any",
    )
    parser.add_argument("config", help="config.json of the checkpoint that the sampler serves, or its directory")
    parser.add_argument("--trainer", default="", metavar="FLAGS", help="the trainer's launch flags, quoted")
    parser.add_argument("--engine", choices=("vllm", "sglang", "transformers"), default="vllm")
    parser.add_argument("--rule", help="read the ignore list by another rule than the engine's, e.g. substring")
    parser.add_argument("--quantization", help="what the engine quantizes an unquantized checkpoint to, e.g. fp8")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Its exit status."""
    import sys

    from ..precision.audit import Audit, SamplerLayers, TrainerLayers, audit
    from .trainer_flags import parse_trainer_flags

    try:
        config = _read_config(Path(arguments.config))
        trainer_args = parse_trainer_flags(arguments.trainer)
        trainer = TrainerLayers.from_args(trainer_args, int(config.get("num_hidden_layers", 0)))
        quantization = config.get("quantization_config")
        if quantization is None and arguments.quantization:
            quantization = {"quant_method": arguments.quantization}
        sampler = SamplerLayers.from_config(quantization, arguments.engine, arguments.rule)
        grouped = trainer_args.moe_grouped_gemm
        result: Audit = audit(config, trainer, sampler, grouped)
    except (OSError, ValueError) as error:
        print(f"megatron-sc audit: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(_as_dict(result)))
    else:
        _print(result, trainer.precision, sampler)
    return 0 if result.agrees else 1


def _read_config(path: Path) -> dict[str, Any]:
    """``config.json``, with ``hf_quant_config.json`` beside it as its quantization config where it has none."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config: dict[str, Any] = json.loads(file.read_text())
        beside = file.with_name("hf_quant_config.json")
        if config.get("quantization_config") is None and beside.exists():
            config["quantization_config"] = json.loads(beside.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    return config


def _as_dict(result: Any) -> dict[str, Any]:
    from ..precision.audit import by_layers

    return {
        "agrees": result.agrees,
        "matrices": result.matrices,
        "differences": [
            {
                "matrices": pattern,
                "layers": layers,
                "count": count,
                "trainer": example.trainer.precision,
                "trainer_because": example.trainer.because,
                "sampler": example.sampler.precision,
                "sampler_because": example.sampler.because,
            }
            for pattern, layers, example, count in by_layers(result.differences)
        ],
        "refused": list(result.refused),
        "partial_names": [list(pair) for pair in result.partial_names],
        "unused": list(result.unused),
    }


def _print(result: Any, trainer: str, sampler: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..precision.audit import by_layers

    console = Console()
    print(f"trainer: {trainer}; sampler: {sampler.precision}, ignore list read by rule {sampler.rule}")
    if result.differences:
        table = Table(title="Matrices that one side quantizes")
        for column in ("matrices", "layers", "trainer", "sampler", "count"):
            table.add_column(column, overflow="fold")
        for pattern, layers, example, count in by_layers(result.differences):
            table.add_row(
                pattern, layers, f"{example.trainer.precision}: {example.trainer.because}",
                f"{example.sampler.precision}: {example.sampler.because}", str(count),
            )  # fmt: skip
        console.print(table)
    for reason in result.refused:
        print(f"the engine refuses {reason}")
    for entry in dict.fromkeys(entry for entry, _ in result.partial_names):
        modules = [module for found, module in result.partial_names if found == entry]
        print(f"entry {entry!r} takes {len(modules)} modules of which it is only a part of a name, e.g. {modules[0]}")
    for entry in result.unused:
        print(f"entry {entry!r} names nothing of this model")
    verdict = "agree" if result.agrees else f"differ in {len(result.differences)}"
    print(f"{result.matrices} matrices compared: trainer and sampler {verdict}")
