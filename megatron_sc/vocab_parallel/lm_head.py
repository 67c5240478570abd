"""The fused LM head: hidden states -> logits -> loss -> gradients, a chunk of tokens at a time.

    for each chunk    logits = s hidden W^T -> loss and metrics (two exchanges) -> gradient, written over the logits
                      -> gradient of the hidden states, and the weight's gradient accumulated in float32
    backward          multiplies by one scalar, and only then touches the weight's gradient

The gradient of the loss sum with respect to the logits is known as soon as the loss is, so the logits of a chunk never
outlive it. Memory, for n tokens on V_local columns of width h:

    forward           one chunk of logits (``CHUNK_BYTES``), used for their gradient too
    until backward    the hidden states' gradient [n, h] in their dtype, the weight's [V_local, h] in float32

The second does not grow with n: 311 MB for Qwen3-30B-A3B (V = 151936, h = 2048) on 4 tensor-parallel ranks, where the
logits of 32K tokens are 2.5 GB. It lives from a micro-batch's forward to its backward, and on the last pipeline stage
the one follows the other. Recomputing the logits in backward instead would cost a fourth product with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..objective.distributions import SamplerDistribution
from ..objective.weights import ImportanceWeight
from . import backend
from .float32_product import product_into
from .hidden_states import HiddenReduction, gather_hidden
from .loss import make_problem
from .op import evaluate
from .problem import Problem, compute_dtype
from .shard import VocabShard
from .sparse_head import SparseHeadLoss, needs_no_softmax
from .weight_gradient import add_product_, hand_over

CHUNK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 29}
"""Size of a chunk's logits. A chunk reads and writes the weight's gradient once, which costs as much as its products
below about 1000 tokens on a GPU: 512 MiB hold 1766 tokens in bfloat16 at V = 151936, 7064 on 4 ranks."""


@dataclass(frozen=True, eq=False)
class CenteredLmHeadOutput:
    """What ``centered_lm_head_loss`` returns.

    Attributes:
        loss_sum: ``[]`` float32 (float64 for float64 hidden states), the sum over trained rows: the only output with a
            gradient.
        loss: ``[n]``, detached, 0 in masked rows, the same bits on every tensor-parallel rank.
        metrics: as of ``centered_loss``; empty with ``metrics=False``.
        metric_names: the names that ``metrics`` has, or would have.
    """

    loss_sum: Tensor
    loss: Tensor
    metrics: dict[str, Tensor]
    metric_names: tuple[str, ...]


def centered_lm_head_loss(
    hidden: Tensor,
    weight: Tensor,
    sampled_ids: Tensor,
    advantages: Tensor,
    sampler: SamplerDistribution | None,
    sampled_logprobs: Tensor | None = None,
    importance_weight: ImportanceWeight | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    vocab: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    center: bool = True,
    sampler_kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    entropy_metric: bool = True,
    logits_scale: float = 1.0,
    sequence_parallel: bool = False,
    float32_logits: bool = False,
    metrics: bool = True,
    chunk_tokens: int | None = None,
    chunk_rows: int | None = None,
) -> CenteredLmHeadOutput:
    """``centered_loss`` of the logits s hidden W^T, which are never all in memory.

    With ``Draws`` and ``Uniform`` no logits are needed at all, see ``sparse_head``; with ``metrics=True`` they are then
    computed for the metrics only, chunk by chunk.

    Communication over ``group``: 2 gathers a chunk (1 without a sampler; 1 in all for ``Draws`` and ``Uniform`` without
    metrics), and what Megatron's layer does: backward reduces the hidden states' gradient, and under sequence
    parallelism forward gathers them.

    The weight's gradient goes to ``weight.main_grad`` where Megatron's data-parallel wrapper keeps one, with or without
    ``--gradient-accumulation-fusion``, and is returned in the weight's dtype otherwise. One backward pass is supported.

    Args:
        hidden: ``[n, h]`` float64 | float32 | bfloat16; under sequence parallelism this rank's ``[n / ranks, h]``.
        weight: ``[V_local, h]``, of the same dtype: this rank's rows of the output weight, padding included.
        sampled_ids: int ``[n]``, as all that follow for all tokens. See ``centered_loss``.
        advantages: float ``[n]``, A.
        sampler: the sampler's distribution, or None for no centering.
        sampled_logprobs: float ``[n]``, log q_y; needed by every importance weight but ``Uniform``.
        importance_weight: f; default ``Uniform()``.
        temperature: T > 0, a number or float ``[n]``.
        mask: bool ``[n]``; False: the row does not count, whatever it and its hidden state hold.
        vocab: this rank's columns and the true vocabulary size; None: ``weight`` is the whole true vocabulary.
        group: tensor-parallel process group; needed when the shard is partial.
        center: False: use ``sampler`` for the metrics only and subtract nothing.
        sampler_kl_coef: adds this times KL(q || p).
        entropy_coef: subtracts this times the entropy of p.
        entropy_metric: False leaves ``entropy`` out of the metrics.
        logits_scale: s, which multiplies the logits (MuP).
        sequence_parallel: whether ``hidden`` is this rank's share of the tokens.
        float32_logits: keep logits in float32 instead of rounding them to the dtype of ``hidden``; a chunk then has
            half as many tokens. Their gradient is rounded once, for the two products that follow.
        metrics: False: return none. That saves time with ``Draws`` and ``Uniform`` only.
        chunk_tokens: tokens a chunk, the same on every rank; default: see ``CHUNK_BYTES``.
        chunk_rows: see ``centered_loss``.

    Returns:
        The loss sum, losses and metrics, see ``CenteredLmHeadOutput``.

    Raises:
        ValueError: as ``centered_loss``; also for float16, whose gradients would underflow because the loss scale is
            not known when they are computed.
    """
    n = _tokens(hidden, weight, group, sequence_parallel)
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    problem = make_problem(
        n, weight.shape[0], compute_dtype(hidden), sampled_ids, advantages, sampler, sampled_logprobs,
        importance_weight, temperature, mask, vocab, group, center=center, sampler_kl_coef=sampler_kl_coef,
        entropy_coef=entropy_coef, entropy_metric=entropy_metric, reuse_logits=True, chunk_rows=chunk_rows,
    )  # fmt: skip
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    call = _Call(
        problem,
        logits_scale,
        sequence_parallel,
        chunk_tokens or _default_chunk(hidden, problem, float32_logits),
        with_gradient,
        float32_logits,
        with_metrics=metrics,
    )
    with torch.autocast(hidden.device.type, enabled=False):
        if needs_no_softmax(problem):
            loss_sum, loss = SparseHeadLoss.apply(
                hidden, weight, problem, logits_scale, sequence_parallel, with_gradient
            )
            rows = None
            if metrics:
                with torch.no_grad():
                    rows = FusedHeadLoss.apply(hidden, weight, replace(call, with_gradient=False))[2]
        else:
            loss_sum, loss, rows = FusedHeadLoss.apply(hidden, weight, call)
    named = dict(zip(problem.metric_names, rows, strict=True)) if metrics and rows is not None else {}
    return CenteredLmHeadOutput(loss_sum, loss, named, problem.metric_names)


@dataclass(frozen=True, eq=False)
class _Call:
    """What ``FusedHeadLoss`` needs beside the tensors with a gradient."""

    problem: Problem
    logits_scale: float
    sequence_parallel: bool
    chunk_tokens: int
    with_gradient: bool
    float32_logits: bool
    with_metrics: bool

    def chunks(self, n: int) -> Iterator[tuple[int, int]]:
        """Token ranges [start, stop), the same on every rank."""
        for start in range(0, n, self.chunk_tokens):
            yield start, min(start + self.chunk_tokens, n)


class FusedHeadLoss(torch.autograd.Function):
    """(hidden, weight, call) -> loss sum ``[]`` and, without gradient, losses ``[n]`` and metrics ``[M, n]``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
        """All chunks, with their gradients."""
        problem, scale, matrix = call.problem, call.logits_scale, weight.detach()
        tokens = gather_hidden(hidden.detach(), problem.group, call.sequence_parallel)
        n, dtype = len(tokens), compute_dtype(hidden)
        loss = torch.zeros(n, dtype=dtype, device=tokens.device)
        metrics = loss.new_zeros((len(problem.metric_names) if call.with_metrics else 0, n))
        grad_hidden = grad_weight = None
        if call.with_gradient and ctx.needs_input_grad[0]:
            grad_hidden = torch.empty_like(tokens)
        if call.with_gradient and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(matrix, dtype=dtype)
        logits_dtype = dtype if call.float32_logits else tokens.dtype
        buffer = tokens.new_empty((min(call.chunk_tokens, n), matrix.shape[0]), dtype=logits_dtype)
        for start, stop in call.chunks(n):
            part, rows = problem.of_rows(start, stop), tokens[start:stop]
            if part.mask is not None:  # a masked row may hold anything, and 0 * NaN is NaN
                rows = rows.masked_fill(~part.mask.unsqueeze(1), 0.0)
            logits = buffer[: stop - start]
            if call.float32_logits:
                product_into(logits, rows, matrix, scale)
            else:
                torch.addmm(logits, rows, matrix.t(), beta=0, alpha=scale, out=logits)
            chunk_loss, chunk_metrics, state = evaluate(logits, part)
            loss[start:stop] = chunk_loss
            if call.with_metrics:
                metrics[:, start:stop] = chunk_metrics
            if not call.with_gradient:
                continue
            gradient = backend.gradient(logits, part, state, torch.ones_like(chunk_loss)).to(tokens.dtype)
            if grad_hidden is not None:
                out = grad_hidden[start:stop]
                torch.addmm(out, gradient, matrix, beta=0, alpha=scale, out=out)
            if grad_weight is not None:
                add_product_(grad_weight, gradient, rows, scale)
        ctx.call, ctx.spent = call, False
        ctx.weight = weight  # not saved_tensors, which saved-tensor hooks may replace: main_grad is on this object
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(loss, metrics)
        return loss.sum(), loss, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """One scalar times what forward found; reduces the hidden states' gradient meanwhile, as Megatron's layer."""
        if ctx.spent:
            raise RuntimeError("the fused LM head supports one backward pass: it hands its gradients over in place")
        ctx.spent = True
        grad_hidden, grad_weight = ctx.saved_tensors
        reduction = None
        if grad_hidden is not None:
            reduction = HiddenReduction(grad_hidden, ctx.call.problem.group, ctx.call.sequence_parallel)
        returned = None if grad_weight is None else hand_over(ctx.weight, grad_weight, grad_sum)
        return (None if reduction is None else reduction.wait().mul_(grad_sum)), returned, None


def _tokens(hidden: Tensor, weight: Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool) -> int:
    """n, after checking shapes and dtypes."""
    if hidden.dtype == torch.float16:
        raise ValueError(
            "the fused LM head does not support float16 (--fp16): its gradients are computed before the loss scale is "
            "known and would underflow; use --bf16, or remove --fuse-lm-head"
        )
    if hidden.dim() != 2 or hidden.dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"hidden must be [n, h] float64, float32 or bfloat16, got {list(hidden.shape)} {hidden.dtype}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight must be [V_local, {hidden.shape[1]}] {hidden.dtype}, got {list(weight.shape)} {weight.dtype}"
        )
    return hidden.shape[0] * (dist.get_world_size(group) if sequence_parallel and group is not None else 1)


def _default_chunk(hidden: Tensor, problem: Problem, float32_logits: bool) -> int:
    """Tokens a chunk. From the average shard, so that ranks with uneven shards agree."""
    ranks = 1 if problem.group is None else dist.get_world_size(problem.group)
    row_bytes = -(-problem.shard.size // ranks) * (compute_dtype(hidden) if float32_logits else hidden.dtype).itemsize
    return max(CHUNK_BYTES.get(hidden.device.type, 1 << 28) // row_bytes, 1)
