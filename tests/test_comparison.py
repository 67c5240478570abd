"""Merging, following, tabulating and drawing the metrics of several runs."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from megatron_sc.diagnostics.comparison import (
    Curve,
    MetricsFollower,
    comparison_figure,
    comparison_table,
    curve,
    merge_metrics,
    summarize,
)

CURVES = (
    Curve("plain", "Policy gradient", "all-positive", "#D55E00", "o"),
    Curve("sc", "Score centering", "all-positive", "#0072B2", "D"),
    Curve("sc-group", "Score centering", "group-centered", "#0072B2", "D", dashed=True),
)


def record(method: str, step: int, split: str, **values: float) -> dict[str, object]:
    return {"method": method, "step": step, "split": split, **values}


RECORDS = [
    record("plain", 10, "train", drift_l1=0.3, reward=0.4, skipped=1),
    record("plain", 10, "valid", accuracy=0.5),
    record("plain", 20, "train", drift_l1=1.3, reward=0.2, skipped=2),
    record("plain", 20, "valid", accuracy=0.1),
    record("sc", 10, "train", drift_l1=0.3, reward=0.4, skipped=0),
    record("sc", 10, "valid", accuracy=0.7),
    record("sc", 20, "train", drift_l1=0.2, reward=0.6, skipped=0),
    record("sc", 20, "valid", accuracy=0.99),
]


def rendered(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_follower_returns_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    follower = MetricsFollower(path)
    assert follower.poll() == []  # the run has not written anything yet

    path.write_text('{"step": 1, "split": "valid", "accuracy": 0.5}\n{"step": 2, "spl')
    assert [r["step"] for r in follower.poll()] == [1]
    assert follower.poll() == []
    with path.open("a") as file:
        file.write('it": "valid", "accuracy": 0.75}\n\n{"step": 3, "split": "valid"}\n')
    assert [r["step"] for r in follower.poll()] == [2, 3]
    assert follower.latest("valid", "accuracy") == 0.75  # step 3 has none
    assert follower.latest("train", "accuracy") is None


@pytest.mark.parametrize("line", ["{broken", "[1, 2]", '{"split": "train"}', '{"step": 1.5}'])
def test_follower_names_file_and_line_of_a_bad_record(tmp_path: Path, line: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1}\n')
    follower = MetricsFollower(path)
    follower.poll()
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"run\.jsonl:2: "):
        follower.poll()


def test_merge_keeps_order_and_leaves_out_what_a_killed_run_tore(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"step": 1, "split": "train"}\n{"step": 2, "split": "train"}\n')
    (tmp_path / "a.jsonl").write_text('{"step": 1, "split": "train"}\n{"step": 2, "sp')
    target = tmp_path / "metrics.jsonl"
    target.write_text("from an earlier demo\n")

    merged = merge_metrics({name: tmp_path / f"{name}.jsonl" for name in ("b", "a", "never-started")}, target)

    assert [(r["method"], r["step"]) for r in merged] == [("b", 1), ("b", 2), ("a", 1)]
    lines = target.read_text().splitlines()
    assert [json.loads(line) for line in lines] == merged
    assert all(line.startswith('{"method": ') for line in lines)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "metrics.jsonl"]


def test_of_two_records_of_a_step_the_later_counts() -> None:
    records = [{"step": 5, "split": "valid", "accuracy": value} for value in (0.25, 0.75)]
    assert curve(records, "valid", "accuracy") == [(5, 0.75)]


def test_curve_is_ordered_and_holds_finite_numbers_only() -> None:
    values = {30: 3.0, 10: 1.0, 20: math.nan, 40: math.inf, 50: None, 60: "6"}
    records = [{"step": step, "split": "train", "x": value} for step, value in values.items()]
    assert curve([*records, {"step": 1, "split": "valid", "x": 9.0}], "train", "x") == [(10, 1.0), (30, 3.0)]


def test_summary_takes_the_last_records() -> None:
    plain, centered, absent = summarize(RECORDS, ["plain", "sc", "sc-group"])
    assert (plain.step, plain.accuracy, plain.reward, plain.skipped) == (20, 0.1, 0.2, 2)
    assert (plain.first_drift, plain.last_drift) == (0.3, 1.3)
    assert (centered.accuracy, centered.skipped) == (0.99, 0)
    assert (absent.method, absent.accuracy, absent.last_drift, absent.skipped) == ("sc-group", None, None, 0)


def test_table_shows_every_number_without_truncation() -> None:
    summaries = summarize(RECORDS, ["plain", "sc", "sc-group"])
    text = rendered(comparison_table(summaries, CURVES, "Results", {"plain": 61.4, "sc": 58.0}), width=90)
    rows = {" ".join(line.split()) for line in text.splitlines()}
    assert "Policy gradient all-positive 0.10 0.30 > 1.30 0.20 2 61 s" in rows
    assert "Score centering all-positive 0.99 0.30 > 0.20 0.60 0 58 s" in rows
    assert "Score centering group-centered - - > - - 0 -" in rows
    assert "…" not in text


def test_table_leaves_out_columns_that_say_nothing() -> None:
    text = rendered(comparison_table(summarize(RECORDS[4:], ["sc"]), [Curve("sc", "Score centering")]), width=60)
    assert "Score centering" in text
    for heading in ("Skipped", "Reward", "Time"):
        assert heading not in text


def test_figure_draws_both_panels_and_sorts_the_legend_by_final_accuracy(tmp_path: Path) -> None:
    figure = comparison_figure(RECORDS, CURVES, "Title", baseline=("before", 0.45), drift_label="drift!")
    accuracy, drift = figure.axes
    lines = [[list(line.get_xdata()), list(line.get_ydata())] for line in accuracy.lines]
    assert lines[:2] == [[[10, 20], [0.5, 0.1]], [[10, 20], [0.7, 0.99]]]
    assert lines[3][1] == [0.45, 0.45]  # the baseline; lines[2] is the method without records
    assert [list(line.get_ydata()) for line in drift.lines[:2]] == [[0.3, 1.3], [0.3, 0.2]]
    assert drift.get_ylabel() == "drift!"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "0.99  Score centering, all-positive",
        "0.10  Policy gradient, all-positive",
        "-  Score centering, group-centered",
    ]
    assert [line.is_dashed() for line in accuracy.lines[:3]] == [False, False, True]
    assert [line.get_color() for line in accuracy.lines[:2]] == ["#D55E00", "#0072B2"]

    path = tmp_path / "demo.png"
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_curves_on_top_of_each_other_carry_their_markers_at_different_points() -> None:
    same = [record(m, step, "valid", accuracy=1.0) for m in ("plain", "sc", "sc-group") for step in range(10, 210, 10)]
    lines = comparison_figure(same, CURVES).axes[0].lines
    starts = [line.get_markevery()[0] for line in lines]
    assert len(set(starts)) == 3
