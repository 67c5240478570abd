"""Run a model without leaving a trace in the training run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import nn

from ..precision.scoring_guard import scoring


@contextmanager
def inference_only(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; modes, random streams and FP8 state as before afterwards.

    The streams are PyTorch's CPU and current CUDA generator and Megatron's ``CudaRNGStatesTracker``. Parameters are
    gathered, see ``gathered_parameters``; for FP8 see ``precision.scoring_guard``. May be nested.

    Args:
        model: a Megatron model, possibly wrapped.

    Raises:
        UnprotectedStateError: for a model whose FP8 state cannot be put back.
    """
    modes = {module: module.training for module in model.modules()}
    tracker = get_cuda_rng_tracker()
    tracked = tracker.get_states()
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        with gathered_parameters(model), scoring(model):
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        tracker.set_states(tracked)


@contextmanager
def gathered_parameters(model: nn.Module) -> Iterator[None]:
    """All parameters up to date inside, also with ``--overlap-param-gather``.

    That flag gathers the data-parallel shards of the updated parameters late, module by module, in hooks of the next
    forward pass. As in Megatron's own evaluation, everything is gathered at once and the hooks rest inside.

    Args:
        model: a Megatron model, possibly wrapped.
    """
    wrapper: Any = model
    is_lazy = len(getattr(wrapper, "remove_forward_pre_hook_handles", ())) > 0
    if is_lazy:
        wrapper.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        if is_lazy:
            wrapper.enable_forward_pre_hook()
