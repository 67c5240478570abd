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
    with pytest.raises(RankError, match="records a head, not a support: the sampler did not truncate; use head"):
        train(f"{CENTERED} --sampler-distribution support", 1, tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("groups", [2, 8])
def test_a_source_that_gives_another_number_of_rollouts_is_refused(groups, tmp_path):
    """Too few must not be asked for twice, and too many must not be left over."""
    with pytest.raises(RankError, match=f"gave {2 * groups} rollouts to this data-parallel rank, but a step takes 8"):
        train(CENTERED, 1, tmp_path / "metrics.jsonl", groups=groups)


def test_a_step_without_a_trainable_token_is_skipped(tmp_path):
    lines = train(CENTERED, 2, tmp_path / "metrics.jsonl", masked_steps=(1,))
    assert [line["skipped"] for line in lines] == [0, 1, 1]
    assert "loss" not in lines[1]
    assert lines[2]["grad_norm"] > 1e-3


@pytest.mark.parametrize(
    ("model", "world_size", "layout"),
    [
        ("dense", 2, "--tensor-model-parallel-size 2"),
        ("dense", 2, ""),
        ("moe", 2, "--expert-model-parallel-size 2"),
    ],
    ids=["tp2", "dp2", "ep2"],
)
def test_embedded_sampler_gives_the_same_rollouts_in_every_layout(model, world_size, layout, weights, tmp_path):
    sampler = "--sampler gaussian --prompts-per-step 4 --samples-per-prompt 2 --train-iters 2 --lr 1e-3"
    flags = f"{CENTERED} {weights[model]} {sampler}"
    expected = train(flags, 1, tmp_path / "one.jsonl", embedded=True)[:2]
    lines = train(f"{flags} {layout}", world_size, tmp_path / "two.jsonl", embedded=True)[:2]
    assert expected[0]["drift_l1"] > 0.01
    for line, reference in zip(lines, expected, strict=True):
        for key in ("loss", "grad_norm", "reward", "accuracy", "drift_l1", "sampler_kl"):
            assert line[key] == pytest.approx(reference[key], rel=1e-4, abs=1e-5), (key, reference["step"])


def test_embedded_sampler_refuses_pipeline_parallelism(tmp_path):
    flags = f"{CENTERED} --pipeline-model-parallel-size 2 --prompts-per-step 4 --samples-per-prompt 2"
    with pytest.raises(RankError, match="pipeline"):
        train(flags, 2, tmp_path / "metrics.jsonl", embedded=True)
