"""vLLM: ``RequestOutput`` of its engines, and the JSON of its servers.

Follows vLLM 0.33.0:

    vllm.outputs.RequestOutput, CompletionOutput, SamplingMask, WeightVersionSpan
    vllm.logprobs.Logprob, FlatLogprobs              rows list the sampled token first, then the top k
    /inference/v1/generate (output_mode "tokens")    GenerateTokensResponse; integer ids, every candidate
    /v1/completions                                  CompletionResponse; needs return_token_ids and
                                                     return_tokens_as_token_ids; the first logprobs + 1 candidates
    /v1/chat/completions                             ChatCompletionResponse; the same flags; the first top_logprobs ones

Older versions lack some fields (``sampling_mask``, ``weight_versions``, ``routed_experts``), which are then not used.
What the log-probabilities are of is the engine's ``--logprobs-mode``, which no output tells: its default, raw_logprobs,
is before temperature, penalties and truncation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ragged import offsets_of
from ..rollout import Int32
from ..schema import SamplerFingerprint
from ..validate import SAMPLED_SLACK
from . import arrays
from .head import check_entries, select
from .request import Request
from .response import Head, Int16, Response
from .routes import decode_npy, pad_routes
from .sampling import NEUTRAL, LogprobsMode, Sampling, parameters
from .versions import WeightVersion, token_versions

ENGINE = "vllm"
MODES: dict[str, LogprobsMode] = {"processed_logprobs": "processed", "raw_logprobs": "raw"}
ADVICE = "start vLLM with --logprobs-mode processed_logprobs"
CHANGES_LOGITS = (
    "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "min_tokens", "thinking_token_budget"
)  # fmt: skip
"""Parameters of a request that raw log-probabilities do not show."""
PREFIX = "token_id:"
"""How servers write a token's id in place of its text, when asked to."""


def responses(output: Any, params: Any, *, logprobs_mode: str, weight_version: WeightVersion = None) -> list[Response]:
    """The responses of one request.

    Args:
        output: a finished ``RequestOutput``; its logprobs are dicts, or ``FlatLogprobs`` (``flat_logprobs=True``).
        params: the request's ``SamplingParams``, with ``logprobs`` set to k.
        logprobs_mode: of the engine: "processed_logprobs" or "raw_logprobs".
        weight_version: see ``versions.WeightVersion``.

    Raises:
        CaptureError: see ``arrays.response``; and for an output that is not finished or carries no log-probabilities.
    """
    request = Request(ENGINE, str(output.request_id))
    sampling = sampling_of(params, logprobs_mode, request)
    if not output.finished:
        raise request.error("finished is False", "capture the last output (RequestOutputKind.FINAL_ONLY)")
    if output.prompt_token_ids is None:
        raise request.error("prompt_token_ids is None", "pass the prompt as token ids")
    result = []
    for choice in output.outputs:
        request = Request(ENGINE, f"{output.request_id}/{choice.index}")
        if choice.logprobs is None:
            note = " (prompt_logprobs are another pass's, not the sampler's)" if output.prompt_logprobs else ""
            raise request.error(f"logprobs is None{note}", "set SamplingParams.logprobs")
        mask = getattr(choice, "sampling_mask", None)
        with request.reading("a RequestOutput"):
            result.append(
                _response(
                    output.prompt_token_ids,
                    choice.token_ids,
                    _listed(choice.logprobs, request),
                    params.logprobs,
                    sampling,
                    request,
                    finish_reason=choice.finish_reason,
                    spans=getattr(choice, "weight_versions", None),
                    weight_version=weight_version,
                    routes=getattr(choice, "routed_experts", None),
                    routes_start=getattr(params, "routed_experts_prompt_start", 0),
                    support=None if mask is None else mask.token_ids,
                )
            )
    return result


