"""A whole buffer, checked: what ``megatron-sc validate`` prints."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from .ledger import Ledger
from .problem import BufferRefusedError, Problem
from .reader import read_row_group
from .schema import MANIFEST
from .shard import Shard
from .storage import LEDGER, TEMPORARY, open_storage
from .validate import Trainer, check_fingerprint, find_problems


@dataclass
class Report:
    """What was found.

    Attributes:
        problems: reasons to refuse the buffer, the first place of each.
        warnings: files that no reader looks at: left by a writer that died, or all that is left of a lost ledger line.
        shards: committed.
        rollouts: in them, read and checked.
        bad_rollouts: with at least one problem.
        tokens: generated.
        size: bytes of the shards.
    """

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    shards: int = 0
    rollouts: int = 0
    bad_rollouts: int = 0
    tokens: int = 0
    size: int = 0

    @property
    def ok(self) -> bool:
        """Whether a reader would accept all of it."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ok": self.ok,
            "problems": [problem.as_dict() for problem in self.problems],
            "warnings": [problem.as_dict() for problem in self.warnings],
            **{name: getattr(self, name) for name in ("shards", "rollouts", "bad_rollouts", "tokens", "size")},
        }


def validate_buffer(path: str | os.PathLike[str], trainer: Trainer | None = None) -> Report:
    """Read everything that is committed: manifest, ledger, every byte of every shard, every rule for every token.

    Args:
        path: a directory or an fsspec URL.
        trainer: what the manifest is checked against; None: itself only.

    Returns:
        Problems, never raised. A damaged shard does not hide those of the next.
    """
    report = Report()
    storage = open_storage(path)
    try:
        ledger = Ledger(storage)
        check_fingerprint(ledger.manifest, trainer or Trainer())
    except BufferRefusedError as error:
        report.problems.append(error.problem)
        return report
    except OSError as error:
        report.problems.append(Problem(f"cannot be read: {error}", MANIFEST))
        return report
    for entry in ledger.shards:
        report.shards += 1
        report.size += entry.size
        try:
            shard = Shard(storage, entry, ledger.manifest)
            for row_group in range(len(shard)):
                table = read_row_group(shard, row_group)
                problems, bad_rows = find_problems(
                    table, ledger.manifest, encoded=True, file=shard.name, first_row=shard.first_row(row_group)
                )
                report.problems += problems
                report.rollouts += len(table)
                report.bad_rollouts += int(bad_rows.sum())
                report.tokens += table.tokens
        except BufferRefusedError as error:
            report.problems.append(error.problem)
        except OSError as error:
            report.problems.append(Problem(f"cannot be read: {error}", entry.shard))
    known = {entry.shard for entry in ledger.shards}
    for name in storage.names():
        if name.startswith(TEMPORARY):
            report.warnings.append(Problem("a writer is at work, or died: ignored by readers", name))
        elif name.endswith(".parquet") and name not in known:
            report.warnings.append(Problem(f"not named by {storage.ledger_name}: ignored by readers", name))
    torn = ledger.torn_bytes()
    if torn:
        rule = f"the last line has no end ({torn} bytes): a torn write, ignored by readers"
        report.warnings.append(Problem(rule, LEDGER))
    return report
