"""The job scripts on a real Slurm of two nodes: jobs finish, are killed, interrupted, canceled, and go on as if not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_sc.rollouts import HeadPolicy, Manifest, RolloutWriter
from megatron_sc.rollouts.check import validate_buffer
from tests.rollouts import make_rollouts
from tests.slurm_cluster import SlurmCluster, slurm_cluster
from tests.slurm_jobs import GROUPS, QWEN3, SAMPLES, SCRIPTS, TinyJob, running_step

pytestmark = pytest.mark.slurm
STEPS, SAVE_INTERVAL = 48, 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts for all steps, in a shard for every eight."""
    path = tmp_path_factory.mktemp("rollouts") / "buffer"
    with RolloutWriter(path, Manifest(30, heads=HeadPolicy.lossless(8))) as writer:
        for seed in range(STEPS // 8):
            writer.write(make_rollouts(8 * GROUPS, SAMPLES, vocab=30, head=8, seed=seed, draws=1))
            writer.commit()
    return path


def values(curve: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What must not depend on interruptions, to the last digit: the rollouts of a step, and what was learned so far."""
    return [tuple(line[key] for key in ("step", "loss", "grad_norm", "reward", "response_length")) for line in curve]


def test_several_ranks_a_node_know_their_places(cluster: SlurmCluster, tmp_path: Path) -> None:
    names = "$SLURM_NODEID $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE"
    step = ("srun", "--nodes=2", "--ntasks-per-node=3", SCRIPTS / "rank.sh", "bash", "-c", f"echo {names}")
    lines = cluster.run("env", f"LOGS={tmp_path}", *step).splitlines()
    assert sorted(lines) == [f"{rank // 3} {rank} {rank % 3} 6 3" for rank in range(6)]


@pytest.mark.timeout(600)
def test_a_job_goes_on_after_every_kind_of_end_to_the_same_curve(
    cluster: SlurmCluster, buffer: Path, tmp_path: Path
) -> None:
    """A rank is killed; the time limit nears; the job is canceled and submitted again."""
    undisturbed = TinyJob(tmp_path / "undisturbed", buffer, STEPS, SAVE_INTERVAL)
    job = undisturbed.submit(cluster)
    cluster.wait(job, "COMPLETED", 240)
    assert [line["step"] for line in undisturbed.curve()] == list(range(1, STEPS + 1))
    logs = undisturbed.logs(job)
    assert {name.split("-")[2] for name in logs} == {"node0", "node1"}
    assert any("saving checkpoint" in log for log in logs.values())

    disturbed = TinyJob(tmp_path / "disturbed", buffer, STEPS, SAVE_INTERVAL)
    job = disturbed.submit(cluster)
    cluster.wait(job, "RUNNING", 240, lambda: disturbed.step() > disturbed.saved() > 0)
    cluster.run("scancel", "--signal=KILL", running_step(cluster, job, "trainer"))

    cluster.wait(job, "RUNNING", 240, lambda: disturbed.saved() >= 2 * SAVE_INTERVAL)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))  # what Slurm sends before the time limit
    cluster.wait(job, "PENDING", 120)
    interrupted_at = disturbed.saved()
    assert interrupted_at == disturbed.step()

    cluster.wait(job, "RUNNING", 240, lambda: disturbed.saved() >= interrupted_at + SAVE_INTERVAL)
    cluster.run("scancel", str(job))
    cluster.wait(job, "CANCELLED", 120)
    assert cluster.job(job)["Restarts"] == "1"
    assert disturbed.step() < STEPS
    cluster.wait(disturbed.submit(cluster), "COMPLETED", 240)
    assert values(disturbed.curve()) == values(undisturbed.curve())


def test_a_job_that_cannot_start_fails_at_once_with_its_exit_code(
    cluster: SlurmCluster, buffer: Path, tmp_path: Path
) -> None:
    job = TinyJob(tmp_path / "job", buffer, STEPS, rollout_flags="--no-such-flag")
    number = job.submit(cluster)
    assert cluster.wait(number, "FAILED", 120)["ExitCode"] == "2:0"
    assert "unrecognized arguments: --no-such-flag" in "".join(job.logs(number).values())
    assert not any("trainer-1" in name for name in job.logs(number))


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of ``TinyJob``: a sampler on transformers, in another precision than the trainer's."""
    folder = tmp_path_factory.mktemp("sampler")
    (folder / "config.json").write_text(json.dumps(QWEN3))
    rng = np.random.default_rng(0)
    lines = [{"prompt_ids": ids, "answer_ids": ids[::-1]} for ids in rng.integers(1, 10, (20, 4)).tolist()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = (
        f"--prompts {folder}/prompts.jsonl --groups-per-step {GROUPS} --samples-per-prompt {SAMPLES} --max-tokens 6 "
        "--ahead 2 --true-vocab-size 30 --head-size 8 --dtype bfloat16"
    )
    return {
        "sampler": ("examples/slurm/sample_transformers.py", *flags.split()),
        "rollout_flags": f"--hf-checkpoint {folder}",
    }


@pytest.mark.timeout(900)
def test_sampler_and_trainer_survive_each_other(cluster: SlurmCluster, sampler: dict[str, Any], tmp_path: Path) -> None:
    """Either is killed while the other goes on; then the whole job is interrupted and queued again.

    What was learned is what one undisturbed job learns from the buffer that they leave: each rollout was used once, in
    order, and none was lost.
    """
    both = TinyJob(tmp_path / "both", tmp_path / "buffer", steps=24, save_interval=4, nodes=1, **sampler)
    job = both.submit(cluster, "train_and_sample.sbatch")
    cluster.wait(job, "RUNNING", 240, lambda: both.step() >= 2)
    cluster.run("scancel", "--signal=KILL", running_step(cluster, job, "sampler"))
    killed_at = both.step()
    cluster.wait(job, "RUNNING", 240, lambda: both.step() >= killed_at + 5 and both.step() > both.saved())
    cluster.run("scancel", "--signal=KILL", running_step(cluster, job, "trainer"))
    killed_at = both.saved()
    cluster.wait(job, "RUNNING", 240, lambda: both.saved() > killed_at)
    logs = both.logs(job)
    assert {"sampler-1", "trainer-1"} <= {"-".join(name.split("-")[:2]) for name in logs}
    assert not any(name.startswith("sampler-2") for name in logs), "the sampler outlives the trainer"

    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    cluster.wait(job, "PENDING", 240)
    assert both.saved() == both.step() < 24
    stopped = [log for name, log in both.logs(job).items() if name.startswith("sampler-1")]
    assert "stopped; everything is committed" in stopped[0]
    assert cluster.wait(job, "COMPLETED", 240)["Restarts"] == "1"
    report = validate_buffer(tmp_path / "buffer")
    assert report.ok
    assert 24 * GROUPS * SAMPLES <= report.rollouts <= (24 + 2) * GROUPS * SAMPLES
    assert all(0 <= line["staleness"] <= 2 for line in both.curve())
    assert all(1e-4 < line["log_ratio_abs"] < 0.05 for line in both.curve()), "the same weights, other numerics"

    alone = TinyJob(tmp_path / "alone", tmp_path / "buffer", steps=24, save_interval=100, nodes=1)
    cluster.wait(alone.submit(cluster), "COMPLETED", 240)
    assert values(both.curve()) == values(alone.curve())


def test_a_sampler_that_cannot_be_kept_alive_ends_the_job(
    cluster: SlurmCluster, sampler: dict[str, Any], tmp_path: Path
) -> None:
    """The trainer would wait for rollouts for ever."""
    broken = {**sampler, "sampler": ("nowhere.py",)}
    job = TinyJob(tmp_path / "job", tmp_path / "buffer", steps=24, nodes=1, grace=1, **broken)
    number = job.submit(cluster, "train_and_sample.sbatch")
    assert cluster.wait(number, "FAILED", 240)["ExitCode"] == "1:0"
    printed = (job.folder / "logs" / f"job-{number}.log").read_text()
    assert "sampler failed twice without getting anywhere" in printed
    assert "nowhere.py" in "".join(log for name, log in job.logs(number).items() if name.startswith("sampler"))
