"""Collapse and rescue on one machine: eight ways to train from the same mismatched sampler, side by side.

    python examples/demo.py [--seed N] [--steps N] [--methods plain,score-centering] [--output DIR]

A tiny transformer learns to reverse six digits. A supervised warm start saves a checkpoint; every method then continues
from it with `examples/pretrain_gpt_sc.py`, an ordinary Megatron script. All differ in the flags of `METHODS` only. Each
run is a process of its own, and its log and metrics stay in the output folder.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from megatron_sc.diagnostics.comparison import (
    ACCURACY,
    DRIFT,
    Curve,
    MetricsFollower,
    Summary,
    comparison_figure,
    comparison_table,
    merge_metrics,
    number,
    summarize,
)

SCRIPT = Path(__file__).with_name("pretrain_gpt_sc.py")

# --- Settings, fixed beforehand -------------------------------------------------------------------------------------

WARM_START_STEPS = 30  # about 0.6 of the digits right: room to learn and to lose
STEPS = 240
SEED = 1

MODEL_ARGS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --tokenizer-type NullTokenizer --vocab-size 32 --make-vocab-size-divisible-by 32 --init-method-std 0.1
"""
OPTIMIZER_ARGS = """
    --micro-batch-size 128 --global-batch-size 128 --optimizer adam --weight-decay 0 --clip-grad 1.0
"""
LOGGING_ARGS = "--log-interval 10 --eval-interval 10 --eval-iters 1"
ROLLOUT_ARGS = "--task reverse --reward-mode fraction --head-size 8"
# Every weight matrix of the sampler is the trainer's plus half a standard deviation of a fixed Gaussian direction,
# distorted again after every step: the distortion runs ahead of a trainer that follows it.
SAMPLER_ARGS = "--prompts-per-step 16 --samples-per-prompt 8 --sampler gaussian --sampler-noise 0.5"
METHOD_ARGS = "--lr 1.5e-3 --min-lr 1.5e-4 --lr-decay-style linear"  # over the run's steps
WARM_START_ARGS = """
    --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant
    --prompts-per-step 128 --samples-per-prompt 1 --sampler demonstrations
    --loss-correction none --importance-weight none --advantage none
"""


@dataclass(frozen=True)
class Method:
    """One row of the comparison: the three flags that make it, and how it is drawn (Okabe-Ito colors)."""

    name: str
    label: str
    correction: str
    weight: str
    advantage: str
    color: str
    marker: str

    @property
    def args(self) -> list[str]:
        """The flags by which this run differs from the others."""
        return [
            "--loss-correction", self.correction, "--importance-weight", self.weight, "--advantage", self.advantage,
        ]  # fmt: skip

    @property
    def curve(self) -> Curve:
        """The method's line in table and picture; group-centered rewards are dashed."""
        group = "group-centered" if self.advantage == "group" else "all-positive"
        return Curve(self.name, self.label, group, self.color, self.marker, dashed=self.advantage == "group")


METHODS = (
    Method("plain", "Policy gradient", "none", "none", "none", "#D55E00", "o"),
    Method("is", "IS", "none", "is", "none", "#E69F00", "v"),
    Method("tis", "TIS", "none", "tis", "none", "#CC79A7", "s"),
    Method("mis", "MIS", "none", "mis", "none", "#56B4E9", "^"),
    Method("score-centering", "Score centering", "score_centering", "none", "none", "#0072B2", "D"),
    Method("tis-score-centering", "TIS + score centering", "score_centering", "tis", "none", "#009E73", "P"),
    Method("plain-group", "Policy gradient", "none", "none", "group", "#D55E00", "o"),
    Method("score-centering-group", "Score centering", "score_centering", "none", "group", "#0072B2", "D"),
)
WARM_START = "warm-start"

# --- From settings to command lines ---------------------------------------------------------------------------------


def warm_start_argv(output: Path, seed: int) -> list[str]:
    """The command line of the supervised warm start, which leaves a checkpoint in `output/warm-start`."""
    return [
        *_common_argv(output / f"{WARM_START}.jsonl", WARM_START_STEPS, seed),
        *shlex.split(WARM_START_ARGS),
        *("--save", str(output / WARM_START), "--save-interval", str(WARM_START_STEPS)),
    ]


def method_argv(method: Method, output: Path, steps: int, seed: int) -> list[str]:
    """The command line of one method: the warm start's weights, a fresh optimizer, the mismatched sampler."""
    return [
        *_common_argv(output / f"{method.name}.jsonl", steps, seed),
        *shlex.split(f"{SAMPLER_ARGS} {METHOD_ARGS}"),
        *method.args,
        *("--load", str(output / WARM_START), "--finetune", "--exit-on-missing-checkpoint"),
    ]


