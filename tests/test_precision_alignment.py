"""Token multiples of each recipe, and padding that changes nothing in a Megatron MoE model."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_sc.precision.alignment import (
    Parallel,
    Precision,
    accept_padding_mask,
    alignment,
    check_alignment,
    pad_tokens,
    padding_effects,
    padding_mask,
    sequence_alignment,
    stage_padding_mask,
)
from megatron_sc.training.batch import BatchLayout, collate
from tests.distributed import run_ranks
from tests.rollouts import make_rollouts
from tests.train_fixed import TINY

MIXED = """
configs:
  block: {transformer_engine_config_type: TEQuantizationParams,
          training_recipe: {fp8_quantization_recipe: blockwise}, evaluation_recipe: {}}
  fine: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {fp8_quantization_recipe: mxfp8}}
matchers:
  all: {config: fine, type: glob, pattern: "*", enabled: true}
"""


def arguments(**values: Any) -> argparse.Namespace:
    defaults: dict[str, Any] = {
        "fp8": None,
        "fp8_recipe": "delayed",
        "fp4": None,
        "fp4_recipe": "nvfp4",
        "te_precision_config_file": None,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "seq_length": 64,
        "micro_batch_size": 1,
    }
    return argparse.Namespace(**(defaults | values))


@pytest.mark.parametrize(
    ("values", "tokens", "sequence"),
    [
        ({}, 1, 1),
        ({"tensor_model_parallel_size": 4}, 1, 1),
        ({"tensor_model_parallel_size": 4, "sequence_parallel": True}, 4, 4),
        ({"context_parallel_size": 2}, 4, 4),
        ({"fp8": "e4m3"}, 16, 1),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, 16, 1),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32, 1),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 128, 1),
        ({"fp4": "e2m1"}, 128, 1),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "tensor_model_parallel_size": 2, "sequence_parallel": True}, 64, 2),
        (
            {
                "fp8": "e4m3",
                "fp8_recipe": "blockwise",
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "context_parallel_size": 2,
            },
            128 * 2 * 4,
            8,
        ),
    ],
)
def test_multiple(values, tokens, sequence):
    args = arguments(**values)
    assert (alignment(args), sequence_alignment(args)) == (tokens, sequence)


def test_row_that_a_recipe_cannot_take_names_the_flag_and_what_to_set():
    args = arguments(fp8="e4m3", fp8_recipe="mxfp8", seq_length=100, context_parallel_size=2)
    with pytest.raises(ValueError, match=r"--seq-length 100 .* multiple of 128 tokens: 32 for mxfp8.*--seq-length 128"):
        check_alignment(args)
    check_alignment(arguments(fp8="e4m3", seq_length=8, micro_batch_size=2))
    check_alignment(arguments(seq_length=7))
    with pytest.raises(ValueError, match="--seq-length 6 "):  # the product is a multiple of 4, the sequence is not
        check_alignment(arguments(seq_length=6, micro_batch_size=2, context_parallel_size=2))


def test_unknown_recipe_is_refused():
    with pytest.raises(ValueError, match="no alignment is known for recipe 'fp6'"):
        Precision(("fp6",))


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(2, 2, True)])
def test_padding_equals_a_batch_collated_at_the_longer_length(parallel):
    """Every field of a training batch, against the collation's own padding."""
    rollouts = make_rollouts(1, 2, vocab=30, head=8)
    layout = BatchLayout(micro_batch_size=2, seq_length=15, distribution="head", width=8)
    size = 32 if parallel.tensor == 1 else 256
    short = collate(rollouts, [1.0, -1.0], 3, layout)
    expected = collate(rollouts, [1.0, -1.0], 3, dataclasses.replace(layout, seq_length=size))
    names = [field.name for field in dataclasses.fields(short) if field.name != "per_rollout"]
    lengths = torch.tensor([len(rollout) for rollout in rollouts])
    padded = pad_tokens({name: getattr(short, name) for name in names}, Precision(("mxfp8",)), parallel, lengths)
    for name in names:
        torch.testing.assert_close(padded.fields[name], getattr(expected, name), rtol=0, atol=0, equal_nan=True)
    assert padded.fields["mask"].sum() == short.mask.sum()
    assert (~padded.padding_mask).sum(dim=1).tolist() == lengths.tolist()
    assert torch.equal(padded.padding_mask, expected.padding.bool())


def test_nothing_is_copied_where_nothing_is_missing():
    tokens = torch.zeros(2, 16)
    padded = pad_tokens({"tokens": tokens}, Precision(("delayed",)), Parallel())
    assert padded.fields["tokens"] is tokens
    assert not padded.padding_mask.any()


def test_fields_of_other_shapes_and_trained_padding_are_refused():
    tokens = torch.zeros(2, 16)
    with pytest.raises(ValueError, match=r"field mask is \[2, 15\]"):
        pad_tokens({"tokens": tokens, "mask": torch.zeros(2, 15)}, Precision(), Parallel())
    mask = torch.zeros(2, 16, dtype=torch.int32)
    mask[1, 12] = 1
    with pytest.raises(ValueError, match="row 1 has 12 tokens, but mask is 1"):
        pad_tokens({"tokens": tokens, "mask": mask}, Precision(), Parallel(), torch.tensor([16, 12]))


