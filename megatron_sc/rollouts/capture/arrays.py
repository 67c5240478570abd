"""Plain arrays, for any sampler: what the other modules of this package end in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .head import NO_MASS, make_head, rectangle
from .request import Request
from .response import Head, Response
from .sampling import Sampling

Array = npt.NDArray[Any] | Sequence[Any]


def response(
    prompt_ids: Array,
    response_ids: Array,
    sampled_logprobs: Array,
    weight_version: Array | int,
    sampling: Sampling,
    *,
    head_ids: Array | None = None,
    head_logprobs: Array | None = None,
    head_sizes: Array | None = None,
    k: int | None = None,
    log_tail_mass: Array | None = None,
    response_mask: Array | None = None,
    finish_reason: str = "",
    expert_routes: npt.NDArray[Any] | None = None,
    request: Request | None = None,
) -> Response:
    """Check a response and bring it into the form of the buffer.

    Args:
        prompt_ids: int ``[P]``.
        response_ids: int ``[R]``.
        sampled_logprobs: float ``[R]`` log q of each token of the response.
        weight_version: int ``[R]``, or one for all.
        sampling: how tokens were drawn.
        head_ids: int ``[R, k]`` with ids below 0 as padding; or flat, with ``head_sizes``. None: no heads.
        head_logprobs: float, like ``head_ids``. -inf, and numbers at or below -9999, mean no mass.
        head_sizes: int ``[R]`` entries of each position in flat ``head_ids``.
        k: how many tokens were asked for, where rows of k + 1 hold the sampled token in addition, first or last.
        log_tail_mass: float ``[R]`` log of the mass outside the head, where the sampler reports it.
        response_mask: bool ``[R]``; False: not drawn from the sampler (a tool's token). None: all were.
        finish_reason: any text.
        expert_routes: int16 ``[P + R, layers, top-k]``, see ``routes.pad_routes``.
        request: for errors.

    Raises:
        CaptureError: if lengths differ, a trained token has no log-probability, or ``head.make_head`` refuses a head.
    """
    request = request or Request("", "arrays")
    temperature = sampling.check(request)
    prompt, tokens = _ids(prompt_ids, "prompt_ids", request), _ids(response_ids, "response_ids", request)
    length = len(tokens)
    trained = np.ones(length, np.bool_) if response_mask is None else _mask(response_mask, request)
    sampled = np.array(sampled_logprobs, np.float32)
    versions = (
        np.full(length, weight_version, np.int32)
        if isinstance(weight_version, int | np.integer)
        else _ids(weight_version, "weight_version", request)
    )
    tail = None if log_tail_mass is None else np.asarray(log_tail_mass, np.float32)
    per_token = {
        "response_mask": trained,
        "sampled_logprobs": sampled,
        "weight_version": versions,
        "log_tail_mass": tail,
    }
    for name, values in per_token.items():
        if values is not None and len(values) != length:
            raise lengths_differ(name, len(values), length, request)
    unknown = ~(sampled > NO_MASS)  # NaN too
    if (trained & unknown).any():
        position = int((trained & unknown).argmax())
        raise request.error(
            f"the sampled token {tokens[position]} has log-probability {sampled[position]}",
            "a sampled token has mass: ask the engine for its log-probability, or mask a token that was not sampled",
            position,
        )
    sampled[unknown] = 0
    return Response(
        prompt_ids=prompt,
        response_ids=tokens,
        response_mask=trained,
        sampled_logprobs=sampled,
        weight_version=versions,
        head=_head(head_ids, head_logprobs, head_sizes, k, tokens, sampled, trained, sampling, request),
        log_tail_mass=tail,
        head_is_support=sampling.truncates and head_ids is not None,
        temperature=temperature,
        finish_reason=finish_reason,
        expert_routes=expert_routes,
        name=request.name,
    )


def lengths_differ(name: str, found: int, length: int, request: Request) -> Exception:
    """The error for a per-token field of another length than the response."""
    return request.error(
        f"{name} has {found} entries and response_ids {length}",
        "one entry a generated token: keep stop tokens in both or in neither, and append nothing after sampling",
    )


def _head(
    head_ids: Array | None,
    head_logprobs: Array | None,
    head_sizes: Array | None,
    k: int | None,
    tokens: npt.NDArray[np.int32],
    sampled: npt.NDArray[np.float32],
    trained: npt.NDArray[np.bool_],
    sampling: Sampling,
    request: Request,
) -> Head | None:
    if (head_ids is None) != (head_logprobs is None):
        raise request.error("head_ids or head_logprobs is absent", "give both")
    if head_ids is None or head_logprobs is None:
        return None
    ids, logprobs = np.asarray(head_ids), np.asarray(head_logprobs, np.float32)
    if ids.shape != logprobs.shape:
        raise request.error(
            f"head_ids has shape {list(ids.shape)} and head_logprobs {list(logprobs.shape)}", "must be the same"
        )
    if head_sizes is None:
        if ids.ndim != 2:
            raise request.error(f"head_ids has {ids.ndim} dimensions", "must be [R, k], or flat with head_sizes")
        listed = rectangle(ids, logprobs)
    else:
        listed = Head(_ids(head_sizes, "head_sizes", request), _ids(ids, "head_ids", request), logprobs)
    if len(listed.sizes) != len(tokens):
        raise lengths_differ("head_ids", len(listed.sizes), len(tokens), request)
    return make_head(listed, tokens, sampled, trained, sampling, request, k)


def _mask(values: Array, request: Request) -> npt.NDArray[np.bool_]:
    array = np.asarray(values)
    if array.dtype != np.bool_ and (other := (array != 0) & (array != 1)).any():
        raise request.error(
            f"response_mask is {array[int(other.argmax())]}",
            "must be 0 or 1: a token trains or not",
            int(other.argmax()),
        )
    return array.astype(np.bool_)


def _ids(values: Array, name: str, request: Request) -> npt.NDArray[np.int32]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise request.error(f"{name} has {array.ndim} dimensions", "must have one")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise request.error(f"{name} has dtype {array.dtype}", "must be integers")
    if array.dtype.itemsize > 4 and array.size and not -(1 << 31) <= array.min() <= array.max() < 1 << 31:
        raise request.error(f"{name} has values in [{array.min()}, {array.max()}]", "must fit int32")
    return array.astype(np.int32)
