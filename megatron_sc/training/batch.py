"""From rollouts to a micro-batch on this rank: shift, pad, broadcast over TP, slice over CP.

A rollout describes response token j by entry j. The trainer predicts it from position P - 1 + j of the sequence, P the
prompt's length: that shift happens here, once, and before the sequence is sliced for context parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ..objective import Draws, FullVocabulary, SamplerDistribution, Support, TopKHead
from ..rollouts import Rollout, RolloutError
from ..vocab_parallel.check import LOGPROB_TOLERANCE
from .config import Distribution


@dataclass(frozen=True)
class BatchLayout:
    """Shapes of a micro-batch: they follow from the configuration, so ranks that receive one need not be told.

    Attributes:
        micro_batch_size: b, rollouts a micro-batch.
        seq_length: s, positions a rollout; shorter ones are padded with mask False.
        distribution: what is recorded of the sampler.
        width: entries a position: head or support size, number of draws, or the true vocabulary size.
        true_vocab_size: ids at or above it are refused; None: ids are not checked.
        route_width: recorded experts a position, over all MoE layers; 0: routes are not used.
    """

    micro_batch_size: int
    seq_length: int
    distribution: Distribution
    width: int
    true_vocab_size: int | None = None
    route_width: int = 0

    @property
    def id_width(self) -> int:
        """Recorded ids a position."""
        return self.width if self.distribution in ("head", "support", "draws") else 0

    @property
    def logprob_width(self) -> int:
        """Recorded log-probabilities a position."""
        return self.width if self.distribution != "none" else 0


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch; position i describes the prediction of token i + 1.

    Attributes:
        tokens: int32 ``[b, s]``, the model's input.
        sampled_ids: int32 ``[b, s]``, the token that was sampled after each position.
        mask: int32 ``[b, s]``, 1 where the position trains.
        advantages: float32 ``[b, s]``.
        sampled_logprobs: float32 ``[b, s]``, log q of the sampled token.
        temperature: float32 ``[b, s]``.
        staleness: float32 ``[b, s]``, optimizer steps between the sampler's weights and the trainer's.
        ids: int32 ``[b, s, width]`` head, support or draws; -1 is padding. ``[b, s, 0]`` for full and none.
        logprobs: float32 ``[b, s, width]``; -inf is padding.
        log_tail_mass: float32 ``[b, s]``; NaN where it was not recorded.
        padding: int32 ``[b, s]``, 1 where there is no token of a rollout: what an MoE router must not count.
        routes: int32 ``[b, s, route_width]``, the experts that the sampler used for the input token; -1: none reported.
        per_rollout: float32 ``[b, len(PER_ROLLOUT)]``, what is logged once a rollout; NaN where there is none.
    """

    tokens: Tensor
    sampled_ids: Tensor
    mask: Tensor
    advantages: Tensor
    sampled_logprobs: Tensor
    temperature: Tensor
    staleness: Tensor
    ids: Tensor
    logprobs: Tensor
    log_tail_mass: Tensor
    padding: Tensor
    routes: Tensor
    per_rollout: Tensor

    PER_ROLLOUT: ClassVar[tuple[str, ...]] = ("reward", "accuracy", "response_length")

    def by_position(self) -> Batch:
        """The per-position fields as ``[s * b, ...]``: the order of Megatron's ``[s, b]`` activations."""

        def flatten(name: str) -> Tensor:
            value: Tensor = getattr(self, name)
            return value if name == "per_rollout" else value.transpose(0, 1).flatten(0, 1)

        return Batch(**{field.name: flatten(field.name) for field in fields(self)})


def check_rollout(rollout: Rollout, layout: BatchLayout) -> None:
    """Refuse a rollout that ``collate`` could not take.

    Raises:
        RolloutError: naming the rollout, the position and the field, or the flag it contradicts.
    """
    name = f"rollout of group {rollout.group_id}"
    if len(rollout) > layout.seq_length:
        raise RolloutError(
            f"{name} has {len(rollout)} tokens but --seq-length is {layout.seq_length}; raise it, or leave the rollout "
            "out (--rollout-policy drop)"
        )
    _check_values(rollout, layout, name)
    _recorded(rollout, layout, name)
    if layout.route_width:
        _routes(rollout, layout, name)


