"""What must hold for rollouts, checked for all tokens at once.

``find_problems`` checks rollouts, ``check_fingerprint`` a buffer's manifest against the trainer. Tolerances are for
float32 log-probabilities; where heads are stored as float16, each is widened by what rounding can do to that very row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .codec import rounding_bound
from .problem import BufferRefusedError, Problem
from .ragged import Int64, blocks, offsets_of, row_sums
from .rollout import Bool
from .schema import MANIFEST, Manifest
from .table import RolloutTable

Policy = Literal["refuse", "drop", "quarantine"]
"""What happens to rollouts with a problem: an error; left out and counted; left out and set aside."""

LOGPROB_SLACK = 1e-6
"""A log-probability may exceed 0 by this: rounding of log-softmax in float32."""
MASS_SLACK = 1e-4
"""Head plus tail may exceed 1 by this."""
TAIL_SLACK = 1e-3
"""A recorded tail and the head must sum to 1 within this."""
SAMPLED_SLACK = 1e-3
"""The sampled token's log-probability and its entry in the head may differ by this: engines compute them twice."""
DEGENERATE_SHARE = 0.9
"""A kind of degenerate head is refused where this share of a rollout's positions has it."""
DEGENERATE_SIZE = 4
"""Heads with fewer tokens are not called degenerate: two equal log-probabilities happen."""


@dataclass(frozen=True)
class Trainer:
    """What the trainer assumes of the sampler; None: not checked.

    Attributes:
        true_vocab_size: tokens of the trainer's softmax.
        temperature: the trainer divides logits by it.
        top_p: of the sampler that the trainer expects.
        top_k: of the sampler that the trainer expects; 0: none.
        tokenizer_hash: as in the manifest.
        max_tokens: most that a rollout's prompt and response may have together.
    """

    true_vocab_size: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tokenizer_hash: str | None = None
    max_tokens: int | None = None


def check_fingerprint(manifest: Manifest, trainer: Trainer) -> None:
    """Refuse a buffer whose sampler is not the one that the trainer assumes, or whose log-probabilities are unusable.

    Raises:
        BufferRefusedError: naming the key and both values.
    """
    sampler = manifest.sampler
    if sampler.logprobs_mode not in ("processed", "raw"):
        raise _manifest_problem("sampler.logprobs_mode", sampler.logprobs_mode, 'must be "processed" or "raw"')
    if sampler.logprobs_mode == "raw" and (sampler.truncates or sampler.temperature != 1.0):
        raise _manifest_problem(
            "sampler.logprobs_mode",
            "raw",
            f"at temperature {sampler.temperature}, top-p {sampler.top_p}, top-k {sampler.top_k}, min-p "
            f"{sampler.min_p} tokens are not drawn from raw log-probabilities, and a head cannot be re-tempered: "
            "record processed ones",
        )
    for key, found, wanted in (
        ("true_vocab_size", manifest.true_vocab_size, trainer.true_vocab_size),
        ("tokenizer_hash", manifest.tokenizer_hash, trainer.tokenizer_hash),
        ("sampler.temperature", sampler.temperature, trainer.temperature),
        ("sampler.top_p", sampler.top_p, trainer.top_p),
        ("sampler.top_k", sampler.top_k, trainer.top_k),
    ):
        if wanted is not None and found is not None and found != wanted:
            raise _manifest_problem(key, found, f"the trainer has {wanted!r}")


