"""From what an engine lists at each position to the sampler's head.

A head is a set of tokens that does not depend on the sampled one: otherwise the same position would be centered
differently for each outcome, and the correction would no longer average out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..ragged import Ragged, blocks, offsets_of, row_sums
from ..rollout import Bool, Float32, Int32
from ..validate import LOGPROB_SLACK, MASS_SLACK, SAMPLED_SLACK, TAIL_SLACK, find_duplicates, find_tokens
from .request import Request
from .response import Head
from .sampling import Sampling

NO_MASS = -9999.0
"""Log-probabilities at or below this are an engine's way to write -inf: vLLM's servers send -9999, Tinker -99999,
SGLang the smallest float32. No model's are: exp(-9999) is 0 even in float64."""


def make_head(
    listed: Head,
    tokens: Int32,
    sampled: Float32,
    trained: Bool,
    sampling: Sampling,
    request: Request,
    k: int | None = None,
) -> Head:
    """Clean the listed tokens and check them against the sampled one.

    In this order: the sampled token is taken out where it was added to the k most likely ones; tokens without mass
    (-inf and its stand-ins) are left out; what remains is sorted.

    Args:
        listed: as the engine has it, rows in any order.
        tokens: int32 ``[R]`` the response.
        sampled: float32 ``[R]`` its log-probabilities.
        trained: bool ``[R]``; other positions may list nothing.
        sampling: how tokens were drawn.
        request: for errors.
        k: how many tokens were asked for, where a row of k + 1 holds the sampled token in addition, first or last.
            None: rows list what they list; only a sampled token that stands first and again is taken out.

    Raises:
        CaptureError: for a log-probability that is NaN or positive, a token listed twice, a row longer than k + 1, rows
            that only k tells from k + 1, a trained position without a head, a mass above 1, a support that is not
            whole, and a sampled token whose log-probability contradicts the head.
    """
    check_entries(listed, request)
    head = (
        _without_repeats(listed, tokens, sampled, sampling, request)
        if k is None
        else _without_added(listed, tokens, k, request)
    )
    head = select(head, head.logprobs > NO_MASS)
    offsets = offsets_of(head.sizes)
    if k is not None and (repeated := find_duplicates(head.ids, offsets)).any():
        raise _repeated(head, offsets, int(repeated.argmax()), request)
    missing = trained & (head.sizes == 0)
    if missing.any():
        raise request.error(
            "no top log-probabilities", "ask the engine for them in the request that generates", int(missing.argmax())
        )
    head = _sorted(head, offsets)
    _check_against_sampled(head, offsets, tokens, sampled, trained, sampling, request)
    return head


def rectangle(ids: npt.NDArray[np.integer], logprobs: npt.NDArray[np.floating]) -> Head:
    """Rows of equal length, ``[R, k]``; an id below 0 is padding."""
    flat = Head(
        np.full(len(ids), ids.shape[1], np.int32),
        np.ascontiguousarray(ids, np.int32).reshape(-1),
        np.ascontiguousarray(logprobs, np.float32).reshape(-1),
    )
    padding = flat.ids < 0
    return select(flat, ~padding) if padding.any() else flat


def select(head: Head, keep: npt.NDArray[np.bool_]) -> Head:
    """The entries where ``keep`` is True."""
    if keep.all():
        return head
    sizes = row_sums(keep, offsets_of(head.sizes)).astype(np.int32)
    return Head(sizes, head.ids[keep], head.logprobs[keep])


def check_entries(listed: Head, request: Request) -> None:
    """Refuse ids and log-probabilities of different number, and log-probabilities that are none."""
    total = int(listed.sizes.sum())
    if not total == len(listed.ids) == len(listed.logprobs):
        raise request.error(
            f"{len(listed.ids)} ids, {len(listed.logprobs)} log-probabilities and rows that hold {total}",
            "every listed token needs one id and one log-probability",
        )
    bad = ~(listed.logprobs <= LOGPROB_SLACK)
    if bad.any():
        entry = int(bad.argmax())
        raise request.error(
            f"token {listed.ids[entry]} has log-probability {listed.logprobs[entry]}",
            "must be a number <= 0: ask for log-probabilities, not logits",
            _position(offsets_of(listed.sizes), entry),
        )


