"""What a record of a file means: its group, and its rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from ..rollout import RolloutError
from ..schema import ExpertRoutes
from . import sglang, vllm
from .columns import ALIASES, Columns, row_response
from .records import Record
from .request import Request
from .response import Response
from .sampling import NEUTRAL, Sampling


@dataclass(frozen=True)
class Sample:
    """One rollout of a file.

    Attributes:
        response: its tokens and distributions.
        reward: of the response.
        advantage: or None.
        metadata: a JSON object.
        place: file and line or row, for errors.
    """

    response: Response
    reward: float
    advantage: float | None
    metadata: dict[str, Any]
    place: str


class Source(Protocol):
    """How to read the records of some files."""

    def group(self, record: Record) -> int | str:
        """The group that its rollouts belong to. Called once a record, in order."""

    def samples(self, record: Record) -> list[Sample]:
        """Its rollouts. Raises RolloutError."""

    def end(self) -> None:
        """Called after the last record. Raises RolloutError if one is missing."""


@dataclass
class ColumnSource:
    """One rollout a record, in named columns.

    Attributes:
        sampling: how tokens were drawn; a column ``temperature`` replaces the one here.
        chosen: names of columns, by field; others are found by ``columns.ALIASES``.
        k: as in ``arrays.response``.
        weight_version: of rows that record none.
        group_size: rollouts of a group, where no column tells; consecutive records.
    """

    sampling: Sampling
    chosen: Mapping[str, str] = field(default_factory=dict)
    k: int | None = None
    weight_version: int | None = None
    group_size: int | None = None
    columns: Columns | None = None
    _count: int = 0

    def group(self, record: Record) -> int | str:
        """From the column, or by counting."""
        columns = self._find(record)
        self._count += 1
        if self.group_size is not None:
            return (self._count - 1) // self.group_size
        return _group(columns.get(record, "group_id"), record)

    def samples(self, record: Record) -> list[Sample]:
        """The one rollout."""
        columns = self._find(record)
        with Request("", record.place).reading("a row with these columns"):
            response = row_response(record, columns, self.sampling, k=self.k, weight_version=self.weight_version)
        metadata = columns.get(record, "metadata")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise RolloutError(f"{record.place}: {columns.names['metadata']} is {metadata!r}; must be a JSON object")
        advantage = columns.get(record, "advantage")
        return [
            Sample(
                response,
                _number(columns.get(record, "reward"), "reward", record),
                None if advantage is None else _number(advantage, "advantage", record),
                dict(metadata or {}),
                record.place,
            )
        ]  # fmt: skip

    def end(self) -> None:
        """Refuse a last group that is not whole."""
        if self.group_size is not None and self._count % self.group_size:
            raise RolloutError(f"{self._count} records are no multiple of --group-size {self.group_size}")

    def _find(self, record: Record) -> Columns:
        if self.columns is None:
            try:
                self.columns = Columns.find(record.values, self.chosen)
            except RolloutError as error:
                raise RolloutError(f"{record.place}: {error}") from None
            if self.group_size is None and "group_id" not in self.columns.names:
                raise RolloutError(
                    f"{record.place}: no column for group_id; choose one with --column group_id=NAME, or pass "
                    "--group-size"
                )
        missing = [name for name in self.columns.names.values() if name not in record.values]
        if missing:
            raise RolloutError(f"{record.place}: no {missing[0]}; every record must have the columns of the first one")
        new = record.values.keys() - self.columns.names.values() - set(self.columns.unused)
        if new:
            known = sorted(name for aliases in ALIASES.values() for name in aliases if name in new)
            if known:
                raise RolloutError(
                    f"{record.place}: has {known[0]}, which the first record lacks; every record must have it, or null"
                )
            self.columns = replace(self.columns, unused=tuple(sorted({*self.columns.unused, *new})))
        return self.columns


@dataclass(frozen=True)
class EngineSource:
    """One reply of an engine a record: ``{"response": reply, "reward": ..., "group_id": ..., "request": ...}``.

    The reply may also be the record itself, with ``reward`` and the rest beside its own keys. A reply with n choices
    takes a list of n rewards. Without ``group_id`` each record is a group. ``weight_version`` (a step, or steps by the
    engine's labels), ``advantage`` and ``metadata`` are optional.

    Attributes:
        engine: "vllm" or "sglang".
        sampling: of all requests. A record's own request must agree with it.
        k: top log-probabilities asked for.
        logprobs_mode: of vLLM, as ``vllm.responses`` takes it.
        weight_version: of responses that the engine reports none for.
        expert_routes: their shape, where SGLang returns routes.
    """

    engine: str
    sampling: Sampling
    k: int
    logprobs_mode: str = "processed_logprobs"
    weight_version: int | None = None
    expert_routes: ExpertRoutes | None = None

    def group(self, record: Record) -> int | str:
        """Its ``group_id``, or its place."""
        group = record.values.get("group_id")
        return record.place if group is None else _group(group, record)

    def samples(self, record: Record) -> list[Sample]:
        """One a choice."""
        reply = record.values.get("response", record.values)
        responses = self._responses(reply, self._request(record), record)
        rewards = _per_choice(record, "reward", len(responses))
        advantages = _per_choice(record, "advantage", len(responses))
        metadata = record.values.get("metadata") or {}
        return [
            Sample(
                response,
                _number(reward, "reward", record),
                None if advantage is None else _number(advantage, "advantage", record),
                dict(metadata),
                record.place,
            )
            for response, reward, advantage in zip(responses, rewards, advantages, strict=True)
        ]

    def end(self) -> None:
        """Records are whole groups, or name theirs."""

    def _responses(self, reply: Any, request: dict[str, Any], record: Record) -> list[Response]:
        version = record.values.get("weight_version", self.weight_version)
        if version is not None and type(version) not in (int, dict):
            raise RolloutError(f"{record.place}: weight_version is {version!r}; must be a step, or steps by label")
        if self.engine == "vllm":
            return vllm.responses_from_json(reply, request, logprobs_mode=self.logprobs_mode, weight_version=version)
        read = sglang.responses_from_chat if isinstance(reply, Mapping) and "choices" in reply else sglang.responses
        return read(
            reply,
            request,
            weight_version=version,
            expert_routes=self.expert_routes,
            original_logprobs=self.sampling.logprobs == "raw",
        )

    def _request(self, record: Record) -> dict[str, Any]:
        given = {name: getattr(self.sampling, name) for name in NEUTRAL}
        request = dict(record.values.get("request") or {})
        stated = {**request, **(request.get("sampling_params") or {})}
        for name, value in given.items():
            found = stated.get(name)
            if name == "top_k" and found == -1:
                found = 0
            if found is not None and found != value:
                flag = "--" + name.replace("_", "-")
                raise RolloutError(
                    f"{record.place}: request has {name} {found}, {flag} is {value}; both must be the same"
                )
        asked = {"logprobs": self.k, "top_logprobs": self.k, "top_logprobs_num": self.k}
        asked |= {name: request[name] for name in asked if type(request.get(name)) is int}
        return {**request, **given, **asked, "sampling_params": {**asked, **stated, **given}}


def _per_choice(record: Record, name: str, count: int) -> list[Any]:
    value = record.values.get(name)
    values = value if isinstance(value, list) else [value] if count == 1 or value is None else None
    if value is None:
        return [None] * count
    if values is None or len(values) != count:
        raise RolloutError(f"{record.place}: {name} is {value!r} for {count} responses; must be a list of {count}")
    return values


def _number(value: Any, name: str, record: Record) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not np.isfinite(value):
        raise RolloutError(f"{record.place}: {name} is {value!r}; must be a finite number")
    return float(value)


def _group(value: Any, record: Record) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str | np.integer):
        raise RolloutError(f"{record.place}: group_id is {value!r}; must be a whole number or a name")
    return value if isinstance(value, str) else int(value)
