"""``megatron-sc mismatch``: how far quantized samplers are from a model, and which part of them makes it so."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from . import Subcommands

if TYPE_CHECKING:
    from ..diagnostics.mismatch import Attribution, Mismatch

TINY = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --vocab-size 32 --make-vocab-size-divisible-by 32 --init-method-std 0.1
"""
"""The model without Megatron's flags: the demo's tiny policy, freshly initialized with ``--seed``."""


def add(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "mismatch",
        help="how far quantized samplers are from a model, and which part of them makes the difference",
        usage="megatron-sc mismatch (SPEC [SPEC ...] | --buffer PATH) [options] [--model MEGATRON FLAGS]",
        description="Samples responses from each simulated sampler, scores them under the model and under the sampler "
        "with one part at a time, and prints the mismatch and where it comes from. With --buffer it scores responses "
        "that a real sampler recorded. Under torchrun the model may be tensor- and expert-parallel.",
    )
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="a name of docs/samplers.md, or a .yaml file")
    parser.add_argument("--buffer", metavar="PATH", help="a rollout buffer instead of simulated samplers")
    parser.add_argument("--by", choices=("component", "layer", "nothing"), default="component", help="what to turn on")
    parser.add_argument("--prompts", help='JSON lines {"prompt_ids": [...]}; default: prompts of --task reverse')
    parser.add_argument("--count", type=int, default=64, help="prompts, or newest rollouts (default 64)")
    parser.add_argument("--response", type=int, help="tokens to sample after each prompt (default: the task's, or 16)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts, draws and a fresh model (default 1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="default 1")
    parser.add_argument("--head-size", type=int, default=8, help="tokens in the sampler's head (default 8)")
    parser.add_argument("--plot", metavar="FILE", help="draw the bars to this file (.png, .pdf, .svg)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--model",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="MEGATRON FLAGS",
        help="the rest of the line: the flags of a launch script, with --load for a checkpoint (its weights alone are "
        "read); default: a tiny model, freshly initialized",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Its exit status."""
    from ..rollouts.problem import BufferRefusedError

    try:
        results = _measure(arguments)
    except (ValueError, BufferRefusedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if results is not None:  # the first rank
        _show(arguments, results)
    return 0


def _measure(arguments: argparse.Namespace) -> dict[str, tuple[Mismatch, Attribution | None]] | None:
    """The mismatch and its attribution by spec, on the first rank; None on others."""
    import shlex

    from ..precision.specs import SamplerSpec

    if bool(arguments.specs) == bool(arguments.buffer):
        raise ValueError("give one or more SPEC, or --buffer")
    specs = {name: SamplerSpec.load(name) for name in arguments.specs}
    if arguments.count < 1 or arguments.head_size < 1 or (arguments.response or 1) < 1 or arguments.temperature <= 0:
        raise ValueError("--count, --head-size and --response must be at least 1, and --temperature above 0")

    from ..training.evaluation_model import evaluation_model

    flags = arguments.model or shlex.split(TINY)
    seed = [] if "--seed" in flags else ["--seed", str(arguments.seed)]
    with contextlib.redirect_stdout(sys.stderr):  # Megatron prints its arguments
        model, args = evaluation_model([*seed, *flags], "megatron-sc mismatch --model")
    import torch.distributed as dist

    from ..diagnostics.probe_sampler import SamplerProbe
    from ..diagnostics.recorded import recorded_mismatch
    from ..sampling import ParallelGroups

    try:
        vocab_size = args.true_vocab_size or args.vocab_size
        if vocab_size is None:
            raise ValueError("--true-vocab-size is needed among the flags of --model: the vocabulary without padding")
        groups = ParallelGroups.from_megatron()
        results: dict[str, tuple[Mismatch, Attribution | None]]
        if arguments.buffer:
            recorded = recorded_mismatch(model, arguments.buffer, arguments.count, vocab_size, groups)
            results = {name: (mismatch, None) for name, mismatch in recorded.items()}
        else:
            prompts, length = _prompts(arguments)
            probe = SamplerProbe(
                model, prompts, arguments.response or length, vocab_size, groups, arguments.seed,
                arguments.temperature, arguments.head_size,
            )  # fmt: skip
            results = {name: probe.measure(spec, arguments.by) for name, spec in specs.items()}
        return results if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _prompts(arguments: argparse.Namespace) -> tuple[list[Any], int]:
    """Token ids of each prompt, and how long responses are."""
    import numpy as np

    from ..sampling import build_task

    if arguments.prompts is None:
        task = build_task("reverse")
        generator = np.random.default_rng(arguments.seed)
        return [task.prompt(generator) for _ in range(arguments.count)], task.response_length
    prompts: list[Any] = []
    try:
        with open(arguments.prompts, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and len(prompts) < arguments.count:
                    prompts.append(_prompt(line, f"{arguments.prompts}:{number}"))
    except OSError as error:
        raise ValueError(f"--prompts: {error}") from None
    if not prompts:
        raise ValueError(f"--prompts {arguments.prompts} holds no prompt")
    return prompts, 16


def _prompt(line: str, where: str) -> Any:
    import numpy as np

    try:
        ids = json.loads(line)["prompt_ids"]
    except (ValueError, KeyError, TypeError):
        ids = None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f'{where}: not an object {{"prompt_ids": [token ids]}} with at least one id')
    return np.array(ids, dtype=np.int64)


def _show(arguments: argparse.Namespace, results: dict[str, tuple[Mismatch, Attribution | None]]) -> None:
    from rich.console import Console

    from ..diagnostics.mismatch_report import attribution_figure, attribution_table, mismatch_table

    attributions = {name: attribution for name, (_, attribution) in results.items() if attribution is not None}
    if arguments.json:
        found = {
            name: mismatch.as_dict()
            | (
                {}
                if attribution is None
                else {"alone": attribution.alone, "up_to": attribution.up_to, "residual": attribution.residual}
            )
            for name, (mismatch, attribution) in results.items()
        }
        print(json.dumps(found))
    else:
        console = Console()
        console.print(mismatch_table({name: mismatch for name, (mismatch, _) in results.items()}))
        for name, attribution in attributions.items():
            console.print(attribution_table(name, attribution))
    if arguments.plot and attributions:
        attribution_figure(attributions).savefig(arguments.plot, dpi=150, bbox_inches="tight")
