"""Megatron's unmodified training loop on the CPU, in every parallel layout that the CPU can run."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_sc.training import cpu
from tests.distributed import RankError, run_megatron, run_ranks
from tests.tiny_model import MOE, Run, train

STEPS = 6


def last(runs: list[Run]) -> Run:
    """The last rank's view: the one that holds Megatron's reduced losses."""
    return runs[-1]


@pytest.fixture(scope="module")
def one_rank() -> Run:
    return last(run_ranks(train, 1, [], STEPS, megatron=True))


def test_one_rank_learns(one_rank: Run) -> None:
    assert one_rank.losses[0] == pytest.approx(math.log(32), rel=0.05)
    assert one_rank.losses[-1] < one_rank.losses[0] - 0.5
    assert one_rank.skipped == [0] * STEPS


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(2, "--tensor-model-parallel-size 2", id="tp2"),
        pytest.param(2, "", id="dp2"),
        pytest.param(
            2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", id="dp2-distributed"
        ),
    ],
)
def test_layout_gives_the_losses_of_one_rank(one_rank: Run, world_size: int, flags: str) -> None:
    run = last(run_ranks(train, world_size, flags.split(), STEPS, megatron=True))
    assert run.losses == pytest.approx(one_rank.losses, rel=1e-4)


# Megatron seeds pipeline stages and experts differently, so these start from other weights than one rank does.
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, "--bf16", id="bf16"),
        pytest.param(2, "--pipeline-model-parallel-size 2", id="pp2"),
        pytest.param(4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", id="tp2-pp2"),
        pytest.param(
            2,
            "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            id="pp2-interleaved",
        ),
        pytest.param(1, " ".join(MOE), id="moe"),
        pytest.param(2, " ".join([*MOE, "--expert-model-parallel-size 2"]), id="ep2"),
    ],
)
def test_layout_learns(world_size: int, flags: str) -> None:
    run = last(run_ranks(train, world_size, flags.split(), STEPS, megatron=True))
    assert run.losses[0] == pytest.approx(math.log(32), rel=0.05)
    assert run.losses[-1] < run.losses[0] - 0.4


def test_run_continues_from_its_checkpoint_as_if_never_interrupted(one_rank: Run, tmp_path: Path) -> None:
    flags = ["--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "2", "--override-opt-param-scheduler"]
    first = last(run_ranks(train, 1, flags, 2, megatron=True))
    second = last(run_ranks(train, 1, flags, STEPS, megatron=True))
    assert first.losses + second.losses == one_rank.losses
    assert len(second.losses) == STEPS - 2


def stub_parser() -> argparse.ArgumentParser:
    """The flags of Megatron whose defaults depend on what is installed, with Megatron's defaults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--distributed-backend", default="nccl")
    for flag, name in (
        ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion"),
        ("--no-rope-fusion", "apply_rope_fusion"),
    ):
        parser.add_argument(flag, action="store_false", dest=name)
    return parser


@pytest.mark.parametrize("installed", [set(), {"transformer_engine"}, {"apex", "fused_weight_gradient_mlp_cuda"}])
def test_defaults_follow_what_is_installed(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_has_module", installed.__contains__)
    parser = stub_parser()
    cpu.set_parser_defaults(parser)
    args = parser.parse_args([])
    has_engine = "transformer_engine" in installed
    assert args.transformer_impl == ("transformer_engine" if has_engine else "local")
    assert args.apply_rope_fusion == has_engine
    assert args.gradient_accumulation_fusion == ("fused_weight_gradient_mlp_cuda" in installed)
    assert args.distributed_backend == "nccl"  # the backend is not installed in this process


def test_flags_given_win_over_defaults() -> None:
    parser = stub_parser()
    cpu.set_parser_defaults(parser)
    assert parser.parse_args(["--transformer-impl", "inference_optimized"]).transformer_impl == "inference_optimized"


def torch_behavior() -> dict[str, Any]:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(2, device="cuda")
    torch.cuda.set_rng_state(state)
    tensor = torch.zeros(2, device=torch.device("cuda", 0))
    return {
        "again": cpu.install(),
        "devices": {
            value.device.type for value in (first, tensor, tensor.to("cuda:0"), tensor.cuda(), tensor.to(device="cuda"))
        },
        "types": [tensor.type(), tensor.bfloat16().type(), tensor.type(torch.float64).dtype],
        "random": torch.equal(first, torch.rand(2)),
        "text": torch.tensor([1]).to("cpu", torch.float32).dtype,
    }


def test_cuda_calls_answer_for_the_cpu() -> None:
    (answer,) = run_ranks(torch_behavior, 1, megatron=True)
    assert answer == {
        "again": True,
        "devices": {"cpu"},
        "types": ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", torch.float64],
        "random": True,
        "text": torch.float32,
    }


PLAIN_SCRIPT = """
from megatron_sc.training import cpu
print("installed", cpu.install(), cpu.install())
import torch
torch.distributed.init_process_group("gloo")  # as Megatron does: from the environment
print("world", torch.distributed.get_world_size())
"""


def test_plain_python_needs_no_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PLAIN_SCRIPT)
    torchrun = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in torchrun}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["installed True True", "world 1"]
    assert result.stderr == ""


def fail_on_rank_1() -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("rank 1 has a reason")
    torch.distributed.barrier()


def sleep() -> None:
    time.sleep(60)


def sum_of_ranks() -> float:
    tensor = torch.tensor(float(torch.distributed.get_rank()))
    torch.distributed.all_reduce(tensor)
    return tensor.item()


def test_failing_rank_is_reported_and_the_next_call_works() -> None:
    with pytest.raises(RankError, match="rank 1 has a reason"):
        run_ranks(fail_on_rank_1, 2, timeout=20)
    assert run_ranks(sum_of_ranks, 2) == [1, 1]


def test_late_rank_is_reported() -> None:
    run_ranks(sum_of_ranks, 1)
    with pytest.raises(RankError, match=r"not finished in 0\.5 s"):
        run_ranks(sleep, 1, timeout=0.5)


def test_failing_process_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise SystemExit('rank 1 has a reason')\ntime.sleep(60)"
    )
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 has a reason"):
        run_megatron([script], 2)
    assert time.monotonic() - start < 30
