"""Rollouts: their schema, and (later) their buffer."""

from .rollout import Rollout, RolloutError

__all__ = ["Rollout", "RolloutError"]
