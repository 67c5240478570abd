"""Publishing from inside a training run: which steps, where to, and what the log says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn

from . import versions
from .config import WeightsConfig
from .export import export
from .hf_config import HFConfig
from .ranks import on_first_rank
from .versions import PublishedWeights


class Publisher:
    """Publishes the policy after every ``publish_interval`` steps, or when it is told to.

    Every rank makes the same calls with the same step: they are collective.

    Args:
        settings: with ``publish_weights`` and ``hf_checkpoint``.
        true_vocab_size: the vocabulary of the objective's softmax; None: whatever config.json has.

    Raises:
        ValueError: for a config.json that is not supported, or whose vocabulary is not the objective's.
    """

    def __init__(self, settings: WeightsConfig, true_vocab_size: int | None = None):
        if settings.publish_weights is None or settings.hf_checkpoint is None:
            raise ValueError("publishing needs --publish-weights and --hf-checkpoint")
        self.settings = settings
        self.root = Path(settings.publish_weights)
        self.config = HFConfig.read(settings.hf_checkpoint)
        if true_vocab_size not in (None, self.config.vocab_size):
            raise ValueError(
                f"--true-vocab-size is {true_vocab_size}, but the sampler's softmax will have vocab_size "
                f"{self.config.vocab_size} of {self.config.path}: the two must agree"
            )

    def after_step(self, model: Sequence[nn.Module], step: int) -> PublishedWeights | None:
        """Publish, if it is time.

        Args:
            model: the chunks of this rank.
            step: training steps done, this one included.

        Returns:
            What was published; None on the steps between.
        """
        return self.publish(model, step) if step % self.settings.publish_interval == 0 else None

    def publish(self, model: Sequence[nn.Module], step: int) -> PublishedWeights:
        """Publish now, and withdraw what was published of later steps.

        Args:
            model: the chunks of this rank.
            step: training steps done.

        Raises:
            ValueError, OSError, RuntimeError: see ``export``. Nothing is published then, and ``latest`` stays.
        """
        started = time.monotonic()
        folder: Path = on_first_rank(lambda: versions.begin(self.root, step))
        export(model, self.config, folder)
        published: PublishedWeights = on_first_rank(lambda: versions.commit(folder, self.settings.publish_keep))
        if dist.get_rank() == 0:
            print(f"> published step {step} in {time.monotonic() - started:.1f} s: {published.path}", flush=True)
        return published
