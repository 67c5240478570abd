"""Run Megatron's own training loop on a machine without a GPU, over gloo.

Megatron-Core has no CPU mode: it asks ``torch.cuda`` for the device, creates tensors on ``"cuda"``, records events and
compares tensor type names. Each of these has an exact answer on a CPU, so :func:`install` gives it and leaves
Megatron's code alone. The same launch script then runs on a laptop (gloo) and on a cluster (NCCL).

    from megatron_sc.training import cpu

    cpu.install()  # before anything of Megatron is imported
    from megatron.training import pretrain

Not possible here, and refused by Megatron itself: sequence parallelism and context-parallel attention (both need
Transformer Engine or Apex).
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import logging
import os
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

INSTALLED = "_megatron_sc_cpu_backend"  # set on torch.cuda: the marker lives where the replacements live


def install() -> bool:
    """Make ``megatron.training.pretrain`` run on the CPU, if this machine has no CUDA device.

    Call it before Megatron is imported: Megatron compiles functions at import time. Calling it again does nothing.
    With a GPU only :func:`skip_helper_build` is applied, and Megatron runs as it always does.

    Returns:
        True where the CPU backend is in place, False on a machine with a GPU.
    """
    if not hasattr(torch.cuda, INSTALLED):
        if torch.cuda.is_available():
            skip_helper_build()
            return False
        setattr(torch.cuda, INSTALLED, True)
        _set_environment()
        _silence_missing_accelerators()
        _replace_compiler()  # first: it must see torch's own functions
        _replace_device_queries()
        _replace_generator()
        _replace_streams()
        _replace_memory_figures()
        _replace_tensor_moves()
        _replace_megatron_helpers()  # last: it imports Megatron
        skip_helper_build()
        atexit.register(_destroy_process_group)
    return True


def is_installed() -> bool:
    """Whether this process trains on the CPU because :func:`install` found no GPU."""
    return hasattr(torch.cuda, INSTALLED)


def set_parser_defaults(parser: argparse.ArgumentParser) -> None:
    """Set the defaults that Megatron needs where Apex, Transformer Engine or CUDA are missing: nobody types them.

    Defaults only: a flag on the command line still wins. Apex and Transformer Engine are optional accelerators of
    Megatron, but its own defaults assume both.

    Args:
        parser: Megatron's parser, after ``add_megatron_arguments``.
    """
    defaults: dict[str, Any] = {}
    if not _has_module(
        "fused_weight_gradient_mlp_cuda"
    ):  # Apex's; Transformer Engine does not stand in for it, because
        defaults["gradient_accumulation_fusion"] = False  # the output layer is Megatron's own ColumnParallelLinear
    if not _has_module("apex"):
        defaults["no_persist_layer_norm"] = True  # the torch norm used in Apex's place asserts it
        defaults["masked_softmax_fusion"] = False  # Apex's kernels, imported when first called
    if not _has_module("transformer_engine"):
        defaults["transformer_impl"] = "local"
        defaults["apply_rope_fusion"] = False  # TransformerConfig raises without Transformer Engine
    if is_installed():
        defaults["distributed_backend"] = "gloo"
        defaults["use_cpu_initialization"] = True  # weights then do not depend on the tensor-parallel size
        defaults["num_workers"] = 0  # forked data loaders cost more than they give, and hold gloo's sockets open
    parser.set_defaults(**defaults)


def skip_helper_build() -> None:
    """Do not run ``make`` for the dataset index helper where it must fail or has nothing to do. Needed with a GPU too.

    ``pretrain`` builds the helper on rank 0 and exits when ``make`` fails. The wheel of Megatron-Core ships the built
    helper but no Makefile; a checkout has the Makefile, which needs pybind11. Only Megatron's own datasets use it.
    """
    from megatron.core.datasets import utils

    if _has_module("megatron.core.datasets.helpers_cpp"):
        _replace(utils, compile_helpers=_do_nothing)
    elif not (Path(utils.__file__).with_name("Makefile").exists() and _has_module("pybind11")):
        _replace(utils, compile_helpers=_warn_about_helper)


def _warn_about_helper() -> None:
    warnings.warn(
        "Megatron's dataset index helper is not built, and without its Makefile and pybind11 it cannot be. Megatron's "
        "own datasets will not work (pip install pybind11); training from rollouts does not need it.",
        stacklevel=2,
    )


def _has_module(name: str) -> bool:
    """Whether ``name`` can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for an operation that has no meaning on a CPU."""


def _set_environment() -> None:
    """Give one plain ``python script.py`` the variables that torchrun would have set."""
    if "WORLD_SIZE" not in os.environ:
        # Port 0: the store picks a free one, so that two jobs never collide.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asserts it for tensor parallelism


def _silence_missing_accelerators() -> None:
    """Megatron warns at import, module by module, that Apex and Transformer Engine are missing: here that is normal."""
    missing = ("Transformer Engine and Apex are", "Apex is", "absl.logging is", "Only transformer-engine")
    for message in missing:
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)  # Megatron's calls


def _replace(target: Any, **replacements: Any) -> None:
    """Set attributes of a module or a class."""
    for name, replacement in replacements.items():
        setattr(target, name, replacement)


def _replace_compiler() -> None:
    """Run Megatron's fused functions as written: a laptop may have no C++ compiler, and tiny models gain nothing."""
    import torch._dynamo  # it maps torch's functions by identity, so it must see them before they are replaced

    def compile_nothing(model: Any = None, **_kwargs: Any) -> Any:
        return model if model is not None else lambda function: function

    _replace(torch, compile=compile_nothing)


