"""HybridModel has no output processor: a hook on its output layer puts the loss in the place of the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import run_ranks
from tests.train_fixed import train_fixed

VOCAB, SEQUENCE, BATCH, K = 30, 16, 3, 4


def hybrid_model(**config: Any) -> Any:
    """Attention, MLP, attention, MLP; 32 columns of the vocabulary, 2 of them padding."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from tests.hybrid_model import stack_spec, use_torch_norm

    model_parallel_cuda_manual_seed(5)
    settings = TransformerConfig(
        num_layers=4, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        tensor_model_parallel_size=dist.get_world_size(), is_hybrid_model=True, **config,
    )  # fmt: skip
    with use_torch_norm():
        return HybridModel(
            settings, stack_spec, vocab_size=32, max_sequence_length=SEQUENCE, hybrid_layer_pattern="*-*-",
            position_embedding_type="rope", pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )  # fmt: skip


def batch() -> Any:
    """Random rollouts over the whole sequence, some positions masked."""
    from megatron_sc.training.batch import BatchLayout, collate
    from tests.rollouts import make_rollouts

    rollouts = make_rollouts(BATCH, 1, vocab=VOCAB, head=K, seed=2)
    layout = BatchLayout(BATCH, SEQUENCE, "head", K, VOCAB)
    return collate(rollouts, [1.0, -0.5, 0.3], 0, layout)


def hook_equals_logits_on_rank(bf16: bool) -> None:
    from megatron.core import mpu
    from megatron.core.transformer.module import Float16Module

    from megatron_sc.training.batch import sampler_distribution
    from megatron_sc.training.config import ObjectiveConfig
    from megatron_sc.training.hybrid import forward_with_loss, takes_output_processor
    from megatron_sc.training.output_processor import LossContext
    from megatron_sc.vocab_parallel import VocabShard, centered_loss

    ranks = dist.get_world_size()
    mpu.initialize_model_parallel(tensor_model_parallel_size=ranks)
    group = mpu.get_tensor_model_parallel_group()
    model = hybrid_model(bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32)
    wrapped = Float16Module(model.config, model) if bf16 else model
    assert not takes_output_processor(wrapped)
    data = batch()
    inputs = (data.tokens.long(), torch.arange(SEQUENCE).expand(BATCH, -1), None)
    objective = ObjectiveConfig("score_centering", "tis", tis_cap=1.2, entropy_coef=0.01)
    context = LossContext(data, objective, "head", VOCAB, group, metric_names=[])

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(model.parameters())))

    output = forward_with_loss(wrapped, *inputs, context=context)
    assert output.shape == (1 + len(context.metric_names), SEQUENCE, BATCH)
    assert output.dtype == torch.float32
    assert "drift_l1" in context.metric_names
    hooked = gradients(output[0].sum())

    logits = wrapped(*inputs)  # [b, s, V / tp] float32: nothing of the hook is left
    assert logits.shape == (BATCH, SEQUENCE, 32 // ranks)
    rows = data.by_position()
    expected = centered_loss(
        logits.transpose(0, 1).reshape(-1, logits.shape[2]), rows.sampled_ids, rows.advantages,
        sampler_distribution(rows, "head"), rows.sampled_logprobs, objective.weight(), rows.temperature,
        rows.mask.bool(), VocabShard.of_rank(dist.get_rank(), ranks, 32 // ranks, VOCAB), group, entropy_coef=0.01,
    )  # fmt: skip
    assert torch.equal(output[0].flatten(), expected.loss)
    assert expected.loss.abs().sum() > 0
    for ours, other in zip(hooked, gradients(expected.loss.sum()), strict=True):
        torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_hook_equals_the_loss_of_the_logits(ranks: int, bf16: bool) -> None:
    run_ranks(hook_equals_logits_on_rank, ranks, bf16, megatron=True)


def refusals_on_rank() -> None:
    from megatron.core import mpu

    from megatron_sc.sampling.generate import generate
    from megatron_sc.training.config import ObjectiveConfig
    from megatron_sc.training.hybrid import forward_with_loss
    from megatron_sc.training.output_processor import LossContext

    mpu.initialize_model_parallel()
    model, data, group = hybrid_model(), batch(), mpu.get_tensor_model_parallel_group()
    fused = ObjectiveConfig("score_centering", fuse_lm_head=True)
    with pytest.raises(ValueError, match="--fuse-lm-head needs GPTModel's output processor"):
        forward_with_loss(model, context=LossContext(data, fused, "head", VOCAB, group, []))
    float32 = ObjectiveConfig("score_centering", sc_logits_dtype="fp32")
    with pytest.raises(ValueError, match="--sc-logits-dtype fp32 needs GPTModel's output processor"):
        forward_with_loss(model, context=LossContext(data, float32, "head", VOCAB, group, []))
    with pytest.raises(ValueError, match="the embedded sampler needs a GPTModel, got HybridModel"):
        generate(model, data.tokens, torch.full((BATCH,), 2), torch.zeros(BATCH, 1, 1), VOCAB)
    model.config.use_mup = True
    with pytest.raises(ValueError, match="--use-mup scales a HybridModel's logits after its output layer"):
        forward_with_loss(model, context=LossContext(data, ObjectiveConfig(), "head", VOCAB, group, []))


def test_what_needs_gpt_model_is_refused() -> None:
    run_ranks(refusals_on_rank, 1, megatron=True)


FLAGS = """
    --loss-correction score_centering --micro-batch-size 2 --train-iters 3 --hybrid-layer-pattern *-*-
    --spec tests.hybrid_model stack_spec
"""


def test_it_trains_in_megatron_loop(tmp_path: Path) -> None:
    """Weights do not depend on the tensor-parallel size on the CPU, so neither does the curve."""
    curves = []
    for ranks in (1, 2):
        flags, metrics = f"{FLAGS} --tensor-model-parallel-size {ranks}", tmp_path / f"{ranks}.jsonl"
        curves.append(run_ranks(train_fixed, ranks, flags, str(metrics), megatron=True)[0])
    for one, two in zip(*curves, strict=True):
        assert one["grad_norm"] > 1e-3
        for key in ("loss", "grad_norm", "drift_l1", "logprob"):
            assert two[key] == pytest.approx(one[key], rel=1e-5, abs=1e-6), (key, one["step"])
    assert len(curves[0]) == 3
