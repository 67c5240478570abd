"""The public loss: ``centered_loss``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..objective.distributions import Draws, FullVocabulary, SamplerDistribution
from ..objective.weights import ImportanceWeight, Uniform
from .centering import Row, centering_for
from .check import check_rows
from .op import CenteredLoss
from .problem import Problem, compute_dtype
from .shard import VocabShard


@dataclass(frozen=True, eq=False)
class CenteredLossOutput:
    """What ``centered_loss`` returns.

    Attributes:
        loss: ``[n]`` float32 (float64 for float64 logits), the same bits on every tensor-parallel rank; 0 in masked
            rows. ``loss.sum().backward()`` puts gradients on the logits.
        metrics: name -> detached ``[n]`` of the same dtype, 0 in masked rows. The names depend on the configuration
            only. ``logprob`` log p_y, ``log_ratio`` log p_y/q_y and its absolute value ``log_ratio_abs``,
            ``ratio_kl`` the k3 estimate of KL(q || p), ``importance_weight`` w_y, ``entropy`` of p; with a recorded
            distribution ``sampled_in_recorded``, ``sampler_kl`` KL(q || p), ``drift_l1`` |q - p|_1,
            ``coefficient_l1`` sum |c_v|; for the head also the masses of head and tail under both,
            ``drift_l1_tail`` the part of ``drift_l1`` outside it, and ``tail_ratio_above_4``.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def centered_loss(
    logits: Tensor,
    sampled_ids: Tensor,
    advantages: Tensor,
    sampler: SamplerDistribution | None,
    sampled_logprobs: Tensor | None = None,
    weight: ImportanceWeight | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    vocab: VocabShard | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    center: bool = True,
    sampler_kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    entropy_metric: bool = True,
    reuse_logits: bool = False,
    chunk_rows: int | None = None,
) -> CenteredLossOutput:
    """The score-centered policy-gradient loss of each position, over vocabulary shards.

        l = -A ( sg[w_y] log p_y - sum_v sg[c_v] log p_v ),  p = softmax(z / T)     paper Eq. (6), weighted as in (14)

    Communication: 2 gathers forward (1 without a sampler) of 24 bytes contributed per rank and token each, whatever k
    is; none backward. Kept for backward: ``logits``, the caller's tensors, nine float32 a token.

    Args:
        logits: ``[n, V_local]`` float64 | float32 | bfloat16 | float16, this rank's columns, padding included.
        sampled_ids: int ``[n]``, global id of the sampled token y.
        advantages: float ``[n]``, A.
        sampler: ``TopKHead | Support | Draws | FullVocabulary``, or None for no centering.
        sampled_logprobs: float ``[n]``, log q_y after temperature; needed by every weight but ``Uniform``.
        weight: f; default ``Uniform()``.
        temperature: T > 0, a number or float ``[n]``.
        mask: bool ``[n]``; False: the loss, metrics and gradient of the row are 0 whatever it holds, NaN included. An
            advantage of 0 is an ordinary row.
        vocab: this rank's columns and the true vocabulary size; None: ``logits`` is the whole true vocabulary.
        group: tensor-parallel process group; needed when the shard is partial.
        center: False: use ``sampler`` for the metrics only and subtract nothing.
        sampler_kl_coef: adds this times KL(q || p); its gradient is (p - q)/T. Without a recorded distribution KL is
            estimated from the sampled token. Not multiplied by A or w.
        entropy_coef: subtracts this times the entropy of p.
        entropy_metric: False leaves ``entropy`` out of the metrics, which saves a pass over the logits.
        reuse_logits: write the gradient over ``logits``' storage; they must not be used after. Refused on a leaf.
        chunk_rows: rows a chunk of the float32 workspace; default: about 4 MiB on the CPU, 256 MiB on a GPU.

    Returns:
        Loss and metrics, see ``CenteredLossOutput``.

    Raises:
        TypeError: for a weight that is none, or a list where a tensor belongs.
        ValueError: for shapes, dtypes or values that cannot be trained on; it names the argument and, on the CPU, the
            row. On a GPU bad values (ids outside the vocabulary, a sampled token outside its support, NaN or positive
            log-probabilities, a mass above 1) fail an asynchronous device assertion instead, and ids that a head
            repeats without a mass above 1 are not found: check them where the rollouts are read.
    """
    n, columns = _shape(logits)
    if reuse_logits and any(t is not None and t.is_leaf and t.requires_grad for t in (logits, logits._base)):
        raise ValueError(
            "reuse_logits would overwrite a leaf tensor; pass the output of the model, or reuse_logits=False"
        )
    problem = make_problem(
        n, columns, compute_dtype(logits), sampled_ids, advantages, sampler, sampled_logprobs, weight, temperature,
        mask, vocab, group, center=center, sampler_kl_coef=sampler_kl_coef, entropy_coef=entropy_coef,
        entropy_metric=entropy_metric, reuse_logits=reuse_logits, chunk_rows=chunk_rows,
    )  # fmt: skip
    with torch.autocast(logits.device.type, enabled=False):  # autocast would round products to bfloat16
        loss, metrics = CenteredLoss.apply(logits, problem)
    return CenteredLossOutput(loss, dict(zip(problem.metric_names, metrics, strict=True)))