def responses_from_json(
    body: Mapping[str, Any],
    request: Mapping[str, Any],
    *,
    logprobs_mode: str,
    weight_version: WeightVersion = None,
    defaults: Mapping[str, float] | None = None,
) -> list[Response]:
    """The responses in a server's reply, one a choice.

    A chat's rows hold the sampled token and the k - 1 most likely others, or the k most likely with the sampled one
    among them, and do not say which. Their head is the k - 1 most likely tokens, in every row: ask for one more.

    Args:
        body: parsed JSON of ``/inference/v1/generate``, ``/v1/completions`` or ``/v1/chat/completions``.
        request: parsed JSON of the request.
        logprobs_mode: of the engine, as in ``responses``.
        weight_version: see ``versions.WeightVersion``.
        defaults: see ``sampling.parameters``.

    Raises:
        CaptureError: as ``responses``; and for tokens that are text instead of ids.
    """
    with Request(ENGINE, "?").reading("a reply of vLLM"):
        name = str(body.get("id") or body.get("request_id"))
        place = Request(ENGINE, name)
        if not isinstance(body.get("choices"), list) or not body["choices"]:
            raise place.error(f"no choices in {sorted(body)[:8]}", "pass the body of a reply that is not streamed")
        kind = body.get("object", "generate")
        if kind not in READ:
            raise place.error(f"object is {kind!r}", "must be a generate, completions or chat completions reply")
        wanted = request.get("sampling_params", {}) if kind == "generate" else request
        k = wanted.get("top_logprobs" if kind == "chat.completion" else "logprobs")
        if type(k) is not int:
            raise place.error(
                "the request asks for no top log-probabilities", "set logprobs (chat: logprobs and top_logprobs)"
            )
        sampling = _sampling(parameters(wanted, defaults, place), wanted.get, logprobs_mode, place)
    result = []
    for number, choice in enumerate(body["choices"]):
        place = Request(ENGINE, f"{name}/{number}")
        with place.reading("a reply of vLLM"):
            if choice.get("logprobs") is None:
                raise place.error("logprobs is null", "ask for log-probabilities in the request that generates")
            listed, named, reported = READ[kind](choice["logprobs"], place)
            tokens = choice.get("token_ids")
            encoded = choice.get("routed_experts")
            result.append(
                _response(
                    _prompt(body, choice, request, place),
                    named if tokens is None else tokens,
                    listed,
                    k,
                    sampling,
                    place,
                    cut=kind == "chat.completion",
                    reported=reported,
                    finish_reason=choice.get("finish_reason"),
                    spans=choice.get("weight_versions"),
                    weight_version=weight_version,
                    routes=None if encoded is None else decode_npy(encoded, place),
                    routes_start=wanted.get("routed_experts_prompt_start") or 0,
                    support=choice.get("sampling_mask"),
                )
            )
    return result


def sampling_of(params: Any, logprobs_mode: str, request: Request | None = None) -> Sampling:
    """How a request's tokens are drawn.

    Args:
        params: its ``SamplingParams``.
        logprobs_mode: of the engine.
        request: for errors.

    Raises:
        CaptureError: for parameters under which log-probabilities are not those of a sampled token's top k.
    """
    request = request or Request(ENGINE, "parameters")
    given = {name: getattr(params, name) for name in NEUTRAL}
    given["top_k"] = max(given["top_k"], 0)
    if params.logprobs is None:
        raise request.error("SamplingParams.logprobs is None", "set it to k, the number of tokens of a head")
    return _sampling(given, lambda name: getattr(params, name, None), logprobs_mode, request)


def fingerprint(config: Any, params: Any, version: str = "") -> SamplerFingerprint:
    """What a ``VllmConfig`` tells for a buffer's manifest.

    Args:
        config: ``llm.llm_engine.vllm_config``, or ``vllm_config`` of an ``AsyncLLM``.
        params: the ``SamplingParams`` of all requests of the buffer.
        version: ``vllm.__version__``.

    Raises:
        CaptureError: as ``sampling_of``; and if the engine watermarks these requests.
    """
    if getattr(config, "watermark_config", None) is not None and getattr(params, "watermarking", None) is not False:
        raise Request(ENGINE, "parameters").error(
            "the engine has a watermark_config", "set SamplingParams.watermarking to False"
        )
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    quantization = model.quantization or ""
    cache = str(config.cache_config.cache_dtype)
    return sampling_of(params, model.logprobs_mode).fingerprint(
        engine=ENGINE,
        engine_version=version,
        # A scheme's name does not say which dtypes it uses: unknown.
        weight_dtype="" if quantization else dtype,
        activation_dtype="" if quantization else dtype,
        kv_cache_dtype=dtype if cache == "auto" and not quantization else "" if cache == "auto" else cache,
        quantization=quantization,
    )


def _sampling(given: Mapping[str, Any], get: Any, logprobs_mode: str, request: Request) -> Sampling:
    if logprobs_mode not in MODES:
        raise request.error(f"logprobs_mode is {logprobs_mode!r}", f"must be one of {', '.join(MODES)}: {ADVICE}")
    if get("trace_decode_token_ids"):
        raise request.error("trace_decode_token_ids is set", "forced tokens are not sampled: leave it out")
    if get("watermarking"):
        raise request.error("watermarking is set", "tokens are not drawn from the log-probabilities: set it to False")
    if get("logprob_token_ids"):
        raise request.error("logprob_token_ids is set", "these are chosen tokens, not the most likely: leave it out")
    altered = tuple(name for name in CHANGES_LOGITS if get(name))
    sampling = Sampling(**given, logprobs=MODES[logprobs_mode], altered=altered, advice=ADVICE)
    sampling.check(request)
    return sampling


