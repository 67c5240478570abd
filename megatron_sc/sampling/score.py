"""The distributions of a model at every position of given sequences."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .generate import _round_up
from .groups import check_parallelism, group_size
from .isolation import inference_only
from .shards import unwrap


def next_token_logprobs(
    model: nn.Module,
    tokens: Tensor,
    true_vocab_size: int,
    temperature: float = 1.0,
    tensor_group: ProcessGroup | None = None,
) -> Tensor:
    """What the model predicts after every token: log-probabilities over the whole true vocabulary.

    One forward pass, with the model as it computes now (see ``simulated``). Modes, gradients and random streams are
    left as found. Every tensor-parallel rank passes the same tokens and gets the same result.

    Args:
        model: a GPTModel, possibly wrapped.
        tokens: [b, s] int64, on any device.
        true_vocab_size: V; columns of the logits beyond it are padding and have no probability.
        temperature: > 0.
        tensor_group: the model's tensor-parallel group; None: one rank.

    Returns:
        [b, s, V] float32, on the model's device.

    Raises:
        ValueError: pipeline or context parallelism.
    """
    core = unwrap(model)
    check_parallelism(core.config.pipeline_model_parallel_size, core.config.context_parallel_size)
    device = next(core.parameters()).device
    length = tokens.shape[1]
    padded = _round_up(length, group_size(tensor_group) if core.config.sequence_parallel else 1)
    inputs = nn.functional.pad(tokens, (0, padded - length)).to(device)
    position_ids = torch.arange(padded, device=device).expand_as(inputs)

    def process(
        *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, scale_logits: Any, **_: Any
    ) -> Tensor:
        sharded = output_layer.sequence_parallel
        if sharded:  # hidden states [s/tp, b, h]
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=output_layer.tp_group)
        output_layer.sequence_parallel = False  # type: ignore[assignment]
        try:
            logits, _bias = output_layer(hidden_states, weight=output_weight, runtime_gather_output=True)
        finally:
            output_layer.sequence_parallel = sharded
        return scale_logits(logits).transpose(0, 1)  # [b, s, V_pad]

    with inference_only(model):
        logits = model(inputs, position_ids, None, output_processor=process)[:, :length, :true_vocab_size]
        return torch.log_softmax(logits.float() / temperature, dim=-1)
