"""Megatron's real loop trains from a rollout buffer: every layout as one rank, packed or not, resumed or not."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_sc.rollouts import (
    Cursor,
    ExpertRoutes,
    HeadPolicy,
    Manifest,
    Rollout,
    RolloutReader,
    RolloutWriter,
    SamplerFingerprint,
    Trainer,
)
from megatron_sc.rollouts.check import validate_buffer
from megatron_sc.training.feed import BufferSource
from tests.distributed import RankError, run_ranks
from tests.rollouts import make_rollouts, make_routes
from tests.test_training import CENTERED, EXACT, assert_same_curve, train, weights  # noqa: F401  (a fixture)
from tests.train_fixed import MOE, train_fixed

STEP = "--prompts-per-step 4 --samples-per-prompt 2"
ROUTES = ExpertRoutes(layers=2, topk=2, experts=4)
PACKED = "--micro-batch-tokens 40"
LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2": (2, ""),
    "ep2": (2, "--expert-model-parallel-size 2"),
}


def steps(count: int = 4, routes: bool = False) -> list[list[Rollout]]:
    made = [make_rollouts(4, 2, vocab=30, head=8, seed=seed) for seed in range(count)]
    if not routes:
        return made
    rng = np.random.default_rng(0)
    return [[replace(r, expert_routes=make_routes(len(r), 2, 2, 4, rng)) for r in step] for step in made]


def fill(path: Path, rollouts: Sequence[Sequence[Rollout]], **manifest: Any) -> Path:
    """A shard a step."""
    with RolloutWriter(path, Manifest(30, heads=HeadPolicy.lossless(8), **manifest)) as writer:
        for step in rollouts:
            writer.write(step)
            writer.commit()
    return path


def from_buffer(flags: str, path: Path, ranks: int, metrics: Path, **options: Any) -> list[dict[str, Any]]:
    return train(f"{CENTERED} {STEP} --rollout-path {path} {flags}", ranks, metrics, embedded=True, **options)


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("buffer"), steps())


@pytest.fixture(scope="module")
def routed_buffer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("routed"), steps(routes=True), expert_routes=ROUTES)


@pytest.fixture(scope="module")
def in_memory(weights: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:  # noqa: F811
    """The curve of the same rollouts, from memory, on one rank."""
    return train(f"{CENTERED} {weights['dense']}", 1, tmp_path_factory.mktemp("memory") / "metrics.jsonl")


@pytest.fixture(scope="module")
def replayed(
    weights: dict[str, str],  # noqa: F811
    routed_buffer: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """The curve of an MoE policy on one rank, routed as the buffer says."""
    flags = f"{weights['moe']} --moe-enable-routing-replay"
    return from_buffer(flags, routed_buffer, 1, tmp_path_factory.mktemp("replayed") / "metrics.jsonl")


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_a_buffer_trains_as_its_rollouts_do(layout, weights, buffer, in_memory, tmp_path):  # noqa: F811
    ranks, flags = LAYOUTS[layout]
    lines = from_buffer(f"{weights['dense']} {flags}", buffer, ranks, tmp_path / "metrics.jsonl")
    assert_same_curve(lines, in_memory, EXACT)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_packing_by_tokens_changes_nothing(layout, weights, buffer, in_memory, tmp_path):  # noqa: F811
    """Micro-batches of other rows, lengths and number, and other shares of the data-parallel ranks."""
    ranks, flags = LAYOUTS[layout]
    lines = from_buffer(f"{weights['dense']} {flags} {PACKED}", buffer, ranks, tmp_path / "metrics.jsonl")
    assert_same_curve(lines, in_memory, EXACT)


def test_packing_in_an_interleaved_pipeline(buffer, tmp_path):
    """Two chunks a stage; micro-batches in multiples of the pipeline's size, the last of them empty."""
    flags = "--num-layers 4 --use-cpu-initialization"
    save = f"--train-iters 1 --lr 0 --weight-decay 0 --save {tmp_path}/weights --save-interval 1 --no-save-optim"
    train(f"{CENTERED} {flags} {save}", 1, tmp_path / "save.jsonl")
    flags += f" --load {tmp_path}/weights --finetune --no-load-optim"
    expected = train(f"{CENTERED} {flags}", 1, tmp_path / "one.jsonl")
    layout = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    lines = from_buffer(f"{flags} {layout} {PACKED}", buffer, 2, tmp_path / "two.jsonl")
    assert_same_curve(lines, expected, EXACT)