def _common_argv(metrics: Path, steps: int, seed: int) -> list[str]:
    settings = " ".join((MODEL_ARGS, OPTIMIZER_ARGS, LOGGING_ARGS, ROLLOUT_ARGS))
    return [
        *(sys.executable, str(SCRIPT), *shlex.split(settings)),
        *("--train-iters", str(steps), "--seed", str(seed), "--sampler-seed", str(seed)),
        *("--metrics-jsonl", str(metrics)),
    ]


# --- Runs: processes that are started, followed and stopped ---------------------------------------------------------


class RunFailedError(RuntimeError):
    """A run ended with an error; `run` is that run."""

    def __init__(self, run: Run) -> None:
        super().__init__(f"{run.name} failed with exit code {run.returncode}")
        self.run = run


@dataclass
class Run:
    """One training process. Its output goes to `log`; its progress is read from the metrics file it writes."""

    name: str
    label: str
    group: str
    argv: list[str]
    steps: int
    log: Path
    metrics: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    seconds: float = 0.0  # how long it has run, or ran
    step: int = 0
    first_step: tuple[int, float] | None = None  # the first step seen, and when: start-up is no measure of speed
    follower: MetricsFollower = field(init=False)

    def __post_init__(self) -> None:
        self.follower = MetricsFollower(self.metrics)

    @property
    def returncode(self) -> int | None:
        """None while it waits or runs."""
        return self.process.returncode if self.process else None

    @property
    def state(self) -> str:
        """waiting, starting, running, done or failed."""
        if self.process is None:
            return "waiting"
        if self.returncode is None:
            return "running" if self.step else "starting"
        return "failed" if self.returncode else "done"

    def start(self) -> None:
        """Start the process in a session of its own, so that a signal reaches whatever it starts."""
        with self.log.open("wb") as log:
            log.write(f"$ {shlex.join(self.argv)}\n\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=_environment(),
                start_new_session=True,
            )  # fmt: skip
        self.started = time.monotonic()

    def poll(self) -> None:
        """Take in what the run has written and whether it has ended.

        Raises:
            RunFailedError: it ended with an error.
        """
        if self.process is None or self.returncode is not None:
            return
        ended = self.process.poll() is not None  # asked first: what it wrote before its end is then read below
        self.seconds = time.monotonic() - self.started
        for record in self.follower.poll():
            self.step = max(self.step, record["step"])
        if self.step and self.first_step is None:
            self.first_step = (self.step, self.seconds)
        if ended and self.returncode:
            raise RunFailedError(self)

    def signal(self, signum: int) -> None:
        """Send a signal to the process and its children, if it still runs."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signum)

    def seconds_left(self, typical: float | None = None) -> float | None:
        """Estimated seconds to its end, or None. `typical`: the length of such a run, where one is known."""
        if self.returncode is not None:
            return 0.0
        if self.first_step and self.step > self.first_step[0]:
            step, seconds = self.first_step
            return (self.steps - self.step) * (self.seconds - seconds) / (self.step - step)
        return max(typical - self.seconds, 0.0) if typical else None


def total_seconds_left(runs: Sequence[Run], workers: int) -> float | None:
    """Estimated seconds until all runs have ended, `workers` at a time, or None as long as none has shown its speed."""
    started = [(run.seconds, run.seconds_left()) for run in runs if run.process is not None]
    lengths = [seconds + left for seconds, left in started if left is not None]
    if not lengths:
        return None
    typical = sum(lengths) / len(lengths)
    lefts = [run.seconds_left(typical) or 0.0 for run in runs]
    return max(sum(lefts) / min(workers, len(runs)), *lefts)


def run_all(runs: Sequence[Run], workers: int, report: Report) -> None:
    """Run all, `workers` at a time, and report on the way. On any exception every process is stopped first.

    Raises:
        RunFailedError: a run ended with an error; the others were stopped.
    """
    try:
        while any(run.returncode is None for run in runs):
            active = sum(run.process is not None and run.returncode is None for run in runs)
            for run in [run for run in runs if run.process is None][: workers - active]:
                run.start()
            time.sleep(0.2)
            for run in runs:
                run.poll()
            report(runs)
    finally:
        stop_all(runs)


def stop_all(runs: Sequence[Run], patience: float = 5.0) -> None:
    """End every run that still runs: politely, then by force. An impatient second Ctrl-C does not leave any behind."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for run in runs:
                run.signal(signum)
            deadline = time.monotonic() + patience
            while any(run.process and run.process.poll() is None for run in runs) and time.monotonic() < deadline:
                time.sleep(0.05)
    finally:
        signal.signal(signal.SIGINT, previous)


