"""slime: ``--loss-type custom_loss --custom-loss-function-path megatron_sc.integrations.slime.loss``.

The sampler's head comes as ``rollout_topk_token_ids`` and ``rollout_topk_log_probs``, the support of a top-p sampler as
``rollout_top_p_token_ids``, ``rollout_top_p_token_offsets`` and ``rollout_top_p_log_probs``. See docs/integrations.md.
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
    """slime's custom loss function.

    Args:
        args: slime's arguments, with ``score_centering`` from ``--custom-config-path``.
        batch: the micro-batch on this rank, packed.
        logits: float32 ``[1, T, V / tp]``, before division by the temperature.
        sum_of_sample_mean: slime's reduction; a sum over tokens with ``--calculate-per-token-loss``.

    Returns:
        The loss that slime scales for Megatron, and detached scalars to log.

    Raises:
        ValueError: naming what is missing or does not fit.
    """
    if logits.dim() != 3 or logits.shape[0] != 1:
        raise ValueError(f"slime packs a micro-batch into logits [1, T, V / tp], got {list(logits.shape)}")
    return framework_loss(args, batch, logits, sum_of_sample_mean, Ranks.from_megatron())
