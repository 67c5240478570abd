"""Memory of activations: what the layers keep for backward, by the formula of Korthikanti et al. with today's layers.

Korthikanti et al. 2022 (arXiv 2205.05198), Table 2, count what a layer keeps: with h the hidden size, t the
tensor-parallel size, fused attention (no s x s scores) and 2 bytes a number, ``s b h (10 + 24/t)`` for GPT-3's layer,
and ``34 s b h / t`` under sequence parallelism. Megatron's own report uses these numbers. Here each term is kept apart,
so that grouped queries, gated and routed MLPs, context parallelism and recomputation are counted as well. For GPT-3's
layer the result is Megatron's.

With n = s b / cp tokens on a rank, n' = n/t under sequence parallelism and n without, e bytes a number, query width a,
key width g, MLP width f (m = 2 for a gated MLP, else 1):

    norms              2 n' h e each: input and output of the two norms before attention and MLP
    attention          n (a + 2g) e / t  q, k, v;  + n (a + g) e / t  q and k before their norm, with --qk-layernorm
                       + n a e / t  output, + 4 n heads / t  logsumexp of fused attention
    dropout            2 n' h: two masks of a byte, with --hidden-dropout
    dense MLP          n f (m + 1) e / t: first product, activation
    routed MLP         N (h + (m + 1) f) e on N = n' topk etp token copies in experts split by etp: f is f/etp;
                       + 8 n' experts: float32 logits and probabilities; shared expert like a dense MLP

Routing is taken as balanced: a rank whose experts get twice the tokens needs twice the routed part. Temporary buffers
of kernels and of communication are not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from .stages import Layers, Stage

DROPPED_BY: dict[str, dict[str, float]] = {
    "core_attn": {},  # fused attention keeps no scores that could be dropped
    "layernorm": {"norms": 0.5},
    "mlp": {"mlp": 1.0},
    "moe": {"experts": 1.0, "expert_activation": 1.0, "shared_experts": 1.0},
    "moe_act": {"expert_activation": 1.0},
    "shared_experts": {"shared_experts": 1.0},
}
"""Values of ``--recompute-modules``: the share of each part of ``LayerActivations`` that is rebuilt in backward."""


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank at the worst moment of a step.

    Attributes:
        layers: kept by transformer layers for all micro-batches in flight.
        recomputed: rebuilt for one recomputed unit at a time, in backward.
        embedding: token ids and the embedding's dropout masks, and hidden states before the output layer.
    """

    layers: float
    recomputed: float
    embedding: float


@dataclass(frozen=True)
class LayerActivations:
    """What one layer keeps, bytes: by what ``--recompute-modules`` can drop."""

    norms: float
    attention: float
    dropout: float
    mlp: float = 0.0
    shared_experts: float = 0.0
    experts: float = 0.0
    expert_activation: float = 0.0

    @property
    def total(self) -> float:
        """Without recomputation."""
        parts = (self.norms, self.attention, self.dropout, self.mlp, self.shared_experts, self.experts)
        return sum(parts) + self.expert_activation


def stage_activations(args: argparse.Namespace, stage: Stage, micro_batches: int) -> Activations:
    """Activations of a rank of ``stage``.

    Args:
        args: validated.
        stage: from ``build_stages``.
        micro_batches: of a step, on this rank.
    """
    kept = recomputed = 0.0
    for chunk in stage.chunks:
        chunk_kept, chunk_recomputed = _chunk(args, chunk)
        kept += chunk_kept / len(stage.chunks)
        recomputed = max(recomputed, chunk_recomputed)
    in_flight = chunks_in_flight(args, stage, micro_batches)
    tokens, width = local_tokens(args), args.params_dtype.itemsize
    embedding = 0.0
    if stage.has_embedding:
        dropout = _split_tokens(args) * args.hidden_size if args.hidden_dropout else 0.0
        embedding += (8 * tokens + dropout) * min(micro_batches, args.pipeline_model_parallel_size)
    if stage.has_output:
        # The last norm's input and output; the output layer gathers the latter under sequence parallelism.
        embedding += (2 * _split_tokens(args) + (tokens if args.sequence_parallel else 0)) * args.hidden_size * width
    return Activations(layers=kept * in_flight, recomputed=recomputed, embedding=embedding)


