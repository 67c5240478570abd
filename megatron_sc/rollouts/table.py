"""Many rollouts as columns: what is written, read and validated, without a Python object a token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from .ragged import Int64, Ragged, offsets_of
from .rollout import Bool, Rollout, RolloutError

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RolloutTable:
    """n rollouts, in columns.

    P and R are a rollout's prompt and response lengths. A column that a rollout does not record is an empty row there.
    The head of response position t (counted over all rollouts) is ``head_ids.values[h[t] : h[t + 1]]`` with
    ``h = head_offsets``; see ``as_rollout`` for one rollout's rectangle.

    Attributes:
        prompt_ids: int32, P entries a row.
        response_ids: int32, R entries.
        response_mask: bool, R entries: the position trains.
        sampled_logprobs: float32, R entries.
        weight_version: int32, R entries.
        head_sizes: int32, R entries, or 0 where no head is recorded.
        head_ids: int32, sum(head_sizes) entries: position after position, most likely token first.
        head_logprobs: float32, like ``head_ids``.
        log_tail_mass: float32, R entries or 0.
        draw_ids: int32, R * K entries or 0.
        draw_logprobs: float32, like ``draw_ids``, or 0.
        expert_routes: int16, (P + R) * layers * top-k entries or 0; -1 where the engine reported none.
        head_is_support: bool ``[n]``.
        temperature: float64 ``[n]``.
        reward: float64 ``[n]``.
        advantage: float64 ``[n]``; NaN where none is recorded.
        group_id: int64 ``[n]``.
        finish_reason: one string a rollout.
        metadata: one JSON object a rollout.
    """

    prompt_ids: Ragged
    response_ids: Ragged
    response_mask: Ragged
    sampled_logprobs: Ragged
    weight_version: Ragged
    head_sizes: Ragged
    head_ids: Ragged
    head_logprobs: Ragged
    log_tail_mass: Ragged
    draw_ids: Ragged
    draw_logprobs: Ragged
    expert_routes: Ragged
    head_is_support: Bool
    temperature: Float64
    reward: Float64
    advantage: Float64
    group_id: Int64
    finish_reason: list[str]
    metadata: list[str]

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout]) -> Self:
        """Columns of these rollouts; padding of their heads (id < 0) is left out.

        Args:
            rollouts: n of them.

        Raises:
            RolloutError: for an advantage that is not finite, padding inside a head, or metadata that is not JSON.
        """
        heads = [_ragged_head(rollout) for rollout in rollouts]
        none = np.empty(0)

        def column(get: Callable[[Rollout], Any], dtype: npt.DTypeLike) -> Ragged:
            values = [get(rollout) for rollout in rollouts]
            return Ragged.from_rows([none if value is None else np.asarray(value) for value in values], dtype)

        for rollout in rollouts:
            if rollout.advantage is not None and not np.isfinite(rollout.advantage):
                raise RolloutError(f"rollout of group {rollout.group_id}: advantage is {rollout.advantage}; not finite")
        return cls(
            prompt_ids=column(lambda r: r.prompt_ids, np.int32),
            response_ids=column(lambda r: r.response_ids, np.int32),
            response_mask=column(lambda r: r.response_mask, np.bool_),
            sampled_logprobs=column(lambda r: r.sampled_logprobs, np.float32),
            weight_version=column(lambda r: r.weight_version, np.int32),
            head_sizes=Ragged.from_rows([head[0] for head in heads], np.int32),
            head_ids=Ragged.from_rows([head[1] for head in heads], np.int32),
            head_logprobs=Ragged.from_rows([head[2] for head in heads], np.float32),
            log_tail_mass=column(lambda r: r.log_tail_mass, np.float32),
            draw_ids=column(lambda r: r.draw_ids, np.int32),
            draw_logprobs=column(lambda r: r.draw_logprobs, np.float32),
            expert_routes=column(lambda r: None if r.expert_routes is None else r.expert_routes.ravel(), np.int16),
            head_is_support=np.array([r.head_is_support for r in rollouts], np.bool_),
            temperature=np.array([r.temperature for r in rollouts], np.float64),
            reward=np.array([r.reward for r in rollouts], np.float64),
            advantage=np.array([np.nan if r.advantage is None else r.advantage for r in rollouts], np.float64),
            group_id=np.array([r.group_id for r in rollouts], np.int64),
            finish_reason=[r.finish_reason for r in rollouts],
            metadata=[_json(r) for r in rollouts],
        )

    def __len__(self) -> int:
        """Number of rollouts."""
        return len(self.group_id)

    @property
    def tokens(self) -> int:
        """Response tokens, trained or not."""
        return len(self.response_ids.values)

    @property
    def head_offsets(self) -> Int64:
        """int64 ``[tokens + 1]``: where each response position's head lies in ``head_ids.values``."""
        if len(self.head_sizes.values) == self.tokens:
            return offsets_of(self.head_sizes.values)
        sizes = np.zeros(self.tokens, np.int64)
        sizes[np.repeat(self.head_sizes.sizes > 0, self.response_ids.sizes)] = self.head_sizes.values
        return offsets_of(sizes)

    @property
    def group_starts(self) -> Int64:
        """Rows at which a group begins: rollouts of one group stand next to each other."""
        if not len(self):
            return np.empty(0, np.int64)
        return np.concatenate([np.zeros(1, np.int64), np.flatnonzero(np.diff(self.group_id)) + 1])

    def as_rollout(self, row: int, group_id: int | None = None, routes: tuple[int, int] | None = None) -> Rollout:
        """One rollout; its flat fields are views, its head is padded to the widest position.

        Args:
            row: which.
            group_id: replaces the recorded one.
            routes: MoE layers and top-k of recorded expert routes; None: they are left out.
        """
        length = int(self.response_ids.sizes[row])

        def optional(column: Ragged) -> npt.NDArray[Any] | None:
            return column[row] if len(column[row]) else None

        head_ids = head_logprobs = None
        if (sizes := optional(self.head_sizes)) is not None:
            valid = np.arange(max(int(sizes.max()), 1)) < sizes[:, None]
            head_ids = np.full(valid.shape, -1, np.int32)
            head_logprobs = np.full(valid.shape, -np.inf, np.float32)
            head_ids[valid], head_logprobs[valid] = self.head_ids[row], self.head_logprobs[row]
        draws, draw_logprobs = optional(self.draw_ids), optional(self.draw_logprobs)
        advantage = float(self.advantage[row])
        return Rollout(
            prompt_ids=self.prompt_ids[row],
            response_ids=self.response_ids[row],
            response_mask=self.response_mask[row],
            sampled_logprobs=self.sampled_logprobs[row],
            weight_version=self.weight_version[row],
            reward=float(self.reward[row]),
            group_id=int(self.group_id[row]) if group_id is None else group_id,
            temperature=float(self.temperature[row]),
            advantage=None if np.isnan(advantage) else advantage,
            head_ids=head_ids,
            head_logprobs=head_logprobs,
            log_tail_mass=optional(self.log_tail_mass),
            head_is_support=bool(self.head_is_support[row]),
            draw_ids=None if draws is None else draws.reshape(length, -1),
            draw_logprobs=None if draw_logprobs is None else draw_logprobs.reshape(length, -1),
            expert_routes=None
            if routes is None or not len(self.expert_routes[row])
            else self.expert_routes[row].reshape(-1, *routes),
            finish_reason=self.finish_reason[row],
            metadata=json.loads(self.metadata[row]),
        )

    def slice(self, start: int, stop: int) -> Self:
        """Rollouts [start, stop); arrays are views."""

        def cut(column: Any) -> Any:
            return column.slice(start, stop) if isinstance(column, Ragged) else column[start:stop]

        return self._each(cut)

    def select(self, keep: Bool) -> Self:
        """Rollouts where ``keep`` is True, copied."""

        def select(column: Any) -> Any:
            if isinstance(column, Ragged):
                return column.select(keep)
            if isinstance(column, list):
                return [value for value, kept in zip(column, keep, strict=True) if kept]
            return column[keep]

        return self._each(select)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """All rollouts of all parts."""
        if len(parts) == 1:
            return parts[0]

        def join(columns: list[Any]) -> Any:
            if isinstance(columns[0], Ragged):
                return Ragged.concatenate(columns)
            if isinstance(columns[0], list):
                return [value for column in columns for value in column]
            return np.concatenate(columns)

        return cls(**{f.name: join([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    def _each(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, **{f.name: change(getattr(self, f.name)) for f in fields(self)})


def _ragged_head(rollout: Rollout) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Sizes ``[R]``, ids and log-probabilities of the entries that are no padding."""
    ids, logprobs = rollout.head_ids, rollout.head_logprobs
    if ids is None or logprobs is None:
        return np.empty(0), np.empty(0), np.empty(0)
    valid = (ids >= 0) & (logprobs != -np.inf)
    if valid.all():
        return np.full(len(ids), ids.shape[1]), ids, logprobs
    sizes = valid.sum(axis=1)
    gap = np.flatnonzero((valid != (np.arange(ids.shape[1]) < sizes[:, None])).any(axis=1))
    if gap.size:
        raise RolloutError(
            f"rollout of group {rollout.group_id}, position {gap[0]}: head_ids has padding before its last entry "
            f"({ids[gap[0]].tolist()[:8]}...); padding belongs at the end of a row"
        )
    return sizes, ids[valid], logprobs[valid]


def _json(rollout: Rollout) -> str:
    try:
        return json.dumps(rollout.metadata, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise RolloutError(f"rollout of group {rollout.group_id}: metadata is not JSON: {error}") from error
