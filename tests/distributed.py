"""Run test functions and training scripts on several gloo ranks on this machine.

    def summed(value):  # at module level, so that the workers can import it
        tensor = torch.tensor(value + dist.get_rank())
        dist.all_reduce(tensor)
        return tensor.item()

    assert run_ranks(summed, 2, 10) == [21, 21]

Importing torch costs seconds, so the workers live as long as the test session and every call gets a new process group.
A call that fails or hangs costs its workers: they are killed, and the next call starts others.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE = 5.0  # seconds that the other ranks get after one has failed: enough to report what they saw


class RankError(AssertionError):
    """One or more ranks raised, died or did not finish in time. The message holds what each of them said."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    megatron: bool = False,
    timeout: float = 120,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on ``world_size`` ranks of one gloo process group.

    Args:
        function: A function at the top level of a module; it is pickled by name.
        world_size: Number of ranks.
        args: Picklable arguments, the same on every rank.
        megatron: Use workers that hold the CPU backend and Megatron (about 10 s to start). Megatron's global state is
            destroyed after the call, so that it may initialize model parallelism and train. Others hold torch only.
        timeout: Seconds that the call may take, not counting the workers' start.
        kwargs: Picklable keyword arguments, the same on every rank.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankError: when a rank raises, dies or is late.
    """
    return _pool(megatron).run(function, args, kwargs, world_size, timeout)


def run_megatron(
    argv: Sequence[str | os.PathLike[str]], world_size: int, timeout: float = 120, env: dict[str, str] | None = None
) -> list[str]:
    """Run ``python *argv`` once per rank, with torchrun's environment but without the cost of starting torchrun.

    Args:
        argv: A script and its flags, or ``-m``, a module and its flags.
        world_size: Number of processes.
        timeout: Seconds until every process must have exited.
        env: Additional environment variables.

    Returns:
        What each rank printed (stdout and stderr together), by rank.

    Raises:
        RankError: when a process exits with an error or is late. None is left running.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    port = str(free_port())
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            variables = {
                **os.environ,
                **rank_environment(rank, world_size, port),
                "PYTHONUNBUFFERED": "1",
                **(env or {}),
            }
            with (folder / f"rank{rank}").open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *map(os.fspath, argv)],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=variables,
                        start_new_session=True,
                    )
                )
        _wait_for_processes(processes, timeout)
        outputs = [(folder / f"rank{rank}").read_text(errors="replace") for rank in range(world_size)]
    finally:
        for process in processes:
            _kill_group(process.pid)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    failures = [
        f"--- rank {rank}: exit code {process.returncode}\n{output[-6000:]}"
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True))
        if process.returncode != 0
    ]
    if failures:
        raise RankError("\n".join([f"{' '.join(map(str, argv[:3]))} ... on {world_size} ranks", *failures]))
    return outputs


def rank_environment(rank: int, world_size: int, port: str) -> dict[str, str]:
    """What torchrun sets for a rank on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """A TCP port that nothing listens on, below those that the system gives to outgoing connections meanwhile."""
    while True:
        port = secrets.randbelow(10_000) + 20_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port


def _wait_for_processes(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    """Return when all have exited, or ``GRACE`` after the first failure, or at the deadline."""
    deadline = time.monotonic() + timeout
    failed = False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if not failed and any(codes):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.05)


def _kill_group(pid: int) -> None:
    """Kill a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@dataclass
