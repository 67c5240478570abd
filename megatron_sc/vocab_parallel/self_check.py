"""The start-up self-check: under the sampler, the centered update of a constant advantage must average to zero.

    sum_y q_y dl(y)/dz = 0        for A = +1 and A = -1, whenever the model of q is exact

That is what centering is for, and it fails if the weight that is centered is not the weight that is applied, if the
shards of the vocabulary disagree, or if a kernel is wrong on this device. The problem is tiny, and runs through the
same code on the same process group as training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..objective.distributions import Draws, FullVocabulary, SamplerDistribution, Support, TopKHead
from ..objective.weights import ImportanceWeight
from .loss import centered_loss
from .shard import VocabShard

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest |expected gradient| per logit that rounding explains at |A| = 1, by the dtype of the logits."""

VOCABULARY, HEAD = 24, 5


class SelfCheckError(RuntimeError):
    """The configured loss does not center: training would drift. The message holds the numbers."""


@dataclass(frozen=True)
class SelfCheckResult:
    """What was found for one configuration.

    Attributes:
        centered: largest |expected gradient| of a logit with centering, over both signs of A.
        uncentered: the same without: the drift that centering removes.
        tolerance: what rounding explains.
    """

    centered: float
    uncentered: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the average is zero up to rounding."""
        return self.centered <= self.tolerance


def self_check(
    distribution: Literal["head", "support", "draws", "full"],
    weight: ImportanceWeight,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> SelfCheckResult:
    """Average the update over every token that a known sampler can draw.

    Args:
        distribution: the estimator.
        weight: f.
        group: tensor-parallel group, whose ranks all call this.
        device: where training runs.
        dtype: dtype of the logits.

    Returns:
        The largest expected gradient over all logits, ranks and both signs of A.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    columns = -(-VOCABULARY // ranks) + 1  # one more: padding columns must not count
    shard = VocabShard.of_rank(rank, ranks, columns, VOCABULARY)
    logits, q, head = _trainer_and_sampler(distribution, dtype)
    padded = torch.cat([logits, logits.new_full((ranks * columns - VOCABULARY,), 3.0)])
    local = padded[shard.start : shard.stop].to(device)
    probability, sampled, sampler = _outcomes(distribution, q, head, device)

    largest = {}
    for center in (True, False):
        worst = 0.0
        for advantage in (1.0, -1.0):
            rows = local.expand(len(sampled), columns).clone().requires_grad_()
            out = centered_loss(
                rows,
                sampled,
                torch.full((len(sampled),), advantage, device=device),
                sampler,
                q.log().to(device)[sampled],
                weight,
                vocab=shard,
                group=group,
                center=center,
            )
            (gradient,) = torch.autograd.grad(out.loss.sum(), rows)
            expected = (probability.unsqueeze(1) * gradient.double()).sum(dim=0).abs().max()
            if ranks > 1:
                dist.all_reduce(expected, dist.ReduceOp.MAX, group=group)
            worst = max(worst, expected.item())
        largest[center] = worst
    return SelfCheckResult(largest[True], largest[False], TOLERANCE[dtype])


def require_centered(result: SelfCheckResult, what: str) -> None:
    """Stop a run whose loss does not center.

    Args:
        result: of ``self_check``.
        what: the configuration, for the message.

    Raises:
        SelfCheckError: if the check failed.
    """
    if not result.passed:
        raise SelfCheckError(
            f"self-check of {what}: with a constant advantage the expected gradient under the sampler is "
            f"{result.centered:.3g} per logit, but must be 0 within {result.tolerance:.0e} (without centering it is "
            f"{result.uncentered:.3g}). The loss would drift; do not train with it. Run megatron-sc selfcheck for all "
            "configurations"
        )


def _trainer_and_sampler(distribution: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``[V]``, a sampler q ``[V]`` in float64 that the estimator models exactly, and the ids that it records.

    For the head that is a sampler whose tail has the trainer's shape; for the support one that samples nothing else.
    """
    generator = torch.Generator().manual_seed(0)
    logits = (1.5 * torch.randn(VOCABULARY, generator=generator)).to(dtype)
    p = torch.softmax(logits.double(), dim=0)
    mismatch = 2 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)  # so that every bound binds
    q = torch.softmax(logits.double() + mismatch, dim=0)
    head = q.topk(HEAD).indices
    outside = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, head, False)
    if distribution == "head":
        q[outside] = q[outside].sum() * p[outside] / p[outside].sum()
    elif distribution == "support":
        q[outside] = 0
        q /= q.sum()
    return logits, q, head


def _outcomes(
    distribution: str, q: Tensor, head: Tensor, device: torch.device | str
) -> tuple[Tensor, Tensor, SamplerDistribution]:
    """Every outcome of a position: its probability ``[n]``, the sampled token ``[n]``, and what would be recorded."""
    tokens = torch.nonzero(q > 0).squeeze(1)
    n = len(tokens)
    logq = q.log()
    if distribution == "draws":  # the sampled token and one draw, independent of each other
        sampled, drawn = tokens.repeat_interleave(n), tokens.repeat(n).unsqueeze(1)
        return (
            (q[sampled] * q[drawn[:, 0]]).to(device),
            sampled.to(device),
            Draws(drawn.to(device), logq[drawn].to(device)),
        )
    recorded: SamplerDistribution
    if distribution == "full":
        recorded = FullVocabulary(logq.expand(n, VOCABULARY).to(device))
    else:
        rows = head.expand(n, HEAD).to(device), logq[head].expand(n, HEAD).to(device)
        recorded = Support(*rows) if distribution == "support" else TopKHead(*rows)
    return q[tokens].to(device), tokens.to(device), recorded
