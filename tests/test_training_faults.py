"""The real loop, killed: a little of what ``benchmarks/training_faults.py`` runs at length."""

from benchmarks.training_faults import kill_megatron


def test_a_killed_loop_trains_on_every_rollout_once():
    assert kill_megatron(kills=2, steps=12) >= 1
