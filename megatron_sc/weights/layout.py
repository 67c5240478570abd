"""From the shards of a Megatron parameter to Hugging Face tensors, and back. Each direction undoes the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .hf_config import HFConfig
from .names import HFWeight, Layout


def split_dim(layout: Layout) -> int | None:
    """The dimension that tensor-parallel ranks split; None where every rank holds all."""
    return {"whole": None, "columns": 1}.get(layout, 0)


def to_hf(weight: HFWeight, shards: Sequence[Tensor], config: HFConfig) -> dict[str, Tensor]:
    """Put the shards together and take the parameter apart.

    Args:
        weight: what the parameter is.
        shards: one for each tensor-parallel rank, in order; one alone where every rank holds all.
        config: the sizes of the attention heads and the vocabulary.

    Returns:
        Name to tensor, possibly a view of the shards.

    Raises:
        ValueError: for fewer rows of the vocabulary than config.json has.
    """
    match weight.layout:
        case "gated":
            halves = [shard.chunk(2) for shard in shards]
            tensors = [_join([half[i] for half in halves], 0) for i in range(2)]
        case "qkv":
            full = _join(shards, 0)
            heads = config.num_heads // config.num_groups
            groups = full.unflatten(0, (config.num_groups, heads + 2, config.head_dim))
            tensors = [part.flatten(0, 2) for part in groups.split([heads, 1, 1], dim=1)]
        case "vocabulary":
            full = _join(shards, 0)
            if len(full) < config.vocab_size:
                raise ValueError(
                    f"{weight.names[0]} has {len(full)} rows, but vocab_size in {config.path} is {config.vocab_size}: "
                    f"set --vocab-size {config.vocab_size}"
                )
            tensors = [full[: config.vocab_size]]
        case layout:
            tensors = [_join(shards, split_dim(layout) or 0)]
    return dict(zip(weight.names, tensors, strict=True))


def from_hf(weight: HFWeight, tensors: Sequence[Tensor], config: HFConfig, rank: int, size: int, rows: int) -> Tensor:
    """One tensor-parallel rank's shard of a parameter.

    Args:
        weight: what the parameter is.
        tensors: those of ``weight.names``, in order.
        config: the sizes of the attention heads.
        rank: place in the tensor-parallel group.
        size: size of that group.
        rows: rows of the shard: the padding of a vocabulary, which is filled with zeros, follows from it.
    """
    match weight.layout:
        case "gated":
            return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])
        case "qkv":
            heads = config.num_heads // config.num_groups
            parts = [
                tensor.unflatten(0, (config.num_groups, count, config.head_dim))
                for tensor, count in zip(tensors, (heads, 1, 1), strict=True)
            ]
            return torch.cat(parts, dim=1).flatten(0, 2).chunk(size)[rank]
        case "vocabulary":
            part = tensors[0][rank * rows : (rank + 1) * rows]
            return torch.cat([part, part.new_zeros(rows - len(part), part.shape[1])])
        case "columns":
            return tensors[0].chunk(size, dim=1)[rank]
        case _:
            return tensors[0]


def _join(shards: Sequence[Tensor], dim: int) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim)
