"""The sampler's distribution at one position: truncation, draws, head and tail."""

from __future__ import annotations

import torch
from torch import Tensor


def log_probabilities(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The processed log-probabilities a token is drawn from: temperature, then top-k, then top-p, renormalized.

    The order and the rule of top-p (the fewest most likely tokens whose probability reaches ``top_p``) are those of
    vLLM and SGLang.

    Args:
        logits: [b, V] any floating dtype, over the true vocabulary only.
        temperature: > 0.
        top_k: keep this many tokens; 0 keeps all. Of equal logits at the edge, any.
        top_p: keep tokens up to this mass, in (0, 1]; the most likely token always stays.

    Returns:
        [b, V] float32; -inf for tokens that were cut.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    if not is_truncated(logits.shape[-1], top_k, top_p):
        return logprobs
    ordered, order = logprobs.sort(dim=-1, descending=True)
    if 0 < top_k < ordered.shape[-1]:
        ordered[..., top_k:] = -torch.inf
    mass = ordered.double().softmax(dim=-1)
    cut = mass.cumsum(dim=-1) - mass >= top_p  # the mass before this token already suffices
    cut[..., 0] = False
    ordered = torch.log_softmax(ordered.masked_fill(cut, -torch.inf), dim=-1)
    return torch.empty_like(ordered).scatter_(-1, order, ordered)


def is_truncated(vocab_size: int, top_k: int, top_p: float) -> bool:
    """Whether these settings can cut a token of a vocabulary."""
    return 0 < top_k < vocab_size or top_p < 1


def draw(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw tokens by inverting the cumulative distribution, in float64.

    Args:
        logprobs: [b, V] float32; -inf for tokens of no probability, which are never drawn.
        uniforms: [b, m] float64 in [0, 1), one for each draw.

    Returns:
        [b, m] int64. A function of its arguments, but for the rounding of a parallel cumulative sum on a GPU.
    """
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, (uniforms * total).contiguous(), right=True)
    last = torch.searchsorted(cumulative, total.contiguous())  # the last token with any probability
    return torch.minimum(ids, last)


def head_and_tail(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k most likely tokens, and the mass of all others summed directly (never one minus the head's).

    Args:
        logprobs: [b, V] float32.
        k: 1 <= k <= V.

    Returns:
        ids [b, k] int64 and log-probabilities [b, k] float32, descending; log tail mass [b] float32, -inf when k = V.
    """
    head_logprobs, head_ids = logprobs.topk(k, dim=-1)
    tail = logprobs.scatter(-1, head_ids, -torch.inf)
    return head_ids, head_logprobs, torch.logsumexp(tail, dim=-1)


def support(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens a truncated distribution can produce.

    Args:
        logprobs: [b, V] float32, -inf for tokens that were cut.

    Returns:
        ids [b, S] int64 and log-probabilities [b, S] float32, descending; S is the largest support of the batch, and
        shorter rows end with id -1 and log-probability -inf.
    """
    width = int((logprobs > -torch.inf).sum(dim=-1).max())
    support_logprobs, ids = logprobs.topk(width, dim=-1)
    return ids.masked_fill(support_logprobs == -torch.inf, -1), support_logprobs
