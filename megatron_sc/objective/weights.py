"""Importance weights f(r) of the sampled token, r = p/q: the second column of the article's Appendix C table.

A scheme is a frozen object with two methods. ``token_weight`` gives w_y = f(p_y/q_y), the weight that is applied.
``weighted_mass`` gives q f(p/q), the mass that centering subtracts, in a closed form that never exponentiates an
unbounded ratio. Both are of the same f by construction, so the weight that is centered is the weight that is applied.

To add a scheme: write one class here and name it in ``IMPORTANCE_WEIGHTS``, its bounds in ``WEIGHT_SETTINGS``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

MAX_LOG_RATIO = 60.0
"""log r is clamped here before exp, so that an unbounded weight stays finite in float32 (e^60 = 1.1e26)."""


class ImportanceWeight(Protocol):
    """What the loss needs to know of a weighting scheme. All tensors broadcast against each other; all are detached."""

    name: ClassVar[str]
    """The value of ``--importance-weight``."""
    needs_ratio: ClassVar[bool]
    """Whether f depends on r, so that the sampled token's log-probability under the sampler is needed."""

    def token_weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """f(r) for log r = log p - log q. Never infinite."""
        ...

    def weighted_mass(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        """q f(p/q) of a token or of a set of tokens (a tail) with masses p and q; 0 where both are 0."""
        ...


@dataclass(frozen=True)
class Uniform:
    """f = 1: REINFORCE."""

    name: ClassVar[str] = "none"
    needs_ratio: ClassVar[bool] = False

    def token_weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """1."""
        return torch.ones_like(log_ratio)

    def weighted_mass(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        """q f = q."""
        return logq.exp()


@dataclass(frozen=True)
class ImportanceSampling:
    """f = r: unbiased, with unbounded variance."""

    name: ClassVar[str] = "is"
    needs_ratio: ClassVar[bool] = True

    def token_weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """r, with log r clamped to ``MAX_LOG_RATIO``."""
        return log_ratio.clamp(max=MAX_LOG_RATIO).exp()

    def weighted_mass(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        """q f = p, and 0 where the sampler has no mass: it never samples there."""
        return torch.where(logq > -math.inf, logp.exp(), 0.0)


@dataclass(frozen=True)
class TruncatedImportanceSampling:
    """TIS: f = min(r, cap). The paper uses cap = 2.

    Raises:
        ValueError: if ``cap`` is not positive and finite.
    """

    cap: float = 2.0

    name: ClassVar[str] = "tis"
    needs_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.cap < math.inf:
            raise ValueError(f"TruncatedImportanceSampling: cap must be positive and finite, got {self.cap}")

    def token_weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """min(r, C) = exp(min(log r, log C))."""
        return log_ratio.clamp(max=math.log(self.cap)).exp()

    def weighted_mass(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        """q f = min(p, C q)."""
        return torch.minimum(logp, logq + math.log(self.cap)).exp()


@dataclass(frozen=True)
class MaskedImportanceSampling:
    """MIS: f = r where low <= r <= high, else 0. The paper uses [0.5, 5].

    Raises:
        ValueError: unless 0 <= low < high.
    """

    low: float = 0.5
    high: float = 5.0

    name: ClassVar[str] = "mis"
    needs_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"MaskedImportanceSampling: needs 0 <= low < high, got low={self.low}, high={self.high}")

    def token_weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """r inside [low, high], else 0."""
        return _ratio_within(log_ratio, _log(self.low), _log(self.high))

    def weighted_mass(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        """q f = p inside [low, high], else 0."""
        return _mass_within(logp, logq, _log(self.low), _log(self.high))


@dataclass(frozen=True)
class ClippedSurrogate:
    """PPO and GRPO as a weight: f = r where the clip of min(r A, clip(r, 1 - low, 1 + high) A) does not bind, else 0.

    The clip binds for A > 0 where r > 1 + high, and for A < 0 where r < 1 - low; with ``dual`` also for A < 0 where
    r > dual (dual clip). f depends on the sign of A, and so does what is centered.

    Raises:
        ValueError: unless 0 <= low <= 1, high >= 0 and (dual is None or dual > 1).
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    name: ClassVar[str] = "ppo"
    needs_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (0 <= self.low <= 1 and self.high >= 0):
            raise ValueError(
                f"ClippedSurrogate: needs 0 <= low <= 1 and high >= 0, got low={self.low}, high={self.high}"
            )
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"ClippedSurrogate: dual must be above 1, got {self.dual}")

    def token_weight(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """r where the clip does not bind for the sign of A, else 0."""
        return _ratio_within(log_ratio, *self._log_bounds(advantages, log_ratio.dtype))

    def weighted_mass(self, logp: Tensor, logq: Tensor, advantages: Tensor) -> Tensor:
        """q f = p where the clip does not bind for the sign of A, else 0."""
        return _mass_within(logp, logq, *self._log_bounds(advantages, logp.dtype))

    def _log_bounds(self, advantages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        positive = advantages >= 0
        # As tensors: torch.where of two numbers is float32, which would round the bounds of a float64 loss.
        binds_low = torch.full_like(advantages, _log(1 - self.low), dtype=dtype)
        binds_high = torch.full_like(advantages, math.inf if self.dual is None else _log(self.dual), dtype=dtype)
        low = torch.where(positive, -math.inf, binds_low)
        high = torch.where(positive, _log(1 + self.high), binds_high)
        return low, high


IMPORTANCE_WEIGHTS: dict[str, type[ImportanceWeight]] = {
    cls.name: cls
    for cls in (Uniform, ImportanceSampling, TruncatedImportanceSampling, MaskedImportanceSampling, ClippedSurrogate)
}


WEIGHT_SETTINGS: dict[str, dict[str, str]] = {
    "tis": {"tis_cap": "cap"},
    "mis": {"mis_low": "low", "mis_high": "high"},
    "ppo": {"ppo_clip_low": "low", "ppo_clip_high": "high", "ppo_dual_clip": "dual"},
}
"""The settings that a scheme alone reads, and the fields of its class that they set."""


def weight_of(settings: Any) -> ImportanceWeight:
    """f, with its bounds, from a configuration.

    Args:
        settings: has ``importance_weight``, a name of ``IMPORTANCE_WEIGHTS``, and the settings of ``WEIGHT_SETTINGS``.

    Raises:
        ValueError: for a bound out of range.
    """
    name = settings.importance_weight
    bounds = {bound: getattr(settings, setting) for setting, bound in WEIGHT_SETTINGS.get(name, {}).items()}
    return IMPORTANCE_WEIGHTS[name](**bounds)


def unread_setting(settings: Any) -> tuple[str, str] | None:
    """A bound that was set but belongs to a scheme that was not chosen, and that scheme; None: there is none.

    Args:
        settings: as for ``weight_of``; a class with defaults for them.
    """
    for weight, bounds in WEIGHT_SETTINGS.items():
        for name in bounds if weight != settings.importance_weight else ():
            if getattr(settings, name) != getattr(type(settings), name):
                return name, weight
    return None


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _ratio_within(log_ratio: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    return torch.where((log_ratio >= low) & (log_ratio <= high), log_ratio.clamp(max=MAX_LOG_RATIO).exp(), 0.0)


def _mass_within(logp: Tensor, logq: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    # Where q = 0 the sampler never samples, so the mass it would weight is 0; -inf - -inf would be NaN.
    log_ratio = torch.where(logq > -math.inf, logp - logq, math.nan)
    return torch.where((log_ratio >= low) & (log_ratio <= high), logp.exp(), 0.0)
