"""Modules that keep quantization state as those of Transformer Engine 2.20 do, on the CPU.

Attributes, views and order of events are those of ``module/base.py``, ``module/linear.py`` and ``quantization.py``:
delayed scaling per tensor, a cached quantized weight, amaxes that are reduced when the outermost autocast with
gradients closes, and scales that are kept for recomputation. ``forward`` is Megatron's ``TELinear.forward``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LARGEST = 448.0


@dataclass
class GlobalState:
    """Fields that the guard reads."""

    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: Any = None
    fp8_distributed_group: Any = None
    is_first_fp8_module: bool = False
    fp8_graph_capturing: bool = False
    autocast_depth: int = 0
    global_amax_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    global_amax_history_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    global_scale_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    fp8_tensors_recompute_buffer: list[deque[Any]] = field(default_factory=list)


class FP8GlobalStateManager:
    """State of the process."""

    quantization_state = GlobalState()


@dataclass(frozen=True)
class Recipe:
    """A recipe by name."""

    kind: str = "delayed"

    def delayed(self) -> bool:
        """Whether scales come from earlier steps."""
        return self.kind == "delayed"

    def custom(self) -> bool:
        """Whether quantizers are the user's."""
        return self.kind == "custom"


@contextmanager
def autocast(recipe: Recipe) -> Iterator[None]:
    state = FP8GlobalStateManager.quantization_state
    before = (state.fp8_enabled, state.fp8_recipe)
    state.fp8_enabled, state.fp8_recipe = True, recipe
    state.autocast_depth += 1
    try:
        yield
    finally:
        state.fp8_enabled, state.fp8_recipe = before
        state.autocast_depth -= 1
        if state.autocast_depth == 0 and torch.is_grad_enabled():
            _reduce_and_update()


def _reduce_and_update() -> None:
    state = FP8GlobalStateManager.quantization_state
    for key, histories in state.global_amax_history_buffer.items():
        for history, scale in zip(histories, state.global_scale_buffer[key], strict=True):
            largest = history.amax(dim=0)
            scale.copy_(torch.where(largest > 0, LARGEST / largest, scale))
            history.copy_(history.roll(-1, dims=0))
            history[0].zero_()


class DelayedScalingRecipeState:
    """Scales and histories of a module's tensors in one direction."""

    def __init__(self, num_quantizers: int, history: int = 4):
        self.scale = torch.ones(num_quantizers)
        self.amax_history = torch.zeros(history, num_quantizers)

    def make_quantizers(self) -> list[Quantizer]:
        """One a tensor, on views."""
        return [Quantizer(self.scale[i], self.amax_history[0][i].reshape(1)) for i in range(len(self.scale))]


class Quantizer:
    """Per-tensor e4m3 with a scale from earlier steps; ``scale`` and ``amax`` are views of the state's."""

    def __init__(self, scale: Tensor, amax: Tensor):
        self.scale, self.amax = scale, amax
        self.rowwise_usage = self.columnwise_usage = True

    def set_usage(self, *, columnwise: bool) -> None:
        """Which layouts the next product needs."""
        self.columnwise_usage = columnwise

    def quantize(self, tensor: Tensor) -> Tensor:
        """Round to e4m3 and back, and note the largest magnitude."""
        with torch.no_grad():
            self.amax.copy_(torch.maximum(self.amax, tensor.detach().abs().max().reshape(1)))
            scaled = (tensor.detach() * self.scale).clamp(-LARGEST, LARGEST)
            return scaled.to(torch.float8_e4m3fn).float() / self.scale


class Linear(nn.Module):
    """A product of quantized inputs and weights, with straight-through gradients."""

    def __init__(self, width: int, recompute: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.quantizers: dict[str, list[Quantizer]] = {"scaling_fwd": [], "scaling_bwd": []}
        self.fp8 = self.fp8_initialized = self.fp8_meta_tensors_initialized = False
        self._fp8_workspaces: dict[str, Tensor] = {}
        self.is_first_microbatch = True
        self.recompute = recompute

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, width]`` -> ``[n, width]``."""
        state = FP8GlobalStateManager.quantization_state
        self.fp8 = state.fp8_enabled
        if not self.fp8:
            self.fp8_initialized = False
            return inputs @ self.weight.t()
        self._initialize()
        if self.training and self.recompute:
            self._keep_for_recomputation()
        input_quantizer, weight_quantizer = self.quantizers["scaling_fwd"]
        weight_quantizer.set_usage(columnwise=torch.is_grad_enabled())
        cached = self._fp8_workspaces.get("weight")
        if cached is None:
            cached = self._fp8_workspaces["weight"] = weight_quantizer.quantize(self.weight)
        elif self.is_first_microbatch:
            cached.copy_(weight_quantizer.quantize(self.weight))
        self.is_first_microbatch = False
        rounded = inputs + (input_quantizer.quantize(inputs) - inputs).detach()
        return rounded @ (self.weight + (cached - self.weight).detach()).t()

    def _initialize(self) -> None:
        state = FP8GlobalStateManager.quantization_state
        if not (self.fp8_initialized and self.fp8_meta.get("recipe") == state.fp8_recipe):
            self.fp8_meta["recipe"] = state.fp8_recipe
            if not self.fp8_meta_tensors_initialized:
                self.fp8_meta["scaling_fwd"] = DelayedScalingRecipeState(2)
                self.quantizers["scaling_fwd"] = self.fp8_meta["scaling_fwd"].make_quantizers()
                self.fp8_meta_tensors_initialized = True
            self.fp8_initialized = True
        if "buffer_index_and_autocast_key" not in self.fp8_meta:
            own = self.fp8_meta["scaling_fwd"]
            key = "forward_delayed"
            state.global_amax_buffer.setdefault(key, []).append(own.amax_history[0])
            state.global_amax_history_buffer.setdefault(key, []).append(own.amax_history)
            state.global_scale_buffer.setdefault(key, []).append(own.scale)
            self.fp8_meta["buffer_index_and_autocast_key"] = [len(state.global_scale_buffer[key]) - 1, key]

    def _keep_for_recomputation(self) -> None:
        state, own = FP8GlobalStateManager.quantization_state, self.fp8_meta["scaling_fwd"]
        name = "global_fp8_buffer_pos_fwd_recompute"
        if name not in self.fp8_meta:
            state.fp8_tensors_recompute_buffer.append(deque())
            self.fp8_meta[name] = len(state.fp8_tensors_recompute_buffer) - 1
        kept = [own.amax_history.clone(), own.scale.clone()]
        state.fp8_tensors_recompute_buffer[self.fp8_meta[name]].append(kept)

    def kept_scale(self) -> Tensor:
        """What a recomputation would take: the oldest entry."""
        buffer = FP8GlobalStateManager.quantization_state.fp8_tensors_recompute_buffer
        scale: Tensor = buffer[self.fp8_meta["global_fp8_buffer_pos_fwd_recompute"]].popleft()[1]
        return scale
