"""What Megatron's layers really keep for backward, counted on the CPU, against the plan's formula.

Megatron's local layers are not those of a GPU: their attention keeps scores. So two models are compared that differ in
one size only, and so is the formula: what attention keeps drops out.
"""

from __future__ import annotations

import shlex
import sys
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_sc.planning.activations import layer_activations
from tests.distributed import run_ranks

TOKENS, HIDDEN = 64, 256
BASE = shlex.split(f"""
    --num-layers 2 --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {TOKENS} --micro-batch-size 1
    --max-position-embeddings {TOKENS} --vocab-size 64 --make-vocab-size-divisible-by 64 --tokenizer-type NullTokenizer
    --bf16 --disable-bias-linear --normalization RMSNorm --attention-dropout 0 --hidden-dropout 0 --lr 1e-3
""")
ROUTED = "--swiglu --num-experts 8 --moe-ffn-hidden-size 512 --moe-token-dispatcher-type alltoall"


def kept(cases: list[str]) -> list[tuple[float, float]]:
    """Bytes that two layers keep beside weights, and what the formula says of them, by case."""
    from megatron.core import mpu, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    from megatron_sc.training.arguments import add_arguments

    mpu.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    results = []
    for case in cases:
        with mock.patch.object(sys, "argv", ["kept", *BASE, *case.split()]):
            args: Any = parse_args(add_arguments)
        validate_args(args)
        config = gpt_config_from_args(args)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        model = config.get_builder_cls()(config).build_model(groups, pre_process=True, post_process=True).bfloat16()
        formula = 2 * layer_activations(args, moe=args.num_experts is not None).total
        results.append((saved_bytes(model), formula))
    return results


def saved_bytes(model: Any) -> float:
    """Bytes of the storages that autograd keeps of the layers' forward pass, each once, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage  # held, so that no other tensor gets its address
        return tensor

    hidden = torch.randn(TOKENS, 1, HIDDEN).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.decoder(hidden_states=hidden, attention_mask=None)
    return float(sum(storage.nbytes() for storage in storages.values()))


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[float, float]]:
    cases = {
        "gelu": "--ffn-hidden-size 512",
        "gelu, wider": "--ffn-hidden-size 1536",
        "gated": "--swiglu --ffn-hidden-size 512",
        "gated, wider": "--swiglu --ffn-hidden-size 1536",
        "top 2": f"{ROUTED} --moe-router-topk 2",
        "top 6": f"{ROUTED} --moe-router-topk 6",
        "top 2, wider": f"{ROUTED} --moe-router-topk 2 --moe-ffn-hidden-size 1536",
        "shared": f"{ROUTED} --moe-router-topk 2 --moe-shared-expert-intermediate-size 1024",
    }
    (results,) = run_ranks(kept, 1, list(cases.values()), megatron=True)
    return dict(zip(cases, results, strict=True))


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ("gelu", "gelu, wider"),
        ("gated", "gated, wider"),
        ("top 2", "top 6"),
        ("top 2", "top 2, wider"),
        ("top 2", "shared"),
        ("gated", "top 2"),
    ],
)
def test_a_larger_layer_keeps_as_much_more_as_the_formula_says(
    small: str, large: str, measured: dict[str, tuple[float, float]]
) -> None:
    kept_more, planned_more = (b - a for a, b in zip(measured[small], measured[large], strict=True))
    assert kept_more == pytest.approx(planned_more, rel=0.03)
