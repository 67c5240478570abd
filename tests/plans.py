"""Plan jobs in a process of its own, where Megatron may be imported and torch.distributed is free.

    python -m tests.plans CASES.json    # [{"files": [...], "flags": [...], "all_ranks": false}, {"cli": [...]}, ...]

Prints one JSON list: of each case the plan and what the tests compare it with, or the error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from megatron_sc.training import cpu

cpu.install()

from megatron_sc.cli import main  # noqa: E402
from megatron_sc.configuration import ConfigurationError  # noqa: E402
from megatron_sc.planning import make_plan  # noqa: E402
from megatron_sc.planning.memory import ModelState  # noqa: E402
from megatron_sc.planning.stages import stage_of_rank  # noqa: E402
from megatron_sc.training.config_files import read_command_line  # noqa: E402


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """The plan of one case, or what the command line says."""
    if "cli" in case:
        return run_cli(case["cli"])
    try:
        configuration, argv, rest = read_command_line(case["files"], case["flags"])
        plan = make_plan(configuration, [*argv, *rest])
    except ConfigurationError as error:
        return {"error": str(error)}
    result = {
        **plan.as_dict(),
        "argv": argv,
        "too_large": len(plan.too_large(reserve_gib=6)),
        "states": [state_bytes(stage.state) for stage in plan.stages],
        "megatron_state": megatron_state(plan.args),
    }
    if case.get("all_ranks"):
        ranks = [stage_of_rank(plan.args, rank) for rank in range(plan.args.world_size)]
        result["ranks"] = [(stage.number, vars(stage.parameters)) for stage in ranks]
    return result


def run_cli(arguments: list[str]) -> dict[str, Any]:
    """``megatron-sc`` with these arguments."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = main(arguments)
    return {"status": status, "out": output.getvalue(), "err": errors.getvalue()}


def state_bytes(state: ModelState) -> float:
    """What lives as long as the job, bytes."""
    return state.weights + state.gradients + state.optimizer


def megatron_state(args: argparse.Namespace) -> float:
    """Megatron's figure with optimizer state divided among all ranks that share it: context-parallel ones too."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    copy = argparse.Namespace(**vars(args))
    copy.padded_vocab_size = args.vocab_size  # no shipped layout pads
    copy.data_parallel_size *= args.context_parallel_size
    return float(compute_weight_and_optimizer_memory(copy))


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):
        results = [run_case(case) for case in json.loads(Path(sys.argv[1]).read_text())]
    print(json.dumps(results))