def find_problems(
    table: RolloutTable,
    manifest: Manifest,
    *,
    encoded: bool,
    file: str = "",
    first_row: int = 0,
    max_tokens: int | None = None,
) -> tuple[list[Problem], Bool]:
    """Check rollouts.

    Args:
        table: n rollouts.
        manifest: of the buffer they are for.
        encoded: whether the heads went through the codec, so that rounding is allowed for.
        file: named in the problems.
        first_row: row of the file at which the table begins.
        max_tokens: most that a prompt and its response may have together; None: any number.

    Returns:
        One problem for each rule that is violated, at its first place, in the order of the rules; and bool ``[n]``:
        the rollouts that violate one.
    """
    findings = _Findings(table, file, first_row)
    _check_lengths(findings, manifest)
    if max_tokens is not None:
        tokens = table.prompt_ids.sizes + table.response_ids.sizes
        rule = f"the trainer takes at most {max_tokens} (--seq-length)"
        findings.by_row(tokens > max_tokens, "tokens of prompt and response", lambda i: tokens[i], rule)
    sound = ~findings.bad_rows
    if not sound.all():  # what follows indexes by position: go on with the rows whose lengths agree
        rows = np.flatnonzero(sound)
        rest = _Findings(table.select(sound), file, first_row, rows)
        _check_values(rest, manifest, encoded)
        findings.bad_rows[rows] |= rest.bad_rows
        return findings.problems + rest.problems, findings.bad_rows
    _check_values(findings, manifest, encoded)
    return findings.problems, findings.bad_rows


class _Findings:
    """Collects the violations of each rule."""

    def __init__(self, table: RolloutTable, file: str, first_row: int, rows: Int64 | None = None):
        self.table = table
        self.problems: list[Problem] = []
        self.bad_rows = np.zeros(len(table), np.bool_)
        self._file = file
        self._rows = first_row + (np.arange(len(table)) if rows is None else rows)

    def by_row(self, bad: Bool, field: str, value: Callable[[int], object], rule: str) -> None:
        """``bad`` is ``[n]``."""
        if bad.any():
            self._add(np.flatnonzero(bad), None, bad, field, value, rule)

    def by_entry(self, bad: Bool, offsets: Int64, field: str, value: Callable[[int], object], rule: str) -> None:
        """``bad`` is ``[m]``, the entries of a column with these offsets; positions are counted within the row."""
        if bad.any():
            entries = np.flatnonzero(bad)
            rows = np.searchsorted(offsets, entries, side="right") - 1
            self._add(rows, int(entries[0] - offsets[rows[0]]), bad, field, value, rule)

    def by_head_entry(self, bad: Bool, heads: Int64, field: str, value: Callable[[int], object], rule: str) -> None:
        """``bad`` is ``[m]``, head entries; ``heads`` the table's head offsets."""
        if bad.any():
            entries = np.flatnonzero(bad)
            positions = np.searchsorted(heads, entries, side="right") - 1
            offsets = self.table.response_ids.offsets
            rows = np.searchsorted(offsets, positions, side="right") - 1
            self._add(rows, int(positions[0] - offsets[rows[0]]), bad, field, value, rule)

    def _add(
        self,
        rows: npt.NDArray[np.integer[Any]],
        position: int | None,
        bad: Bool,
        field: str,
        value: Callable[[int], object],
        rule: str,
    ) -> None:
        self.bad_rows[rows] = True
        first = int(np.argmax(bad))
        self.problems.append(
            Problem(rule, self._file, int(self._rows[rows[0]]), position, field, str(value(first)), int(bad.sum()))
        )