def _prompt(
    body: Mapping[str, Any], choice: Mapping[str, Any], request: Mapping[str, Any], place: Request
) -> Sequence[int]:
    """From the reply, or from the request where that has token ids."""
    for prompt in (body.get("prompt_token_ids"), choice.get("prompt_token_ids"), request.get("token_ids")):
        if prompt is not None:
            return prompt
    prompt = request.get("prompt")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise place.error("no prompt_token_ids", "set return_token_ids in the request, or send token ids")


def _response(
    prompt: Sequence[int],
    token_ids: Sequence[int],
    listed: Head,
    k: int,
    sampling: Sampling,
    request: Request,
    *,
    cut: bool = False,
    reported: Sequence[Any] | None = None,
    finish_reason: str | None,
    spans: Sequence[Any] | None,
    weight_version: WeightVersion,
    routes: npt.NDArray[Any] | None,
    routes_start: int,
    support: Sequence[Sequence[int]] | None,
) -> Response:
    """Rows of ``listed`` have the sampled token first; ``cut``: they end after k, whether it is one of the k or not.

    ``reported`` are the sampled tokens' log-probabilities where they stand beside the rows.
    """
    if finish_reason == "error":
        raise request.error("finish_reason is error", "the engine failed: send the request again")
    tokens = np.asarray(token_ids, np.int32)
    if len(listed.sizes) != len(tokens):
        raise arrays.lengths_differ("logprobs", len(listed.sizes), len(tokens), request)
    if k < 0:
        raise request.error(f"logprobs is {k}", "ask for a number of tokens")
    if (listed.sizes == 0).any():
        position = int((listed.sizes == 0).argmax())
        raise request.error("no log-probabilities", "ask for them in the request that generates", position)
    first = offsets_of(listed.sizes)[:-1]
    other = listed.ids[first] != tokens
    if other.any():
        position = int(other.argmax())
        raise request.error(
            f"token_ids has {tokens[position]}, but logprobs begins with {listed.ids[first[position]]}",
            "a row begins with its sampled token: rows are shifted, or of another choice",
            position,
        )
    if (short := listed.sizes < max(k, 1)).any():
        position = int(short.argmax())
        raise request.error(
            f"{listed.sizes[position]} tokens listed, asked for {k}",
            "pass the request that made this response",
            position,
        )
    if support is not None and sampling.truncates:
        _check_support(support, listed, k, request)
    check_entries(listed, request)
    sampled, width = listed.logprobs[first], k
    if reported is not None:
        other = ~(np.abs(np.array(reported, np.float32) - sampled) <= SAMPLED_SLACK)
        if other.any():
            position = int(other.argmax())
            raise request.error(
                f"the sampled token has log-probability {reported[position]}, and {sampled[position]:.4f} among the "
                "candidates",
                "rows are shifted, or of another choice",
                position,
            )
    if cut and k and not sampling.truncates:
        listed, width = _most_likely(listed), k - 1
    return arrays.response(
        prompt,
        tokens,
        sampled,
        token_versions(spans, len(tokens), weight_version, request),
        sampling,
        head_ids=None if k == 0 else listed.ids,
        head_logprobs=None if k == 0 else listed.logprobs,
        head_sizes=None if k == 0 else listed.sizes,
        k=width,
        finish_reason=finish_reason or "",
        expert_routes=_routes(routes, len(prompt) + len(tokens), routes_start, request),
        request=request,
    )


def _routes(routes: npt.NDArray[Any] | None, tokens: int, start: int, request: Request) -> Int16 | None:
    return None if routes is None else pad_routes(np.asarray(routes), tokens, start, request)


def _check_support(support: Sequence[Sequence[int]], listed: Head, k: int, request: Request) -> None:
    """The engine's own account of how many tokens could be sampled."""
    if len(support) != len(listed.sizes):
        raise arrays.lengths_differ("sampling_mask", len(support), len(listed.sizes), request)
    sizes = np.fromiter(map(len, support), np.int64, len(support))
    wide = sizes > k
    if wide.any():
        position = int(wide.argmax())
        raise request.error(
            f"{sizes[position]} tokens could be sampled, {k} log-probabilities were asked for",
            "ask for at least as many as the sampler's top-k keeps",
            position,
        )


