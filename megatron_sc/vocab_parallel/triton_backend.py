"""The local passes with Triton kernels: the same three functions as ``torch_backend``, for CUDA logits.

The kernels do what is V wide, see ``triton_kernels``. The recorded tokens, k a row, stay in PyTorch and are shared with
``torch_backend``: importance weights are open classes that only PyTorch can call, and k / V is below 1 %. On a few
hundred rows their launches cost more than the kernels; a training micro-batch has thousands.

No host synchronization, and no workspace but the bit masks of ``statistics_kernel``.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from . import torch_backend
from .centering import FullModel, RowState
from .problem import Problem
from .statistics import Normalizer
from .torch_backend import Block, LocalStatistics, Scale
from .triton_kernels import gradient_kernel, statistics_kernel

TILE = {"cuda": 2048, "cpu": 64}
"""Columns that a program holds at a time. On the CPU, in Triton's interpreter: small, so that tests see many tiles."""

PROGRAMS = {"cuda": 8, "cpu": 3}
"""Persistent programs of the forward pass for each multiprocessor; at most 8 fit (64 registers, 8 warps)."""

WARPS = 8
STAGES = 3
"""A tile in work and two on their way: the 32 KB in flight on a multiprocessor hide the memory's latency."""


def serves(logits: Tensor, problem: Problem) -> bool:
    """Whether the kernels cover a call; ``torch_backend`` covers all.

    Not covered: float64, a gradient of the entropy, a dense sampler, columns that are not adjacent in memory.
    """
    return (
        logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not problem.entropy_coef
        and not isinstance(problem.centering, FullModel)
        and (logits.stride(1) == 1 or logits.shape[1] <= 1)
    )


def statistics(logits: Tensor, problem: Problem) -> LocalStatistics:
    """One read of the logits, which are never overwritten."""
    return torch_backend.statistics(logits, problem, _KernelBlock)


def sums(logits: Tensor, problem: Problem, normalizer: Normalizer, alpha: Tensor) -> Tensor:
    """The recorded tokens of this shard; reads k logits a row."""
    return torch_backend.sums(logits, problem, normalizer, alpha, _KernelBlock)


def gradient(logits: Tensor, problem: Problem, state: RowState, grad_loss: Tensor) -> Tensor:
    """One read and one write of the logits; rows whose gradient is 0 beside the recorded tokens are not read."""
    return torch_backend.gradient(logits, problem, state, grad_loss, _KernelBlock)


class _KernelBlock(Block):
    """A block of rows whose dense columns are left to the kernels."""

    def __init__(self, logits: Tensor, problem: Problem, start: int, stop: int):
        super().__init__(logits, problem, start, stop)
        self.in_place = False  # the logits stay as they are until the gradient is written

    def dense_statistics(self) -> tuple[Tensor, Tensor | float]:
        """``statistics_kernel``."""
        rows, valid = self.logits.shape
        exclude = self.entries is not None and self.problem.centering.entries_apart
        tile, programs = self._tile(), min(rows, self._programs())
        result = torch.empty((rows, 3), dtype=self.dtype, device=self.logits.device)
        if rows == 0:
            return result, 1.0
        words = triton.cdiv(valid, tile) * tile // 32 if exclude else 0
        bits = torch.zeros((programs, words), dtype=torch.int32, device=self.logits.device)
        columns, starts, k = self._recorded(exclude)
        statistics_kernel[(programs,)](
            self.logits, self.logits.stride(0), valid, self.temperature, self.mask, columns, starts, k, bits, words,
            result, result.stride(0), rows,
            HAS_TEMPERATURE=self.temperature is not None, HAS_MASK=self.mask is not None, EXCLUDE=exclude,
            RAGGED=starts is not None, WITH_DOT=self.problem.with_entropy, TILE=tile, ENTRIES=_entries_at_once(k),
            STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
        return result, 1.0

    def write_gradient(
        self,
        result: Tensor,
        state: RowState,
        scale: Scale,
        dense: Tensor,
        direct: Tensor,
        write_sampled: Tensor,
        entry_gradient: Tensor | None,
    ) -> None:
        """``gradient_kernel``."""
        rows, valid = self.logits.shape
        if rows == 0 or valid == 0:
            return
        if not self.problem.centering.dense_columns:
            dense = torch.zeros_like(dense)
        if self.mask is not None:
            dense = torch.where(self.mask, dense, 0.0)  # not 0 * NaN
            write_sampled = write_sampled & self.mask
        sampled = torch.where(write_sampled, self.sampled_column, -1).int()
        columns, starts, k = self._recorded(entry_gradient is not None)
        gradient_kernel[(rows,)](
            self.logits, self.logits.stride(0), result, result.stride(0), valid, self.temperature, state.dense_maximum,
            dense, direct, sampled, columns, starts, k,
            None if entry_gradient is None else entry_gradient.contiguous(),
            HAS_TEMPERATURE=self.temperature is not None, RECORDED=entry_gradient is not None,
            RAGGED=starts is not None, TILE=self._tile(), ENTRIES=_entries_at_once(k), STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip

    def _recorded(self, wanted: bool) -> tuple[Tensor | None, Tensor | None, int]:
        """Local columns of the recorded tokens, -1 where another shard holds them; row starts when ragged; k."""
        if not wanted or self.entries is None:
            return None, None, 0
        columns = torch.where(self.owned, self.column, -1).int()
        if self.entries.lengths is None:
            return columns, None, columns.shape[1]
        ends = self.entries.lengths.cumsum(0)
        return columns, torch.cat([ends.new_zeros(1), ends]), 0

    def _tile(self) -> int:
        return TILE[self.logits.device.type]

    def _programs(self) -> int:
        device = self.logits.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        return PROGRAMS[device.type] * processors


def _entries_at_once(k: int) -> int:
    """Recorded tokens that a program handles at once; ragged rows (k = 0) are of any length."""
    return min(max(triton.next_power_of_2(k), 16), 256) if k else 64
