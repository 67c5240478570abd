"""A Hugging Face ``config.json`` of Qwen3 or Qwen3-MoE: its tensors, and whether a Megatron model is that architecture.

Only tensors whose names and shapes follow from the file are read and written, and a model that would compute something
else from the same tensors (another rotary base, another order of softmax and top-k) is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MODEL_TYPES = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class HFConfig:
    """The keys that say which tensors there are; ``raw`` is the whole file."""

    path: Path
    raw: Mapping[str, Any]
    is_moe: bool
    num_layers: int
    hidden_size: int
    ffn_size: int  # of a dense layer
    num_heads: int
    num_groups: int  # of keys and values
    head_dim: int
    vocab_size: int  # rows of the embedding: the vocabulary of the sampler's softmax
    is_tied: bool
    num_experts: int = 0
    expert_ffn_size: int = 0

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> HFConfig:
        """Read ``config.json`` in a folder.

        Raises:
            ValueError: naming the file and the key: missing, or set to what is not supported.
        """
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"--hf-checkpoint {folder}: cannot read config.json: {error}") from error
        if raw.get("model_type") not in MODEL_TYPES:
            raise ValueError(
                f"{path}: model_type is {raw.get('model_type')!r}; supported are {' and '.join(MODEL_TYPES)}"
            )
        _refuse_unsupported(path, raw)
        is_moe = raw["model_type"] == "qwen3_moe"

        def number(*keys: str) -> int:
            for key in keys:
                if isinstance(raw.get(key), int):
                    return int(raw[key])
            raise ValueError(f"{path}: {keys[0]} must be a whole number, got {raw.get(keys[0])!r}")

        return cls(
            path=path,
            raw=raw,
            is_moe=is_moe,
            num_layers=number("num_hidden_layers"),
            hidden_size=number("hidden_size"),
            ffn_size=number("intermediate_size"),
            num_heads=number("num_attention_heads"),
            num_groups=number("num_key_value_heads"),
            head_dim=number("head_dim"),
            vocab_size=number("vocab_size"),
            is_tied=bool(raw.get("tie_word_embeddings", False)),
            num_experts=number("num_experts", "num_local_experts") if is_moe else 0,
            expert_ffn_size=number("moe_intermediate_size") if is_moe else 0,
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer (from 0) has experts."""
        dense = self.raw.get("mlp_only_layers") or ()
        return self.is_moe and layer not in dense and (layer + 1) % self.raw.get("decoder_sparse_step", 1) == 0

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint, and its shape."""
        return dict(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, queries, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_groups * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (hidden,)
            yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
            yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
            yield f"{prefix}.self_attn.q_norm.weight", (self.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (self.head_dim,)
            yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
            yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
            if self.is_sparse(layer):
                yield f"{prefix}.mlp.gate.weight", (self.num_experts, hidden)
                for expert in range(self.num_experts):
                    yield from self._mlp(f"{prefix}.mlp.experts.{expert}", self.expert_ffn_size)
            else:
                yield from self._mlp(f"{prefix}.mlp", self.ffn_size)
        yield "model.norm.weight", (hidden,)
        if not self.is_tied:
            yield "lm_head.weight", (self.vocab_size, hidden)

    def _mlp(self, prefix: str, ffn_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}.gate_proj.weight", (ffn_size, self.hidden_size)
        yield f"{prefix}.up_proj.weight", (ffn_size, self.hidden_size)
        yield f"{prefix}.down_proj.weight", (self.hidden_size, ffn_size)


def check_architecture(config: HFConfig, model: Any) -> None:
    """Refuse a Megatron model that computes something else than ``config.json`` says.

    Args:
        config: the file.
        model: a ``GPTModel`` without wrappers; any stage of a pipeline.

    Raises:
        ValueError: naming every key, its value, and Megatron's flag and value.
    """
    from megatron.core.models.gpt import GPTModel

    if not isinstance(model, GPTModel):
        raise ValueError(f"a Hugging Face checkpoint of Qwen3 is a GPTModel, not a {type(model).__name__}")
    found = [
        f"{key} {wanted!r} in config.json, but {flag} is {value!r}"
        for key, wanted, flag, value in _requirements(config, model)
        if wanted != value
    ]
    if found:
        raise ValueError(f"{config.path} is not the architecture of the model: {'; '.join(found)}")


def _refuse_unsupported(path: Path, raw: Mapping[str, Any]) -> None:
    for key in ("attention_bias", "use_sliding_window", "quantization_config", "rope_scaling"):
        if raw.get(key):
            raise ValueError(f"{path}: {key} is {raw[key]!r}, which is not supported")
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{path}: rope_parameters.rope_type is {rope['rope_type']!r}, which is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act is {raw['hidden_act']!r}, which is not supported")


def _requirements(config: HFConfig, model: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """(key of config.json, its value, Megatron's flag, its value)."""
    megatron, raw = model.config, config.raw
    rope = raw.get("rope_parameters") or {}
    yield "num_hidden_layers", config.num_layers, "--num-layers", megatron.num_layers
    yield "hidden_size", config.hidden_size, "--hidden-size", megatron.hidden_size
    yield "num_attention_heads", config.num_heads, "--num-attention-heads", megatron.num_attention_heads
    groups = megatron.num_query_groups or megatron.num_attention_heads
    yield "num_key_value_heads", config.num_groups, "--num-query-groups", groups
    yield "head_dim", config.head_dim, "--kv-channels", megatron.kv_channels
    yield "tie_word_embeddings", config.is_tied, "tied embeddings", bool(model.share_embeddings_and_output_weights)
    yield "rms_norm_eps", raw.get("rms_norm_eps"), "--norm-epsilon", megatron.layernorm_epsilon
    rope_theta = raw.get("rope_theta", rope.get("rope_theta"))
    yield "rope_theta", rope_theta, "--rotary-base", getattr(model, "rotary_base", None)
    yield "rotary embeddings", "rope", "--position-embedding-type", model.position_embedding_type
    yield "rotary part", 1.0, "--rotary-percent", getattr(model, "rotary_percent", 1.0)
    yield "rope_scaling", False, "--use-rope-scaling", bool(getattr(model, "rotary_scaling", False))
    is_swiglu = megatron.gated_linear_unit and megatron.activation_func is torch.nn.functional.silu
    yield "hidden_act", True, "--swiglu", bool(is_swiglu)
    yield "norms", "RMSNorm", "--normalization", megatron.normalization
    yield "q_norm and k_norm", True, "--qk-layernorm", bool(megatron.qk_layernorm)
    yield (
        "attention_bias",
        False,
        "bias (--disable-bias-linear, --add-qkv-bias)",
        bool(megatron.add_bias_linear or megatron.add_qkv_bias),
    )
    for flag, plain in _PLAIN_FLAGS.items():
        yield "plain transformer:", plain, "--" + flag.replace("_", "-"), getattr(megatron, flag, plain)
    if config.is_moe:
        yield "num_experts", config.num_experts, "--num-experts", megatron.num_moe_experts
        yield "num_experts_per_tok", raw.get("num_experts_per_tok"), "--moe-router-topk", megatron.moe_router_topk
        normalizes = not megatron.moe_router_pre_softmax
        yield (
            "norm_topk_prob",
            raw.get("norm_topk_prob"),
            "softmax over the top k (not --moe-router-pre-softmax)",
            (normalizes),
        )
        yield "router", "softmax", "--moe-router-score-function", megatron.moe_router_score_function


_PLAIN_FLAGS: dict[str, Any] = {
    "activation_func_clamp_value": None,
    "attention_output_gate": False,
    "glu_linear_offset": 0.0,
    "layernorm_zero_centered_gamma": False,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "moe_mlp_glu_interleave_size": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_intermediate_size": None,
    "no_rope_freq": None,
    "qk_l2_norm": False,
    "rotary_interleaved": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "use_mup": False,
    "window_size": None,
}
"""Settings of Megatron that change what the same tensors compute, and their values in Qwen3."""
