"""Weights between the trainer and Hugging Face checkpoints: what a sampler loads, and what training starts from.

What is imported here does not need Megatron: a sampler on another machine waits for weights with it.

    from megatron_sc.weights import wait_for

    held = wait_for("/shared/run/weights")
    engine.load(held.path)
    held = wait_for("/shared/run/weights", other_than=held)  # returns when the trainer has published again
"""

from .config import WeightsConfig
from .versions import PublishedWeights, latest, wait_for

__all__ = ["PublishedWeights", "WeightsConfig", "latest", "wait_for"]
