"""What an error names: the engine, the request, the position, the field, and what to change in the call."""

from __future__ import annotations

from dataclasses import dataclass

from ..rollout import RolloutError


class CaptureError(RolloutError):
    """An engine's output that cannot be trained on as it is. The message says what to change in the engine's call."""


@dataclass(frozen=True)
class Request:
    """Names a response in errors.

    Attributes:
        engine: "vllm", "sglang", ...; empty for arrays.
        name: the engine's request id, and which of its choices.
    """

    engine: str
    name: str

    def error(self, found: str, fix: str, position: int | None = None) -> CaptureError:
        """An error about this response.

        Args:
            found: the field and what is wrong with it.
            fix: what to change, as an order or a rule.
            position: token of the response.
        """
        place = " ".join(part for part in (self.engine, "request", self.name) if part)
        if position is not None:
            place += f", position {position}"
        return CaptureError(f"{place}: {found}; {fix}")
