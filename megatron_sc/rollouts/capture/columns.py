"""Rows with named columns, as other trainers store them: slime, miles, verl, prime-rl and the like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ragged import offsets_of, row_sums
from ..rollout import RolloutError
from . import arrays
from .records import Record, Rows
from .request import Request
from .response import Int16, Response
from .routes import pad_routes
from .sampling import Sampling

ALIASES: dict[str, tuple[str, ...]] = {
    "prompt_ids": ("prompt_ids", "prompt_token_ids"),
    "response_ids": ("response_ids", "completion_ids", "response_token_ids"),
    "tokens": ("tokens",),
    "response_length": ("response_length",),
    "response_mask": ("response_mask", "loss_mask", "completion_mask"),
    "removed": ("remove_sample",),
    "sampled_logprobs": ("sampled_logprobs", "rollout_log_probs", "completion_logprobs"),
    "head_ids": ("head_ids", "rollout_topk_token_ids"),
    "head_logprobs": ("head_logprobs", "rollout_topk_log_probs"),
    "head_sizes": ("head_sizes",),
    "log_tail_mass": ("log_tail_mass",),
    "expert_routes": ("expert_routes", "rollout_routed_experts"),
    "weight_version": ("weight_version", "weight_versions"),
    "temperature": ("temperature",),
    "finish_reason": ("finish_reason", "status"),
    "reward": ("reward", "rewards"),
    "advantage": ("advantage", "advantages"),
    "group_id": ("group_id", "group_index", "uid"),
    "metadata": ("metadata",),
}
"""For each field, the names under which stacks have it: this schema's, those of slime's and miles' ``Sample``, of
prime-rl's training examples, and verl's ``uid``. ``tokens`` with ``response_length`` are prompt and response in one
list. verl's ``prompts`` and ``responses`` are not among them: they are padded."""


@dataclass(frozen=True)
class Columns:
    """Which column of a file is which field.

    Attributes:
        names: of the columns, by field; fields that a file does not have are absent.
        unused: columns that are no field.
    """

    names: Mapping[str, str]
    unused: tuple[str, ...] = field(default=())

    @classmethod
    def find(cls, available: Iterable[str], chosen: Mapping[str, str]) -> Columns:
        """Resolve the columns of a file.

        Args:
            available: names of its columns.
            chosen: the caller's names, by field.

        Raises:
            RolloutError: for a chosen column that is not there, two columns that could be one field, or fields that a
                rollout needs and no column is.
        """
        available = list(available)
        names = {}
        for field_name, aliases in ALIASES.items():
            found = [chosen[field_name]] if field_name in chosen else [name for name in aliases if name in available]
            if len(found) > 1:
                raise RolloutError(
                    f"columns {found} could each be {field_name}: choose with --column {field_name}=NAME"
                )
            if found and found[0] not in available:
                raise RolloutError(f"no column {found[0]}; there are {sorted(available)}")
            if found:
                names[field_name] = found[0]
        whole = {"tokens", "response_length"} <= names.keys()
        for field_name in ("sampled_logprobs", "reward", *(() if whole else ("prompt_ids", "response_ids"))):
            if field_name not in names:
                raise RolloutError(
                    f"no column for {field_name} (known names: {', '.join(ALIASES[field_name])}); choose one of "
                    f"{sorted(available)} with --column {field_name}=NAME"
                )
        return cls(names, tuple(sorted(set(available) - set(names.values()))))

    def get(self, record: Record, name: str) -> Any:
        """A field of a record; None where it is absent or null."""
        return record.values.get(self.names[name]) if name in self.names else None


