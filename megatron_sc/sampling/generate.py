"""Autoregressive sampling with a Megatron model on the trainer's own ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .distribution import draw, head_and_tail, is_truncated, log_probabilities, support
from .groups import check_parallelism, group_size
from .isolation import inference_only
from .shards import unwrap


@dataclass(frozen=True, eq=False)
class Generation:
    """What was generated for b prompts: R tokens each and the distribution each was drawn from. Tensors on the CPU."""

    ids: Tensor  # [b, R] int32
    logprobs: Tensor  # [b, R] float32, of the sampled token, processed
    head_ids: Tensor | None = None  # [b, R, k] int32, most likely first; -1 pads a support
    head_logprobs: Tensor | None = None  # [b, R, k] float32; -inf where padded
    log_tail_mass: Tensor | None = None  # [b, R] float32; None where the head is the support
    head_is_support: bool = False
    draw_ids: Tensor | None = None  # [b, R, K] int32, independent of ids
    draw_logprobs: Tensor | None = None  # [b, R, K] float32


@dataclass(frozen=True)
class SamplingParameters:
    """How a token is drawn and what is recorded of the distribution it was drawn from."""

    temperature: float = 1.0  # 0: the most likely token; nothing but ids is recorded, and it is for evaluation only
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    head_size: int = 0  # k; 0 records no head. A truncated sampler records its whole support whatever k


def generate(
    model: nn.Module,
    prompts: Tensor,
    prompt_lengths: Tensor,
    uniforms: Tensor,
    true_vocab_size: int,
    parameters: SamplingParameters | None = None,
    tensor_group: ProcessGroup | None = None,
    pad_multiple: int = 1,
) -> Generation:
    """Continue each prompt by R tokens, all prompts in one batch, with R forward passes on every rank.

    Randomness comes only from ``uniforms``, so that the tokens of a sequence do not depend on the rest of the batch.
    Every tensor-parallel rank passes the same arguments and gets the same result (the first rank's draws). Expert- and
    data-parallel ranks pass their own prompts, with the same R. There is no key-value cache: each pass runs the
    sequence so far, which is the cheaper way for the short responses of ``tasks``.

    Args:
        model: a GPTModel, possibly in DistributedDataParallel and Float16Module. Modes, gradients and random streams
            are left as found. Its weights are used as they are (see ``distortion.swapped_weights``).
        prompts: [b, P] int64, on any device; what lies beyond a row's length is ignored.
        prompt_lengths: [b] int64, each in 1..P.
        uniforms: [b, R, 1 + K] float64 in [0, 1): at each position one for the sampled token, K for the
            independent draws.
        true_vocab_size: columns of the logits beyond it are padding and have no probability.
        parameters: temperature, truncation, head; default: plain sampling with no head.
        tensor_group: the model's tensor-parallel group; None: one rank.
        pad_multiple: the length of each pass is rounded up to a multiple of this (FP8 alignment). Sequence
            parallelism adds its own multiple.

    Raises:
        ValueError: another model than GPTModel; pipeline or context parallelism; FP8 with delayed scaling, whose
            history a forward pass changes; a head larger than the vocabulary; a sequence longer than the learned
            position embeddings.
    """
    parameters = parameters or SamplingParameters()
    core = unwrap(model)
    _check(core, parameters, true_vocab_size)
    device = next(core.parameters()).device
    batch, width = prompts.shape
    length = uniforms.shape[1]
    multiple = math.lcm(pad_multiple, group_size(tensor_group) if core.config.sequence_parallel else 1)
    total = _round_up(width + length, multiple)
    _check_positions(core, total)
    lengths, uniforms = prompt_lengths.to(device), uniforms.to(device)
    tokens = torch.zeros(batch, total, dtype=torch.int64, device=device)
    tokens[:, :width] = prompts.to(device)
    tokens[torch.arange(total, device=device) >= lengths.unsqueeze(1)] = 0
    position_ids = torch.arange(total, device=device).expand_as(tokens)

    steps = []
    with inference_only(model):
        for j in range(length):
            end = _round_up(width + j, multiple)
            logits = _next_token_logits(model, tokens[:, :end], position_ids[:, :end], lengths + (j - 1))
            steps.append(_sample(logits[:, :true_vocab_size], uniforms[:, j], parameters, tensor_group))
            tokens.scatter_(1, (lengths + j).unsqueeze(1), steps[-1].ids.unsqueeze(1))
    is_support = parameters.temperature > 0 and is_truncated(true_vocab_size, parameters.top_k, parameters.top_p)
    return _join(steps, is_support)


class _Step(NamedTuple):
    """One generated position of every sequence; see ``Generation``. What is not recorded has no columns."""

    ids: Tensor  # [b]
    logprobs: Tensor  # [b]
    head_ids: Tensor  # [b, k]
    head_logprobs: Tensor  # [b, k]
    log_tail_mass: Tensor  # [b]
    draw_ids: Tensor  # [b, K]
    draw_logprobs: Tensor  # [b, K]


def _sample(logits: Tensor, uniforms: Tensor, parameters: SamplingParameters, group: ProcessGroup | None) -> _Step:
    """Draw the next token of each sequence from its logits [b, V], and record the distribution."""
    none = logits.new_empty(len(logits), 0, dtype=torch.float32)
    if parameters.temperature == 0:
        greedy = _first_ranks(logits.argmax(dim=-1), group)
        return _Step(greedy, torch.zeros_like(none.sum(1)), none, none, none.sum(1), none, none)
    logprobs = log_probabilities(logits, parameters.temperature, parameters.top_k, parameters.top_p)
    ids = _first_ranks(draw(logprobs, uniforms), group)  # the token, then the independent draws
    ids_logprobs = logprobs.gather(-1, ids)
    if is_truncated(logits.shape[-1], parameters.top_k, parameters.top_p):
        head = *support(logprobs), none.sum(1)
    elif parameters.head_size:
        head = head_and_tail(logprobs, parameters.head_size)
    else:
        head = none, none, none.sum(1)
    return _Step(ids[:, 0], ids_logprobs[:, 0], *head, ids[:, 1:], ids_logprobs[:, 1:])


def _join(steps: list[_Step], is_support: bool) -> Generation:
    """The positions side by side, on the CPU."""
    ids, logprobs, head_ids, head_logprobs, tail, draw_ids, draw_logprobs = zip(*steps, strict=True)
    has_head, has_draws = head_ids[0].shape[1] > 0, draw_ids[0].shape[1] > 0
    return Generation(
        ids=_stack(ids).int(),
        logprobs=_stack(logprobs),
        head_ids=_stack_ragged(head_ids, -1).int() if has_head else None,
        head_logprobs=_stack_ragged(head_logprobs, -math.inf) if has_head else None,
        log_tail_mass=_stack(tail) if has_head and not is_support else None,
        head_is_support=is_support,
        draw_ids=_stack(draw_ids).int() if has_draws else None,
        draw_logprobs=_stack(draw_logprobs) if has_draws else None,
    )


def _next_token_logits(model: nn.Module, tokens: Tensor, position_ids: Tensor, last: Tensor) -> Tensor:
    """Logits over the whole padded vocabulary, [b, V_pad], at position ``last[i]`` of row i; no others are computed."""

    def process(
        *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, scale_logits: Any, **_: Any
    ) -> Tensor:
        sharded = output_layer.sequence_parallel
        if sharded:  # hidden states [s/tp, b, h]
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=output_layer.tp_group)
        at_last = hidden_states[last, torch.arange(len(last), device=last.device)].unsqueeze(0)  # [1, b, h]
        output_layer.sequence_parallel = False  # type: ignore[assignment]
        try:
            logits, _bias = output_layer(at_last, weight=output_weight, runtime_gather_output=True)
        finally:
            output_layer.sequence_parallel = sharded
        return scale_logits(logits)[0]

    return model(tokens, position_ids, None, output_processor=process)


def _first_ranks(ids: Tensor, group: ProcessGroup | None) -> Tensor:
    """The ids that the first rank of the group drew: a parallel cumulative sum may round differently on each GPU."""
    if group is None or group_size(group) == 1:
        return ids
    ids = ids.contiguous()
    torch.distributed.broadcast(ids, torch.distributed.get_global_rank(group, 0), group=group)
    return ids


def _check(core: nn.Module, parameters: SamplingParameters, true_vocab_size: int) -> None:
    if "output_processor" not in inspect.signature(core.forward).parameters:
        raise ValueError(
            f"the embedded sampler needs a GPTModel, got {type(core).__name__}: train it from recorded rollouts "
            "(--rollout-path)"
        )
    config: Any = core.config
    check_parallelism(config.pipeline_model_parallel_size, config.context_parallel_size)
    if config.fp8 and config.fp8_recipe == "delayed":
        raise ValueError(
            "the embedded sampler cannot run under --fp8-recipe delayed: its forward passes would enter the amax "
            "history and change the scales of the next training step. Use tensorwise, blockwise or mxfp8"
        )
    if parameters.head_size > true_vocab_size:
        raise ValueError(f"--head-size {parameters.head_size} exceeds the true vocabulary of {true_vocab_size} tokens")


def _check_positions(core: Any, length: int) -> None:
    if core.position_embedding_type == "learned_absolute" and length > core.max_sequence_length:
        raise ValueError(
            f"prompt and response take {length} positions but the model has {core.max_sequence_length}; "
            "raise --max-position-embeddings (and --seq-length)"
        )


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _stack(steps: Sequence[Tensor]) -> Tensor:
    """[b, ...] of each position to [b, R, ...] on the CPU."""
    return torch.stack(list(steps), dim=1).cpu()


def _stack_ragged(steps: Sequence[Tensor], fill: float) -> Tensor:
    """[b, k_j] of each position to [b, R, max k] on the CPU; shorter ones end with ``fill``."""
    width = max(step.shape[1] for step in steps)
    return _stack([nn.functional.pad(step, (0, width - step.shape[1]), value=fill) for step in steps])
