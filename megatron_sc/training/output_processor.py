"""Megatron's hook after the decoder: hidden states -> logits -> centered loss, without a copy of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..precision.head_dtype import require_unquantized_head
from ..vocab_parallel import VocabShard, centered_loss
from .batch import Batch, sampler_distribution
from .config import Distribution, ObjectiveConfig
from .float32_head import float32_logits
from .fused_head import fused_head_loss, loss_with_gradient


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
        with_metrics: whether this step's metrics are read. Without, ``--fuse-lm-head`` on draws computes no softmax and
            returns NaN for the metrics, under the same names: Megatron leaves a NaN out of the line it prints.
    """

    batch: Batch
    objective: ObjectiveConfig
    distribution: Distribution
    true_vocab_size: int
    group: Any
    metric_names: list[str]
    with_metrics: bool = True


def centered_output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    scale_logits: Any,
    context: LossContext,
    config: Any = None,
    **_: Any,
) -> Tensor:
    """``GPTModel.forward(output_processor=...)``: returns float32 ``[1 + M, s, b]``, the loss and M detached metrics.

    The gradient is written over the logits' storage: nothing after this call needs them. With ``--fuse-lm-head`` there
    are no logits, and the gradient of the loss belongs to its sum, see ``loss_with_gradient``.

    Raises:
        ValueError: for an output layer in FP8, or one that the configured head cannot stand in for.
    """
    require_unquantized_head(config)
    objective = context.objective
    if not objective.fuse_lm_head:
        if objective.float32_logits:
            logits = float32_logits(output_layer, output_weight, hidden_states, config, context.group)
        else:
            logits, _bias = output_layer(hidden_states, weight=output_weight, runtime_gather_output=False)
        return centered_logits(scale_logits(logits), context)
    columns = (output_layer.weight if output_weight is None else output_weight).shape[0]
    arguments, options = _arguments(context, columns)
    fused = fused_head_loss(
        output_layer, output_weight, hidden_states, scale_logits, config, *arguments,
        metrics=context.with_metrics, float32_logits=objective.float32_logits, **options,
    )  # fmt: skip
    metrics = {name: fused.metrics.get(name, torch.full_like(fused.loss, torch.nan)) for name in fused.metric_names}
    return _output(loss_with_gradient(fused), metrics, context)


def centered_logits(logits: Tensor, context: LossContext) -> Tensor:
    """What the processor returns, from logits ``[s, b, V / tp]``. Their storage is overwritten in backward."""
    arguments, options = _arguments(context, logits.shape[2])
    out = centered_loss(logits.view(-1, logits.shape[2]), *arguments, **options, reuse_logits=True)
    return _output(out.loss, out.metrics, context)


def _arguments(context: LossContext, columns: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The loss's arguments after the logits, for an output layer with this many columns on each rank."""
    rank, ranks = torch.distributed.get_rank(context.group), torch.distributed.get_world_size(context.group)
    rows = context.batch.by_position()
    objective = context.objective
    arguments = (
        rows.sampled_ids,
        rows.advantages,
        sampler_distribution(rows, context.distribution),
        rows.sampled_logprobs,
        objective.weight(),
        rows.temperature,
        rows.mask.bool(),
        VocabShard.of_rank(rank, ranks, columns, context.true_vocab_size),
        context.group,
    )
    options = {
        "center": objective.centers,
        "sampler_kl_coef": objective.sampler_kl_coef,
        "entropy_coef": objective.entropy_coef,
    }
    return arguments, options


def _output(loss: Tensor, metrics: dict[str, Tensor], context: LossContext) -> Tensor:
    """``[1 + M, s, b]``; also tells ``context`` the metrics' names."""
    context.metric_names[:] = metrics
    b, s = context.batch.tokens.shape
    return torch.stack([loss, *metrics.values()]).view(-1, s, b)