def _environment() -> dict[str, str]:
    """One thread and one rank a run, each with its own rendezvous port."""
    return {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
        "MASTER_PORT": str(_free_port()),
    }


def _free_port() -> int:
    """A free port below the ephemeral range, another one at every call."""
    for port in _PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError("no free port below 30000")


_PORTS = iter(range(20000 + os.getpid() % 8000, 30000))

# --- What is shown --------------------------------------------------------------------------------------------------

DRIFT_LABEL = "Drift: L1 distance of sampler and trainer"
SURVIVED = 0.9  # trainer accuracy


class Report:
    """Progress while runs go on: a live table on a terminal, elsewhere a plain line every ten seconds."""

    def __init__(self, console: Console, workers: int, live: Live | None, started: float) -> None:
        self.console = console
        self.workers = workers
        self.live = live
        self.started = started  # of the demo, in time.monotonic()
        self.printed = time.monotonic()

    def __call__(self, runs: Sequence[Run]) -> None:
        """Show where the runs are."""
        now = time.monotonic()
        if self.live is not None:
            self.live.update(progress_table(runs, self.workers, now - self.started))
        elif now - self.printed >= 10.0:
            self.printed = now
            line = progress_line(runs, self.workers, now - self.started)
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress_table(runs: Sequence[Run], workers: int, elapsed: float) -> Table:
    """One row per run: where it is, its accuracy and drift, and when it will end."""
    table = Table(caption=_progress_summary(runs, workers, elapsed), caption_justify="left", box=None)
    for heading in ("Method", "Reward", "", "Step", "Accuracy", "Drift", "Left"):
        table.add_column(heading, justify="left" if heading in ("Method", "Reward", "") else "right", no_wrap=True)
    for run in runs:
        left = run.seconds_left()
        table.add_row(
            run.label,
            run.group,
            ProgressBar(run.steps, run.step, width=8),
            f"{run.step}/{run.steps}" if run.step else run.state,
            number(run.follower.latest("valid", ACCURACY)),
            number(run.follower.latest("train", DRIFT)),
            run.state if run.returncode is not None else f"{left:.0f} s" if left is not None else "",
        )
    return table


def progress_line(runs: Sequence[Run], workers: int, elapsed: float) -> str:
    """The same in one line: the runs in progress and a summary."""
    now = [
        f"{run.name} {run.step}/{run.steps} accuracy {number(run.follower.latest('valid', ACCURACY))}"
        f" drift {number(run.follower.latest('train', DRIFT))}"
        for run in runs
        if run.state in ("starting", "running")
    ]
    return " | ".join([_progress_summary(runs, workers, elapsed), *now])


def _progress_summary(runs: Sequence[Run], workers: int, elapsed: float) -> str:
    done = sum(run.state == "done" for run in runs)
    left = total_seconds_left(runs, workers)
    estimate = f", about {left:.0f} s left" if left else ""
    return f"{elapsed:4.0f} s: {done} of {len(runs)} done{estimate}"


def reading(summaries: Sequence[Summary], methods: Sequence[Method]) -> str:
    """What the results say, and what they cannot say at this size."""
    lines = [
        "Accuracy is the share of right digits when the trainer itself samples, undistorted; guessing gives 0.10.",
        "Drift is the L1 distance of the sampler's next-token distribution from the trainer's, first > last. It is"
        " small where a policy has learned and where it has collapsed, so read it beside the accuracy.",
    ]
    for group in dict.fromkeys(method.curve.group for method in methods):
        rows = [
            (method.label, summary.accuracy)
            for method, summary in zip(methods, summaries, strict=True)
            if method.curve.group == group
        ]
        for verb, wanted in (("survived", True), ("collapsed or fell behind", False)):
            chosen = [row for row in rows if (row[1] is not None and row[1] >= SURVIVED) == wanted]
            if chosen:
                lines.append(f"With {group} reward {verb}: " + ", ".join(f"{k} {number(v)}" for k, v in chosen) + ".")
    lines.append(
        "What this cannot show: at this size IS and MIS survive on some seeds and not on others,"
        " and with group-centered reward every method does. The article's gap between score centering"
        " and importance sampling is one of large models, large vocabularies and long runs;"
        " all-positive reward is the hard case at any size."
    )
    return "\n".join(lines)


