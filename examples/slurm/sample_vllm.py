"""A sampler on vLLM: starts `vllm serve` on its node and asks it over HTTP. See sampling_loop.py.

    SAMPLER=(examples/slurm/sample_vllm.py --prompts prompts.jsonl --tokenizer Qwen/Qwen3-30B-A3B --groups-per-step 128
        --max-tokens 4096 --true-vocab-size 151936 -- --tensor-parallel-size 4 --data-parallel-size 2)

What follows `--` goes to `vllm serve`. The interfaces are those of vLLM 0.33: /v1/completions with token ids, and, as
new weights are published, /collective_rpc (reload_weights from a folder, no restart) and /reset_prefix_cache, both of
which need VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import sampling_loop

from megatron_sc.rollouts import SamplerFingerprint, capture

MODE = "processed_logprobs"


class VllmEngine:
    """A vLLM server, started with the first weights.

    Args:
        arguments: of the command line; ``serve`` holds the flags for ``vllm serve``.
    """

    def __init__(self, arguments: argparse.Namespace):
        self._arguments = arguments
        self._server: subprocess.Popen[bytes] | None = None
        self._url = f"http://127.0.0.1:{arguments.port}"

    def fingerprint(self) -> SamplerFingerprint:
        """See ``Engine``."""
        flags = self._arguments.serve
        dtype, cache = _flag(flags, "--dtype", "bfloat16"), _flag(flags, "--kv-cache-dtype", "auto")
        quantization = _flag(flags, "--quantization", "")
        return capture.Sampling(temperature=self._arguments.temperature).fingerprint(
            engine="vllm",
            weight_dtype="" if quantization else dtype,
            activation_dtype="" if quantization else dtype,
            kv_cache_dtype=dtype if cache == "auto" else cache,
            quantization=quantization,
        )

    def load(self, path: Path) -> None:
        """See ``Engine``. Nothing is being generated meanwhile: the loop is the server's only client."""
        if self._server is None:
            self._start(path)
            return
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
        self._post("/reset_prefix_cache", {})  # the cached keys and values are the old weights'

    def generate(self, prompts: Sequence[Sequence[int]], version: int) -> list[list[capture.Response]]:
        """See ``Engine``. All prompts are asked for at once: the server batches them."""
        requests = [
            {
                "model": "policy",
                "prompt": list(prompt),
                "n": self._arguments.samples_per_prompt,
                "max_tokens": self._arguments.max_tokens,
                "temperature": self._arguments.temperature,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "logprobs": self._arguments.head_size,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            for prompt in prompts
        ]
        with ThreadPoolExecutor(len(requests)) as pool:
            replies = list(pool.map(lambda request: self._post("/v1/completions", request), requests))
        return [
            capture.vllm.responses_from_json(reply, request, logprobs_mode=MODE, weight_version=version)
            for reply, request in zip(replies, requests, strict=True)
        ]

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.terminate()
            try:
                self._server.wait(30)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()

    def _start(self, path: Path) -> None:
        """Start the server and wait until it answers."""
        command = [
            *("vllm", "serve", str(path), "--served-model-name", "policy", "--host", "127.0.0.1"),
            *("--port", str(self._arguments.port), "--logprobs-mode", MODE),
            *("--max-logprobs", str(self._arguments.head_size), *self._arguments.serve),
        ]
        self._server = subprocess.Popen(command, env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"})
        while True:
            if self._server.poll() is not None:
                raise RuntimeError(f"vllm serve exited with code {self._server.returncode}; its output is above")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=10):
                return
            time.sleep(2)

    def _post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._arguments.timeout) as reply:
                content = reply.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read().decode(errors='replace')[:2000]}") from error
        return json.loads(content) if content else None


def _flag(flags: Sequence[str], name: str, default: str) -> str:
    """The value of a flag that is written as two words."""
    return flags[flags.index(name) + 1] if name in flags else default


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sampling_loop.add_arguments(parser)
    parser.add_argument("--port", type=int, default=8000, help="of the server, on this node only")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds until a request counts as failed")
    parser.add_argument("serve", nargs="*", help="flags of vllm serve, after --")
    return parser.parse_args(words)


def main() -> None:
    """Sample, then end the server."""
    arguments = parse()
    engine = VllmEngine(arguments)
    try:
        sampling_loop.run(engine, arguments)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
