"""Megatron's hook after the decoder: hidden states -> logits -> centered loss, without a copy of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..vocab_parallel import VocabShard, centered_loss
from .batch import Batch, sampler_distribution
from .config import Distribution, ObjectiveConfig


@dataclass(frozen=True, eq=False)
class LossContext:
    """What the output processor needs beside the model's own tensors: ``output_processor_context``.

    Attributes:
        batch: this rank's positions, ``[b, s]``.
        objective: the loss.
        distribution: what ``batch`` records of the sampler.
        true_vocab_size: the vocabulary without padding.
        group: tensor-parallel group.
        metric_names: filled by the call, in the order of the output's metrics.
    """

    batch: Batch
    objective: ObjectiveConfig
    distribution: Distribution
    true_vocab_size: int
    group: Any
    metric_names: list[str]


def centered_output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    scale_logits: Any,
    context: LossContext,
    **_: Any,
) -> Tensor:
    """``GPTModel.forward(output_processor=...)``: returns float32 ``[1 + M, s, b]``, the loss and M detached metrics.

    The gradient is written over the logits' storage: nothing after this call needs them.
    """
    logits, _bias = output_layer(hidden_states, weight=output_weight, runtime_gather_output=False)
    logits = scale_logits(logits)
    s, b, columns = logits.shape
    rank, ranks = torch.distributed.get_rank(context.group), torch.distributed.get_world_size(context.group)
    rows = context.batch.by_position()
    objective = context.objective
    out = centered_loss(
        logits.view(s * b, columns),
        rows.sampled_ids,
        rows.advantages,
        sampler_distribution(rows, context.distribution),
        rows.sampled_logprobs,
        objective.weight(),
        rows.temperature,
        rows.mask.bool(),
        VocabShard.of_rank(rank, ranks, columns, context.true_vocab_size),
        context.group,
        center=objective.centers,
        sampler_kl_coef=objective.sampler_kl_coef,
        entropy_coef=objective.entropy_coef,
        reuse_logits=True,
    )
    context.metric_names[:] = out.metrics
    return torch.stack([out.loss, *out.metrics.values()]).view(-1, s, b)
