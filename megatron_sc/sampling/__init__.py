"""The embedded sampler: rollouts from a distorted copy of the trainer."""

from .config import SamplerConfig
from .distortion import (
    Distortion,
    GaussianWeights,
    NoDistortion,
    QuantizedWeights,
    distorted_weights,
    sampler_weights,
    swapped_weights,
)
from .embedded import EmbeddedSampler, Evaluation
from .generate import Generation, SamplingParameters, generate
from .groups import ParallelGroups
from .shards import unwrap
from .simulated import simulated
from .tasks import Countdown, Reverse, Task, build_task, reward

__all__ = [
    "Countdown",
    "Distortion",
    "EmbeddedSampler",
    "Evaluation",
    "GaussianWeights",
    "Generation",
    "NoDistortion",
    "ParallelGroups",
    "QuantizedWeights",
    "Reverse",
    "SamplerConfig",
    "SamplingParameters",
    "Task",
    "build_task",
    "distorted_weights",
    "generate",
    "reward",
    "sampler_weights",
    "simulated",
    "swapped_weights",
    "unwrap",
]