def collate(
    rollouts: Sequence[Rollout], advantages: Sequence[float], step: int, layout: BatchLayout, *, checked: bool = False
) -> Batch:
    """Shift rollouts to prediction positions and pad them to ``layout``; CPU tensors.

    Args:
        rollouts: at most b; the rows after them are empty.
        advantages: one a rollout.
        step: the trainer's step, for the staleness of each token.
        layout: see ``BatchLayout``.
        checked: ``check_rollout`` has seen the rollouts.

    Raises:
        RolloutError: for a rollout that does not fit or lacks what ``--sampler-distribution`` needs. Nothing is cut.
    """
    b, s = layout.micro_batch_size, layout.seq_length
    if len(rollouts) > b:
        raise ValueError(f"a micro-batch has {b} rows, got {len(rollouts)} rollouts")
    values: dict[str, npt.NDArray[np.float32 | np.int32]] = {
        "tokens": np.zeros((b, s), np.int32),
        "sampled_ids": np.zeros((b, s), np.int32),
        "mask": np.zeros((b, s), np.int32),
        "advantages": np.zeros((b, s), np.float32),
        "sampled_logprobs": np.zeros((b, s), np.float32),
        "temperature": np.ones((b, s), np.float32),
        "staleness": np.zeros((b, s), np.float32),
        "ids": np.full((b, s, layout.id_width), -1, np.int32),
        "logprobs": np.full((b, s, layout.logprob_width), -np.inf, np.float32),
        "log_tail_mass": np.full((b, s), np.nan, np.float32),
        "padding": np.ones((b, s), np.int32),
        "routes": np.full((b, s, layout.route_width), -1, np.int32),
        "per_rollout": np.full((b, len(Batch.PER_ROLLOUT)), np.nan, np.float32),
    }
    for i, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True)):
        name = f"rollout of group {rollout.group_id}"
        if not checked:
            check_rollout(rollout, layout)
        prompt, response = len(rollout.prompt_ids), len(rollout.response_ids)
        at = slice(prompt - 1, prompt - 1 + response)  # response token j is predicted at position P - 1 + j
        values["tokens"][i, :prompt] = rollout.prompt_ids
        values["tokens"][i, prompt : prompt + response] = rollout.response_ids
        values["padding"][i, : len(rollout)] = 0
        if layout.route_width:
            values["routes"][i, : len(rollout)] = _routes(rollout, layout, name)
        values["sampled_ids"][i, at] = rollout.response_ids
        values["mask"][i, at] = rollout.response_mask
        values["advantages"][i, at] = advantage
        values["sampled_logprobs"][i, at] = np.where(rollout.response_mask, rollout.sampled_logprobs, 0.0)
        values["temperature"][i, at] = rollout.temperature
        values["staleness"][i, at] = step - rollout.weight_version
        if rollout.log_tail_mass is not None:
            values["log_tail_mass"][i, at] = rollout.log_tail_mass
        ids, logprobs = _recorded(rollout, layout, name)
        if ids is not None:
            values["ids"][i, at, : ids.shape[1]] = ids
        if logprobs is not None:
            values["logprobs"][i, at, : logprobs.shape[1]] = logprobs
        values["per_rollout"][i] = (rollout.reward, rollout.metadata.get("accuracy", np.nan), response)
    return Batch(**{name: torch.from_numpy(value) for name, value in values.items()})


def broadcast(batch: Batch | None, layout: BatchLayout, group: dist.ProcessGroup, device: torch.device) -> Batch:
    """Tensor-parallel rank 0's batch on every rank of ``group``, in one collective.

    Args:
        batch: the batch on rank 0 of the group; None elsewhere.
        layout: the same on all ranks; it gives the shapes.
        group: tensor-parallel group.
        device: where the batch is wanted.
    """
    shapes = _shapes(layout)
    size = sum(int(np.prod(shape)) for _, shape in shapes.values())
    if batch is None:
        packed = torch.empty(size, dtype=torch.int32, device=device)
    else:
        parts = [getattr(batch, name).contiguous().view(-1).view(torch.int32) for name in shapes]
        staging = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        # From memory that is not pinned the copy would hold up the host until the device has reached it.
        packed = torch.cat(parts, out=staging).to(device, non_blocking=True)
    if dist.get_world_size(group) > 1:
        dist.broadcast(packed, src=dist.get_process_group_ranks(group)[0], group=group)
    received, offset = {}, 0
    for name, (dtype, shape) in shapes.items():
        count = int(np.prod(shape))
        received[name] = packed[offset : offset + count].view(dtype).view(shape)
        offset += count
    return Batch(**received)


def slice_context(batch: Batch, rank: int, size: int) -> Batch:
    """This context-parallel rank's positions: chunks ``rank`` and ``2 size - 1 - rank`` of ``2 size``, as in Megatron.

    Raises:
        ValueError: if the sequence length is not a multiple of ``2 size``.
    """
    if size == 1:
        return batch
    s = batch.tokens.shape[1]
    if s % (2 * size):
        raise ValueError(f"--seq-length {s} must be a multiple of 2 x --context-parallel-size = {2 * size}")

    def own(name: str) -> Tensor:
        value: Tensor = getattr(batch, name)
        if name == "per_rollout":
            return value
        chunks = value.chunk(2 * size, dim=1)
        return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=1)

    return Batch(**{field.name: own(field.name) for field in fields(batch)})


def position_ids(batch: Batch, rank: int, size: int) -> Tensor:
    """int64 ``[b, s / size]``: the global position of each local token."""
    b, local = batch.tokens.shape
    chunk = local if size == 1 else local // 2
    starts = (0,) if size == 1 else (rank * chunk, (2 * size - 1 - rank) * chunk)
    device = batch.tokens.device
    return torch.cat([torch.arange(start, start + chunk, device=device) for start in starts]).expand(b, local)


