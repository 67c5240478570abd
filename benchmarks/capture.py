"""Capture: tokens a second of processor time of each path, on one thread.

    python -m benchmarks.capture [--k 20 128] [--tokens 16384] [--length 2048]

Payloads are made first, in the shapes that the engines hand over (servers' replies as text, so that parsing them is
included), from rows p_i ~ i^-2; then each is captured and brought into columns. The sampled token is in the head at
95 % of positions.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_sc.rollouts import capture
from megatron_sc.rollouts.capture.sampling import NEUTRAL
from megatron_sc.rollouts.capture.vllm import CHANGES_LOGITS

VOCAB = 151936
PROMPT = list(range(100))
INSIDE = 0.95


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, nargs="+", default=[20, 128], help="sizes of the head")
    parser.add_argument("--tokens", type=int, default=16384, help="to capture with each path")
    parser.add_argument("--length", type=int, default=2048, help="of a response")
    arguments = parser.parse_args()
    table = Table(title="Thousand tokens a second of processor time")
    table.add_column("path")
    for k in arguments.k:
        table.add_column(f"k = {k}", justify="right")
    rows: dict[str, list[str]] = {}
    for k in arguments.k:
        ids, logprobs, tokens, sampled = make_rows(arguments.length, k)
        for name, run in paths(k, ids, logprobs, tokens, sampled).items():
            rows.setdefault(name, []).append(f"{speed(run, arguments.tokens, arguments.length) / 1e3:.0f}")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    Console().print(table)


def make_rows(length: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ids and log-probabilities ``[length, k]``, sampled tokens and theirs ``[length]``."""
    rng = np.random.default_rng(0)
    ranks = np.arange(1, VOCAB + 1, dtype=np.float64)
    logq = np.log(ranks**-2 / (ranks**-2).sum()).astype(np.float32)
    ids = np.stack([rng.choice(VOCAB - 1000, k, replace=False) for _ in range(length)]) + 1000
    logprobs = np.broadcast_to(logq[:k], ids.shape)
    place = np.where(rng.random(length) < INSIDE, rng.integers(0, k, length), k)
    inside = place < k
    at = np.minimum(place, k - 1)
    tokens = np.where(inside, ids[np.arange(length), at], np.arange(length) % 1000)
    return ids, logprobs, tokens, logq[place]