# --- The demo -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit code: 0 when every run finished, 1 when one failed, 130 when interrupted."""
    options = parse_arguments(arguments)
    output: Path = options.output
    console = Console(width=None if sys.stdout.isatty() else 100)
    signal.signal(signal.SIGTERM, _interrupt)
    clear(output)

    methods: tuple[Method, ...] = options.methods
    warm_start = _run(WARM_START, "Supervised warm start", "", warm_start_argv(output, options.seed), WARM_START_STEPS,
                      output)  # fmt: skip
    runs = [
        _run(method.name, method.label, method.curve.group, method_argv(method, output, options.steps, options.seed),
             options.steps, output)
        for method in methods
    ]  # fmt: skip
    console.print(settings_text(options.steps, options.seed, options.jobs, output), highlight=False, markup=False)

    started = time.monotonic()
    try:
        for batch, workers in (([warm_start], 1), (runs, options.jobs)):
            with Live(console=console, refresh_per_second=2) if console.is_terminal else nullcontext() as live:
                run_all(batch, workers, Report(console, workers, live, started))
    except RunFailedError as failure:
        console.print(failure_text(failure.run), style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        text = f"Interrupted: the runs were stopped. Logs and metrics so far are in {output}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
        return 130
    finally:
        records = merge_metrics({run.name: run.metrics for run in [warm_start, *runs]}, output / "metrics.jsonl")

    summaries = summarize(records, [method.name for method in methods])
    curves = [method.curve for method in methods]
    title = f"{options.steps} steps from one checkpoint under one mismatched sampler, seed {options.seed}"
    console.print()
    console.print(comparison_table(summaries, curves, title, {run.name: run.seconds for run in runs}))
    accuracy = warm_start.follower.latest("valid", ACCURACY)
    baseline = None if accuracy is None else ("after the warm start", accuracy)
    comparison_figure(records, curves, title, baseline, DRIFT_LABEL).savefig(output / "demo.png")
    console.print(f"\nAfter the warm start: {number(accuracy)}", highlight=False)
    console.print(reading(summaries, methods), highlight=False)
    console.print(
        f"\nFinished in {time.monotonic() - started:.0f} s. Picture: {output / 'demo.png'}, numbers:"
        f" {output / 'metrics.jsonl'}, logs: {output / '<method>.log'}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The demo's own flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=_positive, default=SEED, help="of weights and sampler (default %(default)s)")
    parser.add_argument("--steps", type=_positive, default=STEPS, help="of each method (default %(default)s)")
    parser.add_argument(
        "--methods", type=_methods, default=METHODS, metavar="A,B", help=", ".join(method.name for method in METHODS)
    )
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="DIR", help="default %(default)s")
    parser.add_argument(
        "--jobs", type=_positive, default=min(_cores(), 4), help="runs at a time, one thread each (default %(default)s)"
    )
    return parser.parse_args(arguments)


def clear(output: Path) -> None:
    """Make the output folder and remove what an earlier demo left in it, and nothing else."""
    output.mkdir(parents=True, exist_ok=True)
    names = [f"{name}{suffix}" for name in (WARM_START, *(m.name for m in METHODS)) for suffix in (".log", ".jsonl")]
    for name in (*names, "metrics.jsonl", "demo.png"):
        (output / name).unlink(missing_ok=True)
    if (output / WARM_START).exists():
        shutil.rmtree(output / WARM_START)


def settings_text(steps: int, seed: int, jobs: int, output: Path) -> str:
    """The settings that all runs share, for the reader of the results."""
    shared = " ".join(" ".join((MODEL_ARGS, OPTIMIZER_ARGS, ROLLOUT_ARGS, SAMPLER_ARGS)).split())
    return (
        f"{WARM_START_STEPS} supervised steps, then {steps} steps for each method, {jobs} at a time, seed {seed}."
        f"\nEvery run: {shared}\nThe whole command of a run is the first line of its log, {output / '<method>.log'}\n"
    )


def failure_text(run: Run, lines: int = 30) -> str:
    """The end of a failed run's log, and where the whole of it is."""
    tail = run.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    return "\n".join([*tail, "", f"{run.label} ({run.name}) failed with exit code {run.returncode}. Log: {run.log}"])


def _run(name: str, label: str, group: str, argv: list[str], steps: int, output: Path) -> Run:
    return Run(name, label, group, argv, steps, output / f"{name}.log", output / f"{name}.jsonl")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def _methods(text: str) -> tuple[Method, ...]:
    known = {method.name: method for method in METHODS}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown) or 'list'}; choose from {', '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
