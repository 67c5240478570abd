"""Precision of the output layer, and of the weights that a sampler gets.

The output layer turns rounding into log-probabilities directly, so it must be rounded alike on both sides: float32
logits on one side alone raise the mismatch, and FP8 ones make the trainer's own log-probabilities noisy.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor


def check_head(args: argparse.Namespace) -> None:
    """Refuse flags for the output layer that the loss cannot follow, before training starts.

    Args:
        args: Megatron's parsed arguments with the plugin's.

    Raises:
        ValueError: naming the flags.
    """
    require_unquantized_head(args)
    ours = getattr(args, "sc_logits_dtype", "params")
    theirs = getattr(args, "output_logit_dtype", None)  # a later Megatron's flag; 0.19.2 has none
    if ours == "fp32" and theirs is not None and str(theirs).removeprefix("torch.") not in ("fp32", "float32"):
        raise ValueError(f"--sc-logits-dtype fp32 contradicts --output-logit-dtype {theirs}: remove one of them")


def require_unquantized_head(config: Any) -> None:
    """Refuse ``--fp8-output-proj``.

    Args:
        config: Megatron's arguments or ``TransformerConfig``.

    Raises:
        ValueError: with the reason.
    """
    if getattr(config, "fp8_output_proj", False):
        raise ValueError(
            "--fp8-output-proj rounds the operands of the output layer to MXFP8 (3 bits of mantissa): that error goes "
            "into the trainer's log-probabilities undamped, and samplers keep this layer unquantized; remove the flag"
        )


def as_sent(master: Tensor, sent: torch.dtype = torch.bfloat16) -> Tensor:
    """Master weights rounded to what the sampler receives, in their own dtype: quantize this, not the master weights.

    A sampler that receives bfloat16 weights quantizes those. Master weights near the border of two quantized values may
    fall on its other side, so quantizing them gives a sampler that does not exist, or a trainer that differs from it.

    Args:
        master: floating point, usually the optimizer's float32.
        sent: dtype of the weights that are sent to the sampler.
    """
    return master.to(sent).to(master.dtype)
