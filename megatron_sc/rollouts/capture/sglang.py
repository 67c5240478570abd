"""SGLang: ``/generate`` (HTTP or ``Engine.generate``), and its chat endpoint with ``return_meta_info``.

Follows SGLang 0.5.23 (``srt/managers/tokenizer_manager.py``, ``io_struct.GenerateReqInput``, ``layers/sampler.py``):

    meta_info.output_token_logprobs         (log-probability, id, text or None) of each sampled token
    meta_info.output_top_logprobs           the same for the top k; the sampled token is not added
    meta_info.output_top_logprobs_*_flat    the same as two arrays (return_flat_raw_output_top_logprobs), or as base64
                                            of float32 and int32 (return_flat_raw_top_logprobs_b64): the fast form
    meta_info.output_token_sampling_mask    each token's support (return_sampling_mask), with
    meta_info.output_token_sampling_logprobs   its log-probabilities (sampling_logprobs_mode "support")
    meta_info.weight_versions               spans with version, start, end; older versions: weight_version, at the end
    meta_info.routed_experts                base64 of int32, without a shape

The top log-probabilities are taken after penalties and temperature but before top-p, top-k and min-p, so that a
truncating sampler needs the support. With SGLANG_RETURN_ORIGINAL_LOGPROB they are before temperature too. ``-inf`` is
sent as the smallest float32.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ragged import offsets_of
from ..schema import ExpertRoutes, SamplerFingerprint
from ..validate import find_tokens
from . import arrays
from .request import Request
from .response import Head, Response
from .routes import decode_int32, pad_routes
from .sampling import NEUTRAL, Sampling, parameters
from .versions import WeightVersion, token_versions

ENGINE = "sglang"
SUPPORT = (
    "SGLang's top log-probabilities are not truncated: set return_sampling_mask and sampling_logprobs_mode='support'"
)
PROCESSED = "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
TOP = "set return_logprob and top_logprobs_num"
FLAGS = {
    "meta_info": "return_meta_info",
    "response_token_ids": "return_token_ids",
    "prompt_token_ids": "return_token_ids",
}
"""What a choice of a chat reply must have, and how to ask for it."""


def responses(
    outputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    request: Mapping[str, Any],
    *,
    weight_version: WeightVersion = None,
    expert_routes: ExpertRoutes | None = None,
    original_logprobs: bool = False,
    defaults: Mapping[str, float] | None = NEUTRAL,
) -> list[Response]:
    """The responses of one ``/generate`` request.

    Args:
        outputs: parsed JSON of the reply: one object, or a list of them for n > 1 or several prompts.
        request: parsed JSON of the request; its ``input_ids`` are the prompt if the reply has no ``prompt_token_ids``.
        weight_version: see ``versions.WeightVersion``.
        expert_routes: shape of the routes, where they are returned.
        original_logprobs: SGLANG_RETURN_ORIGINAL_LOGPROB is set.
        defaults: see ``sampling.parameters``; other than neutral where the server has --preferred-sampling-params.

    Raises:
        CaptureError: see ``arrays.response``; and for an output that is not finished or carries no log-probabilities.
    """
    listed = [outputs] if isinstance(outputs, Mapping) else outputs
    result = []
    for index, output in enumerate(listed):
        place = Request(ENGINE, str(index))
        with place.reading("a reply of SGLang"):
            place = Request(ENGINE, str(output["meta_info"].get("id", index)))
        with place.reading("a reply of SGLang"):
            result.append(
                _response(
                    output,
                    request,
                    place,
                    weight_version=weight_version,
                    expert_routes=expert_routes,
                    original_logprobs=original_logprobs,
                    defaults=defaults,
                )
            )
    return result


def responses_from_chat(
    body: Mapping[str, Any],
    request: Mapping[str, Any],
    *,
    weight_version: WeightVersion = None,
    expert_routes: ExpertRoutes | None = None,
    original_logprobs: bool = False,
    defaults: Mapping[str, float] | None = None,
) -> list[Response]:
    """The responses in a ``/v1/chat/completions`` reply, one a choice.

    The request needs ``logprobs``, ``top_logprobs``, ``return_meta_info`` and ``return_token_ids``. The completions
    endpoint returns texts in place of token ids: use ``/generate`` instead.

    Args:
        body: parsed JSON of the reply.
        request: parsed JSON of the request.
        weight_version: see ``versions.WeightVersion``.
        expert_routes: shape of the routes, where they are returned.
        original_logprobs: SGLANG_RETURN_ORIGINAL_LOGPROB is set.
        defaults: see ``sampling.parameters``.

    Raises:
        CaptureError: as ``responses``.
    """
    outputs = []
    with Request(ENGINE, "?").reading("a chat reply of SGLang"):
        for choice in body["choices"]:
            place = Request(ENGINE, f"{body.get('id')}/{choice.get('index')}")
            for key, flag in FLAGS.items():
                if choice.get(key) is None:
                    raise place.error(f"no {key}", f"set {flag} in the request")
            outputs.append(
                {
                    "output_ids": choice["response_token_ids"],
                    "prompt_token_ids": choice["prompt_token_ids"],
                    "meta_info": {**choice["meta_info"], "id": place.name},
                }
            )
    return responses(
        outputs,
        {**request, "sampling_params": request, "top_logprobs_num": request.get("top_logprobs")},
        weight_version=weight_version,
        expert_routes=expert_routes,
        original_logprobs=original_logprobs,
        defaults=defaults,
    )


def fingerprint(
    server_info: Mapping[str, Any],
    sampling_params: Mapping[str, Any],
    *,
    original_logprobs: bool = False,
    defaults: Mapping[str, float] | None = NEUTRAL,
) -> SamplerFingerprint:
    """What ``GET /server_info`` tells for a buffer's manifest.

    Args:
        server_info: its parsed JSON.
        sampling_params: of all requests of the buffer.
        original_logprobs: SGLANG_RETURN_ORIGINAL_LOGPROB is set.
        defaults: see ``sampling.parameters``.
    """
    quantization = server_info.get("quantization") or ""
    dtype = server_info.get("dtype") or ""
    dtype = "" if dtype == "auto" or quantization else dtype  # auto: as the checkpoint has it
    cache = server_info.get("kv_cache_dtype") or ""
    return _sampling(sampling_params, defaults, original_logprobs, Request(ENGINE, "parameters")).fingerprint(
        engine=ENGINE,
        engine_version=server_info.get("version") or "",
        weight_dtype=dtype,
        activation_dtype=dtype,
        kv_cache_dtype=dtype if cache == "auto" else cache,
        quantization=quantization,
    )


def _sampling(
    wanted: Mapping[str, Any], defaults: Mapping[str, float] | None, original_logprobs: bool, request: Request
) -> Sampling:
    if wanted.get("watermark"):
        raise request.error("watermark is set", "log-probabilities are those before the watermark: leave it out")
    if (wanted.get("beam_width") or 1) > 1:
        raise request.error(f"beam_width is {wanted['beam_width']}", "beam search does not sample: leave it out")
    given = parameters(wanted, defaults, request)
    if given["top_k"] == 1:
        raise request.error("top_k is 1", "a greedy response has no distribution to center under")
    # Penalties are applied before log-probabilities are taken, and a support's are exact: only temperature is left.
    if original_logprobs and not Sampling(**given).truncates:
        Sampling(given["temperature"], logprobs="raw", advice=PROCESSED).check(request)
    sampling = Sampling(**given, advice=SUPPORT)
    sampling.check(request)
    return sampling


def _response(
    output: Mapping[str, Any],
    sent: Mapping[str, Any],
    request: Request,
    *,
    weight_version: WeightVersion,
    expert_routes: ExpertRoutes | None,
    original_logprobs: bool,
    defaults: Mapping[str, float] | None,
) -> Response:
    meta, output_ids = output["meta_info"], output.get("output_ids")
    wanted = sent.get("sampling_params") or {}
    if not isinstance(wanted, Mapping):
        raise request.error("sampling_params is a list", "send one set of sampling parameters a request")
    sampling = _sampling(wanted, defaults, original_logprobs, request)
    prompt = output.get("prompt_token_ids")
    if prompt is None:
        prompt = sent.get("input_ids")
        if not prompt or not isinstance(prompt[0], int):
            raise request.error("no prompt_token_ids", "set return_prompt_token_ids, or send one prompt's input_ids")
    if (counted := meta.get("prompt_tokens")) is not None and counted != len(prompt):
        raise request.error(
            f"prompt_tokens is {counted}, the prompt has {len(prompt)} tokens",
            "pass the token ids that were generated from",
        )
    reason = meta.get("finish_reason")
    if not reason:
        raise request.error("finish_reason is null", "capture the finished output")
    reported = meta.get("output_token_logprobs")
    if reported is None:
        note = (
            " (input_token_logprobs are another pass's, not the sampler's)" if meta.get("input_token_logprobs") else ""
        )
        raise request.error(f"no output_token_logprobs{note}", TOP)
    logprobs = _column(reported, 0, np.float32, "output_token_logprobs", request)
    tokens = _column(reported, 1, np.int32, "output_token_logprobs", request)
    if output_ids is not None:
        if len(output_ids) != len(tokens):
            raise arrays.lengths_differ("output_token_logprobs", len(tokens), len(output_ids), request)
        other = np.asarray(output_ids, np.int32) != tokens
        if other.any():
            position = int(other.argmax())
            raise request.error(
                f"output_ids has token {output_ids[position]}, output_token_logprobs {tokens[position]}",
                "both must be of the same response",
                position,
            )
    head: Head | None
    if sampling.truncates:
        head, logprobs = _support(meta, tokens, request)
    else:
        head = _top(meta, sent.get("top_logprobs_num"), request)
    if head is not None and len(head.sizes) != len(tokens):
        raise arrays.lengths_differ("top log-probabilities", len(head.sizes), len(tokens), request)
    routes = meta.get("routed_experts")
    total, start = len(prompt) + len(tokens), sent.get("routed_experts_start_len") or 0
    return arrays.response(
        prompt,
        tokens,
        logprobs,
        token_versions(_spans(meta, len(tokens)), len(tokens), weight_version, request),
        sampling,
        head_ids=None if head is None else head.ids,
        head_logprobs=None if head is None else head.logprobs,
        head_sizes=None if head is None else head.sizes,
        finish_reason=reason["type"] if isinstance(reason, Mapping) else str(reason),
        expert_routes=None
        if routes is None
        else pad_routes(decode_int32(routes, expert_routes, request), total, start, request),
        request=request,
    )


def _spans(meta: Mapping[str, Any], length: int) -> list[Any] | None:
    if (spans := meta.get("weight_versions")) is not None:
        return list(spans)
    if (label := meta.get("weight_version")) is not None:
        return [{"version": label, "start": 0, "end": length}]
    return None


def _top(meta: Mapping[str, Any], k: Any, request: Request) -> Head | None:
    """Top log-probabilities: nested, flat, or flat in base64. None: not asked for."""
    if any(key.startswith("output_top_logprobs_") for key in meta):
        head = _flat(meta, meta["output_top_logprobs_shape"], request)
    elif (rows := meta.get("output_top_logprobs")) is not None:
        if None in rows:
            raise request.error("output_top_logprobs is null", TOP, rows.index(None))
        entries = list(chain.from_iterable(rows))
        head = Head(
            np.fromiter(map(len, rows), np.int32, len(rows)),
            _column(entries, 1, np.int32, "output_top_logprobs", request),
            _column(entries, 0, np.float32, "output_top_logprobs", request),
        )
    elif k:
        raise request.error("no output_top_logprobs", TOP)
    else:
        return None
    if k and (other := head.sizes != k).any():
        position = int(other.argmax())
        raise request.error(
            f"{head.sizes[position]} tokens listed, asked for {k}", "pass the request that made this response", position
        )
    return head


def _flat(meta: Mapping[str, Any], shape: Sequence[int], request: Request) -> Head:
    rows, k = shape
    if meta.get("output_top_logprobs_null_prefix"):
        raise request.error(
            f"output_top_logprobs_null_prefix is {meta['output_top_logprobs_null_prefix']}",
            f"every generated token needs top log-probabilities: {TOP}",
            0,
        )
    arrays_read = []
    for name, dtype in (("idx", np.dtype("<i4")), ("val", np.dtype("<f4"))):
        key = f"output_top_logprobs_{name}_flat"
        if key in meta:
            values = np.asarray(meta[key], dtype)
        else:
            stated = meta.get(f"{key}_b64_dtype", dtype.name)
            if stated != dtype.name:
                raise request.error(f"{key}_b64_dtype is {stated!r}", f"must be {dtype.name}, as SGLang 0.5.23 sends")
            try:
                values = np.frombuffer(base64.b64decode(meta[f"{key}_b64"], validate=True), dtype)
            except (KeyError, ValueError, binascii.Error) as error:
                raise request.error(f"{key}_b64 is no base64 of {dtype.name} ({error})", "pass it as it came") from None
        if values.size != rows * k:
            raise request.error(f"{key} has {values.size} values for shape {list(shape)}", "pass the reply as it came")
        arrays_read.append(values)
    ids, logprobs = arrays_read
    return Head(np.full(rows, k, np.int32), ids, logprobs)


def _support(
    meta: Mapping[str, Any], tokens: npt.NDArray[np.int32], request: Request
) -> tuple[Head, npt.NDArray[np.float32]]:
    """What could be sampled, and the sampled tokens' log-probabilities under it."""
    masks, logprobs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if masks is None or logprobs is None or (logprobs and not isinstance(logprobs[0], Sequence)):
        raise request.error("a truncated sampler, and no log-probabilities of its support", SUPPORT)
    sizes, widths = (np.fromiter(map(len, rows), np.int32, len(rows)) for rows in (masks, logprobs))
    if len(sizes) != len(tokens):
        raise arrays.lengths_differ("output_token_sampling_mask", len(sizes), len(tokens), request)
    if not np.array_equal(sizes, widths):
        raise request.error(
            "output_token_sampling_mask and output_token_sampling_logprobs have rows of different lengths", SUPPORT
        )
    total = int(sizes.sum())
    head = Head(
        sizes,
        np.fromiter(chain.from_iterable(masks), np.int32, total),
        np.fromiter(chain.from_iterable(logprobs), np.float32, total),
    )
    inside, at = find_tokens(tokens, head.ids, offsets_of(sizes))
    if not inside.all():
        position = int((~inside).argmax())
        raise request.error(
            f"the sampled token {tokens[position]} is not in its sampling mask", f"it was sampled: {SUPPORT}", position
        )
    return head, head.logprobs[at]


def _column(entries: Sequence[Any], column: int, dtype: Any, field: str, request: Request) -> npt.NDArray[Any]:
    """One element of each (log-probability, id, text)."""
    if None in entries:
        raise request.error(f"{field} is null", TOP, entries.index(None))
    return np.fromiter(map(itemgetter(column), entries), dtype, len(entries))
