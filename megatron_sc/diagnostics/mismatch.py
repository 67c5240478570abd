"""How far a sampler's distributions are from the trainer's, and which part of its numerics makes the difference.

A training step reports the same quantities from the recorded heads (``vocab_parallel.centered_loss``); here both whole
distributions are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from ..precision.specs import SamplerSpec

TAIL_QUANTILES = (0.05, 0.5, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class Positions:
    """What is known of n positions, float64 [n] each."""

    log_ratio: Tensor  # log p_y - log q_y of the sampled token
    kl: Tensor  # KL(q || p) over the whole vocabulary; NaN where only a head of q is known
    head_kl: Tensor  # the same with all tokens outside the head as one: what a recorded head shows
    head_drift: Tensor  # sum of |q - p| over the head
    tail_drift: Tensor  # and over the rest; of a recorded head the difference of the masses, at most that
    tail_ratio: Tensor  # mass outside the head, sampler / trainer; NaN where there is no tail
    outside: Tensor  # 1 where the sampled token is not in the head

    @classmethod
    def of(cls, trainer: Tensor, sampler: Tensor, sampled_ids: Tensor, head_size: int) -> Self:
        """Compare two distributions at each position.

        Args:
            trainer: [n, V] log p.
            sampler: [n, V] log q; -inf where a truncated sampler cut a token.
            sampled_ids: [n] int64, drawn from the sampler.
            head_size: the sampler's k most likely tokens are its head; at most V are taken.
        """
        logp, logq = trainer.double(), sampler.double()
        p, q = logp.exp(), logq.exp()
        terms = torch.where(q > 0, q * (logq - logp), 0.0)
        head = logq.topk(min(head_size, logq.shape[1]), dim=1).indices
        in_head = torch.zeros_like(q, dtype=torch.bool).scatter_(1, head, True)
        tail_p, tail_q = (x.masked_fill(in_head, 0.0).sum(1) for x in (p, q))
        drift = (q - p).abs()
        tail_kl = torch.where(tail_q > 0, tail_q * (tail_q / tail_p).log(), 0.0)
        chosen = sampled_ids.unsqueeze(1)
        return cls(
            log_ratio=(logp - logq).gather(1, chosen).squeeze(1),
            kl=terms.sum(1),
            head_kl=terms.masked_fill(~in_head, 0.0).sum(1) + tail_kl,
            head_drift=drift.masked_fill(~in_head, 0.0).sum(1),
            tail_drift=drift.masked_fill(in_head, 0.0).sum(1),
            tail_ratio=torch.where(tail_p > 0, tail_q / tail_p, torch.nan),
            outside=(~in_head.gather(1, chosen)).squeeze(1).double(),
        )

    @classmethod
    def of_recorded(
        cls,
        trainer: Tensor,
        sampled_ids: Tensor,
        sampled_logprobs: Tensor,
        head_ids: Tensor,
        head_logprobs: Tensor,
        log_tail_mass: Tensor | None = None,
        is_support: bool = False,
    ) -> Self:
        """Compare the trainer's distributions with what a rollout records of the sampler's.

        Args:
            trainer: [n, V] log p.
            sampled_ids: [n] int64.
            sampled_logprobs: [n] log q of them.
            head_ids: [n, k] int64; < 0 is padding.
            head_logprobs: [n, k] log q.
            log_tail_mass: [n]; None or NaN: one minus the head's mass.
            is_support: the head is all the sampler could draw: p is normalized on it, and nothing is outside.
        """
        logp, logq = trainer.double(), head_logprobs.double()
        valid = head_ids >= 0
        ids = head_ids.clamp(min=0)
        if is_support:
            inside = logp.gather(1, ids).masked_fill(~valid, -torch.inf)
            logp = logp - inside.logsumexp(1, keepdim=True)
        head_logp = logp.gather(1, ids)
        p, q = (x.exp().masked_fill(~valid, 0.0) for x in (head_logp, logq))
        outside = torch.ones_like(logp, dtype=torch.bool)
        outside.scatter_(1, ids, ~valid)  # padding repeats id 0: undone below
        outside[:, 0] = ~((ids == 0) & valid).any(1)
        tail_p = logp.exp().masked_fill(~outside, 0.0).sum(1)
        tail_q = (1 - q.sum(1)).clamp(min=0)
        if log_tail_mass is not None:
            tail_q = torch.where(log_tail_mass.isnan(), tail_q, log_tail_mass.double().exp())
        if is_support:
            tail_p, tail_q = torch.zeros_like(tail_p), torch.zeros_like(tail_q)
        terms = torch.where(q > 0, q * (logq - head_logp), 0.0)
        chosen = sampled_ids.unsqueeze(1)
        return cls(
            log_ratio=logp.gather(1, chosen).squeeze(1) - sampled_logprobs.double(),
            kl=torch.full_like(tail_p, torch.nan),
            head_kl=terms.sum(1) + torch.where(tail_q > 0, tail_q * (tail_q / tail_p).log(), 0.0),
            head_drift=(q - p).abs().sum(1),
            tail_drift=(tail_q - tail_p).abs(),
            tail_ratio=torch.where(tail_p > 0, tail_q / tail_p, torch.nan),
            outside=(~((ids == chosen) & valid).any(1)).double(),
        )

    def select(self, keep: Tensor) -> Self:
        """The positions where ``keep`` [n] is True."""
        return type(self)(*(getattr(self, field.name)[keep] for field in fields(self)))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The positions of several batches."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


@dataclass(frozen=True)
class Mismatch:
    """A sampler against its trainer, over all positions: means unless the name says otherwise."""

    positions: int
    kl: float  # KL(q || p), exact; NaN where only a head of q is known
    head_kl: float  # with the tail as one token: a lower bound of kl
    k3_kl: float  # E_q[r - 1 - log r], from the sampled tokens alone
    log_ratio_abs: float  # |log p_y - log q_y|
    log_ratio_abs_max: float
    drift_head: float  # |q - p|_1
    drift_tail: float
    outside_head: float  # share of sampled tokens
    tail_ratio: tuple[float, ...]  # quantiles ``TAIL_QUANTILES`` of tail mass, sampler / trainer; NaN without a tail

    @classmethod
    def of(cls, positions: Positions) -> Self:
        """Summarize positions."""
        log_ratio, tails = positions.log_ratio, positions.tail_ratio[~positions.tail_ratio.isnan()]
        wanted = torch.tensor(TAIL_QUANTILES, dtype=torch.float64, device=tails.device)
        quantiles = torch.quantile(tails, wanted).tolist() if len(tails) else [float("nan")] * len(TAIL_QUANTILES)
        return cls(
            positions=len(log_ratio),
            kl=positions.kl.mean().item(),
            head_kl=positions.head_kl.mean().item(),
            k3_kl=(log_ratio.expm1() - log_ratio).mean().item(),
            log_ratio_abs=log_ratio.abs().mean().item(),
            log_ratio_abs_max=log_ratio.abs().max().item(),
            drift_head=positions.head_drift.mean().item(),
            drift_tail=positions.tail_drift.mean().item(),
            outside_head=positions.outside.mean().item(),
            tail_ratio=tuple(quantiles),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values; None for what is unknown."""
        known = {name: None if value != value else value for name, value in asdict(self).items()}
        tails = [None if math.isnan(value) else value for value in self.tail_ratio]
        return known | {"tail_ratio": dict(zip(map(str, TAIL_QUANTILES), tails, strict=True))}


