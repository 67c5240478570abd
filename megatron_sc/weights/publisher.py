"""Publishing from inside a training run: which steps, where to, and what the log says."""

from __future__ import annotations

import argparse
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
    """Publishes the policy at the start of training and after every ``publish_interval`` steps.

        publisher = Publisher(settings)
        publisher.start(model, step)        # once, after the checkpoint was loaded
        publisher.after_step(model, step)   # after every training step

    Every rank makes the same calls with the same step: they are collective. ``model`` is what Megatron's
    ``setup_model_and_optimizer`` returns, one chunk for each virtual pipeline stage.

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

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Publisher | None:
        """From Megatron's parsed arguments with our flags; None without ``--publish-weights``.

        Raises:
            ValueError: naming the flags that contradict each other.
        """
        from ..training.flags import from_args

        settings = from_args(WeightsConfig, args)
        if settings.publish_weights is None:
            return None
        refuse_sharded_parameters(args, "--publish-weights")
        return cls(settings, args.true_vocab_size)

    def start(self, model: Sequence[nn.Module], step: int) -> PublishedWeights:
        """Publish the weights that training starts or continues from, and withdraw what was published after them.

        Args:
            model: the chunks of this rank.
            step: training steps already done: 0, or the loaded checkpoint's.
        """
        return self.publish(model, step)

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
        """Publish now.

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


def refuse_sharded_parameters(args: argparse.Namespace, flag: str) -> None:
    """Refuse data parallelism that leaves no rank with whole parameters.

    Raises:
        ValueError: naming the flags.
    """
    for other in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if getattr(args, other, False):
            raise ValueError(f"{flag} does not work with --{other.replace('_', '-')}: remove one of them")
