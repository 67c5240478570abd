"""A Megatron model to run forward passes with: built, and loaded from a checkpoint, as the training loop would."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from . import cpu


def evaluation_model(flags: Sequence[str], program: str) -> tuple[nn.Module, argparse.Namespace]:
    """Initialize Megatron from its flags and build this rank's model, without optimizer, wrappers or data.

    Call it once in a process, before anything of Megatron is imported. Under torchrun every rank calls it.

    Args:
        flags: Megatron's and the plugin's, as for a launch script; ``--load`` names a checkpoint, of which the
            weights alone are read.
        program: the name in front of the parser's messages.

    Returns:
        The GPTModel, in Float16Module under ``--bf16``, in evaluation mode; and Megatron's validated arguments.

    Raises:
        ValueError: pipeline parallelism, or a ``--load`` without a checkpoint.
    """
    cpu.install()
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.checkpointing import checkpoint_exists, load_checkpoint
    from megatron.training.initialize import initialize_megatron

    from .arguments import add_arguments

    given = sys.argv
    sys.argv = [program, *flags]  # Megatron's parser reads nothing else
    try:
        args = parse_and_validate_args(
            extra_args_provider=add_arguments, args_defaults={"tokenizer_type": "NullTokenizer", "micro_batch_size": 1}
        )
    finally:
        sys.argv = given
    if args.pipeline_model_parallel_size > 1:
        raise ValueError("a model in pipeline stages cannot be scored here; use --pipeline-model-parallel-size 1")
    if args.load and not checkpoint_exists(args.load):  # a fresh model must not stand for one that was not found
        raise ValueError(f"--load {args.load} holds no checkpoint")
    args.finetune = args.no_load_optim = args.no_load_rng = True
    initialize_megatron()
    config: Any = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    builder = config.model.get_builder_cls()(config.model)
    models = builder.build_distributed_models(
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(), ddp_config=config.ddp, wrap_with_ddp=False
    )
    if args.load:
        load_checkpoint(models, None, None)
    (model,) = models
    return model.eval(), args
