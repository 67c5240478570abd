"""What a sampler of a cluster job does around its engine: follow the trainer's weights, keep pace, fill the buffer.

An engine is any object with the methods of :class:`Engine`; sample_transformers.py and sample_vllm.py have one each.
Prompts come from a file of JSON lines, each with "prompt_ids" (token ids), or with "prompt" (text; needs --tokenizer).
Whatever else a line holds is for the reward function.

The loop holds nothing that must survive: killed at any moment, it leaves whole groups in the buffer, and its next start
goes on from what is there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np

from megatron_sc.rollouts import HeadPolicy, Manifest, RolloutWriter, SamplerFingerprint, capture
from megatron_sc.rollouts.ledger import Ledger
from megatron_sc.rollouts.storage import open_storage
from megatron_sc.weights import PublishedWeights, latest

Record = Mapping[str, Any]
Reward = Callable[[Record, Sequence[int], str | None], float]


class Engine(Protocol):
    """What the loop asks of an engine."""

    def fingerprint(self) -> SamplerFingerprint:
        """For the buffer's manifest: everything that changes what the log-probabilities mean. Known before ``load``."""
        ...

    def load(self, path: Path) -> None:
        """Take the weights of a Hugging Face checkpoint."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], version: int) -> list[list[capture.Response]]:
        """``--samples-per-prompt`` responses to each prompt, with heads, from the loaded weights.

        Args:
            prompts: token ids.
            version: of the loaded weights: the ``weight_version`` of every token.
        """
        ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The loop's own flags. ``--rollouts`` and ``--weights`` are added by train_and_sample.sbatch."""
    add = parser.add_argument
    add("--rollouts", required=True, help="rollout buffer to fill")
    add("--weights", required=True, help="folder of the trainer's --publish-weights")
    add("--prompts", type=Path, required=True, help="JSON lines with prompt_ids, or with prompt")
    add("--tokenizer", help="Hugging Face tokenizer: encodes prompts and decodes responses for the reward")
    add("--reward", default="sampling_loop:match", help="MODULE:FUNCTION of (line, response ids, text or None)")
    add("--groups-per-step", type=int, required=True, help="prompts that the trainer uses in a step")
    add("--samples-per-prompt", type=int, default=8, help="responses to a prompt: a group")
    add("--ahead", type=int, default=2, help="steps of rollouts to have ready beyond the published version, >= 1")
    add("--true-vocab-size", type=int, required=True, help="of the model's softmax, as the trainer's flag")
    add("--head-size", type=int, default=128, help="most likely tokens recorded at each position")
    add("--max-tokens", type=int, required=True, help="length of a response at most")
    add("--temperature", type=float, default=1.0)
    add("--seed", type=int, default=1234)


def run(engine: Engine, arguments: argparse.Namespace) -> None:
    """Sample until SIGTERM (scancel) or SIGURG (the job script); what was begun is then finished and committed."""
    stopping = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGURG, stop)
    sample(engine, arguments, stopping)
    print("stopped; everything is committed", flush=True)


def sample(engine: Engine, arguments: argparse.Namespace, stopping: threading.Event) -> None:
    """Fill the buffer until ``stopping`` is set.

    The pace: while version v is the newest, ``groups_per_step * (v + ahead)`` groups are made, over all samplers. As v
    counts the trainer's steps, no token is more than ``ahead`` steps stale when it is used. ``ahead`` must be at least
    the trainer's ``--publish-interval``.
    """
    records, prompts, decode = read_prompts(arguments.prompts, arguments.tokenizer)
    reward = _import(arguments.reward)
    rng = np.random.default_rng(random_stream(arguments.seed))
    samplers = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    batch = -(-arguments.groups_per_step // samplers)

    manifest = Manifest(
        true_vocab_size=arguments.true_vocab_size,
        sampler=engine.fingerprint(),
        heads=HeadPolicy(k=arguments.head_size),
    )
    writer = RolloutWriter(arguments.rollouts, manifest)  # makes the buffer, which the trainer waits for
    ledger = Ledger(open_storage(arguments.rollouts))
    held: PublishedWeights | None = None
    while not stopping.is_set():
        published = latest(arguments.weights)
        if published is not None and published != held:
            if not _load(engine, published, arguments.weights):
                continue
            held = published
        ledger.refresh()
        committed = sum(shard.groups for shard in ledger.shards)
        wanted = 0 if held is None else arguments.groups_per_step * (held.version + arguments.ahead) - committed
        if held is None or wanted <= 0:
            stopping.wait(0.5)
            continue
        started = time.monotonic()
        chosen = rng.integers(len(prompts), size=min(batch, wanted))
        answers = engine.generate([prompts[i] for i in chosen], held.version)
        responses = [response for group in answers for response in group]
        lines = [records[i] for i, group in zip(chosen, answers, strict=True) for _ in group]
        rewards = [
            reward(line, response.response_ids.tolist(), decode(response.response_ids.tolist()))
            for line, response in zip(lines, responses, strict=True)
        ]
        groups = [number for number, group in enumerate(answers) for _ in group]
        writer.write(capture.to_table(responses, rewards, groups))
        writer.commit()
        tokens = sum(len(response.response_ids) for response in responses)
        print(
            f"version {held.version}: {len(answers)} groups, {tokens} tokens in {time.monotonic() - started:.1f} s, "
            f"mean reward {np.mean(rewards):.3f}; {committed + len(answers)} groups in the buffer",
            flush=True,
        )


def match(record: Record, response_ids: Sequence[int], text: str | None) -> float:
    """A reward to start from: the share of "answer_ids" that is right, or 1 if the text ends with "answer"."""
    if "answer_ids" in record:
        right = [a == b for a, b in zip(record["answer_ids"], response_ids, strict=False)]
        return sum(right) / max(len(record["answer_ids"]), len(response_ids))
    if text is None:
        raise ValueError('a line without "answer_ids" needs --tokenizer, or another --reward')
    return float(text.strip().endswith(str(record["answer"])))


def random_stream(seed: int) -> np.random.SeedSequence:
    """A random stream of its own for every task of every start, so that a sampler that comes back does not repeat."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURM_PROCID")
    return np.random.SeedSequence([seed, *(int(os.environ.get(name) or 0) for name in names)])


def _load(engine: Engine, published: PublishedWeights, root: str) -> bool:
    """False where the version was withdrawn meanwhile: a trainer that came back from a checkpoint publishes anew."""
    try:
        engine.load(published.path)
    except OSError:
        if latest(root) == published:
            raise
        return False
    return True


def read_prompts(
    path: Path, tokenizer_name: str | None
) -> tuple[list[Record], list[list[int]], Callable[[Sequence[int]], str | None]]:
    """The lines, their prompts' ids, and what decodes a response."""
    tokenizer = None
    if tokenizer_name is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    records, prompts = [], []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        record = json.loads(line)
        if "prompt_ids" in record:
            ids = record["prompt_ids"]
        elif "prompt" in record and tokenizer is not None:
            ids = tokenizer.encode(record["prompt"])
        else:
            raise ValueError(f"{path}, line {number}: needs prompt_ids; or prompt, and --tokenizer")
        if not ids:
            raise ValueError(f"{path}, line {number}: the prompt is empty")
        records.append(record)
        prompts.append(list(ids))
    if not records:
        raise ValueError(f"{path}: no prompts")
    return records, prompts, (lambda ids: None) if tokenizer is None else tokenizer.decode


def _import(name: str) -> Reward:
    module, _, function = name.partition(":")
    sys.path.append(os.getcwd())
    reward: Reward = getattr(importlib.import_module(module), function)
    return reward