def paths(
    k: int, ids: np.ndarray, logprobs: np.ndarray, tokens: np.ndarray, sampled: np.ndarray
) -> dict[str, Callable[[], list[capture.Response]]]:
    """What to measure: each call captures one response."""
    added = np.concatenate([tokens[:, None], ids], axis=1)
    values = np.concatenate([sampled[:, None], logprobs], axis=1)
    lists = list(zip(added.tolist(), values.tolist(), strict=True))
    params = SimpleNamespace(**NEUTRAL, logprobs=k, **dict.fromkeys(CHANGES_LOGITS))
    request: dict[str, Any] = {**NEUTRAL, "logprobs": k, "top_logprobs": k}

    def output(rows: Any) -> SimpleNamespace:
        choice = SimpleNamespace(index=0, token_ids=tokens.tolist(), logprobs=rows, finish_reason="stop")
        return SimpleNamespace(request_id="r", prompt_token_ids=PROMPT, finished=True, outputs=[choice])

    dicts = output(
        [
            {i: SimpleNamespace(logprob=v, rank=1, decoded_token=None) for i, v in zip(*row, strict=True)}
            for row in lists
        ]
    )
    ends = (np.arange(1, len(tokens) + 1) * (k + 1)).tolist()
    flat = output(
        SimpleNamespace(
            start_indices=[0, *ends[:-1]],
            end_indices=ends,
            token_ids=added.reshape(-1).tolist(),
            logprobs=values.reshape(-1).tolist(),
        )
    )

    def vllm_json(body: dict[str, Any], sent: dict[str, Any]) -> Callable[[], list[capture.Response]]:
        text = json.dumps(body)
        return lambda: capture.vllm.responses_from_json(
            json.loads(text), sent, logprobs_mode="processed_logprobs", weight_version=0
        )

    rows = [dict(zip(*row, strict=True)) for row in lists]
    generated = {
        "token_ids": tokens.tolist(),
        "logprobs": {
            "content": [
                {
                    "token_id": token,
                    "logprob": value,
                    "rank": 1,
                    "top_logprobs": [{"token_id": i, "logprob": v, "rank": 1} for i, v in row.items()],
                }
                for token, value, row in zip(tokens.tolist(), sampled.tolist(), rows, strict=True)
            ]
        },
    }
    completion = {
        "token_ids": tokens.tolist(),
        "prompt_token_ids": PROMPT,
        "logprobs": {
            "tokens": [f"token_id:{i}" for i in tokens.tolist()],
            "token_logprobs": sampled.tolist(),
            "top_logprobs": [{f"token_id:{i}": v for i, v in row.items()} for row in rows],
        },
    }
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [(v, i, None) for v, i in zip(sampled.tolist(), tokens.tolist(), strict=True)],
    }
    nested = {
        "output_top_logprobs": [
            [(v, i, None) for i, v in zip(*row, strict=True)]
            for row in zip(ids.tolist(), logprobs.tolist(), strict=True)
        ]
    }
    encoded: dict[str, Any] = {"output_top_logprobs_shape": list(ids.shape)}
    for name, array in (("idx", ids.astype("<i4")), ("val", logprobs.astype("<f4"))):
        encoded[f"output_top_logprobs_{name}_flat_b64"] = base64.b64encode(array.tobytes()).decode()

    def sglang_json(top: dict[str, Any]) -> Callable[[], list[capture.Response]]:
        text = json.dumps({"output_ids": tokens.tolist(), "prompt_token_ids": PROMPT, "meta_info": {**meta, **top}})
        return lambda: capture.sglang.responses(json.loads(text), {"sampling_params": {}}, weight_version=0)

    sequence = SimpleNamespace(
        sequence_id="s",
        stop_reason="stop",
        tokens_np=tokens.astype(np.int32),
        logprobs_np=sampled,
        topk_logprobs_np=SimpleNamespace(token_ids=ids.astype(np.int32), logprobs=np.ascontiguousarray(logprobs)),
    )
    sampled_by = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1)
    return {
        "vllm RequestOutput, dicts": lambda: capture.vllm.responses(
            dicts, params, logprobs_mode="processed_logprobs", weight_version=0
        ),
        "vllm RequestOutput, FlatLogprobs": lambda: capture.vllm.responses(
            flat, params, logprobs_mode="processed_logprobs", weight_version=0
        ),
        "vllm JSON, /inference/v1/generate": vllm_json(
            {"request_id": "g", "prompt_token_ids": PROMPT, "choices": [generated]}, {"sampling_params": request}
        ),
        "vllm JSON, /v1/completions": vllm_json({"object": "text_completion", "choices": [completion]}, request),
        "sglang JSON, nested": sglang_json(nested),
        "sglang JSON, flat base64": sglang_json(encoded),
        "tinker SampleResponse": lambda: capture.tinker.responses(
            SimpleNamespace(sequences=[sequence]), PROMPT, sampled_by, weight_version=0
        ),
        "arrays": lambda: [
            capture.arrays.response(
                PROMPT, tokens, sampled, 0, capture.Sampling(), head_ids=ids, head_logprobs=logprobs
            )
        ],
    }


def speed(run: Callable[[], list[capture.Response]], tokens: int, length: int) -> float:
    """Tokens a second: the best of three."""
    calls = max(tokens // length, 1)
    best = np.inf
    for _ in range(3):
        gc.collect()
        start = time.process_time()
        responses = [response for _ in range(calls) for response in run()]
        capture.to_table(responses, [0.0] * len(responses), [0] * len(responses))
        best = min(best, time.process_time() - start)
    return calls * length / best


if __name__ == "__main__":
    main()
