"""One micro-batch of a framework -> ``centered_loss`` -> the framework's reduction."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..vocab_parallel import VocabShard, centered_loss
from ._config import FrameworkObjective
from ._layout import response_spans
from ._sampler import sampler_distribution
from ._tokens import LocalTokens

Reduce = Callable[[Tensor], Tensor]
"""``sum_of_sample_mean``: a value of each response token on this rank, ``[n]`` -> a scalar, masked and normalized."""


@dataclass(frozen=True)
class Ranks:
    """Where this rank stands in Megatron's tensor- and context-parallel groups."""

    tp_group: dist.ProcessGroup
    cp_rank: int
    cp_size: int

    @classmethod
    def from_megatron(cls) -> Ranks:
        """From Megatron's parallel state.

        Raises:
            ValueError: where it is not initialized, as under a backend that is not Megatron.
        """
        from megatron.core import mpu

        if not mpu.model_parallel_is_initialized():
            raise ValueError("Megatron's parallel state is not initialized: this loss needs --train-backend megatron")
        return cls(
            mpu.get_tensor_model_parallel_group(),
            mpu.get_context_parallel_rank(),
            mpu.get_context_parallel_world_size(),
        )


def framework_loss(
    args: argparse.Namespace,
    batch: Mapping[str, Any],
    logits: Tensor,
    reduce: Reduce,
    ranks: Ranks,
    max_seq_len: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The centered loss of a micro-batch, in one call over all its rows: prompt and padding rows are masked.

    Args:
        args: the framework's arguments; ``score_centering``, ``rollout_temperature``, ``entropy_coef`` and
            ``vocab_size`` are read.
        batch: lists with one entry a sample. ``unconcat_tokens`` int ``[total]``; ``total_lengths`` and
            ``response_lengths``; ``loss_masks`` ``[response]``; ``advantages`` and ``rollout_log_probs`` this rank's
            tokens of the response; and what records the sampler, see ``_sampler.py``.
        logits: ``[1, T, V / tp]`` packed or ``[b, s, V / tp]`` padded, before division by the temperature.
        reduce: the framework's reduction.
        ranks: this rank.
        max_seq_len: see ``response_spans``.

    Returns:
        The loss, and detached scalars under names that depend on the settings only.

    Raises:
        ValueError: naming the setting, or the batch's key and sample, that is missing or does not fit.
    """
    objective = FrameworkObjective.from_args(args)
    if ranks.cp_size > 1 and getattr(args, "allgather_cp", False):
        raise ValueError(
            "--allgather-cp cuts sequences for the logits otherwise than for the advantages; use zigzag context "
            "parallelism (leave it out)"
        )
    spans, used = response_spans(
        batch["total_lengths"], batch["response_lengths"], ranks.cp_rank, ranks.cp_size, max_seq_len
    )
    rows = logits.view(-1, logits.shape[-1])
    if rows.shape[0] < used:
        raise ValueError(f"logits {list(logits.shape)} have fewer rows than the {used} that total_lengths take")
    local = LocalTokens(batch, spans, rows.shape[0], logits.device)
    weight = objective.weight()
    sampled_logprobs = None
    if weight.needs_ratio or batch.get("rollout_log_probs") is not None:
        sampled_logprobs = local.scatter(local.of_rank("rollout_log_probs").float(), 0.0)
    out = centered_loss(
        rows,
        local.scatter(local.tokens(), 0),
        local.scatter(local.of_rank("advantages").float(), 0.0),
        sampler_distribution(batch, objective, local),
        sampled_logprobs,
        weight,
        float(args.rollout_temperature),
        local.scatter(local.of_response("loss_masks").bool(), False),
        VocabShard.of_rank(
            dist.get_rank(ranks.tp_group),
            dist.get_world_size(ranks.tp_group),
            rows.shape[1],
            objective.vocab_size(args),
        ),
        ranks.tp_group,
        center=objective.centers,
        sampler_kl_coef=objective.sampler_kl_coef,
        entropy_coef=float(getattr(args, "entropy_coef", 0.0)),
        # Recomputation runs this function again on the same logits, so their storage must keep them.
        reuse_logits=not logits.is_leaf and not getattr(args, "recompute_loss_function", False),
    )
    loss = reduce(out.loss[local.index])
    metrics = {name: reduce(value[local.index]).detach() for name, value in out.metrics.items()}
    return loss, {"loss": loss.detach().clone(), **metrics}
