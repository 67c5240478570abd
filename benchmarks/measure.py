"""How things are measured: time, peak memory, communication."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_gather", "all_to_all")


def seconds(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Time of a step, and processor time of this process meanwhile.

    The time is that of CUDA events on a GPU, of the clock on the CPU. Processor time hardly depends on what else the
    machine does; on a GPU it is what launching costs.
    """
    cpu_at = time.process_time()
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        cpu = time.process_time() - cpu_at
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, cpu
    begin_at = time.perf_counter()
    step()
    return time.perf_counter() - begin_at, time.process_time() - cpu_at


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Largest sum of what a step has allocated and not yet freed.

    On the CPU from the allocation events of torch's profiler, whose count does not depend on what malloc keeps or which
    pages were touched, as the resident size of the process does. On a GPU from the caching allocator.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    results = profile.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


@dataclass
class Traffic:
    """What this rank put on the wire."""

    collectives: int = 0
    contributed: int = 0
    """Bytes of the tensors that it handed in."""


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count the collectives that are called meanwhile, and their input."""
    traffic = Traffic()

    def counting(name: str) -> Callable[..., object]:
        original = getattr(dist, name)

        def call(*args: object, **kwargs: object) -> object:
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            given = tensors[1] if name in ("all_gather_into_tensor", "reduce_scatter_tensor") else tensors[0]
            traffic.collectives += 1
            traffic.contributed += given.numel() * given.element_size()
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, counting(name)))
        yield traffic


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy of 256 MiB reads and writes: the best of five."""
    source = torch.empty(1 << 28, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / min(seconds(lambda: target.copy_(source), device)[0] for _ in range(5))