def _replace_device_queries() -> None:
    """One device per process, which reports itself as a Hopper GPU so that version checks pass."""
    properties = SimpleNamespace(name="cpu", major=9, minor=0, total_memory=0, multi_processor_count=1)
    _replace(
        torch.cuda,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: torch.device("cpu"),
        get_device_name=lambda *_: properties.name,
        get_device_properties=lambda *_: properties,
        get_device_capability=lambda *_: (properties.major, properties.minor),
        set_device=_do_nothing,
        synchronize=_do_nothing,
        device=lambda *_: contextlib.nullcontext(),
    )
    _replace(torch.cuda.nvtx, range_push=_do_nothing, range_pop=_do_nothing, mark=_do_nothing)
    _replace(torch.accelerator, is_available=lambda: False, current_device_index=lambda: 0)


def _replace_generator() -> None:
    """The GPU's random stream is the CPU's: Megatron's tracker of streams per parallel rank then works as written."""

    def get_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.default_generator.set_state(state)

    def manual_seed(seed: int) -> None:  # not torch.manual_seed, which calls this one
        torch.default_generator.manual_seed(seed)

    # Megatron's tracker warns, in every forward pass, when the CPU's stream moves with the GPU's. Here they are one.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: not record.getMessage().startswith("CPU RNG state changed")
    )
    for module in (torch.cuda, torch.cuda.random):
        _replace(module, get_rng_state=get_rng_state, set_rng_state=set_rng_state)
        _replace(module, manual_seed=manual_seed, manual_seed_all=manual_seed)


class _Stream:
    """A stream or an event of a device that runs everything in order: every wait is already over."""

    cuda_stream = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: _Stream) -> float:
        return 0.0

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or self

    record = wait = synchronize = wait_event = wait_stream = _do_nothing


def _replace_streams() -> None:
    """Streams and events that are always up to date."""
    default = _Stream()
    _replace(
        torch.cuda,
        Stream=_Stream,
        Event=_Stream,
        current_stream=lambda *_: default,
        default_stream=lambda *_: default,
        stream=lambda *_: contextlib.nullcontext(),
        set_stream=_do_nothing,
        is_current_stream_capturing=lambda: False,
    )


def _replace_memory_figures() -> None:
    """A device with no memory of its own: every figure is 0."""
    figures = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    _replace(torch.cuda, **dict.fromkeys((*figures, "device_memory_used"), lambda *_: 0))
    _replace(torch.cuda, memory_stats=lambda *_: defaultdict(int), empty_cache=_do_nothing)


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrite the device ``"cuda"`` to ``"cpu"`` in every torch call, and answer ``tensor.type()`` as on a GPU.

    The schedules create their counters on ``"cuda"``; gradient clipping compares with ``"torch.cuda.FloatTensor"``.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with its devices rewritten."""
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if func is torch.Tensor.to:
            args = tuple(map(_on_cpu, args))
        answer = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.")
        return answer


def _on_cpu(value: Any) -> Any:
    """The CPU where ``value`` names a CUDA device, else ``value``."""
    if isinstance(value, torch.device | str) and str(value).partition(":")[0] == "cuda":
        return "cpu"
    return value


def _replace_tensor_moves() -> None:
    """A move to the GPU leaves the tensor where it is."""

    def unmoved(value: Any, *_args: Any, **_kwargs: Any) -> Any:
        return value

    _replace(torch.Tensor, cuda=unmoved, pin_memory=unmoved, record_stream=_do_nothing)
    _replace(torch.nn.Module, cuda=unmoved)
    _CudaMeansCpu().__enter__()  # for the life of the process


def _replace_megatron_helpers() -> None:
    """Helpers of Megatron that mean a GPU and cannot know better."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.training import initialize

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # The original defers until CUDA is initialized, which never happens: each tensor-parallel rank would keep the
    # stream meant for its own shards, and draw its own values for weights that all ranks share.
    _replace(random, _get_cuda_rng_state=torch.cuda.get_rng_state, _set_cuda_rng_state=torch.cuda.set_rng_state)
    for module in (moe_utils, token_dispatcher):
        _replace(module, maybe_move_tensor_to_cpu=to_cpu)  # it asks tensor.is_cuda, but must convert nevertheless
    # Nothing is compiled, so nothing needs warming up. Its random inputs have shapes that depend on the tensor-parallel
    # size, and here they would come from the stream that the weights are drawn from next.
    _replace(initialize, _warmup_jit_function=_do_nothing)


def _destroy_process_group() -> None:
    """Close gloo's sockets before the interpreter goes, so that no rank reports a lost peer."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
