"""Importance weights, the types of the sampler's distribution, and advantages."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import PROPERTY, WEIGHTS

from megatron_sc.objective import (
    IMPORTANCE_WEIGHTS,
    ClippedSurrogate,
    Draws,
    FullVocabulary,
    ImportanceSampling,
    MaskedImportanceSampling,
    Support,
    TopKHead,
    TruncatedImportanceSampling,
    Uniform,
    compute_advantages,
)


def f(name: str, ratio: float, advantage: float) -> float:
    """The article's table, for the bounds of `WEIGHTS`."""
    if name == "none":
        return 1.0
    if name == "is":
        return ratio
    if name == "tis":
        return min(ratio, 1.3)
    if name == "mis":
        return ratio if 0.7 <= ratio <= 1.8 else 0.0
    if advantage >= 0:
        return ratio if ratio <= 1.3 else 0.0
    return ratio if ratio >= 0.8 and (name == "ppo" or ratio <= 1.6) else 0.0


def log(x: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64).log().to(dtype)


probability = st.floats(1e-6, 1.0)


@PROPERTY
@given(p=probability, q=probability, advantage=st.sampled_from([-2.0, 0.0, 0.5]))
@pytest.mark.parametrize("name", WEIGHTS)
def test_both_forms_of_a_weight_are_the_same_f(name, p, q, advantage):
    weight, a = WEIGHTS[name], torch.tensor(advantage)
    expected = f(name, p / q, advantage)
    assert float(weight.token_weight(log(p) - log(q), a)) == pytest.approx(expected, rel=1e-9)
    assert float(weight.weighted_mass(log(p), log(q), a)) == pytest.approx(q * expected, rel=1e-9)


@pytest.mark.parametrize(
    ("weight", "ratio", "advantage", "expected"),
    [
        (TruncatedImportanceSampling(2.0), 1.999, 1.0, 1.999),
        (TruncatedImportanceSampling(2.0), 2.001, 1.0, 2.0),
        (MaskedImportanceSampling(0.5, 5.0), 0.499, 1.0, 0.0),
        (MaskedImportanceSampling(0.5, 5.0), 0.501, 1.0, 0.501),
        (MaskedImportanceSampling(0.5, 5.0), 4.999, 1.0, 4.999),
        (MaskedImportanceSampling(0.5, 5.0), 5.001, 1.0, 0.0),
        (ClippedSurrogate(0.2, 0.3), 1.299, 1.0, 1.299),
        (ClippedSurrogate(0.2, 0.3), 1.301, 1.0, 0.0),
        (ClippedSurrogate(0.2, 0.3), 0.001, 1.0, 0.001),
        (ClippedSurrogate(0.2, 0.3), 0.799, -1.0, 0.0),
        (ClippedSurrogate(0.2, 0.3), 0.801, -1.0, 0.801),
        (ClippedSurrogate(0.2, 0.3), 50.0, -1.0, 50.0),
        (ClippedSurrogate(0.2, 0.3, dual=3.0), 2.999, -1.0, 2.999),
        (ClippedSurrogate(0.2, 0.3, dual=3.0), 3.001, -1.0, 0.0),
        (ClippedSurrogate(1.0, 0.3), 1e-9, -1.0, 1e-9),
        (MaskedImportanceSampling(0.0, 5.0), 1e-9, 1.0, 1e-9),
    ],
)
def test_bounds(weight, ratio, advantage, expected):
    assert float(weight.token_weight(log(ratio), torch.tensor(advantage))) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", WEIGHTS)
def test_nothing_overflows_and_nothing_is_nan(name):
    weight, minus_inf = WEIGHTS[name], torch.tensor(-torch.inf)
    for advantage in (torch.tensor(1.0), torch.tensor(-1.0)):
        assert torch.isfinite(weight.token_weight(torch.tensor([-500.0, 0.0, 500.0]), advantage)).all()
        for logp in (minus_inf, torch.tensor(-700.0), torch.tensor(0.0)):
            # What the sampler never samples has no mass, whatever p is.
            assert float(weight.weighted_mass(logp, minus_inf, advantage)) == 0
        mass = weight.weighted_mass(minus_inf, torch.tensor(-1.0), advantage)
        assert float(mass) == (pytest.approx(math.exp(-1)) if name == "none" else 0.0)
        assert torch.isfinite(weight.weighted_mass(torch.tensor(-1.0), torch.tensor(-700.0), advantage))


