"""What engines hand over, in their shapes, made from one known sampler.

The classes have the fields of the real ones (vLLM 0.33.0, tinker 0.38.0) that a capture reads, and are filled the way
those engines fill them: the sampled token first, then the top k.
"""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PROMPT = [3, 1, 4]


@dataclass(frozen=True)
class Truth:
    """A sampler's distributions ``[R, V]`` (float64 log-probabilities, after all processing) and what it sampled."""

    logq: np.ndarray
    tokens: np.ndarray

    def top(self, k: int) -> np.ndarray:
        """Ids ``[R, k]``, most likely first."""
        return np.argsort(-self.logq, axis=1, kind="stable")[:, :k]

    @property
    def sampled(self) -> np.ndarray:
        """Log-probabilities ``[R]``."""
        return self.logq[np.arange(len(self.tokens)), self.tokens]

    def added(self, k: int) -> np.ndarray:
        """Ids ``[R, k + 1]``: the sampled token, then the top k; the sampled one may stand twice."""
        return np.concatenate([self.tokens[:, None], self.top(k)], axis=1)

    def at(self, ids: np.ndarray) -> np.ndarray:
        """float32 log-probabilities of these ids."""
        return np.take_along_axis(self.logq, ids, axis=1).astype(np.float32)


def truth(length: int = 12, vocab: int = 50, *, seed: int = 0, temperature: float = 1.0, top_k: int = 0) -> Truth:
    """A sampler whose tokens are within and outside its top 4 (a property of the seed)."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(length, vocab)) * 2 / temperature
    if top_k:
        logits[logits < np.sort(logits, axis=1)[:, -top_k, None]] = -np.inf
    logq = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    q = np.exp(logq)
    return Truth(logq, np.array([rng.choice(vocab, p=row / row.sum()) for row in q]))


@dataclass
class Logprob:
    """``vllm.logprobs.Logprob``."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class FlatLogprobs:
    """``vllm.logprobs.FlatLogprobs``."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def add(self, ids: list[int], logprobs: list[float]) -> None:
        """The next position."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids += ids
        self.logprobs += logprobs
        self.ranks += [None] * len(ids)
        self.decoded_tokens += [None] * len(ids)
        self.end_indices.append(len(self.token_ids))


@dataclass
class SamplingMask:
    """``vllm.outputs.SamplingMask``."""

    token_ids: list[list[int]]


@dataclass
class WeightVersionSpan:
    """``vllm.outputs.WeightVersionSpan``."""

    version: str
    start: int
    end: int


