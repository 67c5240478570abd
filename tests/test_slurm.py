"""The job scripts on a real Slurm of two nodes: jobs finish, are killed, interrupted, canceled, and go on as if not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_sc.rollouts import HeadPolicy, Manifest, RolloutWriter
from tests.rollouts import make_rollouts
from tests.slurm_cluster import SlurmCluster, slurm_cluster
from tests.slurm_jobs import GROUPS, SAMPLES, TinyJob, running_step

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