def make_problem(
    n: int,
    columns: int,
    dtype: torch.dtype,
    sampled_ids: Tensor,
    advantages: Tensor,
    sampler: SamplerDistribution | None,
    sampled_logprobs: Tensor | None,
    weight: ImportanceWeight | None,
    temperature: float | Tensor,
    mask: Tensor | None,
    vocab: VocabShard | None,
    group: dist.ProcessGroup | None,
    *,
    center: bool,
    sampler_kl_coef: float,
    entropy_coef: float,
    entropy_metric: bool,
    reuse_logits: bool,
    chunk_rows: int | None,
) -> Problem:
    """The checked arguments of ``centered_loss`` for logits ``[n, columns]`` and a compute dtype.

    Raises:
        ValueError, TypeError: as ``centered_loss``.
    """
    weight = Uniform() if weight is None else weight
    if isinstance(weight, type) or not hasattr(weight, "weighted_mass"):
        raise TypeError(f"weight must be an object such as TruncatedImportanceSampling(), got {weight!r}")
    centering = centering_for(sampler, weight, center)
    if vocab is None:
        if group is not None and dist.get_world_size(group) > 1:
            raise ValueError("with a group of several ranks, vocab must say which columns of the vocabulary these are")
        vocab = VocabShard(0, columns, columns)
    if vocab.columns != columns:
        raise ValueError(f"logits have {columns} columns but vocab names {vocab.columns} ({vocab})")
    if not vocab.is_whole and group is None:
        raise ValueError(f"{vocab} is a part of the vocabulary, so the tensor-parallel group must be given")
    if weight.needs_ratio and sampled_logprobs is None:
        raise ValueError(
            f"importance weight {weight.name!r} needs sampled_logprobs, the sampler's log-probability of y"
        )
    if isinstance(sampler, Draws) and weight.needs_ratio and sampler.logprobs is None:
        raise ValueError(f"importance weight {weight.name!r} needs the log-probabilities of the draws")
    if isinstance(sampler, FullVocabulary) and sampler.logprobs.shape[1] != vocab.size:
        raise ValueError(f"FullVocabulary has {sampler.logprobs.shape[1]} columns but the vocabulary has {vocab.size}")
    for name, coefficient in (("sampler_kl_coef", sampler_kl_coef), ("entropy_coef", entropy_coef)):
        if not 0 <= coefficient < math.inf:
            raise ValueError(f"{name} must be >= 0 and finite, got {coefficient}")
    if sampler_kl_coef and sampler is None and sampled_logprobs is None:
        raise ValueError("sampler_kl_coef needs sampled_logprobs where no distribution of the sampler is given")
    if sampler_kl_coef and isinstance(sampler, Draws) and sampler.logprobs is None:
        raise ValueError("sampler_kl_coef needs the log-probabilities of the draws")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    if isinstance(temperature, Tensor):
        _require_rows("temperature", temperature, n)
    elif not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive, got {temperature}: a greedy sampler cannot be centered")
    for name, value in (("sampled_ids", sampled_ids), ("advantages", advantages), ("mask", mask)):
        if value is not None:
            _require_rows(name, value, n)
    if sampled_logprobs is not None:
        _require_rows("sampled_logprobs", sampled_logprobs, n)
    if sampler is not None and sampler.rows != n:
        raise ValueError(f"{type(sampler).__name__} has {sampler.rows} rows but logits have {n}")
    if sampled_ids.is_floating_point():
        raise ValueError(f"sampled_ids must be integers, got {sampled_ids.dtype}")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool (True: the row trains), got {mask.dtype}")
    check_rows(sampled_ids, advantages, sampler, sampled_logprobs, temperature, mask, vocab.size)

    return Problem(
        sampled_ids=_where_trained(sampled_ids.long(), mask, 0),
        row=Row(
            _where_trained(advantages.to(dtype), mask, 0.0),
            None if sampled_logprobs is None else _where_trained(sampled_logprobs.to(dtype), mask, 0.0),
        ),
        temperature=_temperature(temperature, mask, n, dtype, sampled_ids.device),
        mask=mask,
        sampler=sampler,
        centering=centering,
        shard=vocab,
        group=group,
        sampler_kl_coef=sampler_kl_coef,
        entropy_coef=entropy_coef,
        with_entropy=entropy_metric or entropy_coef != 0,
        reuse_logits=reuse_logits,
        chunk_rows=chunk_rows,
    )


def _shape(logits: Tensor) -> tuple[int, int]:
    if logits.dim() != 2 or logits.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"logits must be [n, V_local] float64, float32, bfloat16 or float16, "
            f"got {list(logits.shape)} {logits.dtype}"
        )
    return logits.shape[0], logits.shape[1]


def _require_rows(name: str, value: Tensor, n: int) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor with one entry a row, [{n}], got {type(value).__name__}")
    if tuple(value.shape) != (n,):
        raise ValueError(f"{name} must have one entry a row, [{n}], got {list(value.shape)}")


def _where_trained(value: Tensor, mask: Tensor | None, otherwise: float) -> Tensor:
    return value if mask is None else torch.where(mask, value, otherwise)


def _temperature(
    temperature: float | Tensor, mask: Tensor | None, n: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    if isinstance(temperature, Tensor):
        return _where_trained(temperature.to(dtype), mask, 1.0)
    return None if temperature == 1.0 else torch.full((n,), temperature, dtype=dtype, device=device)
