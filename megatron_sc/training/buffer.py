"""Open a rollout buffer on every rank of a training job, and agree on what it holds."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..rollouts import BufferRefusedError, Cursor, Manifest, RolloutReader, Trainer, balanced_shares, equal_shares
from ..rollouts.ledger import Ledger
from ..rollouts.schema import MANIFEST
from ..rollouts.storage import Storage, open_storage
from .config import Distribution
from .feed import Place
from .rollout_config import RolloutConfig


@dataclass(frozen=True, eq=False)
class OpenedBuffer:
    """A buffer, as one rank has it.

    Attributes:
        manifest: on every rank.
        reader: on the ranks that read.
    """

    manifest: Manifest
    reader: RolloutReader | None


def open_buffer(
    config: RolloutConfig,
    distribution: Distribution,
    true_vocab_size: int,
    max_tokens: int,
    place: Place,
    cursor: str | None,
) -> OpenedBuffer:
    """Collective over all ranks.

    Without ``--rollout-follow`` the buffer ends where the rank that sees the least of it says, so that writers may be
    active. With it, a buffer that does not exist yet is waited for.

    Args:
        config: the buffer's settings.
        distribution: ``--sampler-distribution``.
        true_vocab_size: the trainer's.
        max_tokens: ``--seq-length``.
        place: of this rank.
        cursor: saved with the checkpoint; None: from the beginning.

    Raises:
        BufferRefusedError: for a damaged buffer, or one of another vocabulary or tokenizer.
        ValueError: where the sampler's distribution is not what ``--sampler-distribution`` says.
        TimeoutError: see ``--rollout-timeout``.
    """
    path = config.rollout_path
    assert path is not None
    ledger = _open_ledger(path, config)
    manifest = ledger.manifest
    truncates = manifest.sampler.truncates
    if truncates and distribution == "head":
        raise ValueError(
            f"--sampler-distribution head: the sampler of {path} truncates (top-p {manifest.sampler.top_p}, top-k "
            f"{manifest.sampler.top_k}, min-p {manifest.sampler.min_p}); use support"
        )
    if not truncates and distribution == "support":
        raise ValueError(f"--sampler-distribution support: the sampler of {path} does not truncate; use head")
    shards = None
    if not config.rollout_follow:
        seen = torch.tensor([len(ledger.shards)], dtype=torch.int64, device=place.device)
        dist.all_reduce(seen, op=dist.ReduceOp.MIN)
        shards = int(seen.item())
    if not place.reads:
        return OpenedBuffer(manifest, None)
    try:
        reader = RolloutReader(
            path,
            rank=place.replica,
            ranks=place.replicas,
            cursor=None if cursor is None else Cursor.from_json(cursor),
            shuffle_window=config.rollout_shuffle_window,
            seed=config.rollout_seed,
            max_staleness=config.max_staleness,
            follow=config.rollout_follow,
            shards=shards,
            trainer=Trainer(
                true_vocab_size=true_vocab_size, tokenizer_hash=config.rollout_tokenizer_hash, max_tokens=max_tokens
            ),
            policy=config.rollout_policy,
            share=equal_shares if config.micro_batch_tokens is None else balanced_shares,
            timeout_seconds=config.rollout_timeout or None,
        )
    except (BufferRefusedError, ValueError) as error:
        error.add_note(_circumstances(config, true_vocab_size, resumes=cursor is not None))
        raise
    return OpenedBuffer(manifest, reader)


def _open_ledger(path: str, config: RolloutConfig) -> Ledger:
    """Open it, or wait until the first sampler has made it."""
    storage = open_storage(path)
    if config.rollout_follow and MANIFEST not in _names(storage) and dist.get_rank() == 0:
        print(f"> waiting for a sampler to make a rollout buffer in {path}", flush=True)
    deadline = time.monotonic() + config.rollout_timeout if config.rollout_timeout else None
    while config.rollout_follow and MANIFEST not in _names(storage):
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(
                f"--rollout-path {path}: no sampler has made a buffer there for {config.rollout_timeout:g} s "
                "(--rollout-timeout)"
            )
        time.sleep(1.0)
    try:
        return Ledger(storage)
    except BufferRefusedError as error:
        if config.rollout_follow or MANIFEST in _names(storage):
            raise
        raise ValueError(
            f"--rollout-path {path}: {error}. Name a buffer, or wait for one with --rollout-follow"
        ) from error


def _circumstances(config: RolloutConfig, true_vocab_size: int, resumes: bool) -> str:
    """The flags that a refusal to open the buffer depends on, and what to change."""
    tokenizer = config.rollout_tokenizer_hash
    text = f"--rollout-path {config.rollout_path} was opened with --true-vocab-size {true_vocab_size}" + (
        f" and --rollout-tokenizer-hash {tokenizer}" if tokenizer is not None else ""
    )
    if not resumes:
        return text
    return (
        f"{text}, at the place that the loaded checkpoint holds: go on in the buffer that the checkpoint was trained "
        "from, or start another one at its beginning with --finetune (optimizer and step start anew, too)"
    )


def _names(storage: Storage) -> list[str]:
    try:
        return storage.names()
    except FileNotFoundError:
        return []