def _without_added(listed: Head, tokens: Int32, k: int, request: Request) -> Head:
    """Rows of k + 1 hold the sampled token first or last: without it they are the k most likely."""
    wrong = listed.sizes > k + 1
    if wrong.any():
        row = int(wrong.argmax())
        raise request.error(
            f"{listed.sizes[row]} tokens listed, asked for {k}", "pass the request that made this response", row
        )
    added = np.flatnonzero(listed.sizes == k + 1)
    ends = np.cumsum(listed.sizes, dtype=np.int64)[added]
    first, last = ends - (k + 1), ends - 1
    leads, trails = listed.ids[first] == tokens[added], listed.ids[last] == tokens[added]
    if not (leads | trails).all():
        row = int(added[(~(leads | trails)).argmax()])
        raise request.error(
            f"{k + 1} tokens listed for {k}, neither first nor last the sampled token {tokens[row]}",
            "rows must be those of the same position: heads are shifted, or the request is another one's",
            row,
        )
    keep = np.ones(len(listed.ids), np.bool_)
    keep[np.where(leads, first, last)] = False
    return select(listed, keep)


def _without_repeats(listed: Head, tokens: Int32, sampled: Float32, sampling: Sampling, request: Request) -> Head:
    """Take out a sampled token that is listed first and again with the same log-probability.

    Rows of which one may hold it in addition to the most likely tokens are refused: k decides that.
    """
    offsets = offsets_of(listed.sizes)
    repeated = find_duplicates(listed.ids, offsets)
    if not repeated.any():
        if not sampling.truncates:  # a support holds the sampled token
            _check_unadded(listed, offsets, tokens, request)
        return listed
    entries = np.flatnonzero(repeated)
    rows = np.searchsorted(offsets, entries, side="right") - 1
    first = offsets[rows]
    same = (
        (listed.ids[first] == tokens[rows])
        & (listed.ids[entries] == tokens[rows])
        & (np.abs(listed.logprobs[entries] - listed.logprobs[first]) <= SAMPLED_SLACK)
        & (np.abs(listed.logprobs[first] - sampled[rows]) <= SAMPLED_SLACK)
    )
    same[1:] &= np.diff(rows) > 0  # once, not several times
    if not same.all():
        raise _repeated(listed, offsets, int(entries[(~same).argmax()]), request)
    keep = np.ones(len(listed.ids), np.bool_)
    keep[first] = False
    rest = select(listed, keep)
    if not sampling.truncates:
        _check_unadded(rest, offsets_of(rest.sizes), tokens, request)
    return rest


def _check_unadded(listed: Head, offsets: npt.NDArray[np.int64], tokens: Int32, request: Request) -> None:
    """Refuse rows whose widest all lead, out of order, or all end with the sampled token."""
    widest = int(listed.sizes.max(initial=0))
    if widest < 2 or widest > int(listed.sizes.min()) + 1:
        return
    rows = np.flatnonzero(listed.sizes == widest)
    first, last = offsets[rows], offsets[rows + 1] - 1
    leads = (listed.ids[first] == tokens[rows]).all() and (listed.logprobs[first] < listed.logprobs[first + 1]).any()
    trails = (listed.ids[last] == tokens[rows]).all() and len(rows) < len(listed.sizes)
    if leads or trails:
        raise request.error(
            f"the sampled token {tokens[rows[0]]} stands {'before' if leads else 'after'} {widest - 1} others",
            "pass k, how many were asked for: a row of k + 1 holds it in addition, and it is no part of the head",
            int(rows[0]),
        )