class _Worker:
    """One process and the pipe to it."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    stack: Path  # where it writes what it is doing, when asked

    def where(self) -> str:
        """The stack of a worker that does not answer."""
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self.process.pid, signal.SIGUSR1)  # type: ignore[arg-type]
            time.sleep(0.2)
        return self.stack.read_text() if self.stack.exists() else ""

    def kill(self) -> None:
        """End the process and what it started, at once."""
        self.pipe.close()
        if self.process.pid is not None:
            _kill_group(self.process.pid)
        self.process.join()
        self.stack.unlink(missing_ok=True)


@dataclass
class _Pool:
    """As many workers as the largest call so far asked for."""

    megatron: bool
    workers: list[_Worker] = field(default_factory=list)

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, world_size: int, timeout: float) -> list[Any]:
        """See :func:`run_ranks`."""
        self._grow(world_size)
        ranks = self.workers[:world_size]
        port = str(free_port())
        for rank, worker in enumerate(ranks):
            call = (rank_environment(rank, world_size, port), timeout, function, args, kwargs)
            worker.pipe.send_bytes(pickle.dumps(call))
        answers = self._collect(ranks, timeout)
        failures = {rank: text for rank, (succeeded, text) in answers.items() if not succeeded}
        if failures:
            self.close()
            report = [f"{function.__module__}.{function.__qualname__} on {world_size} ranks"]
            raise RankError("\n".join(report + [f"--- rank {rank}\n{text}" for rank, text in sorted(failures.items())]))
        return [answers[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        """Kill all workers."""
        while self.workers:
            self.workers.pop().kill()

    def _grow(self, world_size: int) -> None:
        """Start the missing workers, all at once, and wait until they can be called."""
        context = multiprocessing.get_context("spawn")
        new = []
        with _environment(OMP_NUM_THREADS="1"):  # read when torch is loaded
            for _ in range(world_size - len(self.workers)):
                ours, theirs = context.Pipe()
                stack = Path(tempfile.mkstemp(prefix="stack-")[1])
                process = context.Process(target=_serve, args=(theirs, self.megatron, stack))
                process.start()
                theirs.close()
                new.append(_Worker(process, ours, stack))
        self.workers += new
        for rank, (started, text) in self._collect(new, timeout=180).items():
            if not started:
                self.close()
                raise RankError(f"worker {rank} did not start\n{text}")

    def _collect(self, workers: Sequence[_Worker], timeout: float) -> dict[int, tuple[bool, Any]]:
        """One answer per worker: (True, result) or (False, why not)."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = _unpack(pipe.recv_bytes())
                except EOFError:
                    workers[rank].process.join(1)
                    answers[rank] = False, f"died with exit code {workers[rank].process.exitcode}"
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if all(succeeded for succeeded, _ in answers.values()):
            reason = f"not finished in {timeout} s"
        else:
            reason = f"not finished {GRACE} s after another rank had failed"
        return answers | {rank: (False, f"{reason}\n{workers[rank].where()}") for rank in waiting.values()}


_pools: dict[bool, _Pool] = {}


def _pool(megatron: bool) -> _Pool:
    """The session's pool, made at the first call."""
    if megatron not in _pools:
        _pools[megatron] = pool = _Pool(megatron)
        atexit.register(pool.close)  # before multiprocessing's own exit, which would wait for the workers
    return _pools[megatron]


@contextlib.contextmanager
def _environment(**variables: str) -> Any:
    """Set environment variables for the processes started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _serve(pipe: Connection, megatron: bool, stack: Path) -> None:
    """A worker's life: answer calls until the parent closes the pipe."""
    os.setsid()  # the parent kills the group: this process and what it started
    faulthandler.register(signal.SIGUSR1, stack.open("w"))
    try:
        if megatron:
            from megatron_sc.training import cpu

            assert cpu.install(), "this machine has a CUDA device; the tests of the CPU backend need one without"
            import megatron.training
        import torch

        torch.set_num_threads(1)
        pipe.send_bytes(_pack(None))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        try:
            answer = _pack(_call(*pickle.loads(call), megatron))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _pack(result: Any) -> bytes:
    """A successful answer. By torch: Megatron makes a pickled tensor one that only a process with Megatron can read."""
    import torch

    buffer = io.BytesIO()
    torch.save(result, buffer)
    return pickle.dumps((True, buffer.getvalue()))


def _unpack(answer: bytes) -> tuple[bool, Any]:
    """(True, result) or (False, the worker's traceback)."""
    import torch

    succeeded, content = pickle.loads(answer)
    return succeeded, torch.load(io.BytesIO(content), weights_only=False) if succeeded else content


def _call(
    environment: dict[str, str], timeout: float, function: Callable[..., Any], args: Any, kwargs: Any, megatron: bool
) -> Any:
    """Call ``function`` inside a process group of its own."""
    import torch.distributed as dist

    os.environ.update(environment)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    try:
        return function(*args, **kwargs)
    finally:
        if megatron:
            from megatron.training import training

            training.destroy_global_state()
            for name in training._STARTUP_TIMESTAMPS:  # or a rank that ran before exchanges what a new one does not
                training._STARTUP_TIMESTAMPS[name] = None
        dist.destroy_process_group()