def row_response(
    record: Record, columns: Columns, sampling: Sampling, *, k: int | None = None, weight_version: int | None = None
) -> Response:
    """The response of a row.

    Args:
        record: with the columns.
        columns: see ``Columns.find``.
        sampling: how tokens were drawn; a row's temperature replaces the one here.
        k: as in ``arrays.response``.
        weight_version: of rows that record none.

    Raises:
        RolloutError: naming the column, and what ``arrays.response`` refuses.
    """
    request = Request("", record.place)

    def array(name: str) -> npt.NDArray[Any] | None:
        value = columns.get(record, name)
        if value is None:
            return None
        try:
            return np.asarray(value) if len(value) else np.empty(0, np.int32)
        except (TypeError, ValueError):
            raise request.error(f"{columns.names[name]} is no list of numbers", "pass one a row") from None

    prompt, response = array("prompt_ids"), array("response_ids")
    if prompt is None or response is None:
        prompt, response = _divide(array("tokens"), columns.get(record, "response_length"), request)
    length = len(response)
    mask = array("response_mask")
    if columns.get(record, "removed"):
        mask = np.zeros(length, np.bool_)
    temperature = columns.get(record, "temperature")
    if temperature is not None:
        if isinstance(temperature, bool) or not isinstance(temperature, int | float | np.number):
            raise request.error(f"{columns.names['temperature']} is {temperature!r}", "must be a number")
        sampling = replace(sampling, temperature=float(temperature))
    sampled = array("sampled_logprobs")
    if sampled is None:
        raise request.error(f"{columns.names['sampled_logprobs']} is null", "every row needs log-probabilities")
    ids, sizes = _nested(columns, record, "head_ids", request)
    logprobs, widths = _nested(columns, record, "head_logprobs", request)
    if sizes is not None and widths is not None and not np.array_equal(sizes, widths):
        raise request.error(
            f"{columns.names['head_ids']} and {columns.names['head_logprobs']} have rows of different lengths",
            "every listed token needs one id and one log-probability",
        )
    if ids is not None and logprobs is not None and sizes is not None:
        listed = ids >= 0  # -1 pads rows to one width
        if not listed.all():
            sizes = row_sums(listed, offsets_of(sizes)).astype(np.int32)
            ids, logprobs = ids[listed], logprobs[listed]
    return arrays.response(
        prompt,
        response,
        sampled,
        _versions(columns.get(record, "weight_version"), length, weight_version, request),
        sampling,
        head_ids=ids,
        head_logprobs=logprobs,
        head_sizes=array("head_sizes") if sizes is None else sizes,
        k=k,
        log_tail_mass=array("log_tail_mass"),
        response_mask=mask,
        finish_reason=_finish_reason(columns.get(record, "finish_reason")),
        expert_routes=_routes(columns.get(record, "expert_routes"), len(prompt) + length, request),
        request=request,
    )


def _divide(tokens: npt.NDArray[Any] | None, length: Any, request: Request) -> tuple[npt.NDArray[Any], ...]:
    if tokens is None or length is None:
        raise request.error("no prompt_ids and response_ids, nor tokens and response_length", "every row needs them")
    if not isinstance(length, int | np.integer) or not 0 <= length <= len(tokens):
        raise request.error(f"response_length is {length}", f"must be in [0, {len(tokens)}], the length of tokens")
    return tokens[: len(tokens) - length], tokens[len(tokens) - length :]


def _nested(
    columns: Columns, record: Record, name: str, request: Request
) -> tuple[npt.NDArray[Any] | None, npt.NDArray[np.int32] | None]:
    """Flat values, and sizes where the column is a list of lists."""
    value = columns.get(record, name)
    if value is None:
        return None, None
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return value, None
    if isinstance(value, list) and value and not isinstance(value[0], list):
        return np.asarray(value), None
    try:
        rows = Rows.of(value)
    except ValueError as error:
        raise request.error(f"{columns.names[name]} {error}", "pass one list a token") from None
    return rows.flat, rows.sizes


def _versions(value: Any, length: int, default: int | None, request: Request) -> npt.NDArray[np.int64] | int:
    """One a token, or one for all; a list with one for each request of a response only where they are equal."""
    if value is None:
        if default is None:
            raise request.error("no weight version", "add a column, or pass --weight-version for all rows")
        return default
    try:
        labels = np.atleast_1d(value).tolist()
        versions = np.array([int(label) for label in labels], np.int64)
        if any(isinstance(label, float) and label != step for label, step in zip(labels, versions, strict=True)):
            raise ValueError
    except (TypeError, ValueError):
        raise request.error(f"weight version {value!r} is no step of the trainer", "must be whole numbers") from None
    if len(versions) == length:
        return versions
    if len(versions) and (versions == versions[0]).all():
        return int(versions[0])
    raise request.error(
        f"{len(versions)} weight versions {versions.tolist()[:8]} for {length} tokens",
        "where they differ, every token needs its own",
    )


def _finish_reason(value: Any) -> str:
    if isinstance(value, Mapping):  # SGLang's
        value = value.get("type")
    return "" if value is None else str(value)


def _routes(value: Any, tokens: int, request: Request) -> Int16 | None:
    if value is None:
        return None
    try:
        routes = np.asarray(value)
    except ValueError:
        routes = np.empty(0)
    if routes.ndim == 3 and len(routes) == tokens and routes.dtype.kind in "iu":
        return routes.astype(np.int16)
    return pad_routes(routes, tokens, 0, request)