def test_the_bounds_are_as_precise_as_the_logits():
    """In float64 a ratio of 1.2 (1 + 1e-10) is beyond a clip at 1.2; a bound held in float32 would let it pass."""
    weight = ClippedSurrogate(low=0.2, high=0.2)
    above, below = log(1.2 * (1 + 1e-10)), log(0.8 * (1 - 1e-10))
    assert float(weight.token_weight(above, torch.tensor(1.0))) == 0
    assert float(weight.token_weight(below, torch.tensor(-1.0))) == 0
    assert float(weight.token_weight(log(1.2 * (1 - 1e-10)), torch.tensor(1.0))) > 1
    assert float(weight.token_weight(log(0.8 * (1 + 1e-10)), torch.tensor(-1.0))) > 0.79


def test_every_weight_has_a_name_of_its_own():
    assert {name: cls.name for name, cls in IMPORTANCE_WEIGHTS.items()} == {n: n for n in IMPORTANCE_WEIGHTS}
    assert set(IMPORTANCE_WEIGHTS) == {"none", "is", "tis", "mis", "ppo"}
    assert [cls for cls in IMPORTANCE_WEIGHTS.values() if not cls.needs_ratio] == [Uniform]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TruncatedImportanceSampling(0.0), "cap must be positive and finite, got 0.0"),
        (lambda: TruncatedImportanceSampling(math.inf), "cap must be positive and finite, got inf"),
        (lambda: TruncatedImportanceSampling(math.nan), "cap must be positive and finite, got nan"),
        (lambda: MaskedImportanceSampling(2.0, 1.0), "0 <= low < high, got low=2.0, high=1.0"),
        (lambda: MaskedImportanceSampling(-0.1, 1.0), "0 <= low < high"),
        (lambda: ClippedSurrogate(1.5, 0.2), "0 <= low <= 1 and high >= 0, got low=1.5"),
        (lambda: ClippedSurrogate(0.2, -0.1), "high >= 0"),
        (lambda: ClippedSurrogate(0.2, 0.2, dual=1.0), "dual must be above 1, got 1.0"),
    ],
)
def test_a_weight_refuses_bounds_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_importance_sampling_is_the_identity():
    assert float(ImportanceSampling().token_weight(log(3.5), torch.tensor(1.0))) == pytest.approx(3.5)


