"""Megatron's real loop: every layout trains as one rank does, from the same weights and the same recorded rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import RankError, run_ranks
from tests.train_fixed import MOE, train_fixed

CENTERED = "--loss-correction score_centering --micro-batch-size 2 --train-iters 3 --advantage group"
EXACT = 1e-5  # relative, float32


def train(
    flags: str, world_size: int, metrics: Path, rank: int = -1, timeout: float = 120, **options: Any
) -> list[dict[str, Any]]:
    """The metrics of a run, as the last rank read them."""
    return run_ranks(train_fixed, world_size, flags, str(metrics), megatron=True, timeout=timeout, **options)[rank]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints of freshly initialized dense and MoE models, which any layout can load."""
    flags = {}
    for name, extra in (("dense", ""), ("moe", MOE)):
        directory = tmp_path_factory.mktemp(name)
        save = f"--train-iters 1 --lr 0 --weight-decay 0 --save {directory} --save-interval 1 --no-save-optim"
        train(f"{CENTERED} {extra} {save}", 1, directory / "metrics.jsonl")
        flags[name] = f"{extra} --load {directory} --finetune --no-load-optim"
    return flags


@pytest.fixture(scope="module")
def one_rank(weights: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Metrics of one rank, computed once for each set of flags."""
    known: dict[str, list[dict[str, Any]]] = {}

    def run(flags: str) -> list[dict[str, Any]]:
        if flags not in known:
            known[flags] = train(flags, 1, tmp_path_factory.mktemp("one") / "metrics.jsonl")
        return known[flags]

    return run


def assert_same_curve(lines: list[dict[str, Any]], expected: list[dict[str, Any]], relative: float) -> None:
    """Equal loss, gradient norm and metrics on every step."""
    assert len(lines) == len(expected) == 3
    for line, reference in zip(lines, expected, strict=True):
        assert line.keys() == reference.keys()
        assert reference["grad_norm"] > 1e-3
        for key, value in reference.items():
            if isinstance(value, float):
                assert line[key] == pytest.approx(value, rel=relative, abs=relative), (key, reference["step"])


@pytest.mark.parametrize(
    ("model", "world_size", "layout"),
    [
        ("dense", 2, "--tensor-model-parallel-size 2"),
        ("dense", 2, "--pipeline-model-parallel-size 2"),
        ("dense", 4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
        ("dense", 2, ""),
        ("dense", 2, "--use-distributed-optimizer"),
        ("moe", 2, "--expert-model-parallel-size 2"),
    ],
    ids=["tp2", "pp2", "tp2-pp2", "dp2", "dp2-distributed-optimizer", "ep2"],
)
def test_layout_equals_one_rank(model, world_size, layout, weights, one_rank, tmp_path):
    flags = f"{CENTERED} {weights[model]}"
    lines = train(f"{flags} {layout}", world_size, tmp_path / "metrics.jsonl")
    assert_same_curve(lines, one_rank(flags), EXACT)


def test_bf16_trains_like_float32_up_to_its_rounding(weights, one_rank, tmp_path):
    flags = f"{CENTERED} {weights['dense']}"
    lines = train(f"{flags} --bf16", 1, tmp_path / "metrics.jsonl")
    for line, reference in zip(lines, one_rank(flags), strict=True):
        assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=0.05)


def test_interleaved_pipeline_equals_one_rank(weights, one_rank, tmp_path):
    """Two virtual stages a rank: each reads its own iterator, and all of them the same rollouts."""
    four = "--num-layers 4 --micro-batch-size 2"
    directory = tmp_path / "weights"
    save = f"--train-iters 1 --lr 0 --weight-decay 0 --save {directory} --save-interval 1 --no-save-optim"
    train(f"{CENTERED} {four} {save}", 1, tmp_path / "save.jsonl")
    flags = f"{CENTERED} {four} --load {directory} --finetune --no-load-optim"
    interleaved = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    lines = train(f"{flags} {interleaved}", 2, tmp_path / "metrics.jsonl")
    assert_same_curve(lines, one_rank(flags), EXACT)


@pytest.mark.parametrize(
    "objective",
    [
        "--loss-correction none --importance-weight is",
        "--importance-weight tis --sampler-kl-coef 0.01 --entropy-coef 0.01",
        "--importance-weight mis --advantage loo",
        "--importance-weight ppo --advantage none",
        "--sampler-distribution draws --importance-weight tis",
        "--sampler-distribution full --head-size 30 --vocab-size 30",
    ],
)
def test_every_objective_trains_the_same_over_vocabulary_shards(objective, weights, one_rank, tmp_path):
    flags = f"{CENTERED} {weights['dense']} {objective}"
    head = 30 if "full" in objective else 8
    lines = train(f"{flags} --tensor-model-parallel-size 2", 2, tmp_path / "two.jsonl", head=head)
    assert_same_curve(lines, train(flags, 1, tmp_path / "one.jsonl", head=head), EXACT)


def test_recorded_rollouts_of_the_other_kind_are_refused(tmp_path):
    with pytest.raises(RankError, match="records heads of 8 tokens, but --head-size is 4"):
        train(f"{CENTERED} --head-size 4", 1, tmp_path / "metrics.jsonl")
