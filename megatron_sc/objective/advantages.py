"""Advantages A from the rewards R of a group: the rollouts of one prompt (Eq. 13 of the paper)."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Baseline = Literal["none", "group", "loo"]

STD_FLOOR = 1e-6
"""Groups whose rewards agree to this have advantage 0; dividing by their standard deviation would amplify rounding."""


def compute_advantages(
    rewards: npt.ArrayLike, group_ids: npt.ArrayLike, baseline: Baseline, *, normalize_std: bool = False
) -> npt.NDArray[np.float32]:
    """A = R - baseline, optionally divided by the group's standard deviation.

    Args:
        rewards: ``[n]``, one a rollout.
        group_ids: ``[n]``; rollouts with the same id are of the same prompt.
        baseline: ``none`` A = R; ``group`` A = R - mean of the group; ``loo`` A = R - mean of
            the group's other rollouts.
        normalize_std: divide by the population standard deviation of the group; where all rewards agree A is 0.

    Returns:
        float32 ``[n]``, computed in float64.

    Raises:
        ValueError: for an unknown baseline, lengths that disagree, a reward that is not finite, or ``loo`` with a group
            of one rollout; it names the group or the index.
    """
    if baseline not in get_args(Baseline):
        raise ValueError(f"--advantage must be one of {get_args(Baseline)}, got {baseline!r}")
    reward = np.asarray(rewards, dtype=np.float64)
    ids = np.asarray(group_ids)
    if reward.shape != ids.shape or reward.ndim != 1:
        raise ValueError(f"rewards {reward.shape} and group_ids {ids.shape} must be one-dimensional and of one length")
    if not np.isfinite(reward).all():
        index = int(np.flatnonzero(~np.isfinite(reward))[0])
        raise ValueError(f"reward of rollout {index} (group {ids[index]}) is {reward[index]}; rewards must be finite")

    groups, member, size = np.unique(ids, return_inverse=True, return_counts=True)
    if baseline == "loo" and (size == 1).any():
        raise ValueError(
            f"--advantage loo needs at least 2 rollouts a group, but group {groups[size == 1][0]} has one; "
            "use --samples-per-prompt >= 2 or --advantage none"
        )
    mean = np.bincount(member, weights=reward, minlength=len(groups)) / size
    centered = reward - mean[member]
    if baseline == "none":
        advantage = reward.copy()
    elif baseline == "group":
        advantage = centered.copy()
    else:  # R_i - (sum - R_i) / (n - 1) = (R_i - mean) n / (n - 1)
        advantage = centered * (size / np.maximum(size - 1, 1))[member]
    if normalize_std:
        std = np.sqrt(np.bincount(member, weights=centered**2, minlength=len(groups)) / size)[member]
        advantage = np.where(std > STD_FLOOR, advantage / np.maximum(std, STD_FLOOR), 0.0)
    return advantage.astype(np.float32)
