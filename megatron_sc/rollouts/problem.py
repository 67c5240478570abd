"""What is wrong with a buffer, and where."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .rollout import RolloutError


@dataclass(frozen=True)
class Problem:
    """One finding. Rows are counted from 0 within the file, positions within the rollout's response (or prompt).

    Attributes:
        rule: what is violated, in words.
        file: name within the buffer; empty for rollouts that are not in a file yet.
        row: rollout, or None for a finding about the file.
        position: token, or None for a finding about the rollout.
        field: column or key.
        value: what was found, as text.
        count: how often this rule is violated.
    """

    rule: str
    file: str = ""
    row: int | None = None
    position: int | None = None
    field: str = ""
    value: str = ""
    count: int = 1

    def __str__(self) -> str:
        place = [self.file] if self.file else []
        place += [f"row {self.row}"] if self.row is not None else []
        place += [f"position {self.position}"] if self.position is not None else []
        found = f"{self.field} is {self.value}; " if self.value else f"{self.field}: " if self.field else ""
        more = f" ({self.count} in all)" if self.count > 1 else ""
        return f"{', '.join(place) or 'rollouts'}: {found}{self.rule}{more}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class BufferRefusedError(RolloutError):
    """A buffer, or rollouts for one, that must not be used.

    Attributes:
        problem: what and where.
    """

    def __init__(self, problem: Problem):
        super().__init__(str(problem))
        self.problem = problem
