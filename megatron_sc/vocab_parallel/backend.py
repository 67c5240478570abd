"""The local passes of a call, by the implementation that serves it."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any, Protocol

from torch import Tensor

from . import torch_backend
from .centering import RowState
from .problem import Problem
from .statistics import Normalizer
from .torch_backend import LocalStatistics


class Backend(Protocol):
    """What ``torch_backend`` and ``triton_backend`` both are."""

    def statistics(self, logits: Tensor, problem: Problem) -> LocalStatistics:
        """See ``torch_backend.statistics``."""
        ...

    def sums(self, logits: Tensor, problem: Problem, normalizer: Normalizer, alpha: Tensor) -> Tensor:
        """See ``torch_backend.sums``."""
        ...

    def gradient(self, logits: Tensor, problem: Problem, state: RowState, grad_loss: Tensor) -> Tensor:
        """See ``torch_backend.gradient``."""
        ...


def select_backend(logits: Tensor, problem: Problem) -> Backend:
    """Triton's kernels for CUDA logits that they serve, PyTorch for all others; the same forward and backward."""
    if logits.device.type == "cuda" and _has_triton():
        triton_backend: Any = importlib.import_module(".triton_backend", __package__)
        if triton_backend.serves(logits, problem):
            return triton_backend
    return torch_backend


def statistics(logits: Tensor, problem: Problem) -> LocalStatistics:
    """First pass: one read of the logits, which it may overwrite with intermediate values under ``reuse_logits``."""
    return select_backend(logits, problem).statistics(logits, problem)


def sums(logits: Tensor, problem: Problem, normalizer: Normalizer, alpha: Tensor) -> Tensor:
    """``[n, SUMMED]``: this rank's part of ``Sums``; ``alpha`` is ``[n]``."""
    return select_backend(logits, problem).sums(logits, problem, normalizer, alpha)


def gradient(logits: Tensor, problem: Problem, state: RowState, grad_loss: Tensor) -> Tensor:
    """Last pass: ``[n, columns]`` in the logits' dtype, in their storage if it may be reused."""
    return select_backend(logits, problem).gradient(logits, problem, state, grad_loss)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