def test_later_stages_get_their_own_share_of_the_padding_mask():
    mask = padding_mask(torch.tensor([3, 6]), 8)
    parallel = Parallel(2, 1, True)
    assert stage_padding_mask(mask, True, parallel, 1) is mask
    assert stage_padding_mask(mask, False, Parallel(2), 1) is mask
    shares = [stage_padding_mask(mask, False, parallel, rank) for rank in range(2)]
    assert torch.equal(torch.cat(shares, dim=1), mask)
    assert shares[1].tolist() == [[True] * 4, [False, False, True, True]]


def test_settings_under_which_padding_matters_are_named():
    assert padding_effects(arguments(num_experts=8, moe_router_load_balancing_type=["aux_loss"])) == []
    args = arguments(
        fp8="e4m3", num_experts=8, moe_router_load_balancing_type=["sinkhorn"], moe_expert_capacity_factor=1.0
    )
    effects = padding_effects(args)
    for effect, what in zip(effects, ("sinkhorn", "--moe-expert-capacity-factor", "recipe delayed"), strict=True):
        assert what in effect


ROUTERS = {
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    "global_aux_loss": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1},
    "z_loss": {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.1},
    "expert_bias": {
        "moe_router_load_balancing_type": "none",
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp64",
    },
}


def gradients(model: Any, tokens: Tensor, lengths: Tensor, mask: Tensor, mark: bool) -> dict[str, Tensor]:
    """The loss sum, and every parameter's gradient and every routers' count of tokens, after one micro-batch."""
    model.zero_grad(set_to_none=True)
    counts = {name: value for name, value in model.named_buffers() if "tokens_per_expert" in name or "ga_steps" in name}
    for value in counts.values():
        value.zero_()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    marked = padding_mask(lengths, tokens.shape[1]) if mark else None
    losses = model(tokens, positions, None, labels=tokens.roll(-1, dims=1), padding_mask=marked)
    loss = (losses * mask).sum()
    loss.backward()
    found = {f"gradient of {name}": weight.grad.clone() for name, weight in model.named_parameters()}
    return {"loss": loss.detach().clone(), **found, **{name: value.clone() for name, value in counts.items()}}


def with_and_without_padding(
    router: dict[str, Any],
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], dict[str, Tensor]]:
    """One micro-batch of two rows: unpadded; padded in three ways; padded and not marked."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_moe_experts=4, moe_router_topk=2,
        moe_token_dispatcher_type="alltoall", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        apply_rope_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False,
        calculate_per_token_loss=True, **router,
    )  # fmt: skip
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=4),
        vocab_size=24,
        max_sequence_length=64,
        position_embedding_type="rope",
    ).double()
    accept_padding_mask(model)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, dtype=torch.float64))
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(24, (2, 11), generator=generator)
    lengths = torch.tensor([11, 11])
    mask = torch.ones(2, 11)
    mask[:, :4] = 0  # prompts: not trained, but tokens that routers see
    mask[:, -1] = 0
    plain = gradients(model, tokens, lengths, mask, mark=True)
    padded = []
    for precision, filling in (("delayed", 0), ("mxfp8", 0), ("mxfp8", 23)):
        batch = pad_tokens({"tokens": tokens, "mask": mask}, Precision((precision,)), Parallel())
        batch.fields["tokens"][:, 11:] = filling
        padded.append(gradients(model, batch.fields["tokens"], lengths, batch.fields["mask"], mark=True))
    unmarked = gradients(model, batch.fields["tokens"], lengths, batch.fields["mask"], mark=False)
    return plain, padded, unmarked


@pytest.mark.parametrize("router", ROUTERS)
def test_padding_changes_neither_loss_nor_gradients_of_megatron_moe(router):
    ((plain, padded, unmarked),) = run_ranks(with_and_without_padding, 1, ROUTERS[router], megatron=True)
    assert any("router.weight" in name and value.abs().max() > 1e-3 for name, value in plain.items())
    for other in padded:
        assert other.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(other[name], value, rtol=1e-6, atol=1e-7, msg=name)
    differs = [name for name, value in plain.items() if not torch.allclose(unmarked[name], value, rtol=1e-4, atol=1e-5)]
    assert any("router" in name for name in differs), "padding that is not marked must change the router"


def aligned(cases: list[str], folder: str) -> list[int]:
    """``alignment`` of each command line, through Megatron's own parser and validation."""
    import sys
    from unittest import mock

    from megatron.core.quantization.utils import load_quantization_recipe
    from megatron.training.arguments import parse_args, validate_args

    from megatron_sc.training.arguments import add_arguments

    path = Path(folder) / "mixed.yaml"
    path.write_text(MIXED)
    load_quantization_recipe(str(path))
    found = []
    for case in cases:
        argv = ["train", *TINY.split(), *case.format(mixed=path).split()]
        with mock.patch.object(sys, "argv", argv):
            args = parse_args(extra_args_provider=add_arguments)
            validate_args(args)
        found.append(alignment(args))
    return found


def test_flags_pass_megatrons_own_parser(tmp_path):
    common = "--micro-batch-size 2 --train-iters 1 --bf16"
    cases = {
        common: 1,
        f"{common} --fp8-format e4m3": 16,
        f"{common} --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16": 16,
        f"{common} --fp8-format e4m3 --fp8-recipe mxfp8": 32,
        f"{common} --fp8-format e4m3 --fp8-recipe blockwise": 128,
        f"{common} --te-precision-config-file {{mixed}}": 128,
        f"{common} --fp8-format e4m3 --te-precision-config-file {{mixed}}": 128,
    }
    (found,) = run_ranks(aligned, 1, list(cases), str(tmp_path), megatron=True)
    assert found == list(cases.values())
