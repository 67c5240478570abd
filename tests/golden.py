"""The golden cases of `tests/cases/centred_loss.json`: one position each, in float64 over the whole vocabulary.

Error measures: the gradient relative to |A| max(1, w) / T, the loss relative to |A| `loss_scale` (the sum of the
absolute terms of the loss). Where 0 < tail_p < 1e-5 the logged loss is a difference of huge numbers: only the gradient
is compared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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

ESTIMATORS = ("head", "support", "draws", "full", "none")
KINDS: dict[str, ImportanceWeight] = {
    "none": Uniform(),
    "is": ImportanceSampling(),
    "tis": TruncatedImportanceSampling(cap=2.0),
    "mis": MaskedImportanceSampling(low=0.5, high=5.0),
    "ppo": ClippedSurrogate(low=0.2, high=0.2),
}
SMALLEST_TAIL_WITH_A_LOSS = 1e-5


@dataclass(frozen=True)
class Case:
    """One golden case; the fields are those of the JSON object (see `megatron_sc.objective` for the symbols)."""

    index: int
    estimator: str
    kind: str
    hard: str
    T: float
    A: float
    valid: int
    z: list[float]
    y: int
    q_y: float
    expected: dict[str, Any]
    ids: list[int] | None = None
    q: list[float] | None = None
    tail_mass: float | None = None
    draws: list[int] | None = None
    q_draws: list[float] | None = None

    @property
    def weight(self) -> ImportanceWeight:
        """f."""
        return KINDS[self.kind]

    def __str__(self) -> str:
        """What to print when the case fails."""
        return f"case {self.index} ({self.estimator}, {self.kind}, {self.hard})"

    def sampler(self, dtype: torch.dtype = torch.float64) -> SamplerDistribution | None:
        """The sampler's distribution, one row."""
        if self.estimator == "none":
            return None
        if self.estimator == "draws":
            return Draws(torch.tensor([self.draws]), _log([self.q_draws], dtype))
        if self.estimator == "full":
            return FullVocabulary(_log([self.q], dtype))
        ids, logprobs = torch.tensor([self.ids]), _log([self.q], dtype)
        if self.estimator == "support":
            return Support(ids, logprobs)
        return TopKHead(ids, logprobs, None if self.tail_mass is None else _log([self.tail_mass], dtype))

    def gradient_error(self, gradient: Tensor) -> float:
        """Largest error of a gradient `[len(z)]`, padding columns included, relative to |A| max(1, w) / T."""
        difference = (gradient.double() - torch.tensor(self.expected["grad"], dtype=torch.float64)).abs().max()
        return float(difference) * self.T / (abs(self.A) * max(1.0, self.expected["w"]))

    def loss_error(self, loss: Tensor | float) -> float:
        """Error of the loss relative to |A| loss_scale; 0 where the loss is not meaningful."""
        if 0 < self.expected["tail_p"] < SMALLEST_TAIL_WITH_A_LOSS:
            return 0.0
        return abs(float(loss) - self.expected["loss"]) / (abs(self.A) * self.expected["loss_scale"])


@cache
def golden_cases(estimator: str | None = None, kind: str | None = None) -> tuple[Case, ...]:
    """All cases, or those of an estimator and weight."""
    raw = json.loads((Path(__file__).parent / "cases" / "centred_loss.json").read_text())
    cases = (Case(index, **fields) for index, fields in enumerate(raw))
    return tuple(c for c in cases if estimator in (None, c.estimator) and kind in (None, c.kind))


def _log(probabilities: list[Any], dtype: torch.dtype) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().to(dtype)
