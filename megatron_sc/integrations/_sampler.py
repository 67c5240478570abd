"""What a framework's batch records of the sampler, as the loss takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..objective import SamplerDistribution, Support, TopKHead
from ._config import FrameworkObjective
from ._tokens import LocalTokens

TOPK_IDS, TOPK_LOGPROBS = "rollout_topk_token_ids", "rollout_topk_log_probs"
"""int ``[response, k]``, -1 is padding, and float ``[response, k]``, log q after temperature, -inf is padding."""

RAGGED_IDS, RAGGED_OFFSETS, RAGGED_LOGPROBS = (
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "rollout_top_p_log_probs",
)
"""int ``[m]``; int ``[response + 1]``, row i holds entries offsets[i] to offsets[i + 1]; float ``[m]``."""


def sampler_distribution(
    batch: Mapping[str, Any], objective: FrameworkObjective, local: LocalTokens
) -> SamplerDistribution | None:
    """What the batch records of the sampler; None where nothing is recorded and nothing is centered."""
    recorded = any(batch.get(key) is not None for key in (TOPK_IDS, RAGGED_IDS))
    if not objective.centers and not recorded:
        return None
    if objective.sampler_distribution == "support" and batch.get(RAGGED_IDS) is not None:
        return _ragged_support(local)
    ids, logprobs = local.of_rank(TOPK_IDS), local.of_rank(TOPK_LOGPROBS)
    if ids.dim() != 2 or ids.shape != logprobs.shape:
        raise ValueError(
            f"{TOPK_IDS} {list(ids.shape)} and {TOPK_LOGPROBS} {list(logprobs.shape)} must both be [response, k]"
        )
    kind = Support if objective.sampler_distribution == "support" else TopKHead
    return kind(local.scatter(ids.long(), -1), local.scatter(logprobs.float(), -torch.inf))


def _ragged_support(local: LocalTokens) -> Support:
    """Rows without a response token have no entries. Offsets are read on the CPU, where the frameworks keep them."""
    all_ids, all_logprobs = local.values(RAGGED_IDS), local.values(RAGGED_LOGPROBS)
    all_offsets = [torch.as_tensor(offsets).cpu() for offsets in local.values(RAGGED_OFFSETS)]
    counts = torch.zeros(local.rows, dtype=torch.int64)
    ids, logprobs = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0)]
    for span in sorted(local.spans, key=lambda span: span.row):
        offsets = all_offsets[span.sample]
        if len(offsets) != local.batch["response_lengths"][span.sample] + 1:
            raise ValueError(
                f"{RAGGED_OFFSETS} of sample {span.sample} has {len(offsets)} entries, expected one more than the "
                f"response's {local.batch['response_lengths'][span.sample]} tokens"
            )
        first, last = int(offsets[span.start]), int(offsets[span.stop])
        counts[span.row : span.row + len(span)] = offsets[span.start : span.stop + 1].diff()
        ids.append(torch.as_tensor(all_ids[span.sample][first:last]).long().cpu())
        logprobs.append(torch.as_tensor(all_logprobs[span.sample][first:last]).float().cpu())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return Support.ragged(torch.cat(ids).to(local.device), torch.cat(logprobs).to(local.device), offsets)
