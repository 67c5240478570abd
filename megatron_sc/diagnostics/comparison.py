"""Compare runs: merge their metrics, follow them while they run, and show them as one table and one figure.

A run writes JSON lines, one object per logged step and split:

    {"step": 10, "split": "train", "reward": 0.41, "drift_l1": 0.32, "loss": -0.7, "skipped": 0}
    {"step": 10, "split": "valid", "accuracy": 0.40}

"skipped" counts the steps so far that had no trainable token. `valid` is the trainer's own accuracy, sampled without
distortion: the number by which methods are compared. Merged records also carry a "method" key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table
from rich.text import Text

Record = dict[str, Any]

ACCURACY, DRIFT, REWARD, SKIPPED = "accuracy", "drift_l1", "reward", "skipped"


@dataclass(frozen=True)
class Curve:
    """How one method is named and drawn.

    Args:
        method: The value of the records' "method" key.
        label: The name that people read.
        group: A short word for what else differs between methods, such as the reward; a column of the table.
        color: Any Matplotlib color.
        marker: Any Matplotlib marker; it tells curves apart where color cannot.
        dashed: Draw a dashed line.
    """

    method: str
    label: str
    group: str = ""
    color: str = "#000000"
    marker: str = "o"
    dashed: bool = False


@dataclass(frozen=True)
class Summary:
    """One method's result. A number that was never logged, or is not finite, is None.

    Args:
        method: The method's name.
        step: The step of the last validation.
        accuracy: Validation accuracy at that step.
        reward: Training reward at the last logged step.
        first_drift: Drift at the first logged step.
        last_drift: Drift at the last logged step.
        skipped: Steps without a trainable token.
    """

    method: str
    step: int | None
    accuracy: float | None
    reward: float | None
    first_drift: float | None
    last_drift: float | None
    skipped: int


class MetricsFollower:
    """Reads a JSON-lines file that another process is still writing, each complete line once.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        self._offset = 0
        self._line = 0

    def poll(self) -> list[Record]:
        """Return the records completed since the last call; a line without its newline waits for the next one.

        Raises:
            ValueError: A complete line is not a JSON object with a whole "step"; the message names the file and line.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        new = []
        for line in complete.splitlines():
            self._line += 1
            if line.strip():
                new.append(_parse(line, f"{self.path}:{self._line}"))
        self.records += new
        return new

    def latest(self, split: str, key: str) -> float | None:
        """The last finite value of `key` in records of `split`, or None."""
        series = curve(self.records, split, key)
        return series[-1][1] if series else None


def merge_metrics(sources: Mapping[str, Path], target: Path) -> list[Record]:
    """Write the records of several runs into one JSON-lines file, each with its "method" first.

    The target is replaced in one move. A missing source adds nothing; the torn last line of a killed run is left out.

    Args:
        sources: Method name to the metrics file of its run, in the order wanted.
        target: The merged file.

    Returns:
        The merged records.

    Raises:
        ValueError: As `MetricsFollower.poll`.
    """
    merged = [
        {"method": method, **record} for method, path in sources.items() for record in MetricsFollower(path).poll()
    ]
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in merged), encoding="utf-8")
    temporary.replace(target)
    return merged


def curve(records: Iterable[Record], split: str, key: str) -> list[tuple[int, float]]:
    """The (step, value) pairs of one key, ordered by step, without missing and non-finite values.

    Where a step was logged twice (Megatron validates once more after the last step), the later record counts.
    """
    own = [record for record in records if record.get("split") == split]
    return sorted({record["step"]: float(record[key]) for record in own if _is_finite(record.get(key))}.items())


def summarize(records: Iterable[Record], methods: Sequence[str]) -> list[Summary]:
    """Reduce merged records to one `Summary` per method, in the order of `methods`."""
    by_method: dict[str, list[Record]] = {method: [] for method in methods}
    for record in records:
        by_method.get(record["method"], []).append(record)
    return [_summarize_one(method, own) for method, own in by_method.items()]


def comparison_table(
    summaries: Sequence[Summary], curves: Sequence[Curve], title: str = "", seconds: Mapping[str, float] | None = None
) -> Table:
    """A table with one row per method: final accuracy, drift at the first and last step, training reward, time.

    Skipped steps have a column only if there were any.

    Args:
        summaries: From `summarize`.
        curves: Labels and groups by method. A method without a curve is shown by its own name.
        title: The table's title.
        seconds: Wall-clock seconds of each run; without it that column is left out.
    """
    named = {entry.method: entry for entry in curves}
    grouped = any(entry.group for entry in curves)
    skipped = any(row.skipped for row in summaries)
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("Method", "Reward") if grouped else ("Method",):
        table.add_column(heading, no_wrap=True)
    numbers = ["Accuracy", "Drift", "Training\nreward", *(["Skipped"] if skipped else [])]
    for heading in [*numbers, *(["Time"] if seconds is not None else [])]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in summaries:
        entry = named.get(row.method, Curve(row.method, row.method))
        cells: list[str | Text] = [entry.label, *([entry.group] if grouped else [])]
        cells.append(Text(number(row.accuracy), style="bold"))
        cells += [f"{number(row.first_drift)} > {number(row.last_drift)}", number(row.reward)]
        cells += [str(row.skipped)] if skipped else []
        if seconds is not None:
            cells.append(f"{seconds[row.method]:.0f} s" if row.method in seconds else "-")
        table.add_row(*cells)
    return table


def comparison_figure(
    records: Sequence[Record],
    curves: Sequence[Curve],
    title: str = "",
    baseline: tuple[str, float] | None = None,
    drift_label: str = "Drift (L1)",
) -> Figure:
    """Accuracy and drift against the step, one line per method; the legend is sorted by final accuracy and shows it.

    Args:
        records: Merged records.
        curves: The methods to draw, and how.
        title: One line above both panels.
        baseline: A label and an accuracy drawn as a thin horizontal line: where all runs began.
        drift_label: What the drift axis measures.

    Returns:
        A figure that belongs to no window; `figure.savefig(path)` writes it.
    """
    figure = Figure(figsize=(12.5, 4.6), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    final: list[tuple[float, Any, str]] = []
    for order, style in enumerate(curves):
        own = [record for record in records if record.get("method") == style.method]
        accuracy = curve(own, "valid", ACCURACY)
        line = _draw(left, accuracy, style, order, len(curves))
        _draw(right, curve(own, "train", DRIFT), style, order, len(curves))
        last = accuracy[-1][1] if accuracy else math.nan
        name = f"{style.label}, {style.group}" if style.group else style.label
        final.append((last if accuracy else -1.0, line, f"{number(last)}  {name}"))
    _dress(left, "Accuracy of the trainer")
    left.set_ylim(-0.03, 1.05)
    if baseline is not None:
        left.axhline(baseline[1], color="0.6", linewidth=0.8, linestyle=":", zorder=0)
        left.annotate(baseline[0], (0.99, baseline[1]), (0, 3), xycoords=left.get_yaxis_transform(), ha="right",
                      textcoords="offset points", fontsize=8, color="0.4")  # fmt: skip
    _dress(right, drift_label)
    right.set_ylim(bottom=0)
    final.sort(key=lambda entry: -entry[0])
    figure.legend(
        [line for _, line, _ in final],
        [label for *_, label in final],
        loc="outside right center",
        title="Final accuracy",
        alignment="left",
        frameon=False,
        fontsize=9,
        handlelength=3,
    )
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def number(value: float | None) -> str:
    """Two decimals, or a dash where there is no number."""
    return f"{value:.2f}" if _is_finite(value) else "-"


def _summarize_one(method: str, records: Sequence[Record]) -> Summary:
    accuracy = curve(records, "valid", ACCURACY)
    reward = curve(records, "train", REWARD)
    drift = curve(records, "train", DRIFT)
    skipped = curve(records, "train", SKIPPED)
    return Summary(
        method=method,
        step=accuracy[-1][0] if accuracy else None,
        accuracy=accuracy[-1][1] if accuracy else None,
        reward=reward[-1][1] if reward else None,
        first_drift=drift[0][1] if drift else None,
        last_drift=drift[-1][1] if drift else None,
        skipped=round(skipped[-1][1]) if skipped else 0,
    )


def _parse(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not a JSON line: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError(f'{where}: expected an object with a whole "step", got {line[:80]!r}')
    return record


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _draw(axes: Axes, points: Sequence[tuple[int, float]], style: Curve, order: int, count: int) -> Any:
    """Draw one curve. Different curves carry their markers at different points, so that none hides another's."""
    gap = max(len(points) // 5, 1)
    (line,) = axes.plot(
        [step for step, _ in points],
        [value for _, value in points],
        color=style.color,
        linestyle=(0, (4, 2)) if style.dashed else "-",
        linewidth=1.6,
        marker=style.marker,
        markersize=5,
        markevery=(order * gap // max(count, 1), gap),
    )
    return line


def _dress(axes: Axes, label: str) -> None:
    axes.set_xlabel("Step")
    axes.set_ylabel(label)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
