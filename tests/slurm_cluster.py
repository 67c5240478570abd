"""A Slurm of two nodes on this machine: munged, slurmctld and one slurmd a node, in a temporary folder.

Everything is real but the nodes, which are two slurmd of one host: jobs queue, start, are signaled, requeued and
canceled as on a cluster. It needs no root, no systemd and no cgroups; as another user than root it runs that user's
jobs. Each cluster has its own key, socket and ports, so a Slurm that the machine belongs to is not touched.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.distributed import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
"""Debian's packages munge, slurmctld, slurmd and slurm-client have them."""

ENDED = (
    "CANCELLED",
    "COMPLETED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
)
"""States of a job that nothing follows."""

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # daemons are not on everyone's PATH

CONFIGURATION = """
ClusterName=test
# Job scripts derive a port from it: two clusters on this machine must not choose the same.
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A requeued job waits until its credential has expired: 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=0
KillWait=5
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmError(RuntimeError):
    """The cluster did not start, a command failed, or a job did not get where it should in time."""


def missing_programs() -> list[str]:
    """What a cluster needs and this machine does not have."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


@dataclass
class SlurmCluster:
    """A running cluster. Made by :func:`slurm_cluster`.

    Attributes:
        folder: configuration, logs and spools.
    """

    folder: Path

    def run(self, *command: str | os.PathLike[str]) -> str:
        """Run a command of Slurm's; its standard output.

        Raises:
            SlurmError: if it fails.
        """
        process = subprocess.run(
            list(map(os.fspath, command)), capture_output=True, text=True, env=self.environment(), timeout=60
        )
        if process.returncode:
            raise SlurmError(f"{' '.join(map(str, command))}: exit code {process.returncode}\n{process.stderr}")
        return process.stdout

    def environment(self) -> dict[str, str]:
        """This process's, with the cluster in it and without a job that this process may run in."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        return {**own, "PATH": PATH, "SLURM_CONF": os.fspath(self.folder / "slurm.conf")}

    def job(self, job: int) -> dict[str, str]:
        """What the controller knows of a job: "JobState", "ExitCode", "Restarts", ..."""
        words = self.run("scontrol", "show", "job", "--oneliner", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: int, state: str, timeout: float, until: Callable[[], bool] = lambda: True) -> dict[str, str]:
        """Wait until a job is in ``state`` and ``until()`` holds.

        Args:
            job: its number.
            state: Slurm's name, such as "RUNNING" or "COMPLETED".
            timeout: seconds.
            until: another condition.

        Raises:
            SlurmError: when the time is over, or the job ended in another state. The end of its output is quoted.
        """
        deadline = time.monotonic() + timeout
        while True:
            found = self.job(job)
            if found["JobState"] == state and until():
                return found
            ended = found["JobState"] in ENDED
            if ended or time.monotonic() > deadline:
                reason = "ended as" if ended else f"after {timeout} s is"
                raise SlurmError(f"job {job} {reason} {found['JobState']}, not {state}\n{_tail(found)}")
            time.sleep(0.2)


@contextlib.contextmanager
def slurm_cluster(nodes: Sequence[str] = ("n1", "n2"), cpus: int = 8) -> Iterator[SlurmCluster]:
    """Start a cluster; stop it, its jobs and all that they left when the block ends.

    Args:
        nodes: their names.
        cpus: that each node claims to have.

    Raises:
        SlurmError: naming the missing programs, or quoting a daemon that did not start.
    """
    if missing := missing_programs():
        raise SlurmError(f"not installed: {', '.join(missing)} (Debian: munge, slurmctld, slurmd, slurm-client)")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the path of a socket holds 107 bytes
    folder.chmod(0o755)  # munged serves every user, so it wants its socket within everyone's reach
    cluster = SlurmCluster(folder)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _write_files(folder, nodes, cpus)
        daemons.append(_start(cluster, "munged", *_munged_flags(folder)))
        _wait_for(cluster, daemons, (folder / "munge.socket").exists)
        daemons.append(_start(cluster, "slurmctld", "-D"))
        daemons += [_start(cluster, f"slurmd-{node}", "-D", "-N", node) for node in nodes]
        _wait_for(cluster, daemons, lambda: _idle_nodes(cluster) == len(nodes))
        yield cluster
    finally:
        with contextlib.suppress(SlurmError, subprocess.TimeoutExpired):
            _cancel_all(cluster)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        _kill_leftovers(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _write_files(folder: Path, nodes: Sequence[str], cpus: int) -> None:
    """The key and the configuration."""
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    host = socket.gethostname().split(".")[0]
    lines = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={cpus} RealMemory=1000"
        for node in nodes
    ]
    text = CONFIGURATION.format(
        host=host,
        port=free_port(),
        user=getpass.getuser(),
        folder=folder,
        nodes="\n".join(lines),
        first_job=random.randrange(1, 20000),
    )
    (folder / "slurm.conf").write_text(text)
    # slurmd loads a plugin for cgroups even where nothing uses it. From 23.02 on it can be told not to; before, the
    # first version's does not mind that there are none.
    plugin = "cgroup/v1" if _version() < (23, 2) else "disabled"
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")


def _version() -> tuple[int, ...]:
    """Of Slurm: (22, 5, 8)."""
    program = shutil.which("slurmd", path=PATH)
    assert program is not None
    text = subprocess.run([program, "-V"], capture_output=True, text=True, check=True).stdout  # "slurm-wlm 22.05.8"
    return tuple(int(part) for part in re.findall(r"\d+", text.split()[-1]))


def _munged_flags(folder: Path) -> list[str]:
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    return ["--foreground", "--num-threads=10", *(f"--{flag}={folder / name}" for flag, name in names.items())]


def _start(cluster: SlurmCluster, name: str, *flags: str) -> subprocess.Popen[bytes]:
    """Start a daemon; the part of its name before a hyphen is the program."""
    program = shutil.which(name.partition("-")[0], path=PATH)
    assert program is not None
    with (cluster.folder / f"{name}.out").open("wb") as output:
        return subprocess.Popen(
            [program, *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=cluster.environment(),
            cwd=cluster.folder,
            start_new_session=True,
        )


def _wait_for(cluster: SlurmCluster, daemons: Sequence[subprocess.Popen[bytes]], condition: Callable[[], bool]) -> None:
    """Wait until the condition holds and every daemon is up."""
    deadline = time.monotonic() + 60
    while not condition():
        dead = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if dead or time.monotonic() > deadline:
            outputs = [f"--- {path.name}\n{path.read_text()[-2000:]}" for path in cluster.folder.glob("*.out")]
            reason = f"ended: {dead}" if dead else "is not up after 60 s"
            raise SlurmError("\n".join([f"the Slurm of the tests {reason}", *outputs]))
        time.sleep(0.1)


def _idle_nodes(cluster: SlurmCluster) -> int:
    with contextlib.suppress(SlurmError):  # the controller does not answer yet
        return cluster.run("sinfo", "--noheader", "--Node", "--states=idle", "--responding").count("\n")
    return 0


def _cancel_all(cluster: SlurmCluster) -> None:
    """Cancel every job and wait until none is left."""
    jobs = cluster.run("squeue", "--noheader", "--format=%i").split()
    if jobs:
        cluster.run("scancel", *jobs)
    deadline = time.monotonic() + 15
    while cluster.run("squeue", "--noheader", "--format=%i").split() and time.monotonic() < deadline:
        time.sleep(0.2)


def _kill_leftovers(folder: Path) -> None:
    """Kill what still runs in this cluster's environment: slurmd's step daemons and tasks outlive it."""
    mark = f"SLURM_CONF={folder / 'slurm.conf'}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def _tail(job: dict[str, str]) -> str:
    """The last lines that a job printed."""
    path = Path(job.get("StdOut", ""))
    return path.read_text(errors="replace")[-6000:] if path.is_file() else "no output"
