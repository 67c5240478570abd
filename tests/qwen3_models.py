"""Tiny Qwen3 and Qwen3-MoE models, as Megatron's GPTModel under any layout and as a Hugging Face config.json.

For ``run_ranks(..., megatron=True)``. Weights are carried between layouts by Megatron's own checkpoints.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

VOCAB = 50  # padded to 64, or 128 in a layout with TP
HF_DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
HF_MOE = HF_DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; ``vpp`` virtual stages on each of ``pp`` ranks."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None


SINGLE = Layout()


def write_config(folder: Path, **keys) -> Path:
    """``config.json`` of the dense model, or of the MoE one with ``moe=True``, with other keys changed."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = HF_MOE if keys.pop("moe", False) else HF_DENSE
    (folder / "config.json").write_text(json.dumps(raw | keys))
    return folder


def build(
    folder, layout=SINGLE, load_from=None, save_to=None, dtype=torch.float32, transformer_engine=False, **settings
):
    """This rank's chunks of the model that ``config.json`` in ``folder`` describes.

    Args:
        folder: with config.json.
        layout: parallel sizes.
        load_from: one of Megatron's checkpoints, written under any layout; None: random weights, norms included.
        save_to: write such a checkpoint.
        dtype: of the parameters.
        transformer_engine: build its layers instead of Megatron's local ones; needs a GPU.
        settings: of the ``TransformerConfig``, to deviate from the file.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    raw = json.loads((Path(folder) / "config.json").read_text())
    config = TransformerConfig(**(_architecture(raw) | _parallelism(layout, dtype) | settings))
    multiple = 64 * layout.tp
    chunks = []
    for stage in range(layout.vpp or 1):
        vp_stage = stage if layout.vpp else None
        chunk = GPTModel(
            config,
            get_gpt_decoder_block_spec(
                config, use_transformer_engine=transformer_engine, normalization="RMSNorm", vp_stage=vp_stage
            ),
            vocab_size=-(-VOCAB // multiple) * multiple,
            max_sequence_length=64,
            position_embedding_type="rope",
            rotary_base=raw["rope_theta"] if "rope_theta" in raw else raw["rope_parameters"]["rope_theta"],
            share_embeddings_and_output_weights=raw.get("tie_word_embeddings", False),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
        )
        chunks.append(chunk)
    if load_from is None:
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    spread = 0.2 if parameter.dim() == 2 else 0.3
                    parameter.copy_(torch.randn(parameter.shape) * spread + (parameter.dim() == 1))
    else:
        states = {f"chunk{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
        for chunk, state in zip(chunks, dist_checkpointing.load(states, str(load_from)).values(), strict=True):
            chunk.load_state_dict(state)
    if save_to is not None:
        Path(save_to).mkdir()
        dist_checkpointing.save(chunks[0].sharded_state_dict(), str(save_to))
    return [Float16Module(config, chunk) for chunk in chunks] if dtype is torch.bfloat16 else chunks


def _architecture(raw):
    moe = {}
    if raw["model_type"] == "qwen3_moe":
        step = raw["decoder_sparse_step"]
        moe = {
            "num_moe_experts": raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"],
            "moe_router_topk": raw["num_experts_per_tok"],
            "moe_ffn_hidden_size": raw["moe_intermediate_size"],
            "moe_layer_freq": [
                int(layer not in raw.get("mlp_only_layers", []) and layer % step == step - 1)
                for layer in range(raw["num_hidden_layers"])
            ],
            "moe_token_dispatcher_type": "alltoall",
        }
    return moe | {
        "num_layers": raw["num_hidden_layers"],
        "hidden_size": raw["hidden_size"],
        "ffn_hidden_size": raw["intermediate_size"],
        "num_attention_heads": raw["num_attention_heads"],
        "num_query_groups": raw["num_key_value_heads"],
        "kv_channels": raw["head_dim"],
        "layernorm_epsilon": raw["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _parallelism(layout, dtype):
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
