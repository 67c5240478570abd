"""Killed processes, concurrent ones, damaged buffers: a few of what ``benchmarks/buffer_faults.py`` runs at length."""

import numpy as np
import pytest

from benchmarks import buffer_faults
from benchmarks.buffer_faults import MEANINGS, check_mutation, fill, follow, kill_trainer, kill_writer, read_all
from megatron_sc.rollouts import validate


def test_a_killed_writer_loses_nothing_that_it_committed():
    announced, found = kill_writer(10)
    assert 30 <= announced <= found


def test_a_killed_trainer_uses_every_group_once():
    assert kill_trainer(10) == 80


def test_two_writers_and_a_follower():
    assert follow(2) > 8


def test_mutations_are_refused_or_change_nothing():
    outcome = buffer_faults.run_mutations(300)
    assert outcome.total() == 300
    assert outcome["refused"] > 250


@pytest.mark.parametrize("meaning", list(MEANINGS))
def test_every_change_of_meaning_is_refused(tmp_path, meaning):
    """With right checksums: only validation can tell."""
    fill(tmp_path, range(5, 8))
    original = read_all(tmp_path)
    buffer_faults._rewrite(tmp_path, meaning, np.random.default_rng(0))
    assert check_mutation(tmp_path, original) == "refused"


def test_mutations_notice_a_validator_that_sleeps(monkeypatch):
    monkeypatch.setattr(validate, "_check_values", lambda *_: None)
    with pytest.raises(AssertionError, match="silently changed"):
        buffer_faults.run_mutations(60)
