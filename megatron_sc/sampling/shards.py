"""Which part of a full weight matrix a rank holds, so that a distortion is the same whatever the parallel layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup

from .groups import ParallelGroups, group_rank, group_size

# Experts of SequentialMLP and of TEGroupedMLP; the index is local to the expert-parallel rank.
_SEQUENTIAL_EXPERT = re.compile(
    r"(?P<prefix>.*\.experts)\.local_experts\.(?P<index>\d+)\.(?P<layer>linear_fc[12])\.weight"
)
_GROUPED_EXPERT = re.compile(r"(?P<prefix>.*\.experts)\.(?P<layer>linear_fc[12])\.weight(?P<index>\d+)")
_VOCABULARY_MATRICES = ("embedding.word_embeddings.weight", "output_layer.weight")
_OTHER_NON_LINEAR = ("embedding.position_embeddings.weight", "embedding.tokentype_embeddings.weight")


@dataclass(frozen=True)
class ShardLayout:
    """Where a rank's shard lies in the full matrix.

    The full matrix is what one rank would hold. Along ``dim`` it consists of as many blocks as ``blocks`` has entries
    (one for most layers; gate and up for a gated linear unit), each split evenly over the group: block i of the shard
    holds ``blocks[i]`` of the ``blocks[i] * size`` entries of block i of the full matrix.
    """

    shape: tuple[int, int]  # of the shard: rows (outputs), columns (inputs)
    dim: int = 0  # the dimension that is split
    blocks: tuple[int, ...] = ()  # sizes along dim, summing to shape[dim]; empty: one block
    rank: int = 0
    size: int = 1

    @property
    def full_shape(self) -> tuple[int, int]:
        """The shape of the full matrix."""
        rows, columns = self.shape
        return (rows * self.size, columns) if self.dim == 0 else (rows, columns * self.size)

    def local_part(self, full: np.ndarray) -> np.ndarray:
        """This rank's [rows, columns] of a full matrix."""
        if self.size == 1:
            return full
        parts, start = [], 0
        for block in self.blocks or (self.shape[self.dim],):
            parts.append(np.arange(block) + start + self.rank * block)
            start += block * self.size
        return np.take(full, np.concatenate(parts), axis=self.dim)


@dataclass(frozen=True, eq=False)
class WeightShard:
    """One rank's part of one weight matrix."""

    name: str  # of the full matrix: without wrappers' prefixes, with the global index of the expert
    parameter: nn.Parameter
    layout: ShardLayout
    group: ProcessGroup | None  # over which the matrix is split; None: this rank holds all of it
    kind: str  # 'linear', 'router', 'embedding' (word, position), 'output'
    true_rows: int  # the leading rows of the shard that are not padding of the vocabulary


def unwrap(model: nn.Module) -> Any:
    """The GPTModel inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    core: Any = model
    while isinstance(getattr(core, "module", None), nn.Module):
        core = core.module
    return core


def weight_shards(model: nn.Module, true_vocab_size: int, groups: ParallelGroups) -> Iterator[WeightShard]:
    """The weight matrices of a Megatron model, in the order of ``named_parameters``; biases and norms are left out.

    Tied embeddings are one parameter and come once, as 'embedding'. Relies on the attributes that Megatron's layers
    set: ``tensor_model_parallel``, ``partition_dim``, ``partition_stride`` and ``partition_sizes``.

    Args:
        model: a GPTModel, possibly wrapped.
        true_vocab_size: rows of the vocabulary matrices beyond it are padding.
        groups: this rank's process groups.
    """
    core = unwrap(model)
    for name, parameter in core.named_parameters():
        if parameter.dim() != 2 or not parameter.is_floating_point():
            continue
        name, is_expert, is_grouped = _global_name(name, core, groups)
        group = groups.expert_tensor if is_expert else groups.tensor
        if not getattr(parameter, "tensor_model_parallel", False) or group_size(group) == 1:
            group = None
        layout = _layout(parameter, group, gated=is_grouped and ".linear_fc1." in name and _is_gated(core))
        rows = layout.shape[0]
        is_vocabulary = name in _VOCABULARY_MATRICES
        true_rows = min(max(true_vocab_size - layout.rank * rows, 0), rows) if is_vocabulary else rows
        yield WeightShard(name, parameter, layout, group, _kind(name), true_rows)


def _kind(name: str) -> str:
    if name == "output_layer.weight":
        return "output"
    if name in _VOCABULARY_MATRICES or name in _OTHER_NON_LINEAR:
        return "embedding"
    return "router" if name.split(".")[-2] == "router" else "linear"


def _layout(parameter: torch.Tensor, group: ProcessGroup | None, gated: bool) -> ShardLayout:
    rows, columns = parameter.shape
    dim = max(getattr(parameter, "partition_dim", 0), 0)
    blocks = tuple(getattr(parameter, "partition_sizes", ()))
    if not blocks:
        # A grouped expert keeps [gate; up] in each shard as other gated layers do, but records a stride of 1.
        stride = 2 if gated else getattr(parameter, "partition_stride", 1)
        blocks = (parameter.shape[dim] // stride,) * stride
    return ShardLayout((rows, columns), dim, blocks, group_rank(group), group_size(group))


def _global_name(name: str, core: Any, groups: ParallelGroups) -> tuple[str, bool, bool]:
    """The name with a global expert index, whether it is a routed expert, and whether experts are grouped."""
    grouped = _GROUPED_EXPERT.fullmatch(name)
    match = grouped or _SEQUENTIAL_EXPERT.fullmatch(name)
    if match is None:
        return name, False, False
    local_experts = core.config.num_moe_experts // group_size(groups.expert)
    index = group_rank(groups.expert) * local_experts + int(match["index"])
    return f"{match['prefix']}.local_experts.{index}.{match['layer']}.weight", True, grouped is not None


def _is_gated(core: Any) -> bool:
    return bool(core.config.gated_linear_unit)