def _check_lengths(findings: _Findings, manifest: Manifest) -> None:
    table = findings.table
    length = table.response_ids.sizes
    findings.by_row(table.prompt_ids.sizes == 0, "prompt_ids", lambda i: "empty", "the first token needs a prefix")
    findings.by_row(length == 0, "response_ids", lambda i: "empty", "nothing was generated")
    for name, optional in (
        ("response_mask", False),
        ("sampled_logprobs", False),
        ("weight_version", False),
        ("head_sizes", True),
        ("log_tail_mass", True),
    ):
        sizes = getattr(table, name).sizes
        findings.by_row(
            (sizes != length) & ~(optional & (sizes == 0)),
            f"length of {name}",
            lambda i, sizes=sizes: sizes[i],  # type: ignore[misc]
            "must be that of response_ids: one entry a generated token",
        )
    heads = table.head_sizes
    findings.by_entry(heads.values < 0, heads.offsets, "head_sizes", lambda i: heads.values[i], "must be >= 0")
    total = row_sums(heads.values, heads.offsets)
    for name in ("head_ids", "head_logprobs"):
        sizes = getattr(table, name).sizes
        findings.by_row(
            sizes != total,
            f"length of {name}",
            lambda i, sizes=sizes: sizes[i],  # type: ignore[misc]
            "must be the sum of head_sizes",
        )
    draws = table.draw_ids.sizes
    findings.by_row(
        draws % np.maximum(length, 1) != 0,
        "length of draw_ids",
        lambda i: draws[i],
        "must be a multiple of the response's length: the same number of draws at every position",
    )
    findings.by_row(
        (table.draw_logprobs.sizes != draws) & (table.draw_logprobs.sizes != 0),
        "length of draw_logprobs",
        lambda i: table.draw_logprobs.sizes[i],
        "must be that of draw_ids, or 0",
    )
    routes, shape = table.expert_routes.sizes, manifest.expert_routes
    wanted = (table.prompt_ids.sizes + length) * (0 if shape is None else shape.layers * shape.topk)
    findings.by_row(
        (routes != wanted) & (routes != 0),
        "length of expert_routes",
        lambda i: routes[i],
        "must be (prompt + response) * layers * top-k of the manifest, or 0",
    )


def _check_values(findings: _Findings, manifest: Manifest, encoded: bool) -> None:
    table = findings.table
    for name in ("prompt_ids", "response_ids", "draw_ids"):
        column = getattr(table, name)
        findings.by_entry(
            _outside(column.values, manifest.true_vocab_size), column.offsets, name,
            lambda i, column=column: column.values[i],  # type: ignore[misc]
            f"must be in [0, {manifest.true_vocab_size}), the true vocabulary",
        )  # fmt: skip
    _check_rollouts(findings, manifest)
    trained = table.response_mask.values
    offsets = table.response_ids.offsets
    sampled = table.sampled_logprobs.values
    findings.by_entry(
        trained & ~(np.isfinite(sampled) & (sampled <= LOGPROB_SLACK)),
        offsets, "sampled_logprobs", lambda i: sampled[i], "a trained token needs a finite log-probability <= 0",
    )  # fmt: skip
    drawn = table.draw_logprobs.values
    findings.by_entry(
        ~(np.isfinite(drawn) & (drawn <= LOGPROB_SLACK)),
        table.draw_logprobs.offsets, "draw_logprobs", lambda i: drawn[i], "must be finite and <= 0",
    )  # fmt: skip
    versions = table.weight_version.values
    findings.by_entry(versions < 0, offsets, "weight_version", lambda i: versions[i], "must be >= 0")
    falls = np.zeros(len(versions), np.bool_)
    falls[1:] = np.diff(versions) < 0
    falls[offsets[:-1]] = False
    findings.by_entry(falls, offsets, "weight_version", lambda i: versions[i], "must not fall within a response")
    if manifest.expert_routes is not None:
        routes, experts = table.expert_routes.values, manifest.expert_routes.experts
        findings.by_entry(
            (routes < -1) | (routes >= experts),
            table.expert_routes.offsets, "expert_routes", lambda i: routes[i], f"must be in [-1, {experts}); -1: none",
        )  # fmt: skip
        if manifest.expert_routes.topk > 1 and not len(routes) % manifest.expert_routes.topk:
            ordered = np.sort(routes.reshape(-1, manifest.expert_routes.topk), axis=1)
            twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
            partly = (ordered[:, 0] == -1) & (ordered[:, -1] >= 0)
            for bad, rule in ((twice, "an expert is there twice"), (partly, "all of a token's experts or none (-1)")):
                findings.by_entry(
                    np.repeat(bad, manifest.expert_routes.topk), table.expert_routes.offsets, "expert_routes",
                    lambda i: routes[i], rule,
                )  # fmt: skip
    tails = table.log_tail_mass.values
    findings.by_entry(
        ~(np.isnan(tails) | (tails <= LOGPROB_SLACK)),
        table.log_tail_mass.offsets, "log_tail_mass", lambda i: tails[i], "must be <= 0, -inf for none, NaN if unknown",
    )  # fmt: skip
    if len(table.head_ids.values) or table.head_sizes.values.size:
        _check_heads(findings, manifest, encoded)


