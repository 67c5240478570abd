"""Time, peak memory and traffic of the centered loss against what else there is: one table in one run.

    python -m benchmarks.loss                       # minutes: 512 rows of 151936 columns
    python -m benchmarks.loss --quick               # k = 128, one rank, fewer repeats
    python -m benchmarks.loss --rows 8192 --tp 1    # a GPU is used where there is one

What is compared is in ``methods`` and ``heads``, how it is measured in ``measure``. Every gradient is checked against
float64 on a few rows before anything is timed. Methods take turns (A B C A B C ...), so that a change in the machine's
load meets all alike. With several ranks each has one thread (CPU, gloo) or one GPU (NCCL), and the slowest counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import socket
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .heads import heads, parameters
from .measure import Traffic, copy_bandwidth, counted, peak_bytes, seconds
from .methods import methods
from .positions import Positions, make_positions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHECKED_ROWS = 3


@dataclass(frozen=True)
class Plan:
    """What to measure; the flags."""

    rows: int = 512
    vocab: int = 151936
    k: tuple[int, ...] = (8, 32, 128)
    dtype: tuple[str, ...] = ("fp32", "bf16")
    tp: tuple[int, ...] = (1, 2, 4)
    repeats: int = 7
    hidden: int = 256
    """Width of the hidden states for the LM head; 0: leave it out."""
    device: str = "cpu"


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    section: str
    """``loss`` or ``LM head``."""
    method: str
    dtype: str
    tp: int
    k: int
    seconds: tuple[float, ...]
    """Of each repeat, forward and backward, the slowest rank."""
    ratio: float
    """Median over the section's first method's median."""
    cpu_seconds: tuple[float, ...]
    """Processor time of rank 0 in each repeat."""
    cpu_ratio: float
    """Its median over the section's first method's."""
    peak_bytes: int
    """Allocated at the most, above the inputs; rank 0."""
    peak_share: float
    """The same over the size of this rank's logits in float32."""
    collectives: int
    bytes_per_token: float
    """Contributed by a rank."""
    error: float
    """Largest error of the gradient on the checked rows, in units of its largest entry."""
    floor: float
    """Two reads and one write of the logits at the bandwidth of a copy, in seconds."""


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=512, help="positions in a micro-batch (default: 512)")
    parser.add_argument("--vocab", type=int, default=151936, help="vocabulary size (default: 151936)")
    parser.add_argument("--k", type=int, nargs="+", default=[8, 32, 128], help="tokens in a head (default: 8 32 128)")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="of the logits")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4], help="tensor-parallel ranks (default: 1 2 4)")
    parser.add_argument("--repeats", type=int, default=7, help="timed turns of each method (default: 7)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the LM head, 0: without it (default: 256)")
    parser.add_argument("--quick", action="store_true", help="only k = 128, one rank, 3 repeats")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all figures here")
    flags = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = Plan(
        flags.rows, flags.vocab, tuple(flags.k), tuple(flags.dtype), tuple(flags.tp), flags.repeats, flags.hidden,
        device,
    )  # fmt: skip
    if flags.quick:
        plan = dataclasses.replace(plan, k=(min(128, plan.vocab - 1),), tp=(1,), repeats=3)
    if max(plan.k) >= plan.vocab or min(plan.k) < 1 or plan.rows < CHECKED_ROWS:
        parser.error(f"needs 1 <= k < vocab and rows >= {CHECKED_ROWS}")
    if device == "cuda":
        plan = dataclasses.replace(plan, tp=tuple(n for n in plan.tp if n <= torch.cuda.device_count()))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the ranks' profilers announce themselves
    load = os.getloadavg()[0]
    results: list[Result] = []
    with Console(stderr=True).status("starting") as status:
        for ranks in plan.tp:
            for kind, content in run_ranks(plan, ranks):
                if kind == "progress":
                    status.update(content)
                    if not sys.stderr.isatty():
                        print(content, file=sys.stderr, flush=True)
                elif kind == "result":
                    results.append(content)
                else:
                    print(content, file=sys.stderr)
                    return 1
    machine = {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} cores",
        "torch": torch.__version__,
        "load_before": load,
        "load_after": os.getloadavg()[0],
    }
    Console(width=None if sys.stdout.isatty() else 180).print(table(results, plan, machine))
    if flags.json:
        content = {"plan": dataclasses.asdict(plan), "machine": machine}
        content["results"] = [dataclasses.asdict(result) for result in results]
        flags.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


