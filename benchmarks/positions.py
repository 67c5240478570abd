"""Positions to measure on: logits with a head that stands out, and a sampler whose head differs a little."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sc import VocabShard
from megatron_sc.objective import Draws, TopKHead, TruncatedImportanceSampling

CAP = 2.0
"""TIS, as in the paper."""

DRAWS = 8


@dataclass(frozen=True, eq=False)
class Positions:
    """Arguments of the losses for n positions. Logits and the shard are this rank's; the rest is the same on all."""

    logits: Tensor
    """``[n, V_local]`` in the dtype that is measured, not to be overwritten."""
    shard: VocabShard
    sampled_ids: Tensor
    """int64 ``[n]``."""
    sampled_logprobs: Tensor
    """float32 ``[n]``, log q_y."""
    advantages: Tensor
    """float32 ``[n]``."""
    head: TopKHead
    draws: Draws

    weight = TruncatedImportanceSampling(CAP)

    def first(self, rows: int) -> Positions:
        """The first rows, for checks."""
        cut = slice(0, rows)
        return Positions(
            self.logits[cut].clone(), self.shard, self.sampled_ids[cut], self.sampled_logprobs[cut],
            self.advantages[cut], self.head.slice_rows(0, rows), self.draws.slice_rows(0, rows),
        )  # fmt: skip


def make_positions(
    rows: int, vocab: int, k: int, dtype: torch.dtype, device: torch.device, rank: int, ranks: int
) -> Positions:
    """Random positions, the same for every number of ranks.

    Args:
        rows: n.
        vocab: V; a shard holds ceil(V / ranks) columns, the last one fewer and padding.
        k: tokens in a head.
        dtype: of the logits.
        device: where everything lives.
        rank: of the tensor-parallel group.
        ranks: its size.
    """
    random = torch.Generator().manual_seed(0)
    logits = torch.empty(rows, vocab).normal_(std=1.5, generator=random)
    # k distinct ids a row, spread over the vocabulary as a tokenizer spreads frequent tokens.
    stride = max(vocab // k, 1)
    start = torch.randint(vocab, (rows, 1), generator=random)
    ids = (start + stride * torch.arange(k)) % vocab
    logits.scatter_add_(1, ids, 10.0 - 0.05 * torch.arange(k).expand(rows, k))
    logits = logits.to(dtype)

    at_head = logits.gather(1, ids).float()
    normalizer = torch.cat([row.float().logsumexp(0, keepdim=True) for row in logits])
    logp = at_head - normalizer.unsqueeze(1)
    noisy = logp + 0.3 * torch.randn(rows, k, generator=random)
    # The tail keeps the trainer's mass, times 1.5: q and p differ in head and tail.
    tail = (1.5 * (1 - logp.exp().sum(1))).clamp(1e-4, 0.5)
    logq = noisy - noisy.logsumexp(1, keepdim=True) + (1 - tail).log().unsqueeze(1)
    place = torch.multinomial(logq.exp(), 1 + DRAWS, replacement=True, generator=random)
    tokens = ids.gather(1, place)
    columns = -(-vocab // ranks)
    shard = VocabShard(rank * columns, (rank + 1) * columns, vocab)
    local = logits.new_full((rows, columns), -1e4)  # padding, for losses that know none: it takes no probability
    local[:, : shard.valid] = logits[:, shard.start : shard.start + shard.valid]
    return Positions(
        local.to(device),
        shard,
        tokens[:, 0].to(device),
        logq.gather(1, place[:, :1]).squeeze(1).to(device),
        torch.randn(rows, generator=random).to(device),
        TopKHead(ids.to(device), logq.to(device), tail.log().to(device)),
        Draws(tokens[:, 1:].contiguous().to(device)),
    )
