"""The matrices of Qwen3 and Qwen3-MoE under the three names they go by: checkpoint, Megatron, engine.

    checkpoint   model.layers.3.self_attn.q_proj          model.layers.3.mlp.experts.7.up_proj
    Megatron     decoder.layers.3.self_attention.linear_qkv   decoder.layers.3.mlp.experts.linear_fc1
    engine       model.layers.3.self_attn.qkv_proj        model.layers.3.mlp.experts

For the audit only: weights are converted elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["attention", "mlp", "expert", "router", "head"]

MODELS = ("qwen3", "qwen3_moe")

_ATTENTION = {
    "q_proj": ("linear_qkv", "qkv_proj"),
    "k_proj": ("linear_qkv", "qkv_proj"),
    "v_proj": ("linear_qkv", "qkv_proj"),
    "o_proj": ("linear_proj", "o_proj"),
}
_MLP = {
    "gate_proj": ("linear_fc1", "gate_up_proj"),
    "up_proj": ("linear_fc1", "gate_up_proj"),
    "down_proj": ("linear_fc2", "down_proj"),
}


@dataclass(frozen=True)
class Projection:
    """One matrix of a checkpoint.

    Attributes:
        checkpoint: its name in the Hugging Face checkpoint, without ``.weight``.
        megatron: the module of Megatron's GPTModel that holds it. Layers count from 0 over all pipeline stages.
        engine: the module of vLLM and SGLang that holds it.
        kind: what it does.
        layer: its layer; -1 for the output layer.
    """

    checkpoint: str
    megatron: str
    engine: str
    kind: Kind
    layer: int


def projections(config: Mapping[str, Any], grouped_experts: bool = True) -> list[Projection]:
    """All matrices that a system may quantize, layer by layer; the output layer last.

    Args:
        config: the checkpoint's ``config.json``.
        grouped_experts: whether Megatron holds a layer's experts in one module (``--moe-grouped-gemm``) or one each.

    Raises:
        ValueError: for a model whose names are not known, or a missing key.
    """
    model = config.get("model_type")
    if model not in MODELS:
        raise ValueError(f"config.json: model_type {model!r} is not known; known: {', '.join(MODELS)}")
    layers = _number(config, "num_hidden_layers")
    # transformers 5 saves num_experts under another name
    experts = _number(config, "num_experts", "num_local_experts") if model == "qwen3_moe" else 0
    found: list[Projection] = []
    for layer in range(layers):
        found += _attention(layer)
        found += _experts(layer, experts, grouped_experts) if _is_sparse(config, layer, experts) else _mlp(layer)
    return [*found, Projection("lm_head", "output_layer", "lm_head", "head", -1)]


def _number(config: Mapping[str, Any], *keys: str) -> int:
    """The first of ``keys`` that the config has."""
    for key in keys:
        if key in config:
            return int(config[key])
    raise ValueError(f"config.json: key {keys[0]!r} is missing")


def _is_sparse(config: Mapping[str, Any], layer: int, experts: int) -> bool:
    """As ``Qwen3MoeDecoderLayer`` decides."""
    if layer in (config.get("mlp_only_layers") or ()) or experts == 0:
        return False
    return (layer + 1) % int(config.get("decoder_sparse_step", 1)) == 0


def _attention(layer: int) -> Iterator[Projection]:
    ours, theirs = f"model.layers.{layer}.self_attn", f"decoder.layers.{layer}.self_attention"
    for name, (megatron, engine) in _ATTENTION.items():
        yield Projection(f"{ours}.{name}", f"{theirs}.{megatron}", f"{ours}.{engine}", "attention", layer)


def _mlp(layer: int) -> Iterator[Projection]:
    ours, theirs = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    for name, (megatron, engine) in _MLP.items():
        yield Projection(f"{ours}.{name}", f"{theirs}.{megatron}", f"{ours}.{engine}", "mlp", layer)


def _experts(layer: int, experts: int, grouped: bool) -> Iterator[Projection]:
    ours, theirs = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
    yield Projection(f"{ours}.gate", f"{theirs}.router", f"{ours}.gate", "router", layer)
    for expert in range(experts):
        place = f"{theirs}.experts" if grouped else f"{theirs}.experts.local_experts.{expert}"
        for name, (megatron, _) in _MLP.items():
            yield Projection(
                f"{ours}.experts.{expert}.{name}", f"{place}.{megatron}", f"{ours}.experts", "expert", layer
            )
