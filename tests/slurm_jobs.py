"""Jobs for the Slurm of the tests: a tiny policy on the CPU, the scripts of examples/slurm as they are."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.slurm_cluster import SlurmCluster

SCRIPTS = Path(__file__).resolve().parent.parent / "examples" / "slurm"
GROUPS, SAMPLES = 2, 4  # of a step

SETTINGS = """
NODES={nodes} GPUS_PER_NODE=0 SAMPLER_NODES={sampler_nodes}
OUTPUT={output}
ROLLOUTS={rollouts}
PYTHON={python}
GRACE={grace}
MODEL_ARGS=(
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --kv-channels 8 --qk-layernorm
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --seq-length 16 --max-position-embeddings 16 --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 30 --make-vocab-size-divisible-by 1
)
OPTIMIZER_ARGS=(
    --train-iters {steps} --save-interval {save_interval} --global-batch-size 8 --micro-batch-size 1
    --lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-iters 0 --eval-interval 1000000 --seed 7
)
ROLLOUT_ARGS=(--prompts-per-step 2 --samples-per-prompt 4 --head-size 8 {rollout_flags})
SC_ARGS=(--loss-correction score_centering)
SAMPLER=({sampler})
"""

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 30,
    "hidden_act": "silu",
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
"""The architecture of ``TinyJob``."""


@dataclass(frozen=True)
class TinyJob:
    """A job's settings and where they put things.

    Attributes:
        folder: of everything the job writes.
        rollouts: the buffer.
        steps: to train.
        save_interval: steps between checkpoints.
        nodes: that train, one rank each.
        sampler: flags after its script; empty: no sampler.
        rollout_flags: further flags of the trainer.
        grace: seconds that a side has to end when it is asked to.
    """

    folder: Path
    rollouts: Path
    steps: int
    save_interval: int = 10
    nodes: int = 2
    sampler: tuple[str, ...] = ()
    rollout_flags: str = ""
    grace: int = 120

    def submit(self, cluster: SlurmCluster, script: str = "train.sbatch", *flags: str) -> int:
        """Its number."""
        self.folder.mkdir(exist_ok=True)
        settings = self.folder / "job.env"
        settings.write_text(
            SETTINGS.format(
                nodes=self.nodes,
                sampler_nodes=int(bool(self.sampler)),
                output=shlex.quote(str(self.folder)),
                rollouts=shlex.quote(str(self.rollouts)),
                python=shlex.quote(sys.executable),
                steps=self.steps,
                save_interval=self.save_interval,
                rollout_flags=self.rollout_flags,
                grace=self.grace,
                sampler=shlex.join(self.sampler),
            )
        )
        answer = cluster.run(SCRIPTS / "submit.sh", SCRIPTS / script, settings, *flags)
        return int(answer.split()[-1])

    def curve(self) -> list[dict[str, Any]]:
        """The metrics file, one object a step, as far as it is written."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def step(self) -> int:
        """The last one that was logged; 0 before the first."""
        curve = self.curve()
        return curve[-1]["step"] if curve else 0

    def saved(self) -> int:
        """The step of the last checkpoint."""
        tracker = self.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def logs(self, job: int, attempt: int = 0) -> dict[str, str]:
        """What the steps of an attempt printed, by file name."""
        folder = self.folder / "logs" / str(job) / f"attempt-{attempt}"
        return {path.name: path.read_text(errors="replace") for path in folder.glob("*.log")}


def running_step(cluster: SlurmCluster, job: int, name: str) -> str:
    """The number of a job's step that runs now; empty where none does."""
    for line in cluster.run("squeue", "--noheader", "--steps", f"--job={job}", "--format=%i %j").splitlines():
        step, found = line.split()
        if found == name:
            return step
    return ""


def shell(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script outside of Slurm; its exit code, output and errors."""
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd, timeout=60)


def flags_of(settings: Path, *arrays: str) -> Sequence[str]:
    """The words of arrays in a job's settings, as bash reads them."""
    words = " ".join(f'"${{{name}[@]}}"' for name in arrays)
    output = subprocess.run(
        ["bash", "-euc", f'source "$1"; printf "%s\\0" {words}', "bash", str(settings)],
        capture_output=True, text=True, check=True, env={"USER": "someone", "PATH": "/usr/bin:/bin"},
    ).stdout  # fmt: skip
    return output.split("\0")[:-1]
