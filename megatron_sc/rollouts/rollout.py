"""One rollout: what the sampler hands to the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Int16 = npt.NDArray[np.int16]
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


class RolloutError(ValueError):
    """A rollout that must not be trained on. The message names the rollout, the position, the field and the value."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """A prompt, the sampler's response, and the sampler's distribution at each generated position.

    P is the length of the prompt, R of the response, k of the head, K the number of draws. Arrays are indexed by
    response position: entry j describes the distribution from which ``response_ids[j]`` was drawn. The shift to the
    trainer's prediction positions happens once, in ``training/batch.py``.

    Raises:
        RolloutError: from ``__post_init__``, when shapes disagree, a sampled log-probability is not finite, or a weight
            version is missing. Lengths are named; nothing is padded or truncated.
    """

    prompt_ids: Int32  # [P]
    response_ids: Int32  # [R]
    response_mask: Bool  # [R] True: the position trains; False: a tool's or a padding token
    sampled_logprobs: Float32  # [R] log q of the sampled token, after temperature (processed)
    weight_version: Int32  # [R] the trainer's step whose weights the sampler held; one per token
    reward: float
    group_id: int  # rollouts of one prompt share it: the unit of group-centered advantages
    temperature: float = 1.0
    advantage: float | None = None  # None: the trainer derives it from the rewards of the group

    head_ids: Int32 | None = None  # [R, k] distinct ids; < 0 is padding at the end of a row
    head_logprobs: Float32 | None = None  # [R, k] log q; -inf where padded
    log_tail_mass: Float32 | None = None  # [R] log of the sampler's mass outside the head, where it was recorded
    head_is_support: bool = False  # the sampler truncated (top-p, top-k, min-p) and the head is all it could sample
    draw_ids: Int32 | None = None  # [R, K] drawn from the sampler, independently of the sampled token
    draw_logprobs: Float32 | None = None  # [R, K] log q of the draws
    expert_routes: Int16 | None = None  # [P + R, MoE layers, top-k] experts of each input token; -1: none was reported

    finish_reason: str = "length"
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that every per-position field has one entry a response token."""
        length = len(self.response_ids)
        name = f"rollout of group {self.group_id}"
        per_position = {
            "response_mask": self.response_mask,
            "sampled_logprobs": self.sampled_logprobs,
            "weight_version": self.weight_version,
            "head_ids": self.head_ids,
            "head_logprobs": self.head_logprobs,
            "log_tail_mass": self.log_tail_mass,
            "draw_ids": self.draw_ids,
            "draw_logprobs": self.draw_logprobs,
        }
        for field_name, values in per_position.items():
            if values is not None and len(values) != length:
                raise RolloutError(
                    f"{name}: {field_name} has {len(values)} entries but response_ids has {length}; "
                    "both must describe the same generated tokens"
                )
        if (self.head_ids is None) != (self.head_logprobs is None):
            raise RolloutError(f"{name}: head_ids and head_logprobs must be given together")
        for ids_name, logprobs_name in (("head_ids", "head_logprobs"), ("draw_ids", "draw_logprobs")):
            ids, logprobs = getattr(self, ids_name), getattr(self, logprobs_name)
            if ids is not None and logprobs is not None and ids.shape != logprobs.shape:
                raise RolloutError(f"{name}: {ids_name} has shape {ids.shape} but {logprobs_name} has {logprobs.shape}")
        if self.expert_routes is not None and (
            self.expert_routes.ndim != 3 or len(self.expert_routes) != len(self.prompt_ids) + length
        ):
            raise RolloutError(
                f"{name}: expert_routes has shape {self.expert_routes.shape} but must be [{len(self)} tokens of prompt "
                "and response, MoE layers, top-k]"
            )
        if len(self.prompt_ids) == 0:
            raise RolloutError(
                f"{name}: prompt_ids is empty; the first response token needs a prefix to be predicted from"
            )
        if not self.temperature > 0:
            raise RolloutError(
                f"{name}: temperature is {self.temperature}; a greedy response has no sampler distribution to center "
                "under. Drop such rollouts before training"
            )
        bad = np.flatnonzero(~np.isfinite(self.sampled_logprobs) & self.response_mask)
        if bad.size:
            raise RolloutError(
                f"{name}, position {bad[0]}: sampled_logprobs is {self.sampled_logprobs[bad[0]]}; "
                "a trained token needs a finite log-probability"
            )
        bad = np.flatnonzero(self.weight_version < 0)
        if bad.size:
            raise RolloutError(
                f"{name}, position {bad[0]}: weight_version is {self.weight_version[bad[0]]}, but must be >= 0"
            )

    def __len__(self) -> int:
        """Prompt plus response, in tokens."""
        return len(self.prompt_ids) + len(self.response_ids)
