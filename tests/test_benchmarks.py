"""`benchmarks.loss` at tiny sizes: what it counts and checks. What it times is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from benchmarks.loss import Plan, Result, _require_accurate, main, measure, table
from benchmarks.measure import copy_bandwidth, counted, peak_bytes
from benchmarks.positions import make_positions

ROOT = Path(__file__).parent.parent
TINY = Plan(rows=8, vocab=301, k=(4, 12), dtype=("fp32", "bf16"), tp=(2,), repeats=2, hidden=16)


def measured(plan: Plan) -> list[tuple[str, object]]:
    """What a rank reports."""
    reports: list[tuple[str, object]] = []
    measure(plan, dist.group.WORLD, lambda kind, content: reports.append((kind, content)))
    return reports


@pytest.fixture(scope="module")
def reports() -> list[tuple[str, object]]:
    return run_ranks(measured, 2, TINY, timeout=200)[0]


@pytest.fixture(scope="module")
def results(reports) -> list[Result]:
    return [content for kind, content in reports if kind == "result"]


def of(results: list[Result], method: str, dtype: str = "fp32") -> list[Result]:
    return [r for r in results if r.method == method and r.dtype == dtype]


def test_every_combination_is_measured(results):
    losses = [r for r in results if r.section == "loss"]
    heads = [r for r in results if r.section == "LM head"]
    assert len(losses) == 2 * 2 * 8
    assert len(heads) == 2 * 4, "with the largest k only"
    assert {(r.dtype, r.k, r.tp) for r in losses} == {(d, k, 2) for d in ("fp32", "bf16") for k in (4, 12)}
    assert all(len(r.seconds) == TINY.repeats and min(r.seconds) > 0 for r in results)
    assert all(r.ratio == 1 for r in of(results, "(a) Megatron cross-entropy") + of(results, "Megatron layer + (a)"))


def test_collectives_and_bytes_are_counted(results):
    assert {(r.collectives, r.bytes_per_token) for r in of(results, "(a) Megatron cross-entropy")} == {(3, 12.0)}
    assert {(r.collectives, r.bytes_per_token) for r in of(results, "ours")} == {(2, 48.0)}, "whatever k is"
    common = {r.k: (r.collectives, r.bytes_per_token) for r in of(results, "(c) common scheme")}
    assert common == {k: (3, 4.0 * (k + 1) + 8) for k in (4, 12)}
    listing = of(results, "(b) paper's listing")[0]
    assert listing.bytes_per_token == 4 * 151, "every column"
    assert of(results, "(b) paper's listing", "bf16")[0].bytes_per_token == 2 * 151


def test_peak_memory_is_what_the_methods_hold(results):
    logits = 4 * TINY.rows * 151
    assert of(results, "(a) Megatron cross-entropy")[0].peak_bytes < logits / 2, "it works in place"
    assert of(results, "(a) Megatron cross-entropy", "bf16")[0].peak_bytes >= logits, "after a float32 copy"
    kept, reused = of(results, "ours, logits kept")[0], of(results, "ours, no entropy")[0]
    assert kept.peak_bytes - reused.peak_bytes >= logits - 2048, "the gradient"
    assert kept.peak_share == kept.peak_bytes / logits


def test_gradients_are_right(results):
    wrong = [(r.method, r.dtype, r.k, r.error) for r in results if r.error > (1e-3 if r.dtype == "fp32" else 0.05)]
    assert not wrong
    assert sum(r.error > 0 for r in results) > len(results) / 2, "rounding shows"


def test_a_wrong_gradient_stops_the_run():
    _require_accurate("fine", 1e-4, torch.float32)
    for error in (0.01, float("nan")):
        with pytest.raises(RuntimeError, match="wrong: the gradient is off by"):
            _require_accurate("wrong", error, torch.float32)


def test_methods_take_turns(reports):
    turns = [text.split("turn ")[1] for kind, text in reports if kind == "progress" and "loss: turn" in text][:16]
    assert [text[0] for text in turns] == ["1"] * 8 + ["2"] * 8
    names = [text.split(": ", 1)[1] for text in turns]
    assert names[:8] == names[8:]
    assert len(set(names)) == 8


def test_peak_is_the_largest_sum_alive():
    def step() -> None:
        first = torch.empty(1 << 20)
        second = torch.empty(1 << 18)
        del first, second
        torch.empty(1 << 19)

    assert peak_bytes(step, torch.device("cpu")) == 4 * ((1 << 20) + (1 << 18))


def traffic_of_some_calls() -> tuple[int, int]:
    rank_values = torch.zeros(6)
    gathered = torch.zeros(6 * dist.get_world_size())
    with counted() as traffic:
        dist.all_reduce(rank_values)
        dist.all_gather_into_tensor(gathered, rank_values)
    dist.all_reduce(rank_values)  # not counted any more
    return traffic.collectives, traffic.contributed


def test_traffic_is_what_a_rank_hands_in():
    assert run_ranks(traffic_of_some_calls, 2) == [(2, 48), (2, 48)]


def test_positions_do_not_depend_on_the_number_of_ranks():
    whole = make_positions(5, 101, 7, torch.float32, torch.device("cpu"), 0, 1)
    parts = [make_positions(5, 101, 7, torch.float32, torch.device("cpu"), rank, 2) for rank in range(2)]
    assert [part.shard.valid for part in parts] == [51, 50]
    assert torch.equal(torch.cat([p.logits[:, : p.shard.valid] for p in parts], dim=1), whole.logits)
    for part in parts:
        assert torch.equal(part.head.ids, whole.head.ids)
        assert torch.equal(part.sampled_ids, whole.sampled_ids)
    assert all(len(set(row)) == 7 for row in whole.head.ids.tolist())
    mass = whole.head.logprobs.exp().sum(1) + whole.head.log_tail_mass.exp()
    torch.testing.assert_close(mass, torch.ones(5))


def test_the_speed_of_a_copy_is_plausible():
    assert 1e8 < copy_bandwidth(torch.device("cpu")) < 1e13


def test_the_table_shows_every_result(results):
    machine = {"device": "test", "torch": "0", "load_before": 0.0, "load_after": 0.0}
    shown = table(results, TINY, machine)
    assert shown.row_count == len(results)
    ours = [list(column.cells) for column in shown.columns]
    wire = dict(zip(ours[3], ours[11], strict=True))
    assert wire["ours"] == "2 / 48 B"


@pytest.mark.parametrize("flags", [["--k", "301", "--vocab", "301"], ["--k", "0"], ["--rows", "1"], ["--dtype", "fp8"]])
def test_flags_that_make_no_sense_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


def test_the_command(tmp_path):
    path = tmp_path / "figures.json"
    flags = "--rows 8 --vocab 301 --k 4 --dtype fp32 --tp 1 --repeats 1 --hidden 0 --json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.loss", *flags.split(), path], cwd=ROOT, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(c) common scheme" in done.stdout
    assert "turn 1 of 1" in done.stderr
    figures = json.loads(path.read_text())
    assert [r["method"] for r in figures["results"]][:2] == ["(a) Megatron cross-entropy", "(b) paper's listing"]
    assert figures["plan"]["rows"] == 8
    assert [r["collectives"] for r in figures["results"] if r["method"] == "ours"] == [0], "one rank exchanges nothing"