@pytest.mark.parametrize("layout", ["pp2", "dp2", "ep2"])  # MoE needs sequence parallelism at TP 2, and that a GPU
def test_replayed_routes_train_the_same_in_every_layout(layout, weights, routed_buffer, replayed, tmp_path):  # noqa: F811
    ranks, flags = LAYOUTS[layout]
    flags = f"{weights['moe']} --moe-enable-routing-replay {flags} {PACKED}"
    assert_same_curve(from_buffer(flags, routed_buffer, ranks, tmp_path / "metrics.jsonl"), replayed, EXACT)


def test_replayed_routes_survive_recomputation(weights, routed_buffer, replayed, tmp_path):  # noqa: F811
    """Two micro-batches are in flight when the first one's layers run again."""
    flags = (
        f"{weights['moe']} --moe-enable-routing-replay --pipeline-model-parallel-size 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    assert_same_curve(from_buffer(flags, routed_buffer, 2, tmp_path / "metrics.jsonl"), replayed, EXACT)


def test_routes_matter(weights, routed_buffer, replayed, tmp_path):  # noqa: F811
    lines = from_buffer(weights["moe"], routed_buffer, 1, tmp_path / "metrics.jsonl")
    assert abs(lines[0]["log_ratio_abs"] - replayed[0]["log_ratio_abs"]) > 1e-4


def test_resuming_in_the_middle_of_a_shard_gives_the_same_curve(weights, tmp_path):  # noqa: F811
    """Also when the data-parallel size changes: each rollout once along the history of the checkpoints."""
    buffer = tmp_path / "buffer"
    with RolloutWriter(buffer, Manifest(30, heads=HeadPolicy.lossless(8))) as writer:  # one shard
        for step in steps(6):
            writer.write(step)
    flags = f"{weights['dense'].replace('--finetune', '')} --lr-decay-iters 6 --rollout-shuffle-window 3"
    first = flags.replace("--no-load-optim", "--finetune --no-load-optim")
    whole = from_buffer(f"{first} --train-iters 6", buffer, 1, tmp_path / "whole.jsonl")
    checkpoints = f"--save {tmp_path}/ckpt --save-interval 2 --override-opt-param-scheduler"
    from_buffer(f"{first} {checkpoints} --train-iters 4", buffer, 1, tmp_path / "parts.jsonl")
    resumed = f"{checkpoints} --load {tmp_path}/ckpt --lr-decay-iters 6 --rollout-shuffle-window 3 --train-iters 6"
    lines = from_buffer(resumed, buffer, 2, tmp_path / "parts.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line, reference in zip(lines, whole, strict=True):
        for key in ("loss", "grad_norm", "reward", "drift_l1"):
            assert line[key] == pytest.approx(reference[key], rel=EXACT, abs=EXACT), (key, line["step"])


def ends_early(flags: str, metrics: str) -> int:
    """The status with which Megatron leaves the process."""
    try:
        train_fixed(flags, metrics, embedded=True)
    except SystemExit as leave:
        return int(leave.code or 0)
    return -1


def test_training_ends_with_the_buffer_and_saves(tmp_path):
    buffer = fill(tmp_path / "buffer", steps(3))
    flags = f"{CENTERED} {STEP} --rollout-path {buffer} --save {tmp_path}/ckpt --save-interval 2 --train-iters 9"
    metrics = tmp_path / "metrics.jsonl"
    assert run_ranks(ends_early, 2, flags, str(metrics), megatron=True, timeout=120) == [0, 0]
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert metrics.read_text().count('"split": "train"') == 3


def test_a_following_trainer_waits_for_its_sampler(tmp_path):
    """The buffer does not even exist when training starts."""
    made = steps(3)
    writer_error: list[BaseException] = []

    def sample() -> None:
        try:
            time.sleep(2)
            writer = RolloutWriter(tmp_path / "buffer", Manifest(30, heads=HeadPolicy.lossless(8)))
            for step in made:
                time.sleep(1)
                writer.write(step)
                writer.commit()
            writer.finish_buffer()
        except BaseException as error:
            writer_error.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    flags = f"{CENTERED} {STEP} --rollout-path {tmp_path}/buffer --rollout-follow --train-iters 9"
    metrics = tmp_path / "metrics.jsonl"
    assert run_ranks(ends_early, 2, flags, str(metrics), megatron=True, timeout=120) == [0, 0]
    thread.join()
    assert not writer_error
    assert metrics.read_text().count('"split": "train"') == 3


def test_what_the_embedded_sampler_records_is_a_valid_buffer(weights, tmp_path):  # noqa: F811
    """Training from it takes the same steps."""
    flags = f"{weights['dense']} --train-iters 3 --sampler gaussian"
    record = f"{CENTERED} {STEP} {flags} --rollout-record {tmp_path}/buffer"
    recorded = train(record, 1, tmp_path / "one.jsonl", embedded=True)
    assert validate_buffer(tmp_path / "buffer").ok
    assert validate_buffer(tmp_path / "buffer").rollouts == 24
    again = from_buffer(weights["dense"], tmp_path / "buffer", 2, tmp_path / "two.jsonl")
    for line, reference in zip(again, recorded, strict=False):
        for key in ("loss", "grad_norm", "reward", "drift_l1"):
            assert line[key] == pytest.approx(reference[key], rel=EXACT, abs=EXACT), (key, line["step"])


def test_the_flags_reach_the_reader(tmp_path):
    """Each changes which rollouts a step takes: the mean rewards are those of a reader with the same settings."""
    made = [[replace(r, weight_version=r.weight_version + (r.group_id != 1)) for r in step] for step in steps(4)]
    made[2][0] = replace(made[2][0], prompt_ids=np.resize(made[2][0].prompt_ids, 20))
    buffer = fill(tmp_path / "buffer", [made[1], made[2], made[0], made[3]])
    settings: dict[str, Any] = {"shuffle_window": 5, "seed": 3, "max_staleness": 0, "policy": "drop"}
    flags = (
        "--rollout-shuffle-window 5 --rollout-seed 3 --max-staleness 0 --rollout-policy drop --train-iters 2 --lr 0 "
        "--advantage none --prompts-per-step 2 --global-batch-size 4"
    )

    def rewards(**changes: Any) -> list[float]:
        trainer = changes.pop("trainer", Trainer(max_tokens=16))
        with RolloutReader(buffer, trainer=trainer, **settings | changes) as reader:
            taken = [[r.reward for g in reader.take(2, step) for r in g.rollouts()] for step in range(2)]
        return [float(np.mean(step)) for step in taken]

    expected = rewards()
    for change in ({"shuffle_window": 1}, {"seed": 4}, {"max_staleness": None}, {"trainer": Trainer()}):
        assert rewards(**change) != expected, change
    lines = from_buffer(flags, buffer, 1, tmp_path / "metrics.jsonl")
    assert [line["reward"] for line in lines] == pytest.approx(expected, rel=1e-5)


def saved_cursor(flags: str, metrics: str) -> str | None:
    """The place in the buffer among the arguments that this rank saved."""
    from megatron.training import get_args

    train_fixed(flags, metrics, embedded=True)
    cursor: str | None = get_args().rollout_cursor
    return cursor


def test_ranks_that_do_not_read_save_the_same_place(buffer, tmp_path):
    flags = f"{CENTERED} {STEP} --rollout-path {buffer} --tensor-model-parallel-size 2 --save {tmp_path}/ckpt"
    flags += " --save-interval 9"
    cursors = run_ranks(saved_cursor, 2, flags, str(tmp_path / "metrics.jsonl"), megatron=True, timeout=120)
    assert cursors[0] is not None
    assert Cursor.from_json(cursors[0]).used == 12
    assert cursors[1] == cursors[0]


def test_what_is_left_out_is_counted(tmp_path):
    made = steps(3)
    made[1] = [replace(r, weight_version=r.weight_version + 1) for r in made[1]]
    made[2][0] = replace(made[2][0], prompt_ids=np.resize(made[2][0].prompt_ids, 20))
    said: list[str] = []
    trainer = Trainer(max_tokens=16)
    with RolloutReader(fill(tmp_path / "buffer", made), max_staleness=0, trainer=trainer, policy="drop") as reader:
        source = BufferSource(reader, 4, said.append)
        assert len(source.rollouts(1)) == 8
        assert len(reader.cursor.to_json()) > 0
        assert reader.poll(4, 0) == "ready"
    with RolloutReader(tmp_path / "buffer", trainer=trainer, policy="drop") as reader:
        source = BufferSource(reader, 12, said.append)
        assert len(source.rollouts(0)) == 22  # its group goes whole
    assert said == [
        "> step 1: skipped 4 groups that exceed --max-staleness, 4 so far",
        "> step 0: left out 2 rollouts that failed validation, 2 so far on this rank",
    ]


def test_a_rank_that_cannot_read_stops_all_with_its_reason(tmp_path):
    """A rollout that exceeds --seq-length lies in the second rank's share."""
    made = steps(1)
    long = make_rollouts(1, 2, vocab=30, head=8, prompt=20)
    buffer = fill(tmp_path / "buffer", [made[0][:4], made[0][4:6] + [replace(r, group_id=9) for r in long]])
    with pytest.raises(RankError) as caught:
        from_buffer("", buffer, 2, tmp_path / "metrics.jsonl")
    assert "the trainer takes at most 16 (--seq-length)" in str(caught.value)
    assert "another rank could not read its rollouts" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--global-batch-size 6 --prompts-per-step 4 --samples-per-prompt 2", "--global-batch-size 6 must equal"),
        ("--sampler-distribution support", "the sampler of .* does not truncate; use head"),
        ("--vocab-size 29", "true_vocab_size"),
        (f"{MOE} --moe-enable-routing-replay", "records no expert routes"),
        ("--micro-batch-tokens 8", "--micro-batch-tokens is 8; raise it"),
        ("--rollout-path nowhere", "--rollout-path nowhere: .*not a rollout buffer"),
    ],
)
def test_contradictions_are_refused_by_name(flags, message, buffer, tmp_path):
    with pytest.raises(RankError, match=message):
        from_buffer(flags, buffer, 1, tmp_path / "metrics.jsonl")


def test_a_truncating_sampler_needs_supports(tmp_path):
    manifest = Manifest(30, heads=HeadPolicy.lossless(8), sampler=SamplerFingerprint(top_p=0.9))
    RolloutWriter(tmp_path / "buffer", manifest)
    with pytest.raises(RankError, match=r"truncates \(top-p 0.9.*use support"):
        from_buffer("", tmp_path / "buffer", 1, tmp_path / "metrics.jsonl")


def test_the_reader_of_the_test_sees_what_was_written(buffer):
    """The fixtures hold what the in-memory curve was made of."""
    with RolloutReader(buffer) as reader:
        found = [r for group in reader.take(16, 0) for r in group.rollouts()]
    for rollout, wanted in zip(found, [r for step in steps() for r in step], strict=True):
        np.testing.assert_array_equal(rollout.head_logprobs, wanted.head_logprobs)