def table(results: list[Result], plan: Plan, machine: dict[str, Any]) -> Table:
    """All results, sections apart."""
    shown = Table(
        title=f"{plan.rows} rows x {plan.vocab} columns, TIS, forward + backward; {machine['device']}, torch "
        f"{machine['torch']}, load {machine['load_before']:.1f} before and {machine['load_after']:.1f} after",
        caption="ratio: to the first method of the section. CPU: processor time of rank 0, which hardly depends on the "
        "machine's load. peak: allocated at the most above the inputs, and as a "
        "share of the logits in float32. wire: collectives, and bytes that a rank contributes a token. error: of the "
        "gradient against float64, over its largest entry. floor: share of the speed at which a copy would read the "
        "logits twice and write them once.",
    )
    for name in ("dtype", "TP", "k"):
        shown.add_column(name, justify="right")
    shown.add_column("method", no_wrap=True)
    for name in ("ms", "min - max", "ratio", "CPU ms", "ratio", "peak MiB", "share", "wire", "error", "floor"):
        shown.add_column(name, justify="right", no_wrap=True)
    previous = None
    for result in results:
        here = (result.section, result.dtype, result.tp, result.k)
        if previous not in (None, here):
            shown.add_section()
        median, low, high = statistics.median(result.seconds), min(result.seconds), max(result.seconds)
        shown.add_row(
            result.dtype,
            str(result.tp),
            str(result.k),
            result.method,
            f"{median * 1e3:.1f}",
            f"{low * 1e3:.1f} - {high * 1e3:.1f}",
            f"{result.ratio:.2f}",
            f"{statistics.median(result.cpu_seconds) * 1e3:.1f}",
            f"{result.cpu_ratio:.2f}",
            f"{result.peak_bytes / 2**20:.1f}",
            f"{result.peak_share:.1%}",
            f"{result.collectives} / {result.bytes_per_token:.0f} B",
            f"{result.error:.0e}",
            f"{result.floor / median:.0%}" if result.section == "loss" else "",
        )
        previous = here
    return shown


# Ranks ---------------------------------------------------------------------------------------------------------------


def run_ranks(plan: Plan, ranks: int) -> Iterator[tuple[str, Any]]:
    """Measure with some ranks, each a process: yields ("progress", text), ("result", Result) and ("error", text)."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_rank_main, args=(plan, rank, ranks, port, queue), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        finished = 0
        while finished < ranks:
            try:
                kind, content = queue.get(timeout=2)
            except Exception:  # nothing yet: see that all are alive
                if any(process.exitcode not in (None, 0) for process in processes):
                    yield "error", "a rank died"
                    return
                continue
            if kind == "finished":
                finished += 1
                continue
            yield kind, content
            if kind == "error":
                return
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _rank_main(plan: Plan, rank: int, ranks: int, port: int, queue: Any) -> None:
    try:
        # Both cores with one rank; with several, a core each where there are enough.
        torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
        if plan.device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if plan.device == "cuda" else "gloo",
            init_method=f"tcp://localhost:{port}", rank=rank, world_size=ranks, timeout=timedelta(minutes=30),
        )  # fmt: skip
        measure(plan, dist.group.WORLD, lambda kind, content: queue.put((kind, content)) if rank == 0 else None)
        dist.destroy_process_group()
        queue.put(("finished", None))
    except BaseException:
        queue.put(("error", f"rank {rank} of {ranks}:\n{traceback.format_exc()}"))


def measure(plan: Plan, group: Any, report: Callable[[str, Any], None]) -> None:
    """All sections on the ranks of ``group``; ``plan.tp`` is not used. ``report`` is called as ``run_ranks`` yields."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    device = torch.device(plan.device, rank) if plan.device == "cuda" else torch.device("cpu")
    bandwidth = copy_bandwidth(device)
    for dtype in plan.dtype:
        for k in plan.k:
            report("progress", f"TP {ranks}, {dtype}, k = {k}: positions")
            at = make_positions(plan.rows, plan.vocab, k, DTYPES[dtype], device, rank, ranks)
            floor = 3 * at.logits.numel() * at.logits.element_size() / bandwidth
            sections = {"loss": _loss_candidates(at, device, group)}
            if plan.hidden and k == max(plan.k):
                sections["LM head"] = _head_candidates(plan, at, device, group)
            for section, candidates in sections.items():
                found = _compare(plan, section, candidates, at, group, device, report, f"TP {ranks}, {dtype}, k = {k}")
                first, first_cpu = (statistics.median(column) for column in zip(*found[0][1], strict=True))
                for candidate, turns, peak, traffic in found:
                    times, cpu = zip(*turns, strict=True)
                    report(
                        "result",
                        Result(
                            section, candidate.name, dtype, ranks, k, times, statistics.median(times) / first,
                            cpu, statistics.median(cpu) / first_cpu, peak, peak / (4 * at.logits.numel()),
                            traffic.collectives, traffic.contributed / plan.rows, candidate.error, floor,
                        ),
                    )  # fmt: skip


@dataclass(frozen=True)
class _Candidate:
    """A method, ready to run."""

    name: str
    prepare: Callable[[], None]
    """Untimed: what the step will overwrite is put in place."""
    step: Callable[[], object]
    """Forward and backward."""
    error: float


