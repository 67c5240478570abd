"""Where rollouts are read from: the buffer's settings. Each field is a command-line flag."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def _field(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class RolloutConfig:
    """A rollout buffer as the source of training, and how its rollouts become micro-batches.

    Raises:
        ValueError: from ``__post_init__``; the message names the flag.
    """

    rollout_path: str | None = _field(
        None,
        "Train from the rollout buffer in this directory or fsspec URL. A step takes --prompts-per-step groups. The "
        "place in the buffer is saved with checkpoints. Absent: the embedded sampler.",
    )
    rollout_follow: bool = _field(
        False, "Wait for samplers to commit more when the buffer is used up, until one of them ends it."
    )
    rollout_timeout: float = _field(
        3600.0, "With --rollout-follow: stop with an error when nothing was committed for this many seconds (0: never)."
    )
    max_staleness: int | None = _field(
        None, "Skip groups whose oldest trained token was sampled more than this many optimizer steps ago."
    )
    rollout_policy: Literal["refuse", "drop", "quarantine"] = _field(
        "refuse",
        "What happens to a rollout that fails validation: stop; leave it out and count it; also set it aside in the "
        "buffer's folder quarantine.",
    )
    rollout_shuffle_window: int = _field(
        1, "Shuffle this many groups among themselves (1: the order in which they were committed)."
    )
    rollout_seed: int = _field(0, "Seed of the shuffle.")
    rollout_tokenizer_hash: str | None = _field(None, "Refuse a buffer whose manifest names another tokenizer.")
    micro_batch_tokens: int | None = _field(
        None,
        "Pack rollouts of similar length into micro-batches of at most this many tokens, padding included, instead of "
        "--micro-batch-size rows of --seq-length. All data-parallel ranks run equally many micro-batches.",
    )
    rollout_record: str | None = _field(
        None, "Also write what the embedded sampler samples into a rollout buffer here, a shard a step and rank."
    )

    def __post_init__(self) -> None:
        """Check ranges and combinations."""
        for flag, value, valid, requirement in (
            ("--rollout-timeout", self.rollout_timeout, self.rollout_timeout >= 0, "at least 0"),
            (
                "--max-staleness",
                self.max_staleness,
                self.max_staleness is None or self.max_staleness >= 0,
                "at least 0",
            ),
            ("--rollout-shuffle-window", self.rollout_shuffle_window, self.rollout_shuffle_window >= 1, "at least 1"),
            ("--rollout-seed", self.rollout_seed, self.rollout_seed >= 0, "at least 0"),
            (
                "--micro-batch-tokens",
                self.micro_batch_tokens,
                self.micro_batch_tokens is None or self.micro_batch_tokens >= 1,
                "at least 1",
            ),
        ):
            if not valid:
                raise ValueError(f"{flag} is {value} but must be {requirement}")
        if self.rollout_path is not None and self.rollout_record is not None:
            raise ValueError("--rollout-path and --rollout-record exclude each other: what is read is already recorded")
        if self.rollout_path is None:
            for flag, given in (
                ("--rollout-follow", self.rollout_follow),
                ("--max-staleness", self.max_staleness is not None),
                ("--rollout-shuffle-window", self.rollout_shuffle_window != 1),
                ("--rollout-tokenizer-hash", self.rollout_tokenizer_hash is not None),
            ):
                if given:
                    raise ValueError(f"{flag} needs --rollout-path: the embedded sampler has no buffer")
