"""The fused LM head beside Megatron's output layer, on gloo ranks: layers, whole models, and what hangs on them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import run_ranks
from tests.problems import make_problem

WIDTH, VOCAB, COLUMNS = 24, 17, 24  # 24 columns: the second of two ranks holds 5 of the vocabulary and 7 of padding
EXACT = 1e-5  # relative to the largest entry, in float32
LENGTH, BATCH = 8, 2  # s, b


def assert_close(value: Tensor, expected: Tensor, relative: float = EXACT) -> None:
    error, size = (value.double() - expected.double()).abs().max(), expected.double().abs().max()
    assert error <= relative * size, f"{float(error):.3g} of {float(size):.3g}"


# One layer ------------------------------------------------------------------------------------------------------------


def make_layer(sequence_parallel: bool, weight: Tensor) -> Any:
    """Megatron's output layer over all ranks, with this rank's rows of the weight; and its config."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    layer = ColumnParallelLinear(
        WIDTH, COLUMNS, config=config, init_method=torch.nn.init.zeros_, bias=False, tp_group=group()
    )
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(ranks)[dist.get_rank()])
    return layer, config


def group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def layer_inputs(estimator: str, weight: str) -> tuple[Any, Tensor, Tensor]:
    """A problem of s * b positions, hidden states `[s, b, h]` and a weight `[24, h]`, float64; masked rows hold NaN."""
    problem = make_problem(estimator, weight, rows=LENGTH * BATCH, vocab=VOCAB, temperature=True)
    random = torch.Generator().manual_seed(1)
    matrix = torch.randn(COLUMNS, WIDTH, generator=random, dtype=torch.float64)
    hidden = problem.logits @ torch.linalg.pinv(matrix[:VOCAB].t())
    return problem, hidden.view(LENGTH, BATCH, WIDTH).float(), matrix.float()


MASK = torch.arange(LENGTH * BATCH) % 3 != 1


