"""How the sampler's weights differ from the trainer's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp

from megatron_sc.precision.quantize import Placement, fake_quantize

from .groups import ParallelGroups
from .isolation import gathered_parameters
from .shards import ShardLayout, WeightShard, unwrap, weight_shards

WeightFormat = Literal["int8", "int4", "fp8"]


class Distortion(Protocol):
    """A rule that turns the trainer's weight matrices into the sampler's."""

    def apply(self, shards: Sequence[WeightShard]) -> list[Tensor | None]:
        """The sampler's values of each shard, in its shape and dtype; None where it is the trainer's own.

        Collective over the shards' groups: every rank of a group calls it with the same matrices in the same order.
        The parameters are read, never written.
        """


@dataclass(frozen=True)
class NoDistortion:
    """The sampler holds the trainer's weights."""

    def apply(self, shards: Sequence[WeightShard]) -> list[Tensor | None]:
        """Nothing differs."""
        return [None] * len(shards)


@dataclass(frozen=True)
class GaussianWeights:
    """A fixed Gaussian direction added to every weight matrix: W + scale * std(W) * N, with N_ij ~ Normal(0, 1).

    N is a function of the seed and of the matrix's name alone: it is the same at every step, re-applied to the current
    W, and the same under every parallel layout (std is over the full matrix). Every matrix is distorted: attention,
    MLP, experts, router, embeddings (tied or not) and output layer; padding rows of the vocabulary are not, nor biases
    and norms.

    This is the bias that a centered score removes: a sampler that is wrong in the same way after every update
    (Marek & Ryabinin 2026, section 4).
    """

    scale: float
    seed: int = 0
    # This rank's part of N, float32 on the parameter's device: made once, because it is needed again at every step.
    _directions: dict[tuple[str, ShardLayout], Tensor] = field(default_factory=dict, compare=False, repr=False)

    def apply(self, shards: Sequence[WeightShard]) -> list[Tensor | None]:
        """The noisy weights; one all-reduce of 3 numbers a matrix for each process group."""
        with torch.no_grad():
            deviations = _standard_deviations(shards)
            noisy: list[Tensor | None] = []
            for shard, deviation in zip(shards, deviations, strict=True):
                noise = self._direction(shard) * (self.scale * deviation)
                noisy.append((shard.parameter.detach().float() + noise).to(shard.parameter.dtype))
            return noisy

    def _direction(self, shard: WeightShard) -> Tensor:
        key = (shard.name, shard.layout)
        if key not in self._directions:
            local = shard.layout.local_part(gaussian_direction(self.seed, shard.name, shard.layout.full_shape))
            direction = torch.from_numpy(np.ascontiguousarray(local)).to(shard.parameter.device)
            direction[shard.true_rows :] = 0
            self._directions[key] = direction
        return self._directions[key]


@dataclass(frozen=True)
class QuantizedWeights:
    """The linear layers' weights rounded to a low-precision format, one scale per output row of the full matrix.

    As inference engines do, embeddings, the output layer and the router keep the trainer's precision. The rounded
    weights are stored in the trainer's dtype; what an engine does with activations and cache is in ``simulated``.
    """

    format: WeightFormat

    def apply(self, shards: Sequence[WeightShard]) -> list[Tensor | None]:
        """The fake-quantized weights; one all-reduce of a number a row for each matrix whose rows are split."""
        return [self._quantized(shard) if shard.kind == "linear" else None for shard in shards]

    def _quantized(self, shard: WeightShard) -> Tensor:
        parameter, place = shard.parameter.detach(), None
        if shard.group is not None and shard.layout.dim == 1:
            column = shard.layout.rank * parameter.shape[1]
            place = Placement(*shard.layout.full_shape, 0, column, partial(_maximum, group=shard.group))
        return fake_quantize(parameter, self.format, place, parameter.dtype)


