"""miles: ``--loss-type custom_loss --custom-loss-function-path megatron_sc.integrations.miles.loss``.

``--rollout-top-logprobs-num K`` records the sampler's head, or the whole support of a truncating sampler, as
``rollout_topk_token_ids`` and ``rollout_topk_log_probs``. See docs/integrations.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ._common import Ranks, Reduce, framework_loss


def loss(
    args: argparse.Namespace, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reduce
) -> tuple[Tensor, dict[str, Tensor]]:
    """miles' custom loss function, on its Megatron backend.

    Args:
        args: miles' arguments, with ``score_centering`` from ``--custom-config-path``.
        batch: the micro-batch on this rank, packed (``--qkv-format thd``) or padded (``bshd``, with ``max_seq_lens``).
        logits: ``[1, T, V / tp]`` or ``[b, s / cp, V / tp]``, before division by the temperature.
        sum_of_sample_mean: miles' reduction; a sum over tokens with ``--calculate-per-token-loss``.

    Returns:
        The loss that miles scales for Megatron, and detached scalars to log.

    Raises:
        ValueError: naming what is missing or does not fit.
    """
    if args.qkv_format not in ("thd", "bshd"):
        raise ValueError(f"--qkv-format must be thd or bshd, got {args.qkv_format!r}")
    max_seq_len = None
    if args.qkv_format == "bshd":
        if batch.get("max_seq_lens") is None:
            raise ValueError("the batch has no max_seq_lens, which --qkv-format bshd needs")
        max_seq_len = int(batch["max_seq_lens"][0])
    if logits.dim() != 3 or (max_seq_len is None and logits.shape[0] != 1):
        raise ValueError(f"logits must be [1, T, V / tp] (thd) or [b, s, V / tp] (bshd), got {list(logits.shape)}")
    return framework_loss(args, batch, logits, sum_of_sample_mean, Ranks.from_megatron(), max_seq_len)