def sampler_distribution(batch: Batch, distribution: Distribution) -> SamplerDistribution | None:
    """The recorded distribution of a batch whose fields are ``[n, ...]`` (see ``Batch.by_position``)."""
    match distribution:
        case "none":
            return None
        case "head":
            return TopKHead(batch.ids, batch.logprobs, batch.log_tail_mass)
        case "support":
            return Support(batch.ids, batch.logprobs)
        case "draws":
            return Draws(batch.ids, batch.logprobs)
        case "full":
            return FullVocabulary(batch.logprobs)


def _shapes(layout: BatchLayout) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    b, s = layout.micro_batch_size, layout.seq_length
    per_position = {
        "tokens": torch.int32,
        "sampled_ids": torch.int32,
        "mask": torch.int32,
        "advantages": torch.float32,
        "sampled_logprobs": torch.float32,
        "temperature": torch.float32,
        "staleness": torch.float32,
        "log_tail_mass": torch.float32,
        "padding": torch.int32,
    }
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {name: (t, (b, s)) for name, t in per_position.items()}
    shapes["ids"] = (torch.int32, (b, s, layout.id_width))
    shapes["logprobs"] = (torch.float32, (b, s, layout.logprob_width))
    shapes["routes"] = (torch.int32, (b, s, layout.route_width))
    shapes["per_rollout"] = (torch.float32, (b, len(Batch.PER_ROLLOUT)))
    return shapes


def _check_values(rollout: Rollout, layout: BatchLayout, name: str) -> None:
    """Ids are in the true vocabulary (masked tokens too: the model embeds them), log-probabilities are <= 0."""
    trained = rollout.response_mask.astype(bool)
    size = layout.true_vocab_size
    ids = {"prompt_ids": rollout.prompt_ids, "response_ids": rollout.response_ids}
    recorded = {"head_ids": rollout.head_ids, "draw_ids": rollout.draw_ids}
    for field, values in (ids | recorded).items():
        if values is None or size is None:
            continue
        bad = (
            values >= size if field == "head_ids" else (values >= size) | (values < 0)
        )  # heads are padded with ids < 0
        if field in recorded:
            bad = bad & trained[:, None]
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise RolloutError(
                f"{name}, position {at[0]}: {field} is {values[at]}, outside the true vocabulary [0, {size}); is "
                "--true-vocab-size that of the sampler?"
            )
    for field, logprobs in {"head_logprobs": rollout.head_logprobs, "draw_logprobs": rollout.draw_logprobs}.items():
        if logprobs is None:
            continue
        bad = (np.isnan(logprobs) | (logprobs > LOGPROB_TOLERANCE)) & trained[:, None]
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise RolloutError(f"{name}, position {at[0]}, entry {at[1]}: {field} is {logprobs[at]}; it must be <= 0")


def _routes(rollout: Rollout, layout: BatchLayout, name: str) -> npt.NDArray[np.int16]:
    """int16 ``[P + R, route_width]``."""
    routes = rollout.expert_routes
    if routes is None:
        raise RolloutError(f"{name} records no expert routes, but --moe-enable-routing-replay needs them")
    if routes[0].size != layout.route_width:
        raise RolloutError(f"{name} records {routes[0].size} experts a token, but the model uses {layout.route_width}")
    return routes.reshape(len(routes), -1)


def _recorded(
    rollout: Rollout, layout: BatchLayout, name: str
) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.float32] | None]:
    """Ids and log-probabilities ``[R, <= width]`` that ``--sampler-distribution`` asks for."""
    wanted = layout.distribution
    if wanted == "none":
        return None, None
    if wanted == "draws":
        if rollout.draw_ids is None or rollout.draw_logprobs is None:
            raise RolloutError(f"{name} records no draws, but --sampler-distribution is draws; see --num-draws")
        if rollout.draw_ids.shape[1] != layout.width:
            raise RolloutError(f"{name} records {rollout.draw_ids.shape[1]} draws, but --num-draws is {layout.width}")
        return rollout.draw_ids, rollout.draw_logprobs
    if rollout.head_ids is None or rollout.head_logprobs is None:
        raise RolloutError(f"{name} records no head, but --sampler-distribution is {wanted}; see --head-size")
    if wanted == "support" and not rollout.head_is_support:
        raise RolloutError(f"{name} records a head, not a support: the sampler did not truncate; use head")
    if wanted != "support" and rollout.head_is_support:
        raise RolloutError(f"{name} comes from a truncating sampler; use --sampler-distribution support")
    size = rollout.head_ids.shape[1]
    if wanted != "full":
        if size > layout.width:
            raise RolloutError(
                f"{name} records heads of {size} tokens, but --head-size is {layout.width}; set it to {size} or more"
            )
        return rollout.head_ids, rollout.head_logprobs
    if size != layout.width or (np.sort(rollout.head_ids, axis=1) != np.arange(size)).any():
        raise RolloutError(
            f"{name} records {size} of {layout.width} tokens; full needs all: --head-size {layout.width}"
        )
    return None, np.take_along_axis(rollout.head_logprobs, np.argsort(rollout.head_ids, axis=1), axis=1)
