"""``megatron-sc selfcheck``: does every loss center on this device?"""

from __future__ import annotations

import argparse

from . import Subcommands


def add(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "selfcheck",
        help="check that every loss centers on this device, under torchrun over shards; exit status 1 if one does not",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Its exit status."""
    import os

    import torch
    import torch.distributed as dist
    from rich.console import Console
    from rich.table import Table

    from ..objective import IMPORTANCE_WEIGHTS
    from ..vocab_parallel.self_check import self_check

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
