"""The response tokens that this rank's logits predict, from a framework's batch: lists with one entry a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._layout import Span

_RECORD = ": the sampler's distribution must be recorded when a token is generated, see docs/integrations.md"
_WHY = {
    "rollout_topk_token_ids": _RECORD,
    "rollout_topk_log_probs": _RECORD,
    "rollout_top_p_token_offsets": _RECORD,
    "rollout_top_p_log_probs": _RECORD,
    "rollout_log_probs": ": the importance weight needs the sampler's log-probability of each token",
}


class LocalTokens:
    """n response tokens and their rows in the logits.

    Args:
        batch: see ``framework_loss``.
        spans: from ``response_spans``.
        rows: of the flattened logits.
        device: where tensors are wanted.
    """

    def __init__(self, batch: Mapping[str, Any], spans: Sequence[Span], rows: int, device: torch.device):
        self.batch = batch
        self.spans = spans
        self.rows = rows
        self.device = device
        ranges = [torch.arange(span.row, span.row + len(span)) for span in spans]
        self.index = torch.cat([torch.arange(0), *ranges]).to(device)  # [n]

    def scatter(self, values: Tensor, otherwise: float | bool) -> Tensor:
        """``[n, ...]`` -> ``[rows, ...]``."""
        out = torch.full((self.rows, *values.shape[1:]), otherwise, dtype=values.dtype, device=self.device)
        return out.index_copy_(0, self.index, values)

    def tokens(self) -> Tensor:
        """Sampled ids, int64 ``[n]``."""
        values = self.values("unconcat_tokens")
        prompts = [t - r for t, r in zip(self.batch["total_lengths"], self.batch["response_lengths"], strict=True)]
        parts = [torch.as_tensor(values[0][:0])]  # the dtype, where this rank has no response token
        for span in self.spans:
            sequence, prompt = values[span.sample], prompts[span.sample]
            if len(sequence) != self.batch["total_lengths"][span.sample]:
                raise ValueError(
                    f"unconcat_tokens of sample {span.sample} has {len(sequence)} entries, but total_lengths says "
                    f"{self.batch['total_lengths'][span.sample]}"
                )
            parts.append(torch.as_tensor(sequence[prompt + span.start : prompt + span.stop]))
        return torch.cat(parts).long().to(self.device)

    def of_response(self, key: str) -> Tensor:
        """A value that is recorded for the whole response."""
        return self._select(key, lengths=("response",))

    def of_rank(self, key: str) -> Tensor:
        """A value that is recorded for this rank's tokens; for the whole response it is cut here."""
        return self._select(key, lengths=("rank", "response"))

    def _select(self, key: str, lengths: tuple[str, ...]) -> Tensor:
        values = self.values(key)
        on_rank = [0] * len(values)
        for span in self.spans:
            on_rank[span.sample] += len(span)
        parts = [torch.as_tensor(values[0][:0]).to(self.device)]  # the shape, where this rank has no response token
        taken = [0] * len(values)
        for span in self.spans:
            value, sample = values[span.sample], span.sample
            allowed = {"rank": on_rank[sample], "response": self.batch["response_lengths"][sample]}
            if value.shape[0] == allowed["response"]:
                part = value[span.start : span.stop]
            elif "rank" in lengths and value.shape[0] == allowed["rank"]:
                part = value[taken[sample] : taken[sample] + len(span)]
            else:
                expected = " or ".join(f"{allowed[name]} (the {name}'s)" for name in lengths)
                raise ValueError(f"{key} of sample {sample} has {value.shape[0]} rows, expected {expected}")
            if part.shape[1:] != parts[0].shape[1:]:
                raise ValueError(
                    f"{key} of sample {sample} is {list(value.shape)}, of sample 0 {list(values[0].shape)}"
                )
            taken[sample] += len(span)
            parts.append(torch.as_tensor(part).to(self.device, non_blocking=True))
        return torch.cat(parts)

    def values(self, key: str) -> Sequence[Any]:
        """The batch's list under a key, one entry a sample."""
        values = self.batch.get(key)
        if values is None:
            raise ValueError(f"the batch has no {key}{_WHY.get(key, '')}")
        if len(values) != len(self.batch["total_lengths"]):
            raise ValueError(f"{key} has {len(values)} samples, but total_lengths {len(self.batch['total_lengths'])}")
        return values
