"""The trainer's side of a comparison, from the flags of its launch command: no Megatron is started."""

from __future__ import annotations

import argparse
import shlex

FLAGS = {
    "--fp8-format": {"dest": "fp8", "choices": ("e4m3", "hybrid")},
    "--fp8-recipe": {
        "default": "delayed",
        "choices": ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    },
    "--fp8-margin": {"type": int, "default": 0},
    "--fp8-amax-history-len": {"type": int, "default": 1},
    "--fp8-amax-compute-algo": {"default": "most_recent", "choices": ("most_recent", "max")},
    "--no-fp8-wgrad": {"dest": "fp8_wgrad", "action": "store_false"},
    "--fp8-param-gather": {"action": "store_true"},
    "--fp8-output-proj": {"action": "store_true"},
    "--fp4-format": {"dest": "fp4", "choices": ("e2m1",)},
    "--fp4-recipe": {"default": "nvfp4", "choices": ("nvfp4", "custom")},
    "--fp4-param-gather": {"action": "store_true"},
    "--first-last-layers-bf16": {"action": "store_true"},
    "--num-layers-at-start-in-bf16": {"type": int, "default": 1},
    "--num-layers-at-end-in-bf16": {"type": int, "default": 1},
    "--te-precision-config-file": {},
    "--transformer-impl": {"default": "transformer_engine"},
    "--bf16": {"action": "store_true"},
    "--fp16": {"action": "store_true"},
    "--num-layers": {"type": int},
    "--num-experts": {"type": int},
    "--moe-grouped-gemm": {"action": "store_true"},
    "--moe-router-load-balancing-type": {"nargs": "+", "default": "aux_loss"},
    "--moe-expert-capacity-factor": {"type": float},
    "--moe-input-jitter-eps": {"type": float},
    "--pipeline-model-parallel-size": {"type": int, "default": 1},
    "--num-layers-per-virtual-pipeline-stage": {"type": int},
    "--num-virtual-stages-per-pipeline-rank": {"type": int},
    "--decoder-first-pipeline-num-layers": {"type": int},
    "--decoder-last-pipeline-num-layers": {"type": int},
    "--pipeline-model-parallel-layout": {},
    "--account-for-embedding-in-pipeline-split": {"action": "store_true"},
    "--account-for-loss-in-pipeline-split": {"action": "store_true"},
    "--tensor-model-parallel-size": {"type": int, "default": 1},
    "--context-parallel-size": {"type": int, "default": 1},
    "--sequence-parallel": {"action": "store_true"},
    "--micro-batch-size": {"type": int, "default": 1},
    "--vocab-size": {"type": int},
}
"""Megatron's flags that a comparison reads, with Megatron's names, defaults and values."""


def parse_trainer_flags(text: str) -> argparse.Namespace:
    """The flags of ``FLAGS``, of the objective and of the buffer in a launch command; all others are left out.

    Args:
        text: the flags, or the whole command.

    Raises:
        SystemExit: as argparse, for a bad value.
    """
    from ..training.config import ObjectiveConfig
    from ..training.flags import add_flags
    from ..training.rollout_config import RolloutConfig

    parser = argparse.ArgumentParser(prog="--trainer", allow_abbrev=False, add_help=False)
    for flag, options in FLAGS.items():
        parser.add_argument(flag, **options)  # type: ignore[arg-type]
    for config in (ObjectiveConfig, RolloutConfig):
        add_flags(parser.add_argument_group(config.__name__), config)
    return parser.parse_known_args(shlex.split(text))[0]