def _repeated(listed: Head, offsets: npt.NDArray[np.int64], entry: int, request: Request) -> Exception:
    position = _position(offsets, entry)
    row = slice(int(offsets[position]), int(offsets[position + 1]))
    values = listed.logprobs[row][listed.ids[row] == listed.ids[entry]].tolist()
    return request.error(
        f"token {listed.ids[entry]} is listed {len(values)} times, with log-probabilities {values[:4]}",
        "every alternative needs its own id: only a sampled token that stands first may stand again",
        position,
    )


def _sorted(head: Head, offsets: npt.NDArray[np.int64]) -> Head:
    """Most likely token first; equal ones keep their order."""
    rises = head.logprobs[1:] > head.logprobs[:-1]
    starts = offsets[:-1][head.sizes > 0]
    rises[starts[1:] - 1] = False
    if not rises.any():
        return head
    unsorted = np.unique(np.searchsorted(offsets, np.flatnonzero(rises), side="right") - 1)
    chosen = np.zeros(len(head.sizes), np.bool_)
    chosen[unsorted] = True
    ids, logprobs = head.ids.copy(), head.logprobs.copy()
    places = np.flatnonzero(np.repeat(chosen, head.sizes))
    part = Ragged(places, offsets_of(head.sizes[chosen]))
    for block in blocks(part.offsets):
        order = np.argsort(-block.gather(logprobs[places], -np.inf), axis=1, kind="stable")
        target = block.gather(places, -1)
        source = np.take_along_axis(target, order, axis=1)
        ids[target[block.valid]] = head.ids[source[block.valid]]
        logprobs[target[block.valid]] = head.logprobs[source[block.valid]]
    return Head(head.sizes, ids, logprobs)


def _check_against_sampled(
    head: Head,
    offsets: npt.NDArray[np.int64],
    tokens: Int32,
    sampled: Float32,
    trained: Bool,
    sampling: Sampling,
    request: Request,
) -> None:
    mass = row_sums(np.exp(head.logprobs), offsets)
    above = mass > 1 + MASS_SLACK
    if above.any():
        row = int(above.argmax())
        raise request.error(
            f"the listed probabilities sum to {mass[row]:.6f}",
            "must be at most 1: log-probabilities of several temperatures, or of less precision than float32",
            row,
        )
    if sampling.truncates and (short := trained & (mass < 1 - TAIL_SLACK)).any():
        row = int(short.argmax())
        raise request.error(
            f"the {head.sizes[row]} listed tokens hold {mass[row]:.6f} of the mass of a truncated sampler",
            f"must be its whole support: ask for more tokens (a top-k bounds it); or {sampling.advice}",
            row,
        )
    inside, at = find_tokens(tokens, head.ids, offsets)
    last = np.maximum(offsets[1:] - 1, 0)
    if not len(head.logprobs):
        return
    differs = trained & inside & (np.abs(sampled - head.logprobs[at]) > SAMPLED_SLACK)
    if differs.any():
        row = int(differs.argmax())
        raise request.error(
            f"the sampled token {tokens[row]} has log-probability {sampled[row]:.4f}, and {head.logprobs[at[row]]:.4f} "
            "among the listed ones",
            f"both must be of one distribution: {sampling.advice}",
            row,
        )
    outside = trained & ~inside & (head.sizes > 0)
    if sampling.truncates and outside.any():
        row = int(outside.argmax())
        raise request.error(
            f"the sampled token {tokens[row]} is not in the support", f"it was sampled: {sampling.advice}", row
        )
    likely = outside & (sampled > head.logprobs[last] + SAMPLED_SLACK)
    if likely.any():
        row = int(likely.argmax())
        raise request.error(
            f"the sampled token {tokens[row]} is not listed, but its log-probability {sampled[row]:.4f} is above the "
            f"last listed one's, {head.logprobs[last[row]]:.4f}",
            "rows must be those of the same position and list the most likely tokens; no token may be appended to a "
            "response after sampling",
            row,
        )


def _position(offsets: npt.NDArray[np.int64], entry: int) -> int:
    return int(np.searchsorted(offsets, entry, side="right")) - 1
