"""One response of several requests: tools in between, or aborted and resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .request import Request
from .response import Head, Int16, Response


def join(segments: Sequence[Response], engine: str = "") -> Response:
    """The response that these requests made together.

    The prompt of each segment is the tokens so far and, between them and its own response, what a tool or a user said:
    those get mask False, log-probability 0, no head, and the weight version of the segment before.

    Expert routes: tokens of a segment keep those with which they were sampled. A later segment, whose engine fed all
    tokens again, adds those from its predecessor's last token on.

    Args:
        segments: in order; the first one's prompt is the rollout's.
        engine: for errors.

    Raises:
        CaptureError: if a prompt does not continue the segments before it (the text was tokenized again, or a token was
            dropped), or if temperatures, or the presence of heads, of supports or of routes differ.
    """
    first = segments[0]
    if len(segments) == 1:
        return first
    request = Request(engine, " + ".join(segment.name for segment in segments))
    for name in ("temperature", "head_is_support"):
        values = {getattr(segment, name) for segment in segments}
        if len(values) > 1:
            raise request.error(f"segments have {name} {sorted(values)}", "sample a response with one setting")
    for name in ("head", "expert_routes", "log_tail_mass"):
        if len({getattr(segment, name) is None for segment in segments}) > 1:
            raise request.error(f"{name} is recorded for some segments only", "ask for it in every request")
    context = np.concatenate([first.prompt_ids, first.response_ids])
    parts = [first]
    for number, segment in enumerate(segments[1:], 1):
        tool = _continuation(context, segment, number, request)
        if len(tool):
            parts.append(_unsampled(tool, parts[-1]))
        parts.append(segment)
        context = np.concatenate([segment.prompt_ids, segment.response_ids])

    def column(get: Callable[[Response], Any]) -> npt.NDArray[Any]:
        return np.concatenate([get(part) for part in parts])

    return Response(
        prompt_ids=first.prompt_ids,
        response_ids=column(lambda p: p.response_ids),
        response_mask=column(lambda p: p.response_mask),
        sampled_logprobs=column(lambda p: p.sampled_logprobs),
        weight_version=column(lambda p: p.weight_version),
        head=None if first.head is None else _join_heads([part.head for part in parts if part.head is not None]),
        log_tail_mass=None if first.log_tail_mass is None else column(lambda p: p.log_tail_mass),
        head_is_support=first.head_is_support,
        temperature=first.temperature,
        finish_reason=segments[-1].finish_reason,
        expert_routes=_join_routes(segments, request),
        name=request.name,
    )


def _continuation(context: npt.NDArray[np.int32], segment: Response, number: int, request: Request) -> Any:
    """What stands between the tokens so far and the segment's own response."""
    prompt = segment.prompt_ids
    shared = min(len(prompt), len(context))
    differs = prompt[:shared] != context[:shared]
    if differs.any() or len(prompt) < len(context):
        at = int(differs.argmax()) if differs.any() else len(prompt)
        found = f"has token {prompt[at]}" if at < len(prompt) else "ends"
        raise request.error(
            f"the prompt of segment {number} ({segment.name}) {found} at {at}, where the tokens so far have "
            f"{context[at]}",
            "continue with the token ids that were sampled, not with their text",
        )
    return prompt[len(context) :]


def _unsampled(tokens: npt.NDArray[np.int32], before: Response) -> Response:
    """Tokens that no sampler drew."""
    n = len(tokens)
    versions = before.weight_version
    none = np.empty(0, np.int32)
    return Response(
        prompt_ids=none,
        response_ids=tokens,
        response_mask=np.zeros(n, np.bool_),
        sampled_logprobs=np.zeros(n, np.float32),
        weight_version=np.full(n, versions[-1] if len(versions) else 0, np.int32),
        head=Head(np.zeros(n, np.int32), none, np.empty(0, np.float32)),
        log_tail_mass=np.full(n, np.nan, np.float32),
        head_is_support=before.head_is_support,
        temperature=before.temperature,
        finish_reason="",
        expert_routes=None,
        name="",
    )


def _join_heads(heads: Sequence[Head]) -> Head:
    return Head(
        np.concatenate([head.sizes for head in heads]),
        np.concatenate([head.ids for head in heads]),
        np.concatenate([head.logprobs for head in heads]),
    )


def _join_routes(segments: Sequence[Response], request: Request) -> Int16 | None:
    last = segments[-1].expert_routes
    if last is None:
        return None
    joined = np.full(last.shape, -1, np.int16)
    known = 0
    for segment in segments:
        routes = segment.expert_routes
        assert routes is not None
        if routes.shape[1:] != last.shape[1:]:
            raise request.error(
                f"routed_experts has shapes {list(routes.shape[1:])} and {list(last.shape[1:])}",
                "segments must be of one model",
            )
        joined[known : len(routes)] = routes[known:]
        known = max(len(routes) - 1, 0)  # of its last token there is none: the next segment has it
    return joined
