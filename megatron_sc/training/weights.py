"""What a training run does with Hugging Face weights: the calls that its loop makes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..weights import WeightsConfig
from ..weights.hf_config import HFConfig
from ..weights.load import load_hf_weights
from ..weights.publisher import Publisher
from .flags import from_args


class RunWeights:
    """Starts a run from a Hugging Face checkpoint and publishes its policy, as far as the flags ask for it.

        weights = RunWeights.from_args(args)
        weights.start(model, optimizer, args.iteration)  # once, after Megatron's setup_model_and_optimizer
        weights.after_step(model, step)                  # after every training step, with the steps done

    Every rank makes the same calls: they are collective. ``model`` is the list of this rank's chunks, as Megatron
    passes it around.

    Args:
        settings: what to do.
        true_vocab_size: the vocabulary of the objective's softmax; None: whatever config.json has.
    """

    def __init__(self, settings: WeightsConfig, true_vocab_size: int | None = None):
        self.settings = settings
        self.publisher = None if settings.publish_weights is None else Publisher(settings, true_vocab_size)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> RunWeights:
        """From Megatron's parsed and validated arguments.

        Raises:
            ValueError: naming the flags that contradict each other, or the file and the key of ``config.json``.
        """
        settings = from_args(WeightsConfig, args)
        used = "--publish-weights" if settings.publish_weights is not None else "--load-hf-weights"
        if settings.publish_weights is not None or settings.load_hf_weights:
            for flag, spreads in (
                ("--use-megatron-fsdp", args.use_megatron_fsdp),
                ("--use-torch-fsdp2", args.use_torch_fsdp2),
                ("--tensor-parallel-num-weight-shards", args.gtp_weight_remat_size > 1),
                ("--expert-tensor-parallel-num-weight-shards", args.expert_gtp_weight_remat_size > 1),
            ):
                if spreads:
                    raise ValueError(f"{used} does not work with {flag}, which splits parameters further: remove it")
        if settings.load_hf_weights:
            for flag, loads in (("--finetune", args.finetune), ("--pretrained-checkpoint", args.pretrained_checkpoint)):
                if loads:
                    raise ValueError(f"--load-hf-weights would overwrite what {flag} loads: remove one of them")
            for flag, rounds in (
                ("--fp8-param-gather", args.fp8_param_gather),
                ("--fp4-param-gather", args.fp4_param_gather),
            ):
                if rounds:
                    raise ValueError(
                        f"--load-hf-weights with {flag} would start the optimizer from rounded weights: load and save "
                        "a checkpoint without the flag, then continue from that"
                    )
        return cls(settings, (args.true_vocab_size or args.vocab_size) if args.loss_correction is not None else None)

    def start(self, model: Sequence[nn.Module], optimizer: Any, step: int) -> None:
        """Load, unless the run continues from a checkpoint, and publish what it starts from.

        Args:
            model: this rank's chunks.
            optimizer: Megatron's, which is told of the loaded weights; None where nothing is trained.
            step: training steps already done: 0, or those of the checkpoint that Megatron loaded.

        Raises:
            ValueError, OSError, RuntimeError: see ``load_hf_weights`` and ``export``.
        """
        if self.settings.load_hf_weights and step == 0:
            load_hf_weights(model, HFConfig.read(self.settings.hf_checkpoint or ""))
            if optimizer is not None:
                optimizer.reload_model_params()
        if self.publisher is not None:
            self.publisher.publish(model, step)

    def after_step(self, model: Sequence[nn.Module], step: int) -> None:
        """Publish, if it is time.

        Args:
            model: this rank's chunks.
            step: training steps done, this one included.

        Raises:
            ValueError, OSError, RuntimeError: see ``export``.
        """
        if self.publisher is not None:
            self.publisher.after_step(model, step)