def _check_rollouts(findings: _Findings, manifest: Manifest) -> None:
    table, sampler = findings.table, manifest.sampler
    temperature = table.temperature
    findings.by_row(
        ~(np.isfinite(temperature) & (temperature > 0)),
        "temperature", lambda i: temperature[i], "must be > 0; a greedy response has no distribution to center under",
    )  # fmt: skip
    if sampler.temperature is not None:
        findings.by_row(
            temperature != sampler.temperature,
            "temperature", lambda i: temperature[i], f"the manifest says {sampler.temperature}",
        )  # fmt: skip
    findings.by_row(~np.isfinite(table.reward), "reward", lambda i: table.reward[i], "must be finite")
    findings.by_row(np.isinf(table.advantage), "advantage", lambda i: table.advantage[i], "must be finite")
    has_head = table.head_sizes.sizes > 0
    findings.by_row(
        has_head & (table.head_is_support != sampler.truncates),
        "head_is_support", lambda i: table.head_is_support[i],
        f"the manifest's sampler has top-p {sampler.top_p}, top-k {sampler.top_k}, min-p {sampler.min_p}: a head is "
        "its whole support exactly where it truncates",
    )  # fmt: skip
    starts = table.group_starts
    repeated = np.zeros(len(table), np.bool_)
    _, first = np.unique(table.group_id[starts], return_index=True)
    again = np.ones(len(starts), np.bool_)
    again[first] = False
    repeated[starts[again]] = True
    rule = "rollouts of a group must stand next to each other"
    findings.by_row(repeated, "group_id", lambda i: table.group_id[i], rule)


