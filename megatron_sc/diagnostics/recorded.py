"""The mismatch of a recorded sampler: a rollout buffer scored by a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..rollouts import Rollout
from ..rollouts.ledger import Ledger
from ..rollouts.reader import read_row_group
from ..rollouts.shard import Shard
from ..rollouts.storage import open_storage
from ..sampling import ParallelGroups
from ..sampling.score import next_token_logprobs
from .mismatch import Mismatch, Positions


def recorded_mismatch(
    model: nn.Module, path: str | os.PathLike[str], count: int, true_vocab_size: int, groups: ParallelGroups
) -> dict[str, Mismatch]:
    """What the model finds of a buffer's sampler, over all trained positions and for each weight version.

    The version that the model's weights have shows the mismatch of numerics alone; older ones show staleness as well.

    Args:
        model: a GPTModel, possibly wrapped; left bit-identical, as are all random streams.
        path: of the buffer: a directory or an fsspec URL.
        count: rollouts to score, the newest.
        true_vocab_size: the vocabulary without padding.
        groups: this rank's process groups; every rank passes the same buffer.

    Returns:
        Mismatches by name: 'all', then 'version v', the newest first.

    Raises:
        ValueError: another vocabulary, an empty buffer, no trained position, or rollouts without a head.
        BufferRefusedError: what is read is damaged.
    """
    rollouts = _newest(path, count, true_vocab_size)
    parts, versions = [], []
    for rollout in rollouts:
        trained = torch.from_numpy(np.ascontiguousarray(rollout.response_mask))
        if trained.any():
            parts.append(_positions(model, rollout, true_vocab_size, groups).select(trained))
            versions.append(torch.from_numpy(rollout.weight_version.copy())[trained])
    if not parts:
        raise ValueError(f"{path}: the newest {len(rollouts)} rollouts have no trained position")
    positions, version = Positions.join(parts), torch.cat(versions)
    found = {"all": Mismatch.of(positions)}
    for number in sorted(set(version.tolist()), reverse=True):
        found[f"version {number}"] = Mismatch.of(positions.select(version == number))
    return found


def _newest(path: str | os.PathLike[str], count: int, true_vocab_size: int) -> Sequence[Rollout]:
    storage = open_storage(path)
    ledger = Ledger(storage)
    if ledger.manifest.true_vocab_size != true_vocab_size:
        raise ValueError(
            f"{path} was sampled over {ledger.manifest.true_vocab_size} tokens, but the model's true vocabulary has "
            f"{true_vocab_size} (--true-vocab-size)"
        )

    def backwards() -> Iterator[Rollout]:
        for entry in reversed(ledger.shards):
            shard = Shard(storage, entry, ledger.manifest)
            for row_group in reversed(range(len(shard))):
                table = read_row_group(shard, row_group)
                for row in reversed(range(len(table))):
                    yield table.as_rollout(row)

    newest = [rollout for _, rollout in zip(range(count), backwards(), strict=False)]
    if not newest:
        raise ValueError(f"{path} holds no rollout yet")
    return newest


def _positions(model: nn.Module, rollout: Rollout, true_vocab_size: int, groups: ParallelGroups) -> Positions:
    """Every response position of one rollout, on the CPU."""
    if rollout.head_ids is None or rollout.head_logprobs is None:
        raise ValueError(f"the rollout of group {rollout.group_id} records no head, so there is nothing to compare")
    tokens = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids]).astype(np.int64))
    logprobs = next_token_logprobs(model, tokens.unsqueeze(0), true_vocab_size, rollout.temperature, groups.tensor)
    start = len(rollout.prompt_ids) - 1

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy())

    return Positions.of_recorded(
        logprobs[0, start:-1].cpu(),
        tokens[start + 1 :],
        tensor(rollout.sampled_logprobs),
        tensor(rollout.head_ids.astype(np.int64)),
        tensor(rollout.head_logprobs),
        None if rollout.log_tail_mass is None else tensor(rollout.log_tail_mass),
        rollout.head_is_support,
    )
