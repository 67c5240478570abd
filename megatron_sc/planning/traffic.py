"""What the loss adds: logits in memory, bytes between tensor-parallel ranks, and heads on disk."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from ..sampling import SamplerConfig
from ..training.batch import Batch, BatchLayout
from ..training.config import Distribution, ObjectiveConfig
from ..training.flags import from_args
from ..vocab_parallel.centering import SUMMED, RowState
from ..vocab_parallel.lm_head import CHUNK_BYTES
from ..vocab_parallel.statistics import EXCHANGED
from .activations import local_tokens

FLOAT = 4
TOKEN_NUMBERS = len({field.name for field in fields(Batch)} - {"ids", "logprobs", "routes", "per_rollout"})
"""Fields of a batch with one number a token."""


@dataclass(frozen=True)
class LossCost:
    """What the loss needs on a rank of the last stage, and what a step writes to the rollout buffer.

    Attributes:
        logits: bytes of logits, and with ``--fuse-lm-head`` of one chunk and of the weight's float32 gradient.
        batch: bytes of a micro-batch's ids, log-probabilities and per-token numbers.
        wire: bytes a token that a tensor-parallel rank hands to the loss's collectives; constant in k.
        collectives: of the loss, a micro-batch.
        broadcast: bytes a token that the first tensor-parallel rank sends of the batch.
        head_bytes: bytes a generated token in the buffer before compression, with all k entries kept.
        head_step: the same for a step in which every position is generated, all ranks together.
    """

    logits: float
    batch: float
    wire: int
    collectives: int
    broadcast: int
    head_bytes: float
    head_step: float


def loss_cost(args: argparse.Namespace, padded_vocab_size: int, moe_layers: int) -> LossCost:
    """The loss of these arguments; stock Megatron's cross-entropy where ``--loss-correction`` is absent.

    Logits: [n, V / t] in the model's dtype, and the gradient is written over them. Megatron's own loss keeps a float32
    softmax beside them, and sends three numbers a token. ``--fuse-lm-head`` has a chunk of ``CHUNK_BYTES`` and a
    float32 [V / t, h] gradient instead.

    Wire: float32 numbers a token, ``EXCHANGED`` in the first gather and ``SUMMED`` in the second, which needs a
    sampler's distribution. Draws without importance weight, inside the fused head, send one number.

    Args:
        args: validated.
        padded_vocab_size: rows of the output layer over all ranks.
        moe_layers: of the whole model, whose routes are replayed with ``--moe-enable-routing-replay``.
    """
    objective, sampler = from_args(ObjectiveConfig, args), from_args(SamplerConfig, args)
    tokens = local_tokens(args)
    columns = padded_vocab_size / args.tensor_model_parallel_size
    logits = tokens * columns * args.params_dtype.itemsize
    if objective.loss_correction is None:
        return LossCost(logits + tokens * columns * FLOAT, 0, 3 * FLOAT, 3, 0, 0, 0)
    if objective.fuse_lm_head:
        logits = min(logits, CHUNK_BYTES["cuda"]) + columns * args.hidden_size * FLOAT
    width = _width(objective.sampler_distribution, sampler, args)
    routes = moe_layers * args.moe_router_topk if args.moe_enable_routing_replay else 0
    layout = BatchLayout(
        args.micro_batch_size, args.seq_length, objective.sampler_distribution, width, route_width=routes
    )
    per_token = (TOKEN_NUMBERS + layout.id_width + layout.logprob_width + layout.route_width) * FLOAT
    gathers = [EXCHANGED] if objective.sampler_distribution == "none" else [EXCHANGED, SUMMED]
    if objective.fuse_lm_head and _is_sparse(objective):
        logits, gathers = 0.0, [1]
    is_alone = args.tensor_model_parallel_size == 1
    head = buffer_bytes(layout)
    return LossCost(
        logits=logits,
        batch=tokens * (per_token + len(RowState._fields) * FLOAT),
        wire=0 if is_alone else sum(gathers) * FLOAT,
        collectives=0 if is_alone else len(gathers),
        broadcast=0 if is_alone else per_token,
        head_bytes=head,
        head_step=head * args.global_batch_size * args.seq_length,
    )


def buffer_bytes(layout: BatchLayout) -> float:
    """Bytes a generated token before compression: docs/rollout-schema.md's columns, float16 log-probabilities.

    Token, log-probability and version 4 each, the mask a bit; a head adds its size and tail mass, 4 each; a token's
    routes take 2 an expert.
    """
    fixed = 3 * 4 + 1 / 8 + 2 * layout.route_width
    if layout.distribution == "none":
        return fixed
    if layout.distribution == "draws":
        return fixed + layout.width * (4 + 4)
    return fixed + 4 + 4 + layout.width * (4 + 2)


def _is_sparse(objective: ObjectiveConfig) -> bool:
    """Whether the fused head needs no softmax; see ``vocab_parallel/sparse_head.py``."""
    return (
        objective.sampler_distribution == "draws"
        and objective.centers
        and objective.importance_weight == "none"
        and objective.sampler_kl_coef == objective.entropy_coef == 0
    )


def _width(distribution: Distribution, sampler: SamplerConfig, args: argparse.Namespace) -> int:
    """Recorded entries a position."""
    if distribution in ("head", "support"):
        return sampler.head_size
    if distribution == "draws":
        return sampler.num_draws
    return (args.true_vocab_size or args.vocab_size) if distribution == "full" else 0