def layer_on_rank(estimator: str, weight: str, sequence_parallel: bool, chunk: int) -> dict[str, Any]:
    """Fused and unfused results of this rank, and how often each collective was called, forward and backward."""
    from megatron_sc import VocabShard, centered_loss
    from megatron_sc.training.fused_head import fused_head_loss

    problem, full, matrix = layer_inputs(estimator, weight)
    layer, config = make_layer(sequence_parallel, matrix)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local = full.chunk(ranks)[rank] if sequence_parallel else full
    arguments = (
        problem.sampled_ids,
        problem.advantages,
        problem.sampler,
        problem.sampled_logprobs,
        problem.weight,
        problem.temperature,
        MASK,
        VocabShard.of_rank(rank, ranks, COLUMNS // ranks, VOCAB),
        group(),
    )

    hidden = local.clone().requires_grad_()
    logits, _ = layer(hidden)
    loss = centered_loss(0.7 * logits.view(LENGTH * BATCH, -1), *arguments).loss
    loss.sum().backward()
    unfused = (loss.detach(), hidden.grad, layer.weight.grad)

    layer.weight.grad = None
    hidden = local.clone().requires_grad_()
    with count_collectives() as forward:
        out = fused_head_loss(
            layer, None, hidden, lambda z: 0.7 * z, config, *arguments, chunk_tokens=chunk, metrics=estimator != "draws"
        )
    with count_collectives() as backward:
        out.loss_sum.backward()
    fused = (out.loss, hidden.grad, layer.weight.grad)
    for got, expected in zip(fused, unfused, strict=True):
        assert_close(got, expected)
    return {"fused": fused, "sum": out.loss_sum.detach(), "forward": dict(forward), "backward": dict(backward)}


class count_collectives:  # noqa: N801
    """`with count_collectives() as counts`: calls by name, and no other collective."""

    NAMES = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "broadcast", "all_gather", "all_to_all")

    def __enter__(self) -> dict[str, int]:
        counts: dict[str, int] = {}

        def counted(name: str, function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                counts[name] = counts.get(name, 0) + 1
                return function(*args, **kwargs)

            return call

        self.patches = [mock.patch.object(dist, name, counted(name, getattr(dist, name))) for name in self.NAMES]
        for patch in self.patches:
            patch.start()
        return counts

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(("estimator", "weight"), [("head", "tis"), ("support", "none"), ("draws", "none")])
def test_layer_equals_megatrons_on_two_ranks(estimator: str, weight: str, sequence_parallel: bool) -> None:
    """And the reference in float64; 2 gathers a chunk forward; backward only what Megatron's layer communicates."""
    chunk = 6
    results = run_ranks(layer_on_rank, 2, estimator, weight, sequence_parallel, chunk, megatron=True)
    problem, hidden, matrix = layer_inputs(estimator, weight)
    rows, matrix = hidden.double().flatten(0, 1), matrix.double()
    losses, gradient = problem.references(0.7 * rows @ matrix[:VOCAB].t())
    losses, gradient = losses * MASK, gradient * MASK.unsqueeze(1) * 0.7
    gradient = torch.nn.functional.pad(gradient, (0, COLUMNS - VOCAB))
    expected_hidden = (gradient @ matrix).view(LENGTH, BATCH, WIDTH)

    for rank, result in enumerate(results):
        loss, grad_hidden, grad_weight = result["fused"]
        assert_close(loss, losses)
        assert_close(result["sum"], losses.sum())
        assert_close(grad_hidden, expected_hidden.chunk(2)[rank] if sequence_parallel else expected_hidden)
        assert_close(grad_weight, (gradient.t() @ rows).chunk(2)[rank])
        chunks = -(-LENGTH * BATCH // chunk)
        gathers = (1 if estimator == "draws" else 2 * chunks) + sequence_parallel
        assert result["forward"] == {"all_gather_into_tensor": gathers}
        assert result["backward"] == {"reduce_scatter_tensor" if sequence_parallel else "all_reduce": 1}
    assert torch.equal(results[0]["fused"][0], results[1]["fused"][0])


def uneven_on_rank() -> tuple[Tensor, Tensor, Tensor]:
    """Shards of 20 and 4 rows, and one of padding only: chunks must agree although shards do not."""
    from megatron_sc import VocabShard, centered_lm_head_loss

    problem, hidden, matrix = layer_inputs("head", "tis")
    starts = (0, 13, 17, 24)
    rank = dist.get_rank()
    shard = VocabShard(starts[rank], starts[rank + 1], VOCAB)
    rows = hidden.flatten(0, 1).requires_grad_()
    weight = torch.nn.Parameter(matrix[shard.start : shard.stop])
    results = []
    for sampler, metrics in ((problem.sampler, True), (make_problem("draws", rows=16, vocab=VOCAB).sampler, False)):
        rows.grad = weight.grad = None
        with mock.patch("megatron_sc.vocab_parallel.lm_head.CHUNK_BYTES", {"cpu": 100}):
            out = centered_lm_head_loss(
                rows, weight, problem.sampled_ids, problem.advantages, sampler, vocab=shard, group=dist.group.WORLD,
                metrics=metrics,
            )  # fmt: skip
        out.loss_sum.backward()
        results.append((out.loss, rows.grad, weight.grad))
    return results


def test_uneven_shards() -> None:
    problem, hidden, matrix = layer_inputs("head", "tis")
    results = run_ranks(uneven_on_rank, 3)
    for index, sampler in enumerate((problem.sampler, make_problem("draws", rows=16, vocab=VOCAB).sampler)):
        plain = problem.replace(
            sampler=sampler, weight=make_problem("head", "none").weight, temperature=torch.ones(LENGTH * BATCH)
        )
        rows, full = hidden.double().flatten(0, 1), matrix.double()
        losses, gradient = plain.references(rows @ full[:VOCAB].t())
        gradient = torch.nn.functional.pad(gradient, (0, COLUMNS - VOCAB))
        for result in results:
            assert_close(result[index][0], losses)
            assert_close(result[index][1], gradient @ full)
        assert_close(torch.cat([result[index][2] for result in results]), gradient.t() @ rows)


# Whole models ---------------------------------------------------------------------------------------------------------


def make_model(tp: int, tied: bool, mup: bool, overlap: str, bf16: bool = False) -> Any:
    """A one-layer GPTModel inside Megatron's data-parallel wrapper."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        **({"use_mup": True, "mup_base_hidden_size": WIDTH // 2} if mup else {}),
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=COLUMNS,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    )
    with torch.no_grad():
        for parameter in (model.embedding.word_embeddings.weight, *model.output_layer.parameters()):
            parameter.mul_(20)  # from std 0.02, so that p is far from uniform
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap != "none",
        overlap_param_gather=overlap == "params",
        use_distributed_optimizer=overlap == "params",
        grad_reduce_in_fp32=True,
        bucket_size=1,  # each parameter a bucket of its own
    )
    return DistributedDataParallel(config, ddp, Float16Module(config, model) if bf16 else model)


def make_batch(distribution: str, seed: int) -> Any:
    """One micro-batch `[b, s]`."""
    from megatron_sc.training.batch import Batch

    problem = make_problem(distribution, rows=BATCH * LENGTH, vocab=VOCAB, seed=seed)

    def rows(value: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return value.to(dtype).view(BATCH, LENGTH, *value.shape[1:])

    return Batch(
        tokens=rows(torch.arange(BATCH * LENGTH) * 5 % VOCAB, torch.int32),
        sampled_ids=rows(problem.sampled_ids, torch.int32),
        mask=rows(MASK, torch.int32),
        advantages=rows(problem.advantages),
        sampled_logprobs=rows(problem.sampled_logprobs),
        temperature=rows(torch.ones(BATCH * LENGTH)),
        staleness=torch.zeros(BATCH, LENGTH),
        ids=rows(problem.sampler.ids, torch.int32),
        logprobs=rows(problem.sampler.logprobs),
        log_tail_mass=torch.full((BATCH, LENGTH), torch.nan),
        padding=torch.zeros((BATCH, LENGTH), dtype=torch.int32),
        routes=torch.zeros((BATCH, LENGTH, 0), dtype=torch.int32),
        per_rollout=torch.full((BATCH, len(Batch.PER_ROLLOUT)), torch.nan),
    )


def forward_backward(model: Any, fuse: bool, distribution: str, seed: int, with_metrics: bool = True) -> dict[str, Any]:
    """One micro-batch through the plugin's output processor and loss function."""
    from megatron_sc.training.batch import position_ids
    from megatron_sc.training.config import ObjectiveConfig
    from megatron_sc.training.loss_func import loss_func
    from megatron_sc.training.output_processor import LossContext, centered_output_processor

    objective = ObjectiveConfig(
        loss_correction="score_centering", sampler_distribution=distribution, fuse_lm_head=fuse,
        importance_weight="none" if distribution == "draws" else "tis",
    )  # fmt: skip
    batch = make_batch(distribution, seed)
    context = LossContext(batch, objective, distribution, VOCAB, group(), [], with_metrics)
    output = model(
        batch.tokens.long(), position_ids(batch, 0, 1), None,
        output_processor=centered_output_processor, output_processor_context=context,
    )  # fmt: skip
    loss, tokens, report = loss_func(batch, context.metric_names, (), False, output)
    (2 * loss).backward()  # 2: a loss scale
    return {"loss": loss.detach(), "tokens": tokens, **{name: value[0] for name, value in report.items()}}


def steps_on_rank(
    fuse: bool, distribution: str, tp: int, tied: bool, mup: bool, overlap: str, fusion: bool, bf16: bool
):
    """Two steps of two micro-batches with an optimizer; reports, gradients of the first step, parameters at the end."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = make_model(tp, tied, mup, overlap, bf16)
    inner = model.module.module if bf16 else model.module
    if fuse and fusion:
        inner.output_layer.gradient_accumulation_fusion = True  # the fused path does not need Apex's kernel for it
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=0.05, adam_eps=0.1, weight_decay=0.0, clip_grad=0.0, bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=overlap == "params", overlap_param_gather=overlap == "params",
        ),
        [model],
    )  # fmt: skip
    reports, gradients = [], {}
    replica = parallel_state.get_data_parallel_rank()
    for step in range(2):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        with model.no_sync():
            reports.append(forward_backward(model, fuse, distribution, 4 * step + 2 * replica))
        reports.append(forward_backward(model, fuse, distribution, 4 * step + 2 * replica + 1))
        finalize_model_grads([model], torch.tensor(7, dtype=torch.int32))
        if step == 0 and overlap != "params":  # the distributed optimizer reduces each rank's share only
            gradients = {name: p.main_grad.clone() for name, p in inner.named_parameters()}
        optimizer.step()
    if overlap == "params":
        model.disable_forward_pre_hook()
    return reports, gradients, {name: p.detach().clone() for name, p in inner.named_parameters()}


def both_on_rank(*args: Any) -> None:
    """Fused and unfused: the same reports, gradients and updates."""
    bf16 = args[-1]
    tolerance = 0.02 if bf16 else EXACT
    reports, gradients, parameters = steps_on_rank(False, *args)
    fused_reports, fused_gradients, fused_parameters = steps_on_rank(True, *args)
    for report, fused in zip(reports, fused_reports, strict=True):
        assert report.keys() == fused.keys()
        assert "drift_l1" in fused or args[0] != "head"
        for name, value in report.items():
            torch.testing.assert_close(fused[name], value, rtol=0.1 if bf16 else 1e-4, atol=0.2 if bf16 else EXACT)
    assert max(report["loss"].abs() for report in reports) > 0.01
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-4, name
        assert_close(fused_gradients[name], gradient, tolerance)
    for (
        name,
        parameter,
    ) in parameters.items():  # adam_eps is large, or a gradient of rounding only would move a parameter
        assert_close(fused_parameters[name], parameter, 0.05 if bf16 else EXACT)


@pytest.mark.parametrize(
    ("ranks", "tp", "tied", "mup", "overlap", "fusion", "bf16"),
    [
        (1, 1, False, False, "none", False, False),
        (1, 1, True, False, "none", False, False),
        (1, 1, False, False, "grads", True, False),
        (1, 1, True, True, "grads", True, False),
        (1, 1, False, False, "none", True, True),
        (2, 2, False, True, "none", False, False),
        (2, 2, True, False, "grads", True, False),
        (2, 1, False, False, "grads", False, False),
        (2, 1, False, False, "params", True, False),
        (2, 1, True, False, "params", False, False),
    ],
    ids=[
        "plain", "tied", "overlap-grads", "tied-mup-overlap", "bf16", "tp2-mup", "tp2-tied-overlap", "dp2-overlap",
        "dp2-overlap-params", "dp2-tied-overlap-params",
    ],
)  # fmt: skip
@pytest.mark.parametrize("distribution", ["head", "draws"])
def test_model_trains_as_with_megatrons_layer(
    distribution: str, ranks: int, tp: int, tied: bool, mup: bool, overlap: str, fusion: bool, bf16: bool
) -> None:
    run_ranks(both_on_rank, ranks, distribution, tp, tied, mup, overlap, fusion, bf16, megatron=True)


def unlogged_on_rank() -> None:
    """Draws on a step that nobody logs: no metrics, the same names, the same gradients."""
    results = []
    for with_metrics in (True, False):
        model = make_model(1, False, False, "none")
        report = forward_backward(model, True, "draws", 0, with_metrics)
        results.append((report, {name: p.main_grad for name, p in model.module.named_parameters()}))
    (logged, gradients), (unlogged, others) = results
    assert logged.keys() == unlogged.keys()
    assert not logged["logprob"].isnan()
    assert unlogged["logprob"].isnan()
    assert torch.equal(logged["loss"], unlogged["loss"])
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name


def test_draws_compute_metrics_on_logged_steps_only() -> None:
    run_ranks(unlogged_on_rank, 1, megatron=True)
