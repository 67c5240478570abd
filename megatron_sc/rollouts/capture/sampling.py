"""How tokens were drawn, and what the engine's log-probabilities are of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..schema import SamplerFingerprint
from .request import Request

LogprobsMode = Literal["processed", "tempered", "raw"]
NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What the parameters of a request mean when neither it nor the server sets them."""
ALL_TOKENS = 1 << 30
"""SGLang's ``TOP_K_ALL``: a top-k that keeps every token."""


@dataclass(frozen=True)
class Sampling:
    """The distribution that a response was drawn from.

    Attributes:
        temperature: the engine divides logits by it. None: not known, which no response may have.
        top_p: 1 keeps all.
        top_k: 0 keeps all.
        min_p: 0 keeps all.
        repetition_penalty: 1 is none.
        presence_penalty: 0 is none.
        frequency_penalty: 0 is none.
        logprobs: what the reported log-probabilities are of. "processed": the distribution that tokens were drawn from;
            "tempered": after penalties and temperature, before truncation; "raw": the model's, before all of it.
        altered: other parameters of the request that change the distribution, by name (a grammar, a bias, ...).
        advice: how to make this engine report processed log-probabilities; ends errors.
    """

    temperature: float | None = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: LogprobsMode = "processed"
    altered: tuple[str, ...] = ()
    advice: str = "record the log-probabilities of the distribution that tokens were drawn from"

    @property
    def truncates(self) -> bool:
        """Whether a head must be the sampler's whole support."""
        return self.fingerprint().truncates

    def check(self, request: Request) -> float:
        """Refuse log-probabilities that are not those of the sampler.

        Returns:
            The temperature.

        Raises:
            CaptureError: for a temperature of 0, and for raw or tempered log-probabilities where they differ from
                processed ones: a recorded head can be neither tempered nor truncated afterwards, because the mass of
                its tail under the new distribution is unknown.
        """
        if self.temperature is None or not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise request.error(
                f"temperature is {self.temperature}",
                "must be a number > 0: a greedy response has no distribution to center under",
            )
        changed = [f"{name} {value}" for name, value in self._truncation() if self.logprobs != "processed"]
        if self.logprobs == "raw":
            changed += [
                f"{name} {getattr(self, name)}"
                for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")
                if getattr(self, name) != NEUTRAL[name]
            ]
            changed += self.altered
        if changed:
            raise request.error(
                f"log-probabilities are {self.logprobs}, but tokens were drawn with {', '.join(changed)}", self.advice
            )
        return self.temperature

    def fingerprint(self, **engine: str) -> SamplerFingerprint:
        """For a buffer's manifest.

        Args:
            **engine: further fields of ``SamplerFingerprint``, such as ``weight_dtype``.
        """
        return SamplerFingerprint(
            logprobs_mode="raw" if self.logprobs == "raw" else "processed",
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            **engine,
        )

    def _truncation(self) -> list[tuple[str, float]]:
        values = [("top_p", self.top_p), ("top_k", self.top_k), ("min_p", self.min_p)]
        return [(name, value) for name, value in values if value != NEUTRAL[name]]


def parameters(given: Mapping[str, Any], defaults: Mapping[str, float] | None, request: Request) -> dict[str, Any]:
    """The sampling parameters that a server used for a request.

    Args:
        given: the request's own; a null is as good as absent.
        defaults: what the server fills in for those that are absent, or None where that is not known: servers take them
            from the model's generation_config, which often truncates.
        request: for errors.

    Raises:
        CaptureError: if a parameter is absent and has no known default.
    """
    result: dict[str, Any] = {}
    for name in NEUTRAL:
        value = given.get(name)
        if value is None and defaults is not None:
            value = defaults.get(name, NEUTRAL[name])
        if value is None and name in ("temperature", "top_p", "top_k", "min_p"):
            raise request.error(
                f"the request does not set {name}",
                "servers take it from the model's generation_config: set it in the request, or pass defaults= with "
                "what the server fills in (capture.sampling.NEUTRAL where it ignores that file)",
            )
        result[name] = NEUTRAL[name] if value is None else value
    top_k = result["top_k"]
    result["top_k"] = 0 if top_k in (-1, ALL_TOKENS) else top_k
    return result
