"""Random positions with a sampler that differs from the trainer, for every estimator, and the reference's answer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import settings
from torch import Tensor

from megatron_sc import CenteredLossOutput, VocabShard, centered_loss
from megatron_sc.objective import (
    ClippedSurrogate,
    Draws,
    FullVocabulary,
    ImportanceSampling,
    ImportanceWeight,
    MaskedImportanceSampling,
    SamplerDistribution,
    Support,
    TopKHead,
    TruncatedImportanceSampling,
    Uniform,
)
from megatron_sc.objective.reference import ReferencePosition, reference_position

PROPERTY = settings(max_examples=30, deadline=None, derandomize=True, database=None)
"""Property tests are the same in every run and never depend on the machine's speed."""

WEIGHTS: dict[str, ImportanceWeight] = {
    "none": Uniform(),
    "is": ImportanceSampling(),
    "tis": TruncatedImportanceSampling(cap=1.3),
    "mis": MaskedImportanceSampling(low=0.7, high=1.8),
    "ppo": ClippedSurrogate(low=0.2, high=0.3),
    "dual": ClippedSurrogate(low=0.2, high=0.3, dual=1.6),
}
"""Bounds narrower than the defaults, so that random ratios fall on both sides of each."""

ESTIMATORS = ("head", "recorded tail", "support", "draws", "full", "none")


