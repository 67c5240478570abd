"""One sampled response as arrays, and many of them as columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ragged import Ragged, offsets_of
from ..rollout import Bool, Float32, Int32, RolloutError
from ..table import RolloutTable

Int16 = npt.NDArray[np.int16]


@dataclass(frozen=True, eq=False)
class Head:
    """The sampler's most likely tokens at R positions, flat.

    Attributes:
        sizes: int32 ``[R]`` tokens of each position.
        ids: int32 ``[sum(sizes)]``, position after position, most likely token first.
        logprobs: float32, like ``ids``.
    """

    sizes: Int32
    ids: Int32
    logprobs: Float32


@dataclass(frozen=True, eq=False)
class Response:
    """What an engine said about one response; reward and group are the caller's to add.

    P is the length of the prompt, R of the response.

    Attributes:
        prompt_ids: int32 ``[P]``.
        response_ids: int32 ``[R]``.
        response_mask: bool ``[R]`` False: a tool's token.
        sampled_logprobs: float32 ``[R]``; 0 where masked and not reported.
        weight_version: int32 ``[R]``.
        head: None where only sampled tokens' log-probabilities were asked for.
        log_tail_mass: float32 ``[R]`` log of the mass outside the head, or None: engines do not report it.
        head_is_support: the sampler truncates, and the head is all that it could sample.
        temperature: of the request.
        finish_reason: the engine's.
        expert_routes: int16 ``[P + R, layers, top-k]``; -1 where the engine reports none. None: not recorded.
        name: of the request, for errors.
    """

    prompt_ids: Int32
    response_ids: Int32
    response_mask: Bool
    sampled_logprobs: Float32
    weight_version: Int32
    head: Head | None
    log_tail_mass: Float32 | None
    head_is_support: bool
    temperature: float
    finish_reason: str
    expert_routes: Int16 | None
    name: str


def to_table(
    responses: Sequence[Response],
    rewards: Sequence[float] | npt.NDArray[Any],
    group_ids: Sequence[int] | npt.NDArray[Any],
    *,
    advantages: Sequence[float] | npt.NDArray[Any] | None = None,
    metadata: Sequence[Mapping[str, Any]] | None = None,
) -> RolloutTable:
    """Columns for ``RolloutWriter.write``; ``as_rollout(i)`` of the result is one ``Rollout``.

    Args:
        responses: n of them; those of a group next to each other.
        rewards: ``[n]``.
        group_ids: ``[n]``, equal for the responses of one prompt.
        advantages: ``[n]``, or None: the trainer derives them from the rewards of the group.
        metadata: ``[n]`` JSON objects.

    Raises:
        RolloutError: if the lengths differ, or metadata is not JSON. What is wrong with a rollout itself is the
            writer's to say.
    """
    n = len(responses)
    for name, values in (
        ("rewards", rewards), ("group_ids", group_ids), ("advantages", advantages), ("metadata", metadata),
    ):  # fmt: skip
        if values is not None and len(values) != n:
            raise RolloutError(f"{name} has {len(values)} entries for {n} responses")

    none = np.empty(0)

    def column(values: list[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Ragged:
        return Ragged.from_rows(values, dtype)

    heads = [response.head for response in responses]
    empty = Ragged(np.empty(0, np.float32), offsets_of(np.zeros(n, np.int64)))
    return RolloutTable(
        prompt_ids=column([r.prompt_ids for r in responses], np.int32),
        response_ids=column([r.response_ids for r in responses], np.int32),
        response_mask=column([r.response_mask for r in responses], np.bool_),
        sampled_logprobs=column([r.sampled_logprobs for r in responses], np.float32),
        weight_version=column([r.weight_version for r in responses], np.int32),
        head_sizes=column([none if head is None else head.sizes for head in heads], np.int32),
        head_ids=column([none if head is None else head.ids for head in heads], np.int32),
        head_logprobs=column([none if head is None else head.logprobs for head in heads], np.float32),
        log_tail_mass=column([none if r.log_tail_mass is None else r.log_tail_mass for r in responses], np.float32),
        draw_ids=Ragged(np.empty(0, np.int32), empty.offsets),
        draw_logprobs=empty,
        expert_routes=column([none if r.expert_routes is None else r.expert_routes for r in responses], np.int16),
        head_is_support=np.array([r.head_is_support for r in responses], np.bool_),
        temperature=np.array([r.temperature for r in responses], np.float64),
        reward=np.asarray(rewards, np.float64),
        advantage=np.full(n, np.nan) if advantages is None else np.asarray(advantages, np.float64),
        group_id=np.asarray(group_ids, np.int64),
        finish_reason=[r.finish_reason for r in responses],
        metadata=["{}"] * n if metadata is None else [_json(row, value) for row, value in enumerate(metadata)],
    )


def _json(row: int, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(value), allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise RolloutError(f"metadata of response {row} is not JSON: {error}") from error