def _check_heads(findings: _Findings, manifest: Manifest, encoded: bool) -> None:
    table = findings.table
    heads, sizes = table.head_offsets, np.diff(table.head_offsets)
    ids, logprobs = table.head_ids.values, table.head_logprobs.values
    trained, sampled = table.response_mask.values, table.sampled_logprobs.values
    offsets, length = table.response_ids.offsets, table.response_ids.sizes
    support = np.repeat(table.head_is_support, length)
    has_head = np.repeat(table.head_sizes.sizes > 0, length)
    most = manifest.heads.k

    def by_head(bad: Bool, field: str, value: Callable[[int], object], rule: str) -> None:
        findings.by_head_entry(bad, heads, field, value, rule)

    def by_position(bad: Bool, field: str, value: Callable[[int], object], rule: str) -> None:
        findings.by_entry(bad, offsets, field, value, rule)

    by_position(trained & has_head & (sizes == 0), "head_sizes", lambda i: sizes[i], "a trained token needs a head")
    by_position((sizes > most) & ~support, "head_sizes", lambda i: sizes[i], f"the manifest's k is {most}")
    by_head(_outside(ids, manifest.true_vocab_size), "head_ids", lambda i: ids[i],
            f"must be in [0, {manifest.true_vocab_size}), the true vocabulary")  # fmt: skip
    infinite = ~(np.isfinite(logprobs) & (logprobs <= LOGPROB_SLACK))
    by_head(infinite, "head_logprobs", lambda i: logprobs[i], "must be finite and <= 0")
    by_head(find_duplicates(ids, heads), "head_ids", lambda i: ids[i], "occurs twice in one head")
    rises = np.zeros(len(logprobs), np.bool_)
    rises[1:] = logprobs[1:] > logprobs[:-1]
    rises[heads[:-1][sizes > 0]] = False
    by_head(rises, "head_logprobs", lambda i: logprobs[i], "exceeds the one before: the most likely token comes first")

    # Shifted heads break the consistency rule below almost everywhere: name the cause.
    tokens = table.response_ids.values
    inside, at = find_tokens(tokens, ids, heads)
    _check_degenerate(findings, heads, inside)

    precision = manifest.heads.precision if encoded else "float32"
    with np.errstate(over="ignore", invalid="ignore"):
        rounding = rounding_bound(logprobs, precision)
        q = np.exp(np.where(infinite, -np.inf, logprobs))
        mass = row_sums(q, heads)
        slack = row_sums(q * rounding, heads) if precision != "float32" else np.zeros(len(mass))
        tail = np.full(len(mass), np.nan)
        tail[np.repeat(table.log_tail_mass.sizes > 0, length)] = np.exp(table.log_tail_mass.values.astype(np.float64))
        known = np.where(np.isnan(tail), 0, tail)
        total = mass + known
        above = total > 1 + MASS_SLACK + slack
        by_position(above, "head and tail mass", lambda i: f"{total[i]:.6f}", "must be at most 1")
        exact = has_head & (sizes > 0) & (support | ~np.isnan(tail))
        by_position(
            exact & (np.abs(total - 1) > TAIL_SLACK + slack),
            "head and tail mass", lambda i: f"{total[i]:.6f}", "must be 1, since the tail is recorded or there is none",
        )  # fmt: skip
        checked = trained & has_head & (sizes > 0) & np.isfinite(sampled)
        entry = np.where(inside, logprobs[at], -np.inf)
        allowed = SAMPLED_SLACK + rounding[at]
        by_position(
            checked & inside & (np.abs(sampled - entry) > allowed),
            "sampled_logprobs", lambda i: sampled[i], "differs from the sampled token's entry in the head",
        )  # fmt: skip
        by_position(
            checked & ~inside & support,
            "response_ids", lambda i: tokens[i], "was sampled, but is not in the support",
        )  # fmt: skip
        last = np.maximum(heads[1:] - 1, 0)
        by_position(
            checked & ~inside & ~support & (sampled > logprobs[last] + SAMPLED_SLACK + rounding[last]),
            "sampled_logprobs", lambda i: sampled[i], "is not in the head, but more likely than the head's last token",
        )  # fmt: skip
        by_position(
            checked & ~inside & ~support & (np.exp(sampled) > np.maximum(1 - mass, known) + MASS_SLACK + slack),
            "sampled_logprobs", lambda i: sampled[i], "is not in the head, but more likely than the whole tail",
        )  # fmt: skip


