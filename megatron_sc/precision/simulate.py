"""Let a Megatron model compute as a quantized inference engine would, without an engine."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .quantize import Placement, Quantizer, fake_quantize
from .specs import SamplerSpec


@contextmanager
def simulate_sampler(model: nn.Module, spec: SamplerSpec) -> Iterator[Simulated]:
    """Inside, forward passes of the model have the numerics of an engine; gradients are off.

    A quantized linear layer multiplies what an engine multiplies: the float32 products of grid values and scales, with
    the sum rounded to the trainer's dtype once. Where only the weights are quantized they are rounded to the trainer's
    dtype, as engines do that dequantize before a bfloat16 product. Keys and values are quantized where they enter the
    attention, so every pass sees what a cache would hold.

    Nothing of the trainer is written: no parameter, gradient, buffer or random stream. Quantized weights stand in front
    of the parameters for the duration of the context only, also when it is left by an exception.

    The result is that of one rank, up to the order of summation: a scale whose block spans tensor-parallel ranks is
    their maximum, one all-reduce each. Ranks of a tensor-parallel group therefore enter and call the model together.

    Args:
        model: a Megatron GPTModel or one pipeline stage of it, possibly wrapped, of Megatron's own layers or of
            Transformer Engine's. The latter's products are then computed by PyTorch.
        spec: the numerics. ``noise`` and ``staleness`` belong to the weights that the model holds when the context is
            entered, so they must be off here: see ``sampling.simulated``.

    Yields:
        The names of what is quantized.

    Raises:
        ValueError: for noise or staleness, a pattern that matches no layer, grouped or fused layers, multi-latent
            attention with a quantized cache, autocast, FP8 parameters; infinities or NaN where they would be quantized.
    """
    if spec.noise or spec.staleness > 1:
        raise ValueError(
            "simulate_sampler computes with the weights that the model holds; noise and staleness change these. Use "
            "megatron_sc.sampling.simulated, or dataclasses.replace(spec, noise=0.0, staleness=1)"
        )
    core = _core(model)
    named = [(name, module) for name, module in core.named_modules() if name]
    linears = [_Linear(_global_name(name, core), module) for name, module in named if _is_linear(name, module)]
    attentions = [(_global_name(name, core), module) for name, module in named if name.endswith(".core_attention")]
    _check_patterns("ignored", spec.ignored, [linear.name for linear in linears], core.config)
    _check_patterns("ignored_caches", spec.ignored_caches, [name for name, _ in attentions], core.config)
    quantized: list[str] = []
    caches: list[str] = []
    with torch.no_grad(), ExitStack() as undo:
        for linear in linears:
            weights, activations = spec.linear(linear.is_expert)
            if (weights or activations) and not _matches(linear.name, spec.ignored):
                linear.quantize(weights, activations, spec.received, core.config, undo)
                quantized.append(linear.name)
        for name, attention in attentions:
            if (spec.keys or spec.values) and not _matches(name, spec.ignored_caches):
                _quantize_cache(attention, spec, core.config, undo)
                caches.append(name)
        if spec.head != "trainer" and isinstance(getattr(core, "output_layer", None), nn.Module):
            _compute_head_in(core.output_layer, getattr(torch, spec.head), undo)
        yield Simulated(tuple(quantized), tuple(caches))


@dataclass(frozen=True)
class Simulated:
    """What a context quantizes on this rank, by module path in the whole model."""

    linears: tuple[str, ...]
    caches: tuple[str, ...]


def linear_names(model: nn.Module) -> list[str]:
    """The linear layers that a spec can quantize or ignore, on this rank, by module path in the whole model."""
    core = _core(model)
    return [_global_name(name, core) for name, module in core.named_modules() if name and _is_linear(name, module)]


class _Linear:
    """One of Megatron's parallel linear layers."""

    def __init__(self, name: str, module: Any):
        self.name = name
        self.module = module

    @property
    def is_expert(self) -> bool:
        """Whether it is a routed expert's."""
        return ".experts." in self.name

    def quantize(
        self, weights: Quantizer | None, activations: Quantizer | None, received: str, config: Any, undo: ExitStack
    ) -> None:
        """Install the quantized weight and the hooks; ``undo`` takes them away."""
        module = self.module
        _check_plain(self.name, module)
        parameter = module.weight
        dtype = parameter.dtype
        if torch.is_autocast_enabled(parameter.device.type):
            raise ValueError(
                f"{self.name}: autocast would round the quantized product to its own dtype; leave it first"
            )
        weight = parameter.detach()
        if weights is not None:
            sent = weight.bfloat16() if received == "bfloat16" else weight
            weight = self._quantized_weight(sent, weights, config)
        weight = weight.float() if activations is not None else weight.to(dtype)
        if self._is_transformer_engines:
            module.__dict__["forward"] = partial(self._product, weight, activations, dtype)
            undo.callback(module.__dict__.pop, "forward")
            return
        module.__dict__["weight"] = weight  # found before the parameter, which stays untouched
        undo.callback(module.__dict__.pop, "weight")
        if activations is not None:
            handle = module.register_forward_pre_hook(partial(self._quantize_input, activations))
            undo.callback(handle.remove)
            undo.callback(module.register_forward_hook(partial(self._round_output, dtype)).remove)

    def _product(
        self, weight: Tensor, activations: Quantizer | None, dtype: torch.dtype, x: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """What stands for the forward pass of a layer of Transformer Engine: (product, bias that is not yet added)."""
        from megatron.core.tensor_parallel import mappings

        module = self.module
        group = module._tp_group
        if hasattr(module, "layer_norm_weight"):
            x = _normalize(module, x)
        adds_later = self.is_expert and (self._place()[1] > 1 or module.config.expert_model_parallel_size > 1)
        if module.config.sequence_parallel and not self._splits_columns and not adds_later:
            x = mappings.gather_from_sequence_parallel_region(x, group=group)
        if activations is not None:
            x = self._quantize_input(activations, module, (x,))[0]
        product = nn.functional.linear(x, weight)
        if self._splits_columns and not adds_later:
            reduce = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if module.config.sequence_parallel
                else mappings.reduce_from_tensor_model_parallel_region
            )
            product = reduce(product, group=group)
        bias = module.bias if module.use_bias else None
        if bias is not None and not module.te_return_bias:
            product, bias = product + bias, None
        return self._round_output(dtype, module, (), (product, bias))

    def _quantized_weight(self, weight: Tensor, quantizer: Quantizer, config: Any) -> Tensor:
        """Each projection of the fused matrix by itself, float32."""
        rank, ranks = self._place()
        rows, columns = weight.shape
        if self._splits_columns:  # one projection each
            return fake_quantize(weight, quantizer, Placement(rows, columns * ranks, 0, columns * rank, self._maximum))
        parts = _projections(self.name, rows, ranks, config) if _needs_projections(quantizer) else None
        if parts is None:
            return fake_quantize(weight, quantizer, Placement(rows * ranks, columns, rows * rank, 0, self._maximum))
        quantized = torch.empty(rows, columns, dtype=torch.float32, device=weight.device)
        for index in parts:
            own, count = torch.tensor(index, device=weight.device), len(index)
            place = Placement(count * ranks, columns, count * rank, 0, self._maximum)
            quantized[own] = fake_quantize(weight[own], quantizer, place)
        return quantized

    def _quantize_input(self, quantizer: Quantizer, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        tokens = x.reshape(-1, x.shape[-1])
        rank, ranks = self._place()
        place = None
        if self._splits_columns and getattr(module, "input_is_parallel", True):
            width = tokens.shape[1]
            place = Placement(tokens.shape[0], width * ranks, 0, width * rank, self._maximum)
        return fake_quantize(tokens, quantizer, place).view(x.shape), *rest

    def _round_output(
        self, dtype: torch.dtype, module: Any, args: tuple[Any, ...], output: tuple[Tensor, Any]
    ) -> tuple[Tensor, Any]:
        product, bias = output
        rank, ranks = self._place()
        if self._splits_columns and self.is_expert and ranks > 1 and product.dtype != dtype:
            # Megatron's dispatcher adds the ranks' parts later, in the trainer's dtype. Add them here in float32, and
            # leave it one rank's whole and the others' zeros.
            dist.all_reduce(product, group=self._group)
            product = product if rank == 0 else torch.zeros_like(product)
        return product.to(dtype), bias

    @property
    def _splits_columns(self) -> bool:
        return not {"RowParallelLinear", "TERowParallelLinear"}.isdisjoint(_ancestors(self.module))

    @property
    def _is_transformer_engines(self) -> bool:
        return not _ENGINE_CLASSES.isdisjoint(_ancestors(self.module))

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The ranks that split the matrix. Transformer Engine's ``tp_group`` is None where others communicate."""
        return getattr(self.module, "_tp_group", None) or self.module.tp_group

    def _place(self) -> tuple[int, int]:
        """This rank's place in the group that splits the matrix, and its size."""
        group = self._group
        return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def _maximum(self, values: Tensor) -> Tensor:
        group = self._group
        if group is not None and dist.get_world_size(group) > 1:
            values = values.contiguous()
            dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
        return values


def _needs_projections(quantizer: Quantizer) -> bool:
    """Whether blocks could span two of the matrices that Megatron keeps in one."""
    return quantizer.scale != "one" and (quantizer.rows != 1 or quantizer.scale == "e4m3")


def _projections(name: str, rows: int, ranks: int, config: Any) -> list[list[int]] | None:
    """The local rows of each projection in a fused matrix, in the projection's own order; None: it is not fused.

    ``linear_fc1`` of a gated unit is [gate; up] on every rank; ``linear_qkv`` has query, key and value rows group by
    group.
    """
    layer = name.rpartition(".")[2]
    if layer == "linear_fc1" and config.gated_linear_unit:
        return [list(range(rows // 2)), list(range(rows // 2, rows))]
    if layer != "linear_qkv":
        return None
    width = config.kv_channels
    heads = config.num_attention_heads // config.num_query_groups
    sizes = [heads * width] * (2 if getattr(config, "attention_output_gate", False) else 1) + [width, width]
    if rows % sum(sizes):
        raise ValueError(
            f"{name}: {ranks} tensor-parallel ranks split its {config.num_query_groups} query groups, so blocks of "
            "several rows cannot be formed. Quantize weights by row (1x128, row), or use fewer ranks"
        )
    of_row = [part for part, size in enumerate(sizes) for _ in range(size)] * (rows // sum(sizes))
    return [[row for row, own in enumerate(of_row) if own == part] for part in range(len(sizes))]


def _quantize_cache(module: nn.Module, spec: SamplerSpec, config: Any, undo: ExitStack) -> None:
    """Quantize keys and values where they enter the attention."""
    if getattr(config, "multi_latent_attention", False):
        raise ValueError("multi-latent attention caches a latent, not keys and values: leave keys and values out")

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        query, key, value, *rest = args
        return query, _by_head(key, spec.keys), _by_head(value, spec.values), *rest

    undo.callback(module.register_forward_pre_hook(hook).remove)


def _by_head(x: Tensor, quantizer: Quantizer | None) -> Tensor:
    """Keys or values [..., heads, width], each head of each token a row."""
    if quantizer is None:
        return x
    return fake_quantize(x.reshape(-1, x.shape[-1]), quantizer, dtype=x.dtype).view(x.shape)


def _compute_head_in(output_layer: Any, dtype: torch.dtype, undo: ExitStack) -> None:
    """Compute the logits in another dtype; they come out in it."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = ("weight", "runtime_gather_output")
        given = dict(zip(names, args[1:], strict=False)) | kwargs
        weight = module.weight if given.get("weight") is None else given["weight"]
        return (args[0].to(dtype),), given | {"weight": weight.detach().to(dtype)}

    undo.callback(output_layer.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _normalize(module: Any, x: Tensor) -> Tensor:
    """The norm that Transformer Engine fuses in front of a linear layer, in float32, rounded to the dtype of ``x``."""
    weight = module.layer_norm_weight.float() + (1.0 if module.zero_centered_gamma else 0.0)
    if module.normalization == "RMSNorm":
        return nn.functional.rms_norm(x.float(), x.shape[-1:], weight, module.eps).to(x.dtype)
    return nn.functional.layer_norm(x.float(), x.shape[-1:], weight, module.layer_norm_bias.float(), module.eps).to(
        x.dtype
    )


def _is_linear(name: str, module: nn.Module) -> bool:
    """Megatron's parallel linear layers and Transformer Engine's, but for the output layer."""
    return name != "output_layer" and not (_LINEAR_CLASSES | _ENGINE_CLASSES | _OTHER_CLASSES).isdisjoint(
        _ancestors(module)
    )


def _ancestors(module: nn.Module) -> set[str]:
    """Names of its classes: Transformer Engine's cannot be imported where it is not installed."""
    return {cls.__name__ for cls in type(module).__mro__}


_LINEAR_CLASSES = {"ColumnParallelLinear", "RowParallelLinear"}
_ENGINE_CLASSES = {"TEColumnParallelLinear", "TERowParallelLinear", "TELayerNormColumnParallelLinear"}
_OTHER_CLASSES = {"TELinear", "TEGroupedLinear", "TEFusedMLP"}
_LAYER = re.compile(r"(?P<layers>(?:.*\.)?layers)\.\d+(?=\.)")
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.local_experts\.(?P<index>\d+)(?=\.)")


def _check_plain(name: str, module: Any) -> None:
    if (_LINEAR_CLASSES | _ENGINE_CLASSES).isdisjoint(_ancestors(module)):
        raise ValueError(
            f"{name} is a {type(module).__name__}, which cannot be simulated; ignore it, or build the model without "
            "--moe-grouped-gemm and --use-transformer-engine-op-fuser"
        )
    if not {"weight", "forward"}.isdisjoint(module.__dict__):
        raise ValueError(f"{name} is simulated already; leave the other context first")
    if type(module.weight.data) is not Tensor:
        raise ValueError(
            f"{name} is stored as {type(module.weight.data).__name__}; train without --fp8-param-gather to simulate "
            "another precision"
        )


def _core(model: nn.Module) -> Any:
    """The GPTModel inside Megatron's wrappers."""
    core: Any = model
    while isinstance(getattr(core, "module", None), nn.Module):
        core = core.module
    return core


def _global_name(name: str, core: Any) -> str:
    """The module's path in the whole model: with the layer's index over all stages and the expert's over all ranks."""
    expert = _EXPERT.match(name)
    if expert:
        experts = core.get_submodule(expert["experts"])
        index = int(expert["index"])
        if experts.ep_group is not None:
            index += dist.get_rank(experts.ep_group) * experts.num_local_experts
        name = f"{expert['experts']}.local_experts.{index}{name[expert.end() :]}"
    layer = _LAYER.match(name)
    if layer:
        number = getattr(core.get_submodule(layer[0]), "layer_number", None)
        if number is not None:
            name = f"{layer['layers']}.{number - 1}{name[layer.end() :]}"
    return name


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(field: str, patterns: tuple[str, ...], names: list[str], config: Any) -> None:
    """Refuse a pattern that no such module of the whole model has; this rank may hold a part of it."""
    whole = set(names)
    for rule, count in ((r"(\blayers\.)\d+", config.num_layers), (r"(\blocal_experts\.)\d+", config.num_moe_experts)):
        whole |= {re.sub(rule, rf"\g<1>{i}", name) for name in whole for i in range(count or 0)}
    for pattern in patterns:
        if not fnmatch.filter(whole, pattern):
            raise ValueError(
                f"{field}: {pattern!r} matches nothing that could be quantized; patterns match whole paths, such as "
                f"{min(names, default='(this stage has none)')}"
            )