# Distributions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopKHead(torch.zeros(2, 5).long(), torch.zeros(2, 4)), r"ids are \[2, 5\] but logprobs are \[2, 4\]"),
        (lambda: TopKHead(torch.zeros(2, 3), torch.zeros(2, 3)), "ids must be integers, got torch.float32"),
        (lambda: TopKHead(torch.zeros(2, 3).long(), torch.zeros(2, 3).long()), "logprobs must be floating point"),
        (lambda: TopKHead(torch.zeros(6).long(), torch.zeros(6)), r"must be \[n, k\], got \[6\].*TopKHead.ragged"),
        (
            lambda: TopKHead(torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.zeros(3)),
            r"log_tail_mass must be \[2\], one entry a row, got \[3\]",
        ),
        (
            lambda: TopKHead.ragged(torch.zeros(6).long(), torch.zeros(6), torch.tensor([0, 4])),
            r"offsets must rise from 0 to 6, got \[0, 4\]",
        ),
        (
            lambda: TopKHead.ragged(torch.zeros(6).long(), torch.zeros(6), torch.tensor([1, 6])),
            "offsets must rise from 0 to 6",
        ),
        (
            lambda: Support.ragged(torch.zeros(6).long(), torch.zeros(6), torch.tensor([0, 4, 3, 6])),
            "Support.ragged: offsets must rise",
        ),
        (
            lambda: Support.ragged(torch.zeros(6).long(), torch.zeros(6), torch.tensor([], dtype=torch.int64)),
            "Support.ragged",
        ),
        (
            lambda: TopKHead.ragged(torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.tensor([0, 3, 6])),
            r"ids must be \[m\] and offsets \[n \+ 1\]",
        ),
        (
            lambda: TopKHead.ragged(torch.zeros(2).long(), torch.zeros(2), torch.zeros(2, device="meta").long()),
            "offsets must be on the CPU",
        ),
        (lambda: Draws(torch.zeros(2, 0).long()), r"\[n, K\] with K >= 1, got \[2, 0\]"),
        (lambda: Draws(torch.zeros(2).long()), r"\[n, K\] with K >= 1, got \[2\]"),
        (lambda: Draws(torch.zeros(2, 3)), "Draws: ids must be integers, got torch.float32"),
        (lambda: Draws(torch.zeros(2, 3).long(), torch.zeros(2, 4)), r"ids are \[2, 3\] but logprobs are \[2, 4\]"),
        (lambda: FullVocabulary(torch.zeros(5)), r"logprobs must be \[n, V\], got \[5\]"),
    ],
)
def test_a_distribution_refuses_shapes_that_disagree(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_rows():
    ids, logprobs = torch.zeros(6).long(), torch.zeros(6)
    assert TopKHead(ids.view(2, 3), logprobs.view(2, 3)).rows == 2
    assert TopKHead.ragged(ids, logprobs, torch.tensor([0, 0, 4, 6])).rows == 3
    assert Support.ragged(ids, logprobs, torch.tensor([0, 6])).rows == 1
    assert Draws(ids.view(2, 3)).rows == 2
    assert FullVocabulary(logprobs.view(3, 2)).rows == 3


def test_nothing_is_copied():
    ids, logprobs = torch.zeros(2, 3).long(), torch.zeros(2, 3)
    head = TopKHead(ids, logprobs)
    assert head.ids is ids
    assert head.logprobs is logprobs


# Advantages ----------------------------------------------------------------------------------------------------------

REWARDS, GROUPS = [1.0, 0.0, 0.0, 1.0, 3.0, 5.0], ["a", "a", "b", "a", "b", "a"]


def by_hand(baseline: str, normalize: bool) -> list[float]:
    advantages = []
    for i, (reward, group) in enumerate(zip(REWARDS, GROUPS, strict=True)):
        peers = [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group]
        others = [r for j, (r, g) in enumerate(zip(REWARDS, GROUPS, strict=True)) if g == group and j != i]
        base = {"none": 0.0, "group": sum(peers) / len(peers), "loo": sum(others) / len(others)}[baseline]
        mean = sum(peers) / len(peers)
        std = math.sqrt(sum((r - mean) ** 2 for r in peers) / len(peers))
        advantages.append((reward - base) / (std if normalize else 1.0))
    return advantages


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("baseline", ["none", "group", "loo"])
def test_advantages(baseline, normalize):
    got = compute_advantages(REWARDS, GROUPS, baseline, normalize_std=normalize)
    assert got.dtype == np.float32
    assert got.tolist() == pytest.approx(by_hand(baseline, normalize), abs=1e-6)


def test_the_mean_of_a_group_is_removed():
    assert compute_advantages([1, 0, 1, 0, 0, 0, 0, 0], [0] * 8, "group").tolist() == [0.75, -0.25] * 2 + [-0.25] * 4


@pytest.mark.parametrize("baseline", ["none", "group", "loo"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6 + 0.1])
def test_the_standard_deviation_is_safe_when_all_rewards_agree(baseline, reward):
    """The mean of eight times 0.1 is not 0.1; dividing that rounding by itself would give advantages of order 1."""
    got = compute_advantages([reward] * 7, [3] * 7, baseline, normalize_std=True)
    assert got.tolist() == [0.0] * 7


def test_a_rollout_alone_in_its_group():
    assert compute_advantages([2.0, 1.0], [0, 1], "group").tolist() == [0.0, 0.0]
    assert compute_advantages([2.0, 1.0], [0, 1], "none").tolist() == [2.0, 1.0]
    with pytest.raises(ValueError, match=r"group 7 has one.*--samples-per-prompt"):
        compute_advantages([2.0, 1.0, 1.0], [7, 1, 1], "loo")


def test_no_rollouts():
    for baseline in ("none", "group", "loo"):
        assert compute_advantages([], [], baseline, normalize_std=True).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "groups", "baseline", "message"),
    [
        ([1.0], [0], "mean", "must be one of .*group.*got 'mean'"),
        ([1.0, 2.0], [0], "group", r"rewards \(2,\) and group_ids \(1,\)"),
        ([[1.0]], [[0]], "group", "one-dimensional"),
        ([1.0, math.nan], [0, 5], "group", r"rollout 1 \(group 5\) is nan"),
        ([math.inf, 1.0], [4, 5], "none", r"rollout 0 \(group 4\) is inf"),
    ],
)
def test_advantages_refuse(rewards, groups, baseline, message):
    with pytest.raises(ValueError, match=message):
        compute_advantages(rewards, groups, baseline)
