"""``--sc-logits-dtype fp32``: float32 logits in the place of Megatron's output layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..vocab_parallel.float32_product import float32_product
from .fused_head import call_in_place_of_forward, check_layer


def float32_logits(
    output_layer: Any, output_weight: Tensor | None, hidden_states: Tensor, config: Any, group: Any
) -> Tensor:
    """float32 ``[s, b, V_local]`` as if from the forward pass of Megatron's output layer.

    Args:
        output_layer: Megatron's ``ColumnParallelLinear``.
        output_weight: the embedding's weight where it is tied, else None: the layer's own.
        hidden_states: ``[s, b, h]``; ``[s / tp, b, h]`` under sequence parallelism.
        config: the model's ``TransformerConfig``.
        group: tensor-parallel group.

    Raises:
        ValueError: for a layer that does what the product here does not; it names the flag.
    """
    check_layer(output_layer, config, "--sc-logits-dtype fp32")
    b = hidden_states.shape[1]

    def forward(hidden: Tensor) -> Tensor:
        weight = output_layer.weight if output_weight is None else output_weight
        logits = float32_product(hidden.flatten(0, 1), weight, group, output_layer.sequence_parallel)
        return logits.view(-1, b, logits.shape[1])

    logits: Tensor = call_in_place_of_forward(output_layer, forward, hidden_states)
    return logits
