"""What a parameter of a Megatron model is in a Hugging Face checkpoint.

Megatron's names depend on the layer's implementation, and all of these are known:

    local layers           input_layernorm.weight, pre_mlp_layernorm.weight
    Transformer Engine     the norm inside the linear layer that follows it: linear_qkv.layer_norm_weight
    experts one by one     experts.local_experts.3.linear_fc1.weight
    grouped experts        experts.linear_fc1.weight3
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

Layout = Literal["whole", "columns", "vocabulary", "qkv", "gated"]
"""How tensor-parallel ranks split a parameter, and of which tensors it consists.

whole        every rank holds all of it
columns      split along its inputs (dimension 1)
vocabulary   split along its rows, of which the last are padding
qkv          split along its rows: for each group of heads its queries, its key, its value
gated        each rank holds rows of the gate, then as many of the projection up
"""


@dataclass(frozen=True)
class HFWeight:
    """The tensors that one Megatron parameter, put together from its shards, consists of."""

    names: tuple[str, ...]
    layout: Layout
    layer: int = 0  # from 0 over the whole model; 0 for what is outside the layers
    is_expert: bool = False  # split over the expert-tensor-parallel group
    is_copy: bool = False  # of a parameter on another stage: an output layer whose weight is the embedding


def hf_weights(model: Any, expert_rank: int, expert_size: int) -> Iterator[tuple[str, HFWeight, nn.Parameter | Tensor]]:
    """The parameters of this rank's part of a model: Megatron's name, what it is, and the parameter itself.

    Args:
        model: a ``GPTModel`` without wrappers: one stage, or one virtual stage, of the pipeline.
        expert_rank: this rank's place in the expert-parallel group.
        expert_size: the size of that group.

    Raises:
        ValueError: naming a parameter that has no place in a Qwen3 or Qwen3-MoE checkpoint.
    """
    first_expert = expert_rank * ((model.config.num_moe_experts or 0) // expert_size)
    for name, parameter in model.named_parameters():
        yield name, _hf_weight(name, model, first_expert), parameter


def _hf_weight(name: str, model: Any, first_expert: int) -> HFWeight:
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return HFWeight(_OUTSIDE["embedding.word_embeddings.weight"].names, "vocabulary", is_copy=True)
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    if match := _IN_LAYER.fullmatch(name):
        layer = model.decoder.layers[int(match["layer"])].layer_number - 1
        prefix, rest = f"model.layers.{layer}.", match["rest"]
        if expert := _EXPERT.fullmatch(rest):
            index = first_expert + int(expert["index"] or expert["grouped_index"])
            linear = expert["name"] or expert["grouped_name"]
            weight, is_expert = _MLP[f"{linear}.weight"], True
            prefix += f"mlp.experts.{index}."
        elif rest.startswith("mlp.") and rest.removeprefix("mlp.") in _MLP:
            weight, is_expert = _MLP[rest.removeprefix("mlp.")], False
            prefix += "mlp."
        elif rest in _LAYER:
            weight, is_expert = _LAYER[rest], False
        else:
            raise ValueError(_refusal(name))
        return HFWeight(tuple(prefix + part for part in weight.names), weight.layout, layer, is_expert)
    raise ValueError(_refusal(name))


def _refusal(name: str) -> str:
    return (
        f"parameter {name} has no place in a Hugging Face checkpoint of Qwen3 or Qwen3-MoE: remove the flag that "
        "creates it"
    )


_IN_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<index>\d+)\.(?P<name>linear_fc[12])\.weight"
    r"|(?P<grouped_name>linear_fc[12])\.weight(?P<grouped_index>\d+))"
)
_OUTSIDE = {
    "embedding.word_embeddings.weight": HFWeight(("model.embed_tokens.weight",), "vocabulary"),
    "decoder.final_layernorm.weight": HFWeight(("model.norm.weight",), "whole"),
    "output_layer.weight": HFWeight(("lm_head.weight",), "vocabulary"),
}
_MLP = {
    "linear_fc1.weight": HFWeight(("gate_proj.weight", "up_proj.weight"), "gated"),
    "linear_fc2.weight": HFWeight(("down_proj.weight",), "columns"),
}
_LAYER = {
    "input_layernorm.weight": HFWeight(("input_layernorm.weight",), "whole"),
    "self_attention.linear_qkv.layer_norm_weight": HFWeight(("input_layernorm.weight",), "whole"),
    "self_attention.linear_qkv.weight": HFWeight(
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"), "qkv"
    ),
    "self_attention.q_layernorm.weight": HFWeight(("self_attn.q_norm.weight",), "whole"),
    "self_attention.k_layernorm.weight": HFWeight(("self_attn.k_norm.weight",), "whole"),
    "self_attention.linear_proj.weight": HFWeight(("self_attn.o_proj.weight",), "columns"),
    "pre_mlp_layernorm.weight": HFWeight(("post_attention_layernorm.weight",), "whole"),
    "mlp.linear_fc1.layer_norm_weight": HFWeight(("post_attention_layernorm.weight",), "whole"),
    "mlp.router.weight": HFWeight(("mlp.gate.weight",), "whole"),
}
