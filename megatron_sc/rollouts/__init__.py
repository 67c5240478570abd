"""Rollouts: what they are, and the buffer that carries them from samplers to the trainer."""

from .codec import HeadPolicy
from .cursor import Cursor
from .problem import BufferRefusedError, Problem
from .reader import EndOfBufferError, Group, GroupRef, RolloutReader, balanced_shares, equal_shares
from .rollout import Rollout, RolloutError
from .schema import ExpertRoutes, Manifest, SamplerFingerprint
from .table import RolloutTable
from .validate import Trainer
from .writer import RolloutWriter

__all__ = [
    "BufferRefusedError",
    "Cursor",
    "EndOfBufferError",
    "ExpertRoutes",
    "Group",
    "GroupRef",
    "HeadPolicy",
    "Manifest",
    "Problem",
    "Rollout",
    "RolloutError",
    "RolloutReader",
    "RolloutTable",
    "RolloutWriter",
    "SamplerFingerprint",
    "Trainer",
    "balanced_shares",
    "equal_shares",
]
