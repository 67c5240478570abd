"""Forward passes that only score leave Transformer Engine's quantization state as it was.

Old log-probabilities, evaluation, the embedded sampler and start-up checks run the trainer's own modules. Without
gradients too, those modules

    write ``amax_history[0]`` under delayed scaling, which becomes the scale of a later training step
    store quantized weights in ``_fp8_workspaces`` and lower ``is_first_microbatch``, so that the next training forward
        pass uses the weights that were scored, or a score uses the weights of an earlier step
    push scales for a recomputation that never comes, which the next training step then pops

``scoring`` saves what they change and puts it back, in the same tensors: quantizers and the buffers that are reduced
over ranks hold views of them. Written against the attributes of Transformer Engine 2.20 (``module/base.py``,
``quantization.py``, ``ops/op.py``) and of Megatron-Core 0.19.2 (``is_first_microbatch``). Without them it is
``torch.no_grad``.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_STATES = ("scaling_fwd", "scaling_bwd")
_INITIAL = {"scale": 1.0, "amax_history": 0.0}
_FLAGS = (
    "fp8",
    "fp8_calibration",
    "fp8_initialized",
    "fp8_meta_tensors_initialized",
    "fp8_parameters",
    "is_first_microbatch",
)
_PLAIN = (bool, int, float, str, tuple, enum.Enum, torch.dtype, torch.device, torch.Size, dist.ProcessGroup)


class UnprotectedStateError(RuntimeError):
    """A model whose quantization state cannot be saved and restored. The message names the flag to change."""


@contextmanager
def scoring(*models: nn.Module) -> Iterator[None]:
    """No gradients inside; quantization state as before afterwards, exceptions included. May be nested.

    Inside, every module quantizes its weights anew at its first forward pass, so no stale copy is used; after a change
    of the weights inside, enter again. That takes one more quantized copy of the weights (1 byte a parameter under
    FP8) until the end. Modes, random streams and parameters are not touched:
    see ``sampling.isolation`` for those.

    Args:
        models: the model, or its chunks under virtual pipeline parallelism; wrapped or not.

    Raises:
        UnprotectedStateError: for CUDA graphs over quantized modules, for custom recipes that keep state of other kinds
            than tensors and plain values, for Kitchen, and for a Transformer Engine that keeps its state elsewhere.
    """
    modules = [module for model in models for module in model.modules() if _is_quantized(module)]
    _require_protectable(models, modules)
    saved = [_SavedModule(module) for module in modules]
    manager = _SavedManager(_state_manager()) if modules else None
    try:
        for module in saved:
            module.begin()
        with torch.no_grad():
            yield
    finally:
        for module in saved:
            module.restore()
        if manager is not None:
            manager.restore()


def _is_quantized(module: nn.Module) -> bool:
    """Whether it has state of Transformer Engine's, used yet or not, or Megatron's flag for its weight copies."""
    return any(hasattr(module, name) for name in ("fp8_meta", "_fp8_metas", "is_first_microbatch"))


class _SavedModule:
    """State of a ``TransformerEngineBaseModule`` or of an operation of ``te.ops``.

    A module that had no state before the first score keeps what that score made, at its initial values: it is
    registered in the buffers that are reduced over ranks, and must not be registered twice.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        self._flags = {name: getattr(module, name) for name in _FLAGS if hasattr(module, name)}
        self._workspaces = getattr(module, "_fp8_workspaces", None)
        self._metas = [(meta, dict(meta)) for meta in _metas(module)]
        self._was_used = any(True for _ in _states(module))
        quantizers = _quantizers(module)
        self._quantizers = [(lists, {key: list(lists[key]) for key in lists}) for lists in quantizers]
        self._objects = [_SavedObject(found) for found in _objects(module)]

    def begin(self) -> None:
        """Make the module quantize its weights at the next forward pass, into storage of its own."""
        if self._workspaces is not None:
            self._module._fp8_workspaces = {}  # type: ignore[assignment]
        if "is_first_microbatch" in self._flags:
            self._module.is_first_microbatch = True  # type: ignore[assignment]

    def restore(self) -> None:
        """Put everything back."""
        if self._workspaces is not None:
            self._module._fp8_workspaces = self._workspaces
        if not self._was_used:
            if "is_first_microbatch" in self._flags:
                self._module.is_first_microbatch = self._flags["is_first_microbatch"]
            for state in _states(self._module):
                for name, initial in _INITIAL.items():
                    if isinstance(getattr(state, name, None), Tensor):
                        getattr(state, name).fill_(initial)
            return
        for name, value in self._flags.items():
            setattr(self._module, name, value)
        for meta, items in self._metas:
            meta.update(items)  # new keys stay: they say where the module is in the buffers that are reduced
        for lists, items in self._quantizers:
            lists.update(items)
        for found in self._objects:
            found.restore()


class _SavedObject:
    """Attributes of a recipe state or quantizer, and the values of its tensors."""

    def __init__(self, found: Any):
        self._found = found
        self._attributes = dict(vars(found))
        self._values = [(tensor, tensor.detach().clone()) for _, tensor in _tensors(found)]

    def restore(self) -> None:
        vars(self._found).update(self._attributes)
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)