@dataclass(frozen=True)
class Problem:
    """Arguments of `centered_loss`, in float64, for `[n]` positions."""

    logits: Tensor
    sampled_ids: Tensor
    advantages: Tensor
    sampler: SamplerDistribution | None
    sampled_logprobs: Tensor
    weight: ImportanceWeight
    temperature: Tensor
    q: Tensor
    """[n, V] what the tokens were drawn from."""

    @property
    def rows(self) -> int:
        """Number of positions."""
        return self.logits.shape[0]

    def run(self, dtype: torch.dtype = torch.float64, **overrides: Any) -> tuple[CenteredLossOutput, Tensor]:
        """The op's output and the gradient of the summed loss. Logits are rounded to `dtype`."""
        arguments = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "q"}
        arguments |= overrides
        leaf = arguments.pop("logits").detach().to(dtype).requires_grad_()
        out = centered_loss(leaf * 1 if arguments.get("reuse_logits") else leaf, **arguments)
        (gradient,) = torch.autograd.grad(out.loss.sum(), leaf)
        return out, gradient

    def reference(self, row: int, logits: Tensor | None = None) -> ReferencePosition:
        """The dense float64 answer for a row, of these or of other logits."""
        return reference_position(
            (self.logits if logits is None else logits)[row],
            int(self.sampled_ids[row]),
            float(self.advantages[row]),
            self.sampler,
            row,
            sampled_logprob=float(self.sampled_logprobs[row]),
            weight=self.weight,
            temperature=float(self.temperature[row]),
        )

    def references(self, logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Losses `[n]` and gradients `[n, V]` of the reference."""
        positions = [self.reference(row, logits) for row in range(self.rows)]
        return torch.stack([p.loss for p in positions]), torch.stack([p.gradient for p in positions])

    def replace(self, **changes: Any) -> Problem:
        """A copy with some arguments changed."""
        return dataclasses.replace(self, **changes)


def make_problem(
    estimator: str,
    weight: str = "none",
    *,
    rows: int = 5,
    vocab: int = 17,
    k: int = 4,
    seed: int = 0,
    temperature: bool = False,
    scale: float = 2.0,
    mismatch: float = 0.5,
    exact: bool = False,
) -> Problem:
    """Random logits, a sampler whose logits differ by `mismatch`, its record as `estimator`, tokens drawn from it.

    Args:
        estimator: one of `ESTIMATORS`; `recorded tail` is a head with `log_tail_mass`.
        weight: a key of `WEIGHTS`.
        rows: n.
        vocab: V.
        k: entries of the head or of the support, or number of draws.
        seed: of the random numbers.
        temperature: whether each row has a temperature of its own; else 1.
        scale: standard deviation of the logits.
        mismatch: standard deviation of the sampler's error.
        exact: make q what a head can express: its tail is the trainer's tail, rescaled.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    logits = scale * normal(rows, vocab)
    temperatures = torch.ones(rows, dtype=torch.float64)
    if temperature:
        temperatures = 0.5 + torch.rand(rows, generator=random, dtype=torch.float64)
    p = torch.softmax(logits / temperatures.unsqueeze(1), dim=1)
    q = torch.softmax(p.log() + mismatch * normal(rows, vocab), dim=1)
    head = q.topk(min(k, vocab), dim=1).indices
    in_head = torch.zeros_like(q, dtype=torch.bool).scatter(1, head, True)
    if estimator == "support":
        q = torch.where(in_head, q, 0.0)
        q = q / q.sum(dim=1, keepdim=True)
    elif exact and estimator in ("head", "recorded tail"):
        tail = torch.where(in_head, 0.0, p)
        rescaled = tail * (torch.where(in_head, 0.0, q).sum(1) / tail.sum(1).clamp(min=1e-300)).unsqueeze(1)
        q = torch.where(in_head, q, rescaled)
    y = torch.multinomial(q, 1, generator=random).squeeze(1)
    logq = q.log()
    sampler: SamplerDistribution | None = None
    if estimator in ("head", "recorded tail"):
        log_tail = None
        if estimator == "recorded tail":
            log_tail = torch.where(in_head, 0.0, q).sum(dim=1).log()
        sampler = TopKHead(head, logq.gather(1, head), log_tail)
    elif estimator == "support":
        sampler = Support(head, logq.gather(1, head))
    elif estimator == "draws":
        draws = torch.multinomial(q, k, replacement=True, generator=random)
        sampler = Draws(draws, logq.gather(1, draws))
    elif estimator == "full":
        sampler = FullVocabulary(logq)
    return Problem(
        logits=logits,
        sampled_ids=y,
        advantages=normal(rows) + 0.1,
        sampler=sampler,
        sampled_logprobs=logq.gather(1, y.unsqueeze(1)).squeeze(1),
        weight=WEIGHTS[weight],
        temperature=temperatures,
        q=q,
    )


def as_ragged(sampler: TopKHead | Support) -> TopKHead | Support:
    """The same entries, stored one row after the other without padding."""
    kept = sampler.ids >= 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(dim=1).cumsum(0)])
    if isinstance(sampler, Support):
        return Support.ragged(sampler.ids[kept], sampler.logprobs[kept], offsets)
    return TopKHead.ragged(sampler.ids[kept], sampler.logprobs[kept], offsets, sampler.log_tail_mass)


def shard_sizes(vocab: int, ranks: int, uneven: bool = False) -> tuple[int, ...]:
    """Columns of each rank. Equal ones leave padding on the last ranks; uneven ones also give a rank nothing but it."""
    if not uneven:
        return (-(-vocab // ranks) + 1,) * ranks
    weights = [1 + (5 * rank) % 7 for rank in range(ranks - 1)]
    sizes = [vocab * w // sum(weights) for w in weights]
    sizes[-1] += vocab - sum(sizes)
    return (*sizes, 3)


def run_shard(
    problem: Problem, rank: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[CenteredLossOutput, Tensor]:
    """What rank `rank` of the default group computes from its columns; padding columns hold NaN."""
    start, vocab = sum(sizes[:rank]), problem.logits.shape[1]
    columns = torch.full((problem.rows, sum(sizes)), torch.nan, dtype=torch.float64)
    columns[:, :vocab] = problem.logits
    local = columns[:, start : start + sizes[rank]]
    shard = VocabShard(start, start + sizes[rank], vocab)
    return problem.run(dtype, logits=local, vocab=shard, group=dist.group.WORLD, **options)
