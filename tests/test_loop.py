"""The hooks in Megatron's loop: steps without tokens, the metrics file, and that nothing stays replaced."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_sc.training.loop import MetricsFile, TrainableTokens, hooked_training_loop
from tests.distributed import run_ranks
from tests.tiny_model import MOE, Run, train


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, "", id="adam"),
        pytest.param(1, "--bf16", id="bf16"),
        pytest.param(2, "--use-distributed-optimizer", id="distributed"),
        pytest.param(2, "--pipeline-model-parallel-size 2", id="pipeline"),
        pytest.param(2, " ".join([*MOE, "--expert-model-parallel-size 2"]), id="chained"),
    ],
)
def test_step_without_tokens_changes_nothing(world_size: int, flags: str) -> None:
    """Steps 2 and 4 have no token anywhere; step 3 has none on data-parallel rank 0, which must not skip it alone."""
    has_data_parallel_ranks = world_size > 1 and "pipeline" not in flags
    empty = [(step, rank) for step in (2, 4) for rank in (0, 1)] + [(3, 0)] * has_data_parallel_ranks
    runs: list[Run] = run_ranks(train, world_size, flags.split(), 5, empty, megatron=True)
    for run in runs:
        assert run.skipped == [0, 1, 0, 1, 0]
        assert run.states[1] == run.states[0]
        assert run.states[3] == run.states[2]
        assert len(set(run.states)) == 3
    assert [math.isnan(loss) for loss in runs[-1].losses] == [False, True, False, True, False]


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, "", id="adam"),
        pytest.param(2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", id="overlapped"),
    ],
)
def test_run_with_skipped_steps_ends_where_a_run_without_them_does(world_size: int, flags: str) -> None:
    empty = [(step, rank) for step in (1, 3) for rank in (0, 1)]  # 1: before Megatron enables its parameter gathering
    skipping = run_ranks(train, world_size, flags.split(), 5, empty, megatron=True)[-1]
    plain = run_ranks(train, world_size, flags.split(), 3, megatron=True)[-1]
    assert [loss for loss in skipping.losses if not math.isnan(loss)] == plain.losses


def test_metrics_file_and_tensorboard(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "metrics.jsonl"
    flags = "--tensor-model-parallel-size 2 --log-interval 2 --eval-interval 2 --eval-iters 1"
    run: Run = run_ranks(train, 2, flags.split(), 4, [(2, 0), (3, 0)], str(path), megatron=True)[-1]
    records = read(path)
    assert [(record["step"], record["split"]) for record in records] == [
        (2, "train"),
        (2, "valid"),
        (4, "train"),
        (4, "valid"),
        (4, "valid"),  # Megatron evaluates once more at the end
    ]
    assert [record["skipped"] for record in records] == [1, 1, 2, 2, 2]
    assert records[0].keys() == {"step", "split", "skipped", "grad_norm", "learning_rate"}  # no token, no mean
    assert records[0]["grad_norm"] == 0
    assert records[2]["loss"] == run.losses[3]
    assert records[2]["negative"] == -run.losses[3]
    assert records[2]["grad_norm"] > 0
    assert records[2]["learning_rate"] == pytest.approx(3e-3)
    assert records[1].keys() == {"step", "split", "skipped", "loss", "negative"}
    assert run.scalars["loss"] == [run.losses[0], run.losses[3]]  # through Megatron's own writer
    assert run.scalars["negative validation"][0] == records[1]["negative"]


def test_resumed_run_continues_its_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    checkpoint = ["--load", str(tmp_path), "--override-opt-param-scheduler", "--eval-iters", "0"]
    run_ranks(
        train, 1, ["--save", str(tmp_path), "--save-interval", "2", *checkpoint], 2, [(1, 0)], str(path), megatron=True
    )
    with path.open("a") as file:
        file.write('{"step": 3, "split": "train", "skipped": 1, "loss": 1.0}\n{"step": 4, "spl')  # killed in step 4
    run_ranks(train, 1, checkpoint, 4, (), str(path), megatron=True)
    records = read(path)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["skipped"] for record in records] == [1, 1, 1, 1]
    assert records[2]["loss"] != 1.0


def test_value_that_is_not_finite_is_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.open(0)
    metrics.write(1, "train", {"grad_norm": None, "loss": math.nan, "ratio": math.inf, "reward": 0.5})
    metrics.close()
    assert read(metrics.path) == [
        {"step": 1, "split": "train", "skipped": 0, "grad_norm": None, "loss": None, "ratio": None, "reward": 0.5}
    ]


@pytest.mark.parametrize(("count", "steps"), [(None, 1), (3, 1), (0, 0)])
def test_guard_calls_the_optimizer_only_for_tokens(count: int | None, steps: int) -> None:
    tokens, calls = TrainableTokens(), []

    def finalize_model_grads(model: Any, num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
        if num_tokens is not None:
            num_tokens.sub_(2)  # in place, as the all-reduce works: what counts is the value afterwards

    def step() -> tuple[bool, float, int]:
        calls.append(1)
        return True, 1.5, 7

    watched, guarded = tokens.watch(finalize_model_grads), tokens.guard(step)
    watched([], torch.tensor(count + 2) if count is not None else None, force_all_reduce=False)
    assert guarded() == ((True, 1.5, 7) if steps else (False, 0.0, 0))
    assert len(calls) == steps


def attributes_after_hooks() -> list[bool]:
    from megatron.training import training

    names = ("setup_model_and_optimizer", "training_log", "evaluate_and_print_results", "evaluate")
    stock = [getattr(training, name) for name in names]
    inside = []
    try:
        with hooked_training_loop():
            inside = [getattr(training, name) for name in names]
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    return [
        getattr(training, name) is was and was is not hook for name, was, hook in zip(names, stock, inside, strict=True)
    ]


def test_hooks_are_removed_also_after_an_exception() -> None:
    assert run_ranks(attributes_after_hooks, 1, megatron=True) == [[True] * 4]