@dataclass(frozen=True)
class Attribution:
    """Where a mismatch comes from: each part of the numerics by itself.

    The KL of parts does not add up to the KL of the whole: errors of two parts can cancel or amplify each other. What
    is left is ``residual``; no share is made to fit.
    """

    total: float  # KL(q || p) of the whole sampler
    alone: Mapping[str, float]  # with one part on, the others at the trainer's precision
    up_to: Mapping[str, float]  # with that part and all before it on; the last one is the whole

    @property
    def residual(self) -> float:
        """total - sum of alone."""
        return self.total - sum(self.alone.values())


def attribute(names: Sequence[str], kl: Callable[[Sequence[str]], float]) -> Attribution:
    """Turn the parts on one at a time: alone, and one after the other.

    Args:
        names: of the parts, in the order in which they are added.
        kl: the KL(q || p) of the sampler with some parts on, on fixed sequences.
    """
    alone = {name: kl([name]) for name in names}
    up_to = {name: alone[name] if i == 0 else kl(names[: i + 1]) for i, name in enumerate(names)}
    return Attribution(up_to[names[-1]] if names else 0.0, alone, up_to)


def component_names(spec: SamplerSpec, has_experts: bool) -> list[str]:
    """The kinds of part that a spec has, in the order in which a forward pass meets them first."""
    weights, activations = spec.linear(is_expert=True)
    present = {
        "noise": spec.noise > 0,
        "weights": spec.weights is not None,
        "activations": spec.activations is not None,
        "keys": spec.keys is not None,
        "values": spec.values is not None,
        "expert weights": has_experts and weights is not None,
        "expert activations": has_experts and activations is not None,
        "head": spec.head != "trainer",
    }
    return [name for name, is_present in present.items() if is_present]


def with_components(spec: SamplerSpec, on: Collection[str]) -> SamplerSpec:
    """The spec with only these of its ``component_names``; fresh weights."""
    weights, activations = spec.linear(is_expert=True)
    return replace(
        spec,
        noise=spec.noise if "noise" in on else 0.0,
        weights=spec.weights if "weights" in on else None,
        activations=spec.activations if "activations" in on else None,
        keys=spec.keys if "keys" in on else None,
        values=spec.values if "values" in on else None,
        expert_weights=weights if "expert weights" in on else None,
        expert_activations=activations if "expert activations" in on else None,
        head=spec.head if "head" in on else "trainer",
        staleness=1,
    )


def layer_names(spec: SamplerSpec, layers: int) -> list[str]:
    """'layer 0' and so on, between 'noise' and 'head', which belong to no layer, where the spec has these."""
    quantizers = (*spec.linear(is_expert=False), *spec.linear(is_expert=True), spec.keys, spec.values)
    inside = [f"layer {index}" for index in range(layers)] if any(quantizers) else []
    return ["noise"] * (spec.noise > 0) + inside + ["head"] * (spec.head != "trainer")


def with_layers(spec: SamplerSpec, layers: int, on: Collection[str]) -> SamplerSpec:
    """The spec with only these of its ``layer_names``; fresh weights."""
    off = tuple(f"decoder.layers.{index}.*" for index in range(layers) if f"layer {index}" not in on)
    return replace(
        spec,
        noise=spec.noise if "noise" in on else 0.0,
        ignored=spec.ignored + off,
        ignored_caches=spec.ignored_caches + off,
        head=spec.head if "head" in on else "trainer",
        staleness=1,
    )