def gaussian_direction(seed: int, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Standard normal numbers, float32 [rows, columns], that depend on the seed and the name only.

    Rows come in order from one stream, so a matrix with more rows (another vocabulary padding) begins with the same
    ones.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return generator.standard_normal(shape, dtype=np.float32)


def sampler_weights(
    model: nn.Module, distortion: Distortion, true_vocab_size: int, groups: ParallelGroups | None = None
) -> dict[nn.Parameter, Tensor]:
    """The values that a distortion gives to the parameters it changes.

    Collective over the tensor-parallel groups. The model is read, never written.

    Args:
        model: a Megatron GPTModel, possibly wrapped.
        distortion: the rule.
        true_vocab_size: rows of the vocabulary matrices beyond it are padding and never distorted.
        groups: this rank's process groups; None: one rank.

    Raises:
        ValueError: a parameter is stored in FP8 (``--fp8-param-gather``), whose values cannot be exchanged.
    """
    shards = list(weight_shards(model, true_vocab_size, groups or ParallelGroups()))
    for shard in shards:
        if type(shard.parameter.data) is not Tensor:
            raise ValueError(
                f"{shard.name} is stored as {type(shard.parameter.data).__name__}; the embedded sampler needs plain "
                "weights. Train without --fp8-param-gather"
            )
    with gathered_parameters(model):
        values = distortion.apply(shards)
    return {shard.parameter: value for shard, value in zip(shards, values, strict=True) if value is not None}


@contextmanager
def swapped_weights(model: nn.Module, values: dict[nn.Parameter, Tensor]) -> Iterator[None]:
    """Let the model compute with other values for the duration of the context.

    Parameters keep their identity, gradients, main_grad and optimizer state; only the storage that they point to is
    exchanged, and the trainer's own storage, never written to, comes back at the end, also after an exception.

    Args:
        model: the model the parameters belong to; its Transformer Engine modules are told to re-quantize their weights.
        values: the values by parameter, each of the parameter's shape, dtype and device.
    """
    own = {parameter: parameter.data for parameter in values}
    try:
        for parameter, value in values.items():
            parameter.data = value
        _weights_changed(model)
        yield
    finally:
        for parameter, data in own.items():
            parameter.data = data
        _weights_changed(model)


@contextmanager
def distorted_weights(
    model: nn.Module, distortion: Distortion, true_vocab_size: int, groups: ParallelGroups | None = None
) -> Iterator[None]:
    """Let the model compute with distorted weights; ``sampler_weights`` and ``swapped_weights`` in one."""
    with swapped_weights(model, sampler_weights(model, distortion, true_vocab_size, groups)):
        yield


def _weights_changed(model: nn.Module) -> None:
    """Transformer Engine keeps FP8 copies of weights and refreshes them only when told."""
    core = unwrap(model)
    if hasattr(core, "set_is_first_microbatch"):
        core.set_is_first_microbatch()


def _standard_deviations(shards: Sequence[WeightShard]) -> list[float]:
    """The standard deviation of each full matrix, over its true rows, from sums in float64."""
    sums = [_moments(shard) for shard in shards]
    for group, members in _by_group(shards):
        if group is not None:
            for i, total in zip(members, _all_reduce([sums[i] for i in members], ReduceOp.SUM, group), strict=True):
                sums[i] = total
    if not sums:
        return []
    count, total, squares = torch.stack(sums).cpu().unbind(1)
    mean = total / count
    return ((squares / count - mean**2).clamp(min=0).sqrt()).tolist()


def _moments(shard: WeightShard) -> Tensor:
    """Count, sum and sum of squares, float64 [3]."""
    values = shard.parameter.detach()[: shard.true_rows].double()
    return torch.stack([values.new_tensor(values.numel()), values.sum(), values.square().sum()])


def _by_group(shards: Sequence[WeightShard]) -> Iterator[tuple[ProcessGroup | None, list[int]]]:
    """The indices of the shards that share a process group."""
    members: dict[ProcessGroup | None, list[int]] = {}
    for i, shard in enumerate(shards):
        members.setdefault(shard.group, []).append(i)
    yield from members.items()


def _maximum(values: Tensor, group: ProcessGroup) -> Tensor:
    """The elementwise maximum over a group."""
    torch.distributed.all_reduce(values, ReduceOp.MAX, group=group)
    return values


def _all_reduce(tensors: list[Tensor], operation: ReduceOp.RedOpType, group: ProcessGroup) -> list[Tensor]:
    """Reduce a list of tensors of one dtype as one message."""
    if not tensors:
        return []
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    torch.distributed.all_reduce(flat, operation, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
