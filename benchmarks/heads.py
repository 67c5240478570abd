"""The LM head with its loss: hidden states and the output weight in, their gradients out.

Each is a function (hidden, weight, positions, group) -> loss, ``[n]`` or its sum. The weight's gradient goes to float32
``weight.main_grad`` in all of them, as under Megatron's data-parallel wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_sc import centered_loss

from .methods import Reference, cross_entropy_gradient, draws_gradient, head_gradient
from .positions import Positions


@dataclass(frozen=True)
class Head:
    """A row of the table."""

    name: str
    loss: Callable[[Tensor, Tensor, Positions, dist.ProcessGroup], Tensor]
    reference: Reference


def heads() -> list[Head]:
    """Megatron's layer with Megatron's cross-entropy first."""
    return [
        Head("Megatron layer + (a)", _layer_megatron, cross_entropy_gradient),
        Head("Megatron layer + ours", _layer_ours, head_gradient),
        Head("fused head", _fused, head_gradient),
        Head("8 draws, no softmax", _sparse, draws_gradient),
    ]


def parameters(
    rows: int, width: int, at: Positions, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, torch.nn.Parameter]:
    """Hidden states ``[n, h]``, the same on every rank, and this rank's output weight ``[V_local, h]``."""
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, width, generator=random).to(device, dtype)
    full = torch.empty(at.shard.size, width).normal_(std=2 * width**-0.5, generator=random)
    local = full.new_zeros(at.shard.columns, width)
    local[: at.shard.valid] = full[at.shard.start : at.shard.start + at.shard.valid]
    weight = torch.nn.Parameter(local.to(device, dtype))
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    weight.register_post_accumulate_grad_hook(_accumulate)
    return hidden.requires_grad_(), weight


def _accumulate(weight: Tensor) -> None:
    """What the hook of Megatron's data-parallel wrapper does."""
    if not weight.grad_added_to_main_grad:  # type: ignore[attr-defined]
        weight.main_grad.add_(weight.grad)  # type: ignore[attr-defined]
    weight.grad, weight.grad_added_to_main_grad = None, False  # type: ignore[attr-defined]


def _layer(hidden: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What ``ColumnParallelLinear`` calls; ``[n, V_local]``."""
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    return linear_with_grad_accumulation_and_async_allreduce(
        hidden, weight, None, gradient_accumulation_fusion=False, allreduce_dgrad=dist.get_world_size(group) > 1,
        sequence_parallel=False, tp_group=group,
    )  # fmt: skip


def _layer_megatron(hidden: Tensor, weight: Tensor, at: Positions, group: dist.ProcessGroup) -> Tensor:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    return vocab_parallel_cross_entropy(_layer(hidden, weight, group), at.sampled_ids, tp_group=group)


def _layer_ours(hidden: Tensor, weight: Tensor, at: Positions, group: dist.ProcessGroup) -> Tensor:
    return centered_loss(
        _layer(hidden, weight, group), at.sampled_ids, at.advantages, at.head, at.sampled_logprobs, at.weight,
        vocab=at.shard, group=group, reuse_logits=True,
    ).loss  # fmt: skip


def _fused(hidden: Tensor, weight: Tensor, at: Positions, group: dist.ProcessGroup) -> Tensor:
    return _lm_head()(
        hidden, weight, at.sampled_ids, at.advantages, at.head, at.sampled_logprobs, at.weight, vocab=at.shard,
        group=group,
    ).loss_sum  # fmt: skip


def _sparse(hidden: Tensor, weight: Tensor, at: Positions, group: dist.ProcessGroup) -> Tensor:
    return _lm_head()(
        hidden, weight, at.sampled_ids, at.advantages, at.draws, vocab=at.shard, group=group, metrics=False
    ).loss_sum


def _lm_head() -> Any:
    from megatron_sc.vocab_parallel.lm_head import centered_lm_head_loss

    return centered_lm_head_loss