@dataclass
class CompletionOutput:
    """``vllm.outputs.CompletionOutput``."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: Any
    routed_experts: np.ndarray | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    sampling_mask: SamplingMask | None = None
    weight_versions: list[WeightVersionSpan] | None = None


@dataclass
class RequestOutput:
    """``vllm.outputs.RequestOutput``."""

    request_id: str
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    prompt_logprobs: Any = None
    finished: bool = True


@dataclass
class VllmParams:
    """``vllm.SamplingParams``."""

    logprobs: int | None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: Any = None
    thinking_token_budget: int | None = None
    logprob_token_ids: list[int] | None = None
    trace_decode_token_ids: list[int] | None = None
    routed_experts_prompt_start: int = 0
    watermarking: bool | None = None


def vllm_rows(source: Truth, k: int) -> list[dict[int, Logprob]]:
    """``SampleLogprobs`` as dicts: the sampled token once, first."""
    ids = source.added(k)
    values = source.at(ids)
    return [
        {int(i): Logprob(float(v)) for i, v in zip(row, line, strict=True)}
        for row, line in zip(ids, values, strict=True)
    ]


def vllm_flat(source: Truth, k: int) -> FlatLogprobs:
    """``FlatLogprobs``: always k + 1 entries."""
    ids = source.added(k)
    flat = FlatLogprobs()
    for row, values in zip(ids.tolist(), source.at(ids).tolist(), strict=True):
        flat.add(row, values)
    return flat


def vllm_output(source: Truth, logprobs: Any, **fields: Any) -> RequestOutput:
    choice = CompletionOutput(0, "", source.tokens.tolist(), float(source.sampled.sum()), logprobs, **fields)
    return RequestOutput("cmpl-1", list(PROMPT), [choice])


def vllm_generate_json(source: Truth, k: int, **fields: Any) -> dict[str, Any]:
    """Reply of ``/inference/v1/generate``."""
    content = []
    for token, row in zip(source.tokens.tolist(), vllm_rows(source, k), strict=True):
        top = [{"token_id": i, "logprob": max(v.logprob, -9999.0), "rank": 1} for i, v in row.items()]
        content.append({"token_id": token, "logprob": top[0]["logprob"], "rank": 1, "top_logprobs": top})
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": source.tokens.tolist(),
        "logprobs": {"content": content},
        **fields,
    }
    return {"request_id": "gen-1", "prompt_token_ids": PROMPT, "output_mode": "tokens", "choices": [choice]}


def vllm_completion_json(source: Truth, k: int, **fields: Any) -> dict[str, Any]:
    """Reply of ``/v1/completions``."""
    rows = [
        {f"token_id:{i}": max(v.logprob, -9999.0) for i, v in list(row.items())[: k + 1]}
        for row in vllm_rows(source, k)
    ]
    tokens = source.tokens.tolist()
    choice = {
        "index": 0,
        "text": "",
        "finish_reason": "length",
        "token_ids": tokens,
        "prompt_token_ids": PROMPT,
        "logprobs": {
            "tokens": [f"token_id:{i}" for i in tokens],
            "token_logprobs": [row[f"token_id:{i}"] for i, row in zip(tokens, rows, strict=True)],
            "top_logprobs": rows,
            "text_offset": [0] * len(rows),
        },
        **fields,
    }
    return {"id": "cmpl-2", "object": "text_completion", "choices": [choice]}


def vllm_chat_json(source: Truth, k: int, **fields: Any) -> dict[str, Any]:
    """Reply of ``/v1/chat/completions``: only the first k candidates."""
    content = []
    for token, row in zip(source.tokens.tolist(), vllm_rows(source, k), strict=True):
        top = [{"token": f"token_id:{i}", "logprob": max(v.logprob, -9999.0)} for i, v in list(row.items())[:k]]
        content.append({"token": f"token_id:{token}", "logprob": top[0]["logprob"], "top_logprobs": top})
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": ""},
        "finish_reason": "stop",
        "token_ids": source.tokens.tolist(),
        "logprobs": {"content": content},
        **fields,
    }
    return {"id": "chat-1", "object": "chat.completion", "prompt_token_ids": PROMPT, "choices": [choice]}


def sglang_output(source: Truth, k: int, form: str = "nested", **meta: Any) -> dict[str, Any]:
    """One ``/generate`` reply; ``form``: nested, flat or b64."""
    tokens = source.tokens.tolist()
    floor = float(np.finfo(np.float32).min)  # SGLang clamps -inf
    sampled = np.maximum(source.sampled, floor).astype(np.float32).tolist()
    ids = source.top(k)
    values = np.maximum(source.at(ids), np.float32(floor))
    if form == "nested":
        top: dict[str, Any] = {
            "output_top_logprobs": [
                [(v, i, None) for i, v in zip(row, line, strict=True)]
                for row, line in zip(ids.tolist(), values.tolist(), strict=True)
            ]
        }
    else:
        top = {"output_top_logprobs_shape": list(ids.shape), "output_top_logprobs_null_prefix": 0}
        for name, array in (("idx", ids.astype("<i4")), ("val", values.astype("<f4"))):
            key = f"output_top_logprobs_{name}_flat"
            if form == "flat":
                top[key] = array.reshape(-1).tolist()
            else:
                top[f"{key}_b64"] = base64.b64encode(array.tobytes()).decode()
                top[f"{key}_b64_dtype"] = array.dtype.name
    return {
        "text": "",
        "output_ids": tokens,
        "prompt_token_ids": list(PROMPT),
        "meta_info": {
            "id": "rid-1",
            "finish_reason": {"type": "stop", "matched": 2},
            "weight_version": "7",
            "completion_tokens": len(tokens),
            "output_token_logprobs": [(v, i, None) for v, i in zip(sampled, tokens, strict=True)],
            **top,
            **meta,
        },
    }


def sglang_support(source: Truth) -> dict[str, Any]:
    """What ``return_sampling_mask`` with mode "support" adds to meta_info."""
    masks = [np.flatnonzero(np.isfinite(row)).tolist() for row in source.logq]
    return {
        "output_token_sampling_mask": masks,
        "output_token_sampling_logprobs": [
            row[mask].astype(np.float32).tolist() for row, mask in zip(source.logq, masks, strict=True)
        ],
    }


def npy_base64(array: np.ndarray) -> str:
    """As vLLM's servers encode arrays."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


@dataclass(frozen=True)
class TopkLogprobs:
    """``tinker.types.TopkLogprobs``."""

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class SampledSequence:
    """``tinker.types.SampledSequence``."""

    stop_reason: str
    sequence_id: str
    tokens_np: np.ndarray | None = None
    logprobs_np: np.ndarray | None = None
    topk_logprobs_np: TopkLogprobs | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    topk_logprobs: list[list[tuple[int, float]] | None] | None = None


@dataclass(frozen=True)
class SampleResponse:
    """``tinker.types.SampleResponse``."""

    sequences: list[SampledSequence]


@dataclass(frozen=True)
class TinkerParams:
    """``tinker.types.SamplingParams``."""

    temperature: float = 1
    top_k: int = -1
    top_p: float = 1


@dataclass(frozen=True)
class ModelInput:
    """``tinker.types.ModelInput``."""

    tokens: list[int]

    def to_ints(self) -> list[int]:
        """Token ids."""
        return self.tokens


def tinker_response(source: Truth, k: int) -> SampleResponse:
    """Dense matrices; the last entry of each row is not filled."""
    ids, values = source.top(k).astype(np.int32), source.at(source.top(k))
    ids[:, -1], values[:, -1] = 0, -99999.0
    sequence = SampledSequence(
        "stop",
        "seq-1",
        source.tokens.astype(np.int32),
        source.sampled.astype(np.float32),
        TopkLogprobs(ids, values),
    )
    return SampleResponse([sequence])


def mutate(value: Any, rng: random.Random) -> Any:
    """Change one thing somewhere in the JSON, mostly near its leaves."""
    if not isinstance(value, dict | list) or not value:
        return rng.choice([None, "x", float("nan"), -3, 0.5, 1 << 40, [], {}])
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    kind = rng.random()
    if kind < 0.05:
        del value[key]
    elif kind < 0.1:
        value[key] = rng.choice([None, "x", -3, [], {}])
    else:
        value[key] = mutate(value[key], rng)
    return value