def _listed(logprobs: Any, request: Request) -> Head:
    """Rows of dicts or of ``FlatLogprobs``."""
    if hasattr(logprobs, "start_indices"):
        starts = np.array(logprobs.start_indices, np.int64)
        sizes = np.array(logprobs.end_indices, np.int64) - starts
        if (starts != offsets_of(sizes)[:-1]).any():
            raise request.error("FlatLogprobs has gaps between its positions", "pass the engine's own object")
        ids, values = logprobs.token_ids, logprobs.logprobs
        return Head(sizes.astype(np.int32), np.array(ids, np.int32), np.array(values, np.float32))
    if None in logprobs:
        raise request.error(
            "logprobs is None", "prompt_logprobs begin so: pass the output's own logprobs", logprobs.index(None)
        )
    sizes = np.fromiter(map(len, logprobs), np.int32, len(logprobs))
    total = int(sizes.sum())
    ids = np.fromiter(chain.from_iterable(logprobs), np.int32, total)
    objects = chain.from_iterable(row.values() for row in logprobs)
    return Head(sizes, ids, np.fromiter(map(attrgetter("logprob"), objects), np.float32, total))


Listed = tuple[Head, list[int], list[Any]]
"""Candidates; the sampled tokens, and their log-probabilities, as they stand beside the candidates."""


def _listed_generate(logprobs: Mapping[str, Any], request: Request) -> Listed:
    """``GenerateLogProbs``."""
    content = logprobs.get("content") or []
    rows = [position.get("top_logprobs") or [] for position in content]
    sizes = np.fromiter(map(len, rows), np.int32, len(rows))
    total = int(sizes.sum())
    ids = np.fromiter(map(itemgetter("token_id"), chain.from_iterable(rows)), np.int32, total)
    values = np.fromiter(map(itemgetter("logprob"), chain.from_iterable(rows)), np.float32, total)
    tokens, reported = _columns(content, "token_id", "logprob")
    return Head(sizes, ids, values), tokens, reported


def _listed_completion(logprobs: Mapping[str, Any], request: Request) -> Listed:
    """``CompletionLogProbs``."""
    rows = logprobs.get("top_logprobs") or []
    if None in rows:
        raise request.error("top_logprobs is null", "an echoed prompt begins so: leave echo out", rows.index(None))
    named = _ids_of(logprobs["tokens"], request).tolist()
    sizes = np.fromiter(map(len, rows), np.int32, len(rows))
    ids = _ids_of(list(chain.from_iterable(rows)), request)
    values = np.fromiter(chain.from_iterable(row.values() for row in rows), np.float32, len(ids))
    return Head(sizes, ids, values), named, logprobs["token_logprobs"]


def _listed_chat(logprobs: Mapping[str, Any], request: Request) -> Listed:
    """``ChatCompletionLogProbs``."""
    content = logprobs.get("content") or []
    tokens, reported = _columns(content, "token", "logprob")
    rows = [position.get("top_logprobs") or [] for position in content]
    sizes = np.fromiter(map(len, rows), np.int32, len(rows))
    ids = _ids_of(list(map(itemgetter("token"), chain.from_iterable(rows))), request)
    values = np.fromiter(map(itemgetter("logprob"), chain.from_iterable(rows)), np.float32, len(ids))
    return Head(sizes, ids, values), _ids_of(tokens, request).tolist(), reported


READ = {"generate": _listed_generate, "text_completion": _listed_completion, "chat.completion": _listed_chat}
"""How to read log-probabilities, by the ``object`` of a reply; ``/inference/v1/generate`` has none."""


def _columns(rows: Sequence[Mapping[str, Any]], *names: str) -> tuple[list[Any], ...]:
    return tuple([row[name] for row in rows] for name in names)


def _most_likely(listed: Head) -> Head:
    """Of k tokens, the sampled one first and the others sorted, the k - 1 most likely.

    The least likely of a row is either the k-th or a sampled token that is not among the k: without it both rows list
    the same tokens, whatever was sampled.
    """
    offsets = offsets_of(listed.sizes)
    first, last = offsets[:-1], offsets[1:] - 1
    keep = np.ones(len(listed.ids), np.bool_)
    keep[np.where(listed.logprobs[first] < listed.logprobs[last], first, last)] = False
    return select(listed, keep)


def _ids_of(names: list[str], request: Request) -> Int32:
    """Ids of tokens that a server writes as ``token_id:N``."""
    parts = "".join(names).split(PREFIX)
    try:
        if parts[0] or len(parts) != len(names) + 1:
            raise ValueError
        return np.fromiter(map(int, parts[1:]), np.int32, len(names))
    except ValueError:
        found = next((name for name in names if not name.startswith(PREFIX)), names[0])
        raise request.error(
            f"the token {found!r} is text",
            "set return_tokens_as_token_ids in the request: texts do not identify tokens",
        ) from None
