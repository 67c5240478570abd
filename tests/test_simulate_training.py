"""Training from a simulated sampler in Megatron's real loop: live, from its recorded rollouts, and in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed import run_ranks
from tests.test_training import CENTERED, EXACT, assert_same_curve, train
from tests.train_fixed import MOE, train_fixed

SAMPLER = "--prompts-per-step 4 --samples-per-prompt 2 --sampler-precision fp8-fp4kv --reward-mode signed"


def train_and_record(flags: str, metrics: str) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """An embedded run: its metrics and the rollouts of each step."""
    from megatron_sc.sampling import EmbeddedSampler

    steps: list[list[Any]] = []
    stock = EmbeddedSampler.sample

    def sample(self: Any, model: Any, step: int, clean: bool = False) -> list[Any]:
        steps.append(stock(self, model, step, clean))
        return steps[-1]

    with mock.patch.object(EmbeddedSampler, "sample", sample):
        return train_fixed(flags, metrics, embedded=True), steps


@pytest.mark.parametrize(
    ("extra", "layout"),
    [("", "--tensor-model-parallel-size 2"), (MOE, "--expert-model-parallel-size 2")],
    ids=["tp2", "ep2"],
)
def test_training_on_its_recorded_rollouts_equals_one_rank(extra: str, layout: str, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    save = f"--train-iters 1 --lr 0 --weight-decay 0 --save {weights} --save-interval 1 --no-save-optim"
    train(f"{CENTERED} {extra} {save}", 1, tmp_path / "save.jsonl")
    flags = f"{CENTERED} --advantage none {extra} --load {weights} --finetune --no-load-optim"
    ((live, steps),) = run_ranks(train_and_record, 1, f"{flags} {SAMPLER}", str(tmp_path / "live.jsonl"), megatron=True)
    assert len(steps) == 3
    one = train(flags, 1, tmp_path / "one.jsonl", recorded=steps)
    for line, reference in zip(one, live[:3], strict=True):
        assert {key: reference[key] for key in line} == line  # sampling left no trace in the trainer
    assert one[0]["log_ratio_abs"] > 1e-4  # the sampler is not the trainer
    assert one[0]["drift_l1"] > one[0]["drift_l1_tail"] > 0
    assert_same_curve(train(f"{flags} {layout}", 2, tmp_path / "two.jsonl", recorded=steps), one, EXACT)
