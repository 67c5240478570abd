"""The start-up self-check passes for every configuration, and stops a run whose loss does not center."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, override

import pytest
import torch
import torch.distributed as dist

from megatron_sc.objective import (
    ClippedSurrogate,
    ImportanceSampling,
    MaskedImportanceSampling,
    TruncatedImportanceSampling,
    Uniform,
)
from megatron_sc.vocab_parallel.self_check import SelfCheckError, require_centered, self_check
from tests.distributed import RankError, run_ranks
from tests.train_fixed import train_fixed

DISTRIBUTIONS = ["head", "support", "draws", "full"]
WEIGHTS = [
    Uniform(),
    ImportanceSampling(),
    TruncatedImportanceSampling(1.2),
    MaskedImportanceSampling(),
    ClippedSurrogate(),
    ClippedSurrogate(dual=3.0),
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("weight", WEIGHTS, ids=repr)
def test_every_configuration_centers(distribution, weight):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        result = self_check(distribution, weight, dtype=dtype)
        assert result.passed, (dtype, result)
        require_centered(result, "a good loss")


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_without_centering_there_is_drift(distribution):
    """The problem would show a failure: the same update without centering is far from zero."""
    assert self_check(distribution, Uniform()).uncentered > 0.1


@dataclasses.dataclass(frozen=True)
class AppliesAnother(TruncatedImportanceSampling):
    """Applies min(r, cap), but centers as if the cap were twice as high."""

    name: ClassVar[str] = "tis"

    @override
    def weighted_mass(self, logp, logq, advantages):
        return TruncatedImportanceSampling(2 * self.cap).weighted_mass(logp, logq, advantages)


@pytest.mark.parametrize("distribution", ["head", "support", "full"])
def test_a_weight_that_is_not_the_one_centered_is_found(distribution):
    result = self_check(distribution, AppliesAnother(1.2))
    assert not result.passed
    with pytest.raises(SelfCheckError, match=r"expected gradient under the sampler is 0\.0\d+ per logit"):
        require_centered(result, "--importance-weight tis")


def on_shards(distribution: str) -> tuple[bool, float]:
    result = self_check(distribution, TruncatedImportanceSampling(1.2), group=dist.group.WORLD)
    return result.passed, result.uncentered


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_it_runs_over_vocabulary_shards(distribution):
    whole = self_check(distribution, TruncatedImportanceSampling(1.2)).uncentered
    for passed, uncentered in run_ranks(on_shards, 2, distribution):
        assert passed
        assert uncentered == pytest.approx(whole, rel=1e-5)


def train_with_a_broken_weight(metrics_path: str) -> None:
    from unittest import mock

    from megatron_sc.training.config import ObjectiveConfig

    with mock.patch.object(ObjectiveConfig, "weight", return_value=AppliesAnother(1.2)):
        train_fixed("--loss-correction score_centering --micro-batch-size 2 --train-iters 1", metrics_path)


def test_training_stops_before_the_first_step(tmp_path):
    with pytest.raises(RankError, match="self-check of --sampler-distribution head --importance-weight none"):
        run_ranks(train_with_a_broken_weight, 1, str(tmp_path / "metrics.jsonl"), megatron=True)
