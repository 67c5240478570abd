"""Tiny Megatron models for ``run_ranks(megatron=True)``; their weights depend on names, not on the parallel layout."""

import hashlib

import numpy as np
import torch

HIDDEN = 32
VOCAB = 21  # true vocabulary; padded to a multiple of PADDING times the tensor-parallel size
PADDING = 8


def build_model(
    tp=1, ep=1, moe=False, gated=True, tied=True, bf16=False, pp=1, dropout=0.0, wrapped=False, lazy_gather=False
):
    """A two-layer GPTModel on this rank's place, after initializing Megatron's parallel state.

    Args:
        tp: tensor-parallel size.
        ep: expert-parallel size.
        moe: four experts, all-to-all dispatch, in every layer.
        gated: SwiGLU; fc1 is then two matrices in one.
        tied: embedding and output layer share their weight.
        bf16: in bfloat16, inside Float16Module.
        pp: pipeline-parallel size.
        dropout: of hidden states and attention.
        wrapped: inside DistributedDataParallel.
        lazy_gather: inside it as with --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"} if moe else {}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        ffn_hidden_size=48,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        add_bias_linear=not moe,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        bf16=bf16,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **experts,
    )
    multiple = PADDING * tp
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=4 if moe else None),
        vocab_size=-(-VOCAB // multiple) * multiple,
        max_sequence_length=32,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=tied,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    load_named_weights(model)
    if bf16:
        model = Float16Module(config, model)
    if wrapped or lazy_gather:
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=lazy_gather, overlap_grad_reduce=lazy_gather, overlap_param_gather=lazy_gather
        )
        model = DistributedDataParallel(config, ddp_config, model)
    return model


def load_named_weights(model):
    """Give every parameter values that depend on its global name; shards get their slice, written out here by hand."""
    from megatron.core import parallel_state as ps

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tp, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
            if ".experts.local_experts." in name:
                before, _, after = name.partition(".local_experts.")
                local, _, layer = after.partition(".")
                count = model.config.num_moe_experts // ps.get_expert_model_parallel_world_size()
                index = int(local) + ps.get_expert_model_parallel_rank() * count
                name = f"{before}.local_experts.{index}.{layer}"
            split = -1
            if any(part in name for part in ("linear_qkv.", "linear_fc1.", "word_embeddings.", "output_layer.")):
                split = 0
            elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                split = 1
            shape = list(parameter.shape)
            if split >= 0:
                shape[split] *= tp
            full = named_values(name, shape)
            if split >= 0 and "linear_fc1." in name and model.config.gated_linear_unit:
                gate, up = full.chunk(2, dim=0)
                full = torch.cat([gate.chunk(tp, 0)[rank], up.chunk(tp, 0)[rank]])
            elif split >= 0:
                full = full.chunk(tp, split)[rank]
            parameter.copy_(full)


def named_values(name, shape):
    """Values of a full parameter; rows beyond the true vocabulary are large, so that using them shows."""
    digest = hashlib.sha256(name.encode()).digest()
    values = np.random.default_rng(list(digest[:8])).standard_normal(shape[:1] + shape[1:])
    if len(shape) == 1:
        return torch.from_numpy(values).float() * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    tensor = torch.from_numpy(values).float() * 0.25
    if "word_embeddings" in name or "output_layer" in name:
        tensor[VOCAB:] = 5.0
    return tensor


def groups():
    """This rank's process groups."""
    from megatron_sc.sampling import ParallelGroups

    return ParallelGroups.from_megatron()
