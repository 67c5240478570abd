"""Micro-batches by a budget of tokens: everything once, within the budget, and no more of them than needed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sc.rollouts import RolloutError
from megatron_sc.training.packing import pack_by_tokens, pack_in_order, spread

lengths = st.lists(st.integers(1, 40), max_size=30)


@given(lengths, st.integers(40, 200), st.sampled_from([1, 2, 8]))
def test_every_rollout_once_and_within_the_budget(lengths, budget, multiple):
    packed = pack_by_tokens(lengths, budget, multiple)
    assert sorted(i for each in packed for i in each.rollouts) == list(range(len(lengths)))
    for each in packed:
        assert each.rows == len(each.rollouts) > 0
        assert each.positions % multiple == 0
        assert (
            max(lengths[i] for i in each.rollouts) <= each.positions < max(lengths[i] for i in each.rollouts) + multiple
        )
        assert each.rows * each.positions <= budget


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(9, 24))
def test_no_division_needs_fewer_micro_batches(lengths, budget):
    def divisions(items):
        if not items:
            yield []
            return
        first, rest = items[0], items[1:]
        for size in range(len(rest) + 1):
            for others in itertools.combinations(rest, size):
                left = list(rest)
                for other in others:
                    left.remove(other)
                for division in divisions(left):
                    yield [[first, *others], *division]

    fewest = min(
        len(division) for division in divisions(lengths) if all(len(part) * max(part) <= budget for part in division)
    )
    assert len(pack_by_tokens(lengths, budget, 1)) == fewest


@given(lengths, st.integers(0, 40), st.sampled_from([1, 4]))
def test_spread_keeps_the_rollouts_and_never_grows_a_micro_batch(lengths, more, multiple):
    packed = pack_by_tokens(lengths, 80, multiple)
    result = spread(packed, len(packed) + more, lengths, multiple)
    assert len(result) == len(packed) + more
    assert sorted(i for each in result for i in each.rollouts) == list(range(len(lengths)))
    assert all(each.rows * each.positions <= 80 for each in result)
    assert all(each.positions >= max((lengths[i] for i in each.rollouts), default=1) for each in result)
    if any(not each.rollouts for each in result):  # an empty one only where nothing can be divided
        assert all(len(each.rollouts) <= 1 for each in result)


def test_a_rollout_that_exceeds_the_budget_is_named():
    with pytest.raises(RolloutError, match="rollout 1 has 9 tokens, padded 12, but --micro-batch-tokens is 10"):
        pack_by_tokens([3, 9, 4], 10, 4)


def test_in_order_keeps_the_shape():
    packed = pack_in_order(5, 2, 16)
    assert [each.rollouts for each in packed] == [(0, 1), (2, 3), (4,)]
    assert {(each.rows, each.positions) for each in packed} == {(2, 16)}
