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
    forward pass. As in Megatron's own evaluation, everything is gathered at once and the hooks rest inside. Until the
    first step is over Megatron has no hooks in place, and what that step updated is gathered here too.

    Args:
        model: a Megatron model, possibly wrapped.

    Raises:
        ValueError: for parameters that are gathered from the gradients' storage.
    """
    wrapper: Any = model
    is_lazy = getattr(wrapper, "use_forward_hook", False)
    if is_lazy and wrapper.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
        raise ValueError(
            "--reuse-grad-buf-for-mxfp8-param-ag with --overlap-param-gather keeps updated parameters in the optimizer "
            "until the next step, so they can be neither published nor sampled from between steps; remove one of them"
        )
    has_hooks = is_lazy and len(wrapper.remove_forward_pre_hook_handles) > 0
    if has_hooks:
        wrapper.disable_forward_pre_hook(param_sync=True)
    elif is_lazy:
        with torch.no_grad():
            wrapper.start_param_sync(force_sync=True)
    try:
        yield
    finally:
        if has_hooks:
            wrapper.enable_forward_pre_hook()