def _compare(
    plan: Plan,
    section: str,
    candidates: Iterator[_Candidate],
    at: Positions,
    group: Any,
    device: torch.device,
    report: Callable[[str, Any], None],
    label: str,
) -> list[tuple[_Candidate, list[tuple[float, float]], int, Traffic]]:
    """Check, count, then time in turns."""
    ready: list[tuple[_Candidate, list[tuple[float, float]], int, Traffic]] = []
    for candidate in candidates:  # each is checked as it is made
        report("progress", f"{label}: {candidate.name}: memory and traffic")
        candidate.prepare()
        candidate.step()  # warm: code, allocator, kernels
        candidate.prepare()
        with counted() as traffic:
            peak = peak_bytes(candidate.step, device)
        ready.append((candidate, [], peak, traffic))
    for turn in range(plan.repeats):
        for candidate, turns, _, _ in ready:
            report("progress", f"{label}: {section}: turn {turn + 1} of {plan.repeats}: {candidate.name}")
            candidate.prepare()
            dist.barrier(group)
            elapsed, cpu = seconds(candidate.step, device)
            slowest = torch.tensor([elapsed], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
            turns.append((slowest.item(), cpu))
    return ready


def _loss_candidates(at: Positions, device: torch.device, group: Any) -> Iterator[_Candidate]:
    storage = torch.empty_like(at.logits)
    anchor = torch.zeros((), device=device, requires_grad=True)
    for method in methods(device):
        few = at.first(CHECKED_ROWS)
        sink: list[Tensor] = []
        total = method.loss(_Given.apply(anchor, few.logits.clone(), sink), few, group).sum()
        total.backward()
        error = _gradient_error(sink[0], few, method.reference, group)
        _require_accurate(method.name, error, at.logits.dtype)

        def prepare() -> None:
            storage.copy_(at.logits)

        def step(loss: Any = method.loss) -> None:
            loss(_Given.apply(anchor, storage, None), at, group).sum().backward()

        yield _Candidate(method.name, prepare, step, error)


def _head_candidates(plan: Plan, at: Positions, device: torch.device, group: Any) -> Iterator[_Candidate]:
    hidden, weight = parameters(plan.rows, plan.hidden, at, device, at.logits.dtype)
    for head in heads():
        few = at.first(CHECKED_ROWS)
        rows = hidden.detach()[:CHECKED_ROWS].clone().requires_grad_()
        weight.main_grad.zero_()  # type: ignore[attr-defined]
        head.loss(rows, weight, few, group).sum().backward()
        assert rows.grad is not None
        error = _hidden_error(rows, weight, few, head.reference, group)
        _require_accurate(head.name, error, at.logits.dtype)

        def prepare() -> None:
            hidden.grad = None

        def step(loss: Any = head.loss) -> None:
            loss(hidden, weight, at, group).sum().backward()

        yield _Candidate(head.name, prepare, step, error)


class _Given(torch.autograd.Function):
    """Logits as a model hands them over: no leaf, and their storage may be overwritten. Costs nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, storage: Tensor, sink: list[Tensor] | None) -> Tensor:
        ctx.sink = sink
        return storage.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        if ctx.sink is not None:
            ctx.sink.append(gradient.clone())
        return None, None, None


# Correctness ---------------------------------------------------------------------------------------------------------


def _whole(local: Tensor, at: Positions, group: Any) -> Tensor:
    """All ranks' columns ``[n, V]`` in float64 on the CPU.

    One rank gathers nothing: gloo copies in a thread of its own, which leaves a second team of OpenMP threads behind.
    With more threads than cores libgomp stops spinning between parallel regions, and methods of many small operations
    pay.
    """
    if dist.get_world_size(group) == 1:
        return local[:, : at.shard.size].double().cpu()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local.contiguous(), group=group)
    return torch.cat(parts, dim=1)[:, : at.shard.size].double().cpu()


def _on_cpu(at: Positions) -> Positions:
    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.cpu()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return type(value)(**{f.name: moved(getattr(value, f.name)) for f in dataclasses.fields(value)})
        return value

    return moved(at)


def _gradient_error(gradient: Tensor, at: Positions, reference: Any, group: Any) -> float:
    """Largest error of a gradient ``[n, V_local]``, over the largest entry of its row."""
    got, logits, at = _whole(gradient, at, group), _whole(at.logits, at, group), _on_cpu(at)
    worst = 0.0
    for row in range(len(got)):
        exact = reference(logits[row], at, row)
        worst = max(worst, float((got[row] - exact).abs().max() / exact.abs().max()))
    return worst


def _hidden_error(hidden: Tensor, weight: Tensor, at: Positions, reference: Any, group: Any) -> float:
    """Largest error of the hidden states' gradient ``[n, h]``, over its row's largest entry."""
    assert hidden.grad is not None
    matrix = _whole(weight.detach().t(), at, group)  # [h, V]
    got, at, worst = hidden.grad.double().cpu(), _on_cpu(at), 0.0
    for row in range(len(got)):
        logits = hidden.detach()[row].double().cpu() @ matrix
        exact = matrix @ reference(logits, at, row)
        worst = max(worst, float((got[row] - exact).abs().max() / exact.abs().max()))
    return worst


def _require_accurate(name: str, error: float, dtype: torch.dtype) -> None:
    """A wrong method is not worth timing.

    Raises:
        RuntimeError: when the error is beyond what rounding explains (in bfloat16, of the logits too).
    """
    bound = 1e-3 if dtype == torch.float32 else 0.05
    if not error <= bound:
        raise RuntimeError(f"{name}: the gradient is off by {error:.1e} of its largest entry (bound {bound:.0e})")


if __name__ == "__main__":
    sys.exit(main())
