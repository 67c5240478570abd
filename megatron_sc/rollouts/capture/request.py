"""What an error names: the engine, the request, the position, the field, and what to change in the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..rollout import RolloutError


class CaptureError(RolloutError):
    """An engine's output that cannot be trained on as it is. The message says what to change in the engine's call."""


@dataclass(frozen=True)
class Request:
    """Names a response in errors.

    Attributes:
        engine: "vllm", "sglang", ...; empty for arrays and files.
        name: the engine's request id, and which of its choices; or a place in a file.
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
        place = f"{self.engine} request {self.name}" if self.engine else self.name
        if position is not None:
            place += f", position {position}"
        return CaptureError(f"{place}: {found}; {fix}")

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Errors of a payload that has not the shape of ``what`` become errors about this response."""
        try:
            yield
        except RolloutError:
            raise
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise self.error(
                f"not {what} ({type(error).__name__}: {error})", "pass it as the engine made it"
            ) from error
