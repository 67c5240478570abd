"""Kill Megatron's real loop while it trains from a rollout buffer, and compare with a run that nobody killed.

python -m benchmarks.training_faults --kills 20

The metrics file tells of one history however often it was interrupted (see ``training/loop.py``). Every rollout has its
own reward, so equal rewards in every step mean that each was trained on once, in the same step; equal losses mean that
parameters, optimizer and schedule were those of the uninterrupted run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.buffer_faults import VOCAB, make_group
from megatron_sc.rollouts import Manifest, RolloutWriter

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "pretrain_gpt_sc.py"
GROUPS_PER_STEP = 2
FLAGS = f"""
    --num-layers 1 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --seq-length 24
    --max-position-embeddings 24 --position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size {VOCAB}
    --make-vocab-size-divisible-by 8 --attention-dropout 0 --hidden-dropout 0 --seed 7 --lr 1e-2
    --micro-batch-size 2 --global-batch-size 4 --prompts-per-step {GROUPS_PER_STEP} --samples-per-prompt 2
    --micro-batch-tokens 48 --rollout-shuffle-window 5 --loss-correction score_centering --advantage none
    --log-interval 1 --save-interval 3 --ckpt-format torch_dist --override-opt-param-scheduler
"""


def write_buffer(path: Path, steps: int) -> None:
    """Groups of two for ``steps`` steps; each rollout's reward is its own."""
    with RolloutWriter(path, Manifest(VOCAB), row_group_tokens=64) as writer:
        for number in range(GROUPS_PER_STEP * steps):
            group = make_group(number, samples=2)
            writer.write([replace(r, reward=float(2 * number + i) / 100) for i, r in enumerate(group)])
            if number % 7 == 6:
                writer.commit()


@contextlib.contextmanager
def training(folder: Path, buffer: Path, steps: int) -> Iterator[subprocess.Popen[bytes]]:
    """The example script on one rank, from its latest checkpoint; nothing of it is left afterwards."""
    command = [
        sys.executable, str(SCRIPT), *FLAGS.split(), "--train-iters", str(steps), "--lr-decay-iters", str(steps),
        "--rollout-path", str(buffer), "--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints"),
        "--metrics-jsonl", str(folder / "metrics.jsonl"),
    ]  # fmt: skip
    folder.mkdir(exist_ok=True)
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of the metrics file."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def kill_megatron(kills: int, steps: int = 24, seed: int = 0, patience: float = 300) -> int:
    """Kill the loop with -9 at random points, restart it each time, and let it end.

    Args:
        kills: how many.
        steps: of the whole run.
        seed: of the delays.
        patience: seconds that one start may take.

    Returns:
        Kills that hit a run which had trained and not yet ended.

    Raises:
        AssertionError: if the surviving history differs from the uninterrupted run.
    """
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_buffer(root / "buffer", steps)
        with training(root / "whole", root / "buffer", steps) as process:
            assert process.wait(patience) == 0, (root / "whole" / "log").read_text()[-3000:]
        expected = lines_of(root / "whole")
        assert len(expected) == steps
        folder, hits = root / "killed", 0
        for _ in range(kills):
            with training(folder, root / "buffer", steps) as process:
                modified = _modified(folder)
                deadline = time.monotonic() + patience
                while process.poll() is None and _modified(folder) == modified:
                    assert time.monotonic() < deadline, "the run does not start"
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, 1.5))
                hits += process.poll() is None
        with training(folder, root / "buffer", steps) as process:
            assert process.wait(patience) == 0, (folder / "log").read_text()[-3000:]
        found = lines_of(folder)
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    for line, wanted in zip(found, expected, strict=True):
        for key in ("reward", "loss", "grad_norm"):
            assert np.isclose(line[key], wanted[key], rtol=1e-5, atol=1e-7), (line["step"], key, line[key], wanted[key])
    return hits


def _modified(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.stat().st_mtime_ns if path.exists() else 0


def main() -> None:
    """Run it and say how it went; an AssertionError is a failure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="of the whole run (default: 3 a kill, at least 24)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    steps = given.steps or max(24, 3 * given.kills)
    hits = kill_megatron(given.kills, steps, given.seed)
    print(f"{given.kills} kills, {hits} of them in the middle of training; {steps} steps equal the uninterrupted run's")


if __name__ == "__main__":
    main()
