"""Smaller heads: keep the tokens that matter for the correction, and round what is kept.

**Which tokens.** The gradient of centering is q - p (weight ``none``). Under independent noise of variance s^2 in the
trainer's logits, q - p = J n with J = diag(q) - q q', so its expected square is s^2 S^2 with

    S^2 = tr(J^2) = sum q^2 - 2 sum q^3 + (sum q^2)^2.

A dropped token v joins the tail, whose shape is the trainer's, so its error is q_v times the noise. A position keeps
its most likely tokens until the dropped ones D satisfy ``sqrt(sum_D q^2) <= dropped_norm * S``, or until the kept mass
reaches ``target_mass``, or k. The dropped mass is added to the recorded tail mass: no probability disappears.

**Rounding.** Log-probabilities are stored as IEEE float16: ``|error| <= u |log q|`` with u = 2^-11 (or 2^-25 below
6.1e-5). It is finest where it must be, at probabilities near 1, whose log is near 0.

**Bound.** Let e_v = q^_v f(p_v/q^_v) - q_v f(p_v/q_v), L the Lipschitz constant of q -> q f(p/q) (none 1, is 0, tis C;
mis and ppo jump at their bounds, where a ratio within the rounding of a bound may fall on either side). The gradient is
-(A/T)(... - e + p sum e), so it changes by at most ``(|A|/T) 2 L |q^ - q|_1`` in the 1-norm, and

    |q^ - q|_1 <= sum_H q_v (exp(u |log q_v|) - 1)  +  2 (exp(d) - 1) sum_D q_v

where d bounds |log(p_v/q_v) - log(tail_p/tail_q)| over D: how differently trainer and sampler see the dropped tokens,
relative to the new tail. The first term is at most about u times the entropy. Without any d the second is at most
2 tail_q. ``head_error_bound`` evaluates it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from .ragged import Int64, Ragged, blocks, offsets_of, prefixes, row_sums
from .table import RolloutTable

FLOAT16_UNIT = 2.0**-11
"""Largest relative error of rounding a normal number to float16."""
FLOAT16_SMALLEST = 2.0**-25
"""Largest absolute error of rounding a number below 2^-14."""


@dataclass(frozen=True)
class HeadPolicy:
    """What is kept of a head.

    Attributes:
        k: most tokens a head may have.
        target_mass: a head may end once it holds this much of the sampler's mass.
        dropped_norm: a head may end once the 2-norm of the dropped probabilities is this share of the correction's
            expected norm; see the module.
        precision: of the log-probabilities.
    """

    k: int = 128
    target_mass: float = 0.9999
    dropped_norm: float = 0.01
    precision: Literal["float16", "float32"] = "float16"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"head policy: k must be >= 1, got {self.k}")
        if not 0 < self.target_mass <= 1:
            raise ValueError(f"head policy: target_mass must be in (0, 1], got {self.target_mass}")
        if not 0 <= self.dropped_norm < 1:
            raise ValueError(f"head policy: dropped_norm must be in [0, 1), got {self.dropped_norm}")
        if self.precision not in ("float16", "float32"):
            raise ValueError(f"head policy: precision must be float16 or float32, got {self.precision!r}")

    @classmethod
    def lossless(cls, k: int = 128) -> HeadPolicy:
        """float32 and all k: bit-exact."""
        return cls(k=k, target_mass=1.0, dropped_norm=0.0, precision="float32")

    @property
    def drops(self) -> bool:
        """Whether a recorded token may be dropped."""
        return self.target_mass < 1 or self.dropped_norm > 0


def encode_heads(table: RolloutTable, policy: HeadPolicy) -> RolloutTable:
    """Apply the policy to every position of every rollout. Supports are rounded but keep all tokens.

    Args:
        table: valid rollouts whose heads have at most ``policy.k`` tokens.
        policy: see ``HeadPolicy``.

    Returns:
        The table with fewer head entries, larger tail masses and rounded log-probabilities (still float32 arrays).
    """
    if not len(table.head_ids.values):
        return table
    if policy.drops:
        table = _drop(table, policy)
    if policy.precision == "float16":
        with np.errstate(over="ignore"):
            rounded = table.head_logprobs.values.astype(np.float16).astype(np.float32)
        table = replace(table, head_logprobs=Ragged(rounded, table.head_logprobs.offsets))
    return table


def rounding_bound(logprobs: npt.NDArray[np.float32], precision: str) -> npt.NDArray[np.float32]:
    """Largest |error| of stored log-probabilities, elementwise, from the stored or the original ones."""
    if precision == "float32":
        return np.zeros_like(logprobs)
    # From the stored value the error is u |log q| (1 + u): 1.001 covers it.
    return np.maximum(np.float32(1.001 * FLOAT16_UNIT) * np.abs(logprobs), np.float32(FLOAT16_SMALLEST))


def head_error_bound(
    original: RolloutTable, encoded: RolloutTable, policy: HeadPolicy, log_ratio_bound: float
) -> npt.NDArray[np.float64]:
    """float64 ``[tokens]`` bound on |q^ - q|_1; see the module for what it bounds in the gradient.

    Args:
        original: before ``encode_heads``.
        encoded: after.
        policy: that was applied.
        log_ratio_bound: d of the module.
    """
    before, after = original.head_offsets, encoded.head_offsets
    q = np.exp(original.head_logprobs.values.astype(np.float64))
    kept = np.arange(len(q)) - np.repeat(before[:-1], np.diff(before)) < np.repeat(np.diff(after), np.diff(before))
    error = np.expm1(rounding_bound(original.head_logprobs.values, policy.precision).astype(np.float64))
    return row_sums(np.where(kept, q * error, 0), before) + 2 * np.expm1(log_ratio_bound) * row_sums(
        np.where(kept, 0, q), before
    )


def _drop(table: RolloutTable, policy: HeadPolicy) -> RolloutTable:
    """Move what need not stay from the heads to the tail masses."""
    offsets = table.head_offsets
    may_drop = np.repeat(~table.head_is_support, table.response_ids.sizes)
    sizes, dropped_mass = _kept(table.head_logprobs.values, offsets, may_drop, policy)
    changed = sizes < np.diff(offsets)
    if not changed.any():
        return table
    entries = prefixes(offsets, sizes)
    # A tail that was not recorded is what the whole head leaves, as the loss takes it to be.
    recorded = np.full(table.tokens, np.nan)
    recorded[np.repeat(table.log_tail_mass.sizes > 0, table.response_ids.sizes)] = table.log_tail_mass.values
    missing = np.isnan(recorded)
    tail = np.exp(recorded)
    if missing.any():
        mass = row_sums(np.exp(table.head_logprobs.values.astype(np.float64)), offsets)
        tail[missing] = np.maximum(1 - mass[missing], 0)
    with np.errstate(divide="ignore"):
        log_tail = np.where(changed, np.minimum(np.log(tail + dropped_mass), 0), recorded).astype(np.float32)
    has_tail = (table.log_tail_mass.sizes > 0) | (row_sums(changed, table.response_ids.offsets) > 0)
    has_head = np.repeat(table.head_sizes.sizes > 0, table.response_ids.sizes)
    head_sizes = Ragged(sizes[has_head].astype(np.int32), table.head_sizes.offsets)
    by_rollout = offsets_of(row_sums(head_sizes.values, head_sizes.offsets).astype(np.int64))
    return replace(
        table,
        head_sizes=head_sizes,
        head_ids=Ragged(table.head_ids.values[entries], by_rollout),
        head_logprobs=Ragged(table.head_logprobs.values[entries], by_rollout),
        log_tail_mass=Ragged(
            log_tail[np.repeat(has_tail, table.response_ids.sizes)], offsets_of(table.response_ids.sizes * has_tail)
        ),
    )


def _kept(
    logprobs: npt.NDArray[np.float32], offsets: Int64, may_drop: npt.NDArray[np.bool_], policy: HeadPolicy
) -> tuple[Int64, npt.NDArray[np.float64]]:
    """For each position: how many of its first entries stay, and the mass of the others."""
    sizes = np.diff(offsets)
    dropped_mass = np.zeros(len(sizes))
    for block in blocks(offsets):
        q = np.exp(block.gather(logprobs, -np.inf))
        square = q * q
        # The squares from each column on: a suffix sum, from its small end.
        left = np.cumsum(square[:, ::-1], axis=1)[:, ::-1]
        total = np.einsum("ij,ij->i", q, q, dtype=np.float64)
        scale = total - 2 * np.einsum("ij,ij->i", square, q, dtype=np.float64) + total * total
        enough = left <= (policy.dropped_norm**2 * np.maximum(scale, 0)).astype(np.float32)[:, None]
        enough[:, 1:] |= (np.cumsum(q, axis=1) >= policy.target_mass)[:, :-1]
        enough[:, 0] = False  # the first token stays
        stays = np.where(enough.any(axis=1) & may_drop[block.rows], enough.argmax(axis=1), sizes[block.rows])
        dropped = np.arange(q.shape[1]) >= stays[:, None]
        dropped_mass[block.rows] = np.sum(q, axis=1, where=dropped, dtype=np.float64)
        sizes[block.rows] = np.minimum(stays, sizes[block.rows])
    return sizes, dropped_mass
