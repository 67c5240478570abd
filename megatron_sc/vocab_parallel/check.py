"""Values that must not be trained on: one clear error on the CPU, an asynchronous assertion on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..objective.distributions import Draws, FullVocabulary, SamplerDistribution, Support, TopKHead
from .entries import Entries

LOGPROB_TOLERANCE = 1e-6
"""Log-probabilities may exceed 0 by this: float32 rounding of an engine's log-softmax."""

MASS_TOLERANCE = 1e-3
"""A recorded distribution may sum to this above 1: bfloat16 engines round up; more means repeated or wrong entries."""


def check_rows(
    sampled_ids: Tensor,
    advantages: Tensor,
    sampler: SamplerDistribution | None,
    sampled_logprobs: Tensor | None,
    temperature: float | Tensor,
    mask: Tensor | None,
    vocab_size: int,
) -> None:
    """Check every trained row; arguments as of ``centered_loss``.

    Raises:
        ValueError: on the CPU, naming the argument, the row and the value. On a GPU an asynchronous device assertion
            fails instead, so that the host does not wait.
    """

    def require(name: str, good: Tensor, value: Tensor, what: str) -> None:
        if mask is not None:
            good = good | ~mask
        if good.device.type != "cpu":
            torch._assert_async(good.all(), f"centered_loss: {name} {what}")
        elif not good.all():
            row = int(torch.nonzero(~good)[0])
            shown = value[row].item() if value.dim() == 1 else value[row].tolist()
            raise ValueError(f"centered_loss: row {row}: {name} {what}, got {shown}")

    in_vocabulary = f"must be in the true vocabulary [0, {vocab_size})"
    require("sampled_ids", (sampled_ids >= 0) & (sampled_ids < vocab_size), sampled_ids, in_vocabulary)
    require("advantages", torch.isfinite(advantages), advantages, "must be finite")
    if sampled_logprobs is not None:
        good = torch.isfinite(sampled_logprobs) & (sampled_logprobs <= LOGPROB_TOLERANCE)
        require("sampled_logprobs", good, sampled_logprobs, "must be finite and <= 0")
    if isinstance(temperature, Tensor):
        require("temperature", temperature > 0, temperature, "must be positive (greedy rows cannot be centered)")
    if isinstance(sampler, FullVocabulary):
        mass = sampler.logprobs.exp().sum(dim=1)
        good = (mass - 1).abs() <= MASS_TOLERANCE
        require("FullVocabulary.logprobs", good, mass, f"must sum to 1 within {MASS_TOLERANCE}")
    elif sampler is not None:
        _check_entries(sampler, sampled_ids, vocab_size, require)


def _check_entries(sampler: TopKHead | Support | Draws, sampled_ids: Tensor, vocab_size: int, require) -> None:  # type: ignore[no-untyped-def]
    name = type(sampler).__name__
    entries = Entries.of_rows(sampler, 0, sampler.rows, None, torch.float32)

    def row_any(bad: Tensor) -> Tensor:
        return entries.row_sum(bad.float()) > 0

    largest = entries.row_max(entries.ids.double(), -1.0).long()
    require(f"{name}.ids", largest < vocab_size, largest, f"must be in the true vocabulary [0, {vocab_size})")
    if isinstance(sampler, Draws):
        smallest = entries.ids.amin(dim=1)
        require("Draws.ids", smallest >= 0, smallest, "must not be padded: every row needs K draws")
    if entries.logprobs is None:
        return
    is_entry = entries.ids >= 0
    bad = is_entry & (entries.logprobs.isnan() | (entries.logprobs > LOGPROB_TOLERANCE))
    if isinstance(sampler, Draws):
        bad = bad | entries.logprobs.isinf()
    worst = entries.row_max(torch.where(bad, entries.logprobs.nan_to_num(nan=torch.inf), -torch.inf), -torch.inf)
    require(f"{name}.logprobs", ~row_any(bad), worst, "must be log-probabilities, <= 0 and not NaN (NaN shows as inf)")
    if isinstance(sampler, Draws):
        return
    mass = entries.row_sum(torch.where(entries.kept, entries.logprobs.exp(), 0.0))
    require(
        f"{name}.logprobs", mass <= 1 + MASS_TOLERANCE, mass, "have a mass above 1 (repeated ids?); it must be <= 1"
    )
    if isinstance(sampler, Support):
        require("Support.ids", row_any(entries.is_token(sampled_ids)), sampled_ids, "must contain the sampled token")
        require("Support.logprobs", (mass - 1).abs() <= MASS_TOLERANCE, mass, f"must sum to 1 within {MASS_TOLERANCE}")
    if isinstance(sampler, TopKHead) and sampler.log_tail_mass is not None:
        tail = sampler.log_tail_mass
        require("TopKHead.log_tail_mass", ~(tail > LOGPROB_TOLERANCE), tail, "must be <= 0, or NaN: not recorded")
    if entries.ids.device.type == "cpu":
        # Sorting costs more than the rest of the checks, so a GPU relies on the mass and on the buffer's validator.
        repeated = _repeated_id(entries, vocab_size)
        require(f"{name}.ids", repeated < 0, repeated, "must be distinct within a row")


def _repeated_id(entries: Entries, vocab_size: int) -> Tensor:
    """``[rows]``: an id that a row holds more than once, or -1."""
    kept = entries.kept & (entries.ids < vocab_size)  # an id beyond, in a masked row, must not look like another row's
    key = torch.where(kept, entries.row_index * vocab_size + entries.ids, -1).flatten()
    ordered = key.sort().values
    again = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)]
    rows = len(entries.lengths) if entries.lengths is not None else entries.ids.shape[0]
    return torch.full((rows,), -1).scatter(0, again // vocab_size, again % vocab_size)