def chunks_in_flight(args: argparse.Namespace, stage: Stage, micro_batches: int) -> int:
    """Model chunks of this rank whose forward pass waits for its backward pass, at the most.

    One forward, one backward: stage i of p has p - i micro-batches in flight. Interleaved, with v chunks a rank: it
    runs 2 (p - i - 1) + (v - 1) p chunks ahead, and one more (Narayanan et al. 2021, arXiv 2104.04473).
    """
    stages, chunks = args.pipeline_model_parallel_size, len(stage.chunks)
    if chunks == 1:
        return min(stages - stage.number, micro_batches)
    return min(2 * (stages - stage.number - 1) + (chunks - 1) * stages + 1, micro_batches * chunks)


def layer_activations(args: argparse.Namespace, moe: bool) -> LayerActivations:
    """What one layer keeps without recomputation; see the module.

    Args:
        args: validated.
        moe: whether its MLP is routed.
    """
    tokens, split, width = local_tokens(args), _split_tokens(args), args.params_dtype.itemsize
    h, t = args.hidden_size, args.tensor_model_parallel_size
    query = args.kv_channels * args.num_attention_heads
    key = args.kv_channels * (args.num_query_groups if args.group_query_attention else args.num_attention_heads)
    products = 2 if args.swiglu else 1
    attention = (query + 2 * key + (query + key if args.qk_layernorm else 0) + query) * width
    attention += 4 * args.num_attention_heads
    common = LayerActivations(
        norms=4 * split * h * width,
        attention=tokens * attention / t,
        dropout=2 * split * h if args.hidden_dropout else 0,
    )

    def plain(ffn: int) -> float:
        return tokens * ffn * (products + 1) * width / t

    if not moe:
        return LayerActivations(common.norms, common.attention, common.dropout, mlp=plain(args.ffn_hidden_size))
    expert_shards = args.expert_tensor_parallel_size
    copies = split * args.moe_router_topk * expert_shards
    ffn = args.moe_ffn_hidden_size / expert_shards
    return LayerActivations(
        common.norms,
        common.attention,
        common.dropout,
        shared_experts=plain(args.moe_shared_expert_intermediate_size or 0),
        experts=copies * (h + products * ffn) * width + 8 * split * args.num_experts,
        expert_activation=copies * ffn * width,
    )


def _chunk(args: argparse.Namespace, layers: Layers) -> tuple[float, float]:
    """Bytes that a chunk keeps a micro-batch, and bytes rebuilt at once in backward."""
    dense, moe = layer_activations(args, moe=False), layer_activations(args, moe=True) if layers.moe else None
    largest = max(dense.total if layers.dense else 0.0, moe.total if moe else 0.0)
    everything = layers.dense * dense.total + (layers.moe * moe.total if moe else 0.0)
    entry = _split_tokens(args) * args.hidden_size * args.params_dtype.itemsize
    if args.distribute_saved_activations:
        entry /= args.tensor_model_parallel_size
    if args.recompute_granularity == "full" and args.recompute_method == "uniform":
        units = -(-layers.total // args.recompute_num_layers)
        return units * entry, min(args.recompute_num_layers, layers.total) * largest
    if args.recompute_granularity == "full":  # block: the first layers of the chunk
        first = min(args.recompute_num_layers, layers.total)
        return everything * (1 - first / max(layers.total, 1)) + first * entry, largest
    if args.recompute_granularity == "selective":
        modules = args.recompute_modules or ["core_attn"]
        dense_dropped = _dropped(dense, modules)
        moe_dropped = _dropped(moe, modules) if moe else 0.0
        everything -= layers.dense * dense_dropped + layers.moe * moe_dropped
        return everything, max(dense_dropped if layers.dense else 0.0, moe_dropped)
    return everything, 0.0


def _dropped(layer: LayerActivations, modules: Sequence[str]) -> float:
    """Bytes of a layer that ``--recompute-modules`` rebuilds instead of keeping them."""
    shares: dict[str, float] = {}
    for module in modules:
        for part, share in DROPPED_BY[module].items():
            shares[part] = max(shares.get(part, 0.0), share)
    return sum(share * getattr(layer, part) for part, share in shares.items())


def local_tokens(args: argparse.Namespace) -> float:
    """Tokens of a micro-batch on a context-parallel rank: full rows, or what ``--micro-batch-tokens`` packs."""
    packed = getattr(args, "micro_batch_tokens", None)
    tokens: float = packed or args.seq_length * args.micro_batch_size
    return tokens / args.context_parallel_size


def _split_tokens(args: argparse.Namespace) -> float:
    """Those between the tensor-parallel regions: sequence parallelism divides them among its ranks."""
    return local_tokens(args) / (args.tensor_model_parallel_size if args.sequence_parallel else 1)