def _check_degenerate(findings: _Findings, heads: Int64, inside: Bool) -> None:
    """Heads that are well-formed and wrong: what a bug in an engine or in a capture leaves behind."""
    table = findings.table
    ids, logprobs = table.head_ids.values, table.head_logprobs.values
    sizes, offsets = np.diff(heads), table.response_ids.offsets
    wide = sizes >= DEGENERATE_SIZE
    count = np.maximum(row_sums(wide, offsets), 1)
    enough = row_sums(wide, offsets) >= DEGENERATE_SIZE
    starts, last = heads[:-1], np.maximum(heads[1:] - 1, 0)

    def whole(candidates: Bool, other: Callable[[Int64, Int64], Bool]) -> Bool:
        """Of the candidate positions, those with ``other(entries, place in the head)`` for every entry."""
        result = np.zeros(len(sizes), np.bool_)
        chosen = np.flatnonzero(candidates & wide)
        if chosen.size:
            ends = offsets_of(sizes[chosen])
            place = np.arange(ends[-1]) - np.repeat(ends[:-1], sizes[chosen])
            entries = np.repeat(starts[chosen], sizes[chosen]) + place
            result[chosen] = np.logical_and.reduceat(other(entries, place), ends[:-1])
        return result

    def refuse(kind: Bool, among: npt.NDArray[np.float64], field: str, rule: str) -> None:
        share = row_sums(kind & wide, offsets) / np.maximum(among, 1)
        findings.by_row(
            enough & (share >= DEGENERATE_SHARE), field, lambda i: f"degenerate at {share[i]:.0%} of positions", rule
        )

    if len(ids):
        flat = logprobs[np.minimum(starts, len(ids) - 1)] == logprobs[last]
        refuse(flat, count, "head_logprobs", "the same for all tokens of a head: not a sampler's distribution")
        counting = (ids[np.minimum(starts, len(ids) - 1)] == 0) & (ids[last] == sizes - 1)
        counting = whole(counting, lambda entries, place: ids[entries] == place)
        refuse(counting, count, "head_ids", "0, 1, 2, ... in order: not a sampler's ranking")
        same = np.zeros(len(sizes), np.bool_)
        same[1:] = (sizes[1:] == sizes[:-1]) & (ids[last[1:]] == ids[last[:-1]])
        same[offsets[:-1]] = False
        before = np.repeat(sizes, sizes)

        def repeats(entries: Int64, place: Int64) -> Bool:
            earlier = entries - before[entries]
            return (ids[entries] == ids[earlier]) & (logprobs[entries] == logprobs[earlier])

        refuse(whole(same, repeats), count - 1, "head_ids", "the same head again and again")

    trained = table.response_mask.values & (sizes > 0)
    here = row_sums(inside & trained, offsets) / np.maximum(row_sums(trained, offsets), 1)
    suspects = (row_sums(sizes > 0, offsets) >= 2 * DEGENERATE_SIZE) & (here < 0.5)
    if not suspects.any():
        return
    for shift, name in ((1, "next"), (-1, "previous")):
        found, _ = find_tokens(np.roll(table.response_ids.values, shift), ids, heads)
        found[offsets[:-1] if shift == 1 else offsets[1:] - 1] = False
        there = row_sums(found, offsets) / np.maximum(row_sums(sizes > 0, offsets) - 1, 1)
        value = functools.partial(_shifted, name, there)
        rule = f"heads are shifted: tokens stand in the {name} position's head, not in their own"
        findings.by_row(suspects & (there >= DEGENERATE_SHARE), "head_ids", value, rule)


def _shifted(name: str, share: npt.NDArray[np.float64], row: int) -> str:
    return f"the {name} token's for {share[row]:.0%} of positions"


def find_tokens(tokens: npt.NDArray[np.int32], ids: npt.NDArray[np.int32], heads: Int64) -> tuple[Bool, Int64]:
    """Whether each position's token is in its head, and the entry where it is (else any)."""
    entries = np.flatnonzero(ids == np.repeat(tokens, np.diff(heads)))
    positions = np.searchsorted(heads, entries, side="right") - 1
    inside = np.zeros(len(tokens), np.bool_)
    at = np.zeros(len(tokens), np.int64)
    inside[positions], at[positions] = True, entries
    return inside, at


def find_duplicates(ids: npt.NDArray[np.int32], heads: Int64) -> Bool:
    """Bool ``[m]``: entries whose id stands in the same head before."""
    found = np.zeros(len(ids), np.bool_)
    for block in blocks(heads):
        # Padding gets distinct ids outside every vocabulary.
        rectangle = block.gather(ids, -1 - np.arange(block.valid.shape[1], dtype=np.int32))
        ordered = np.sort(rectangle, axis=1)
        for row in np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1)):
            _, first = np.unique(rectangle[row], return_index=True)
            again = block.valid[row].copy()
            again[first] = False
            found[block.entries(int(row))[again]] = True
    return found


def _outside(ids: npt.NDArray[np.int32], vocab: int) -> Bool:
    return ids.view(np.uint32) >= vocab  # negative ids wrap to large ones


def _manifest_problem(key: str, value: object, rule: str) -> BufferRefusedError:
    return BufferRefusedError(Problem(rule, MANIFEST, field=key, value=repr(value)))
