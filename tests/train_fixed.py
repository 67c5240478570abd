"""Trains Megatron's real loop on recorded rollouts: runs inside the workers of ``run_ranks(..., megatron=True)``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

TINY = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 16
    --max-position-embeddings 16 --position-embedding-type rope --vocab-size 30 --tokenizer-type NullTokenizer
    --make-vocab-size-divisible-by 8 --global-batch-size 8 --lr 1e-2 --log-interval 1 --eval-interval 1000
    --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --head-size 8 --num-draws 4 --ckpt-format torch_dist
    --no-load-rng --seed 7
"""
MOE = """
    --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
    --swiglu --disable-bias-linear
"""


def train_fixed(
    flags: str,
    metrics_path: str,
    groups: int = 4,
    samples: int = 2,
    masked_steps: tuple[int, ...] = (),
    head: int = 8,
    embedded: bool = False,
    recorded: Sequence[Sequence[Any]] | None = None,
) -> list[dict[str, Any]]:
    """One training run over four made-up steps, repeated; over ``recorded`` steps of rollouts; or, ``embedded``, from
    the embedded sampler.

    Returns:
        The lines of the metrics file (the same on every rank: read after the run).
    """
    import numpy as np
    from megatron.core import mpu
    from megatron.core.enums import ModelType
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        hybrid_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_sc.training.arguments import add_arguments
    from megatron_sc.training.loop import pretrain
    from megatron_sc.training.plugin import ScoreCentering
    from megatron_sc.training.source import FixedRollouts
    from tests.hybrid_model import use_torch_norm
    from tests.rollouts import make_rollouts

    steps = recorded or [make_rollouts(groups, samples, vocab=30, head=head, seed=seed) for seed in range(4)]
    for step in masked_steps:
        for rollout in steps[step]:
            rollout.response_mask[:] = np.False_

    def source() -> FixedRollouts:
        return FixedRollouts(steps, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size())

    with mock.patch.object(sys, "argv", ["train", *TINY.split(), *flags.split()]):
        args = parse_and_validate_args(extra_args_provider=add_arguments)
    plugin = ScoreCentering.from_args(args, None if embedded else source)
    model = gpt_config_from_args(args) if args.hybrid_layer_pattern is None else hybrid_config_from_args(args)
    config = pretrain_cfg_container_from_args(args, model)
    with use_torch_norm():
        pretrain(
            config,
            plugin.datasets_provider,
            ModelType.encoder_or_decoder,
            plugin.forward_step,
            metrics_path=metrics_path,
        )
    lines = Path(metrics_path).read_text().splitlines() if Path(metrics_path).exists() else []
    return [json.loads(line) for line in lines]