class _SavedManager:
    """Transformer Engine's state of the process: the open autocast, scales kept for recomputation, reduced buffers."""

    def __init__(self, manager: Any):
        self._state = None if manager is None else manager.quantization_state
        if self._state is None:
            return
        names = ("fp8_enabled", "fp8_calibration", "fp8_recipe", "fp8_distributed_group", "is_first_fp8_module")
        self._fields = {name: getattr(self._state, name) for name in (*names, "fp8_graph_capturing", "autocast_depth")}
        self._recompute = [list(entries) for entries in self._state.fp8_tensors_recompute_buffer]
        buffers = ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer")
        self._buffers = [
            (getattr(self._state, name), {key: list(value) for key, value in getattr(self._state, name).items()})
            for name in buffers
        ]

    def restore(self) -> None:
        if self._state is None:
            return
        for name, value in self._fields.items():
            setattr(self._state, name, value)
        for index, entries in enumerate(self._state.fp8_tensors_recompute_buffer):
            entries.clear()
            entries.extend(self._recompute[index] if index < len(self._recompute) else ())
        for buffer, entries in self._buffers:
            for key, tensors in entries.items():
                buffer[key][: len(tensors)] = tensors  # modules that were registered since stay registered


def _metas(module: Any) -> list[dict[str, Any]]:
    """Dictionaries with recipe and states: one of a module, one a direction of an operation."""
    if hasattr(module, "fp8_meta"):
        return [module.fp8_meta]
    return [meta for meta in (getattr(module, "_fp8_metas", None) or {}).values() if meta]


def _quantizers(module: Any) -> list[dict[str, Any]]:
    """Lists of quantizers by direction."""
    found = getattr(module, "quantizers", None) or getattr(module, "_quantizers", None)
    return [found] if isinstance(found, dict) else []


def _states(module: Any) -> Iterator[Any]:
    """Recipe states, and the delayed-scaling state inside a custom one."""
    for meta in _metas(module):
        for key in _STATES:
            state = meta.get(key)
            if state is not None:
                yield state
                inner = getattr(state, "_ds_state", None)
                if inner is not None:
                    yield inner


def _objects(module: Any) -> Iterator[Any]:
    """Recipe states and quantizers, quantizers inside quantizers included; each once."""
    pending = [*_states(module)]
    for lists in _quantizers(module):
        for quantizers in lists.values():
            pending += [quantizer for quantizer in quantizers or () if quantizer is not None]
    seen: set[int] = set()
    while pending:
        found = pending.pop()
        if id(found) not in seen and hasattr(found, "__dict__"):
            seen.add(id(found))
            yield found
            pending += [value for value in vars(found).values() if _is_quantizer(value)]


def _is_quantizer(value: Any) -> bool:
    return hasattr(value, "set_usage") and hasattr(value, "quantize")


def _tensors(found: Any) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in vars(found).items() if isinstance(value, Tensor)]


def _state_manager() -> Any:
    """Transformer Engine's ``FP8GlobalStateManager``, or None where it is not imported."""
    module = sys.modules.get("transformer_engine.pytorch.quantization")
    return getattr(module, "FP8GlobalStateManager", None)


def _require_protectable(models: Iterable[nn.Module], modules: list[nn.Module]) -> None:
    """Raise ``UnprotectedStateError`` for what cannot be saved."""
    configs = [module.config for model in models for module in model.modules() if hasattr(module, "config")]
    if any(getattr(config, "use_kitchen", False) for config in configs):
        raise UnprotectedStateError("Kitchen keeps quantization state of its own: score with another recipe")
    if not any(_metas(module) for module in modules):
        return
    for config in configs:
        graphs = getattr(config, "cuda_graph_impl", None) or "none"
        if graphs != "none" and (getattr(config, "fp8", None) or getattr(config, "fp4", None)):
            raise UnprotectedStateError(
                f"--cuda-graph-impl {graphs}: captured graphs write amax histories and weight copies at fixed "
                "addresses, which cannot be set aside while scoring; set --cuda-graph-impl none, or do not score "
                "with this model"
            )
    manager = _state_manager()
    if manager is not None and not hasattr(manager, "quantization_state"):
        raise UnprotectedStateError(
            "this Transformer Engine does not keep its state in FP8GlobalStateManager.quantization_state; 2.20 does"
        )
    for module in modules:
        for meta in _metas(module):
            recipe = meta.get("recipe")
            if recipe is not None and recipe.custom():
                _require_plain(module, recipe)


def _require_plain(module: nn.Module, recipe: Any) -> None:
    """Raise for state in a custom recipe's quantizers that a shallow copy does not hold."""
    states = [id(state) for state in _states(module)]
    for found in _objects(module):
        if id(found) in states:
            continue
        for name, value in vars(found).items():
            if value is not None and not isinstance(value, (Tensor, *_PLAIN)) and not _is_quantizer(value):
                raise UnprotectedStateError(
                    f"custom recipe {type(recipe).__name__}: attribute {name} of quantizer {type(found).__name__} is a "
                    f"{type(value).__name__}, which may change while scoring and cannot be restored; keep state in "
                    "tensors, or use a built-in --fp8-recipe"
                )
