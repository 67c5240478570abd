"""What engines hand over, and what becomes of it: heads, refusals, segments."""

import numpy as np
import pytest

from megatron_sc.rollouts import ExpertRoutes, HeadPolicy, Manifest, RolloutReader, RolloutWriter, capture
from megatron_sc.rollouts.capture import CaptureError, Sampling, arrays, join, to_table
from megatron_sc.rollouts.validate import find_problems
from tests.payloads import PROMPT, Truth, truth

PLAIN = Sampling()


def expected(source: Truth, k: int) -> list[dict[int, float]]:
    """The head of each position, from the dense distribution."""
    return [
        {int(i): float(np.float32(row[i])) for i in ids} for ids, row in zip(source.top(k), source.logq, strict=True)
    ]


def heads(response: capture.Response) -> list[dict[int, float]]:
    ends = np.cumsum(response.head.sizes)
    return [
        dict(zip(response.head.ids[a:b].tolist(), response.head.logprobs[a:b].tolist(), strict=True))
        for a, b in zip(ends - response.head.sizes, ends, strict=True)
    ]


def make(source: Truth, ids, logprobs, sampling=PLAIN, **fields) -> capture.Response:
    fields = {"sampled_logprobs": source.sampled, "weight_version": 5} | fields
    return arrays.response(PROMPT, source.tokens, sampling=sampling, head_ids=ids, head_logprobs=logprobs, **fields)


def one(probabilities: dict[int, float], token: int) -> Truth:
    """One position over a vocabulary of 50."""
    logq = np.full((1, 50), -np.inf)
    for i, q in probabilities.items():
        logq[0, i] = np.log(q)
    return Truth(logq, np.array([token]))


def test_sampled_token_in_front_of_the_head_is_no_part_of_it():
    source = truth(40)
    k = 4
    response = make(source, source.added(k), source.at(source.added(k)), k=k)
    assert heads(response) == expected(source, k)
    inside = (source.top(k) == source.tokens[:, None]).any(axis=1)
    assert 0 < inside.sum() < len(inside)  # both kinds of row occur


def test_prepended_duplicate_of_the_article():
    # q={42:.70,7:.12,9:.05,11:.03} with 42 listed twice must not become Q=1.6.
    source = one({42: 0.70, 7: 0.12, 9: 0.05, 11: 0.03}, 42)
    ids = np.array([[42, 42, 7, 9, 11]])
    for k in (None, 4):
        (head,) = heads(make(source, ids, source.at(ids), k=k))
        assert list(head) == [42, 7, 9, 11]
        assert sum(np.exp(list(head.values()))) == pytest.approx(0.90, abs=1e-6)


def test_infinite_entries_are_left_out():
    source = truth(6, 200)
    ids = source.top(128)
    logprobs = source.at(ids)
    for absent in (-np.inf, -9999.0, -99999.0, np.finfo(np.float32).min):
        logprobs[:, 20:] = absent
        assert heads(make(source, ids, logprobs)) == expected(source, 20)


def test_unsorted_rows_are_sorted_and_ragged_ones_kept():
    source = truth(9)
    sizes = np.arange(9) % 4 + 1
    ids = np.concatenate([row[:size][::-1] for row, size in zip(source.top(4), sizes, strict=True)])
    logprobs = np.concatenate(
        [line[row[:size][::-1]] for line, row, size in zip(source.logq, source.top(4), sizes, strict=True)]
    )
    response = make(source, ids, logprobs, head_sizes=sizes)
    wanted = [dict(list(head.items())[:size]) for head, size in zip(expected(source, 4), sizes, strict=True)]
    assert heads(response) == wanted
    assert [list(head) for head in heads(response)] == [list(head) for head in wanted]  # in order


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, lps: (ids[:, :4], lps), r"head_ids has shape \[12, 4\] and head_logprobs \[12, 5\]"),
        (lambda ids, lps: (ids[:-1], lps[:-1]), "head_ids has 11 entries and response_ids 12; .* append nothing"),
        (lambda ids, lps: (ids[:, :1].repeat(5, 1), lps), "position 0: token .* is listed 5 times"),
        (lambda ids, lps: (ids, np.where(np.arange(5) == 2, np.nan, lps)), "position 0: .* log-probability nan"),
        (lambda ids, lps: (ids, lps + 20), "ask for log-probabilities, not logits"),
        (lambda ids, lps: (ids, lps * 0.1), "position 0: the listed probabilities sum to [2-5]"),
        (lambda ids, lps: (ids, np.full_like(lps, -np.inf)), "position 0: no top log-probabilities"),
        (lambda ids, lps: (np.roll(ids, 1, 0), np.roll(lps, 1, 0)), "above the last listed one's|of one distribution"),
    ],
)  # fmt: skip
def test_heads_that_contradict_themselves_are_refused(change, message):
    source = truth()
    ids, logprobs = change(source.top(5), source.at(source.top(5)))
    with pytest.raises(CaptureError, match=message):
        make(source, ids, logprobs)


def test_every_alternative_with_the_chosen_token_is_refused():
    source = truth()
    ids = np.broadcast_to(source.tokens[:, None], (12, 5))
    logprobs = source.at(source.added(4))
    for k in (None, 4):
        with pytest.raises(CaptureError, match=r"position 0: token .* is listed [45] times"):
            make(source, ids, logprobs, k=k)
    same = np.broadcast_to(source.sampled[:, None], (12, 5))  # even where they agree
    for k in (None, 4):
        with pytest.raises(CaptureError, match=r"position 0: token .* is listed [45] times"):
            make(source, ids, same, k=k)


def test_wrong_width_is_refused():
    source = truth()
    with pytest.raises(CaptureError, match="position 0: 5 tokens listed, asked for 3"):
        make(source, source.top(5), source.at(source.top(5)), k=3)
    shifted = np.roll(source.added(4), 1, 0)
    with pytest.raises(CaptureError, match="neither first nor last the sampled token"):
        make(source, shifted, source.at(shifted), k=4)


def test_added_token_in_the_last_place():
    source = truth(40)
    inside = (source.top(4) == source.tokens[:, None]).any(axis=1)
    assert 0 < inside.sum() < len(inside)
    rows = [
        row if held else [*row, token] for row, held, token in zip(source.top(4), inside, source.tokens, strict=True)
    ]
    ids = np.concatenate(rows)
    logprobs = np.concatenate([line[np.array(row)] for line, row in zip(source.logq, rows, strict=True)])
    sizes = [len(row) for row in rows]
    assert heads(make(source, ids, logprobs, head_sizes=sizes, k=4)) == expected(source, 4)
    with pytest.raises(CaptureError, match=r"position \d+: the sampled token \d+ stands after 4 others; pass k"):
        make(source, ids, logprobs, head_sizes=sizes)


def test_rows_that_only_k_can_read_are_refused_without_it():
    # The sampled token in front, once: k + 1 distinct tokens, or k with one out of order.
    source = truth(40)
    outside = np.flatnonzero(~(source.top(4) == source.tokens[:, None]).any(axis=1))
    part = Truth(source.logq[outside], source.tokens[outside])
    with pytest.raises(CaptureError, match=r"position 0: the sampled token .* stands before 4 others; pass k"):
        make(part, part.added(4), part.at(part.added(4)))
    with pytest.raises(CaptureError, match=r"position \d+: the sampled token .* stands before 4 others; pass k"):
        make(source, source.added(4), source.at(source.added(4)))  # where it stands twice, once is taken out


def test_empty_response_and_segment():
    nothing = Truth(np.empty((0, 50)), np.empty(0, np.int64))
    empty = segment(nothing, PROMPT, 3)
    assert len(empty.response_ids) == len(empty.head.ids) == 0
    source = truth(3)
    joined = join([empty, segment(source, PROMPT, 4)])  # aborted before its first token, then resumed
    assert joined.weight_version.tolist() == [4] * 3
    assert heads(joined) == expected(source, 4)


def test_lengths_are_named_and_never_padded():
    source = truth()
    top = source.top(4)
    for field, values in (
        ("sampled_logprobs", source.sampled[:-1]),
        ("weight_version", np.zeros(13, np.int32)),
        ("response_mask", np.ones(11, bool)),
    ):
        with pytest.raises(CaptureError, match=f"{field} has .* entries and response_ids 12"):
            make(source, top, source.at(top), **{field: values})


def test_appended_end_of_sequence_is_refused():
    # log-probability 0 and mask 1: a ratio of e^-3 for a token that nobody sampled.
    source = truth()
    sampled = source.sampled.copy()
    sampled[-1] = 0.0
    tokens = source.tokens.copy()
    tokens[-1] = 2 if 2 not in source.top(4)[-1] else int(np.setdiff1d(np.arange(50), source.top(4)[-1])[0])
    with pytest.raises(CaptureError, match=r"position 11: .* no token may be appended"):
        make(Truth(source.logq, tokens), source.top(4), source.at(source.top(4)), sampled_logprobs=sampled)


@pytest.mark.parametrize("value", [np.nan, -np.inf, -9999.0, None])
def test_sampled_token_without_log_probability_is_refused_where_it_trains(value):
    source = truth()
    sampled = source.sampled.astype(object)
    sampled[3] = value
    top = source.top(4)
    with pytest.raises(CaptureError, match="position 3: the sampled token"):
        make(source, top, source.at(top), sampled_logprobs=sampled)
    mask = np.arange(12) != 3
    response = make(source, top, source.at(top), sampled_logprobs=sampled, response_mask=mask)
    assert (response.sampled_logprobs[3], bool(response.response_mask[3])) == (0, False)


def test_raw_and_processed_are_not_mixed():
    # logits [2,1,0] at T=.5: the first token is -.4076 raw and -.1429 processed.
    logits = np.array([[2.0, 1.0, 0.0]])
    raw = logits - np.log(np.exp(logits).sum())
    processed = logits / 0.5 - np.log(np.exp(logits / 0.5).sum())
    assert (round(raw[0, 0], 4), round(processed[0, 0], 4)) == (-0.4076, -0.1429)
    tempered = Sampling(temperature=0.5)
    source, ids = Truth(processed, np.array([0])), np.array([[0, 1, 2]])
    good = make(source, ids, processed, tempered)
    assert good.head.logprobs[0] == good.sampled_logprobs[0] == np.float32(processed[0, 0])  # the ratio is 1
    with pytest.raises(CaptureError, match=r"position 0: .* -0.1429, and -0.4076 .* one distribution"):
        make(source, ids, raw, tempered)
    with pytest.raises(CaptureError, match=r"log-probabilities are raw, but tokens were drawn with temperature 0.5"):
        make(Truth(raw, np.array([0])), ids, raw, Sampling(temperature=0.5, logprobs="raw"))
    make(Truth(raw, np.array([0])), ids, raw, Sampling(logprobs="raw"))  # at temperature 1 they are the same


def test_truncating_sampler_needs_its_support():
    # top-p 0.8 over (.5,.3,.15,.05).
    nucleus = one({0: 0.5 / 0.8, 1: 0.3 / 0.8}, 1)
    ids = np.array([[0, 1, 2, 3]])
    sampling = Sampling(top_p=0.8)
    response = make(nucleus, ids, nucleus.at(ids), sampling)
    assert response.head_is_support
    assert heads(response) == [{0: np.float32(np.log(0.625)), 1: np.float32(np.log(0.375))}]
    full = one({0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}, 1)
    with pytest.raises(CaptureError, match=r"log-probabilities are raw, but tokens were drawn with top_p 0.8"):
        make(full, ids, full.at(ids), Sampling(top_p=0.8, logprobs="raw"))
    with pytest.raises(CaptureError, match=r"log-probabilities are tempered, but tokens were drawn with top_p 0.8"):
        make(full, ids, full.at(ids), Sampling(top_p=0.8, logprobs="tempered"))
    with pytest.raises(CaptureError, match=r"position 0: the 1 listed tokens hold 0.375"):
        make(nucleus, ids[:, 1:2], nucleus.at(ids[:, 1:2]), sampling)  # cut by k
    outside = Truth(nucleus.logq, np.array([2]))
    with pytest.raises(CaptureError, match="the sampled token 2 is not in the support"):
        make(outside, ids, nucleus.at(ids), sampling, sampled_logprobs=[-1.0])


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan, np.inf])
def test_greedy_is_refused(temperature):
    source = truth()
    with pytest.raises(CaptureError, match=r"temperature is .*; must be a number > 0: a greedy"):
        make(source, None, None, Sampling(temperature=temperature))


def test_ids_are_integers_within_int32():
    source = truth()
    with pytest.raises(CaptureError, match="response_ids has dtype float64"):
        arrays.response(PROMPT, source.tokens.astype(float), source.sampled, 0, PLAIN)
    with pytest.raises(CaptureError, match=r"prompt_ids has values in .* must fit int32"):
        arrays.response([1 << 40], source.tokens, source.sampled, 0, PLAIN)
    big = arrays.response([151643], source.tokens, source.sampled, 0, PLAIN)  # 16 bits would wrap it to 20571
    assert (big.prompt_ids.tolist(), big.head) == ([151643], None)


def segment(source: Truth, prompt: list[int], version: int, k: int = 4, routes: int | None = None, **fields):
    shape = (len(prompt) + len(source.tokens), 2, 3)
    padded = None
    if routes is not None:
        padded = np.full(shape, routes, np.int16) + np.arange(3, dtype=np.int16)
        padded[-1] = -1
    return arrays.response(
        prompt, source.tokens, source.sampled, version, fields.pop("sampling", PLAIN),
        head_ids=source.top(k), head_logprobs=source.at(source.top(k)), expert_routes=padded, **fields,
    )  # fmt: skip


def test_join_of_turns_and_versions(tmp_path):
    first, second, third = (truth(length, seed=seed) for length, seed in ((3, 1), (2, 2), (4, 3)))
    tool = [40, 41]
    a = segment(first, PROMPT, 3, routes=0)
    middle = [*PROMPT, *first.tokens.tolist(), *tool]
    b = segment(second, middle, 3, routes=10)
    c = segment(third, [*middle, *second.tokens.tolist()], 4, routes=20, finish_reason="length")  # resumed, new weights
    joined = join([a, b, c])
    assert joined.prompt_ids.tolist() == PROMPT
    assert joined.response_ids.tolist() == [*first.tokens, *tool, *second.tokens, *third.tokens]
    assert joined.response_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 6
    assert joined.weight_version.tolist() == [3] * 7 + [4] * 4
    assert joined.head.sizes.tolist() == [4] * 3 + [0] * 2 + [4] * 6
    assert [head for head in heads(joined) if head] == [
        *expected(first, 4), *expected(second, 4), *expected(third, 4)
    ]  # fmt: skip
    assert joined.finish_reason == "length"
    # Tokens keep the routes they were sampled with; a later segment adds those from its predecessor's last token on.
    assert joined.expert_routes[:, 0, 0].tolist() == [0] * 5 + [10] * 4 + [20] * 4 + [-1]

    manifest = Manifest(50, heads=HeadPolicy.lossless(k=4), expert_routes=ExpertRoutes(2, 3, 32))
    table = to_table([joined, joined], [1.0, 0.0], [9, 9], metadata=[{"turns": 3}, {}])
    problems, _ = find_problems(table, manifest, encoded=False)
    assert not problems
    with RolloutWriter(tmp_path, manifest) as writer:
        writer.write(table)
    with RolloutReader(tmp_path) as reader:
        (group,) = reader.take(1, step=4)
        rollout = group.rollouts()[0]
    assert rollout.response_ids.tolist() == joined.response_ids.tolist()
    np.testing.assert_array_equal(rollout.head_ids[5], second.top(4)[0])
    assert rollout.metadata == {"turns": 3}


def test_join_refuses_what_does_not_continue():
    first, second = truth(3, seed=1), truth(2, seed=2)
    a = segment(first, PROMPT, 3)
    retokenized = [*PROMPT, *first.tokens.tolist()]
    retokenized[4] += 1
    with pytest.raises(CaptureError, match=r"prompt of segment 1 .* has token \d+ at 4, where .* not with their text"):
        join([a, segment(second, retokenized, 3)])
    with pytest.raises(CaptureError, match=r"prompt of segment 1 .* ends at 5"):
        join([a, segment(second, [*PROMPT, *first.tokens.tolist()][:5], 3)])
    good = [*PROMPT, *first.tokens.tolist()]
    with pytest.raises(CaptureError, match="segments have temperature"):
        join([a, segment(second, good, 3, sampling=Sampling(temperature=0.7))])
    with pytest.raises(CaptureError, match="expert_routes is recorded for some segments only"):
        join([a, segment(second, good, 3, routes=1)])


def test_to_table_checks_lengths_and_metadata():
    response = segment(truth(), PROMPT, 3)
    with pytest.raises(ValueError, match="rewards has 2 entries for 1 responses"):
        to_table([response], [1.0, 2.0], [0])
    with pytest.raises(ValueError, match="metadata of response 0 is not JSON"):
        to_table([response], [1.0], [0], metadata=[{"x": np.nan}])


def test_fingerprint_of_sampling():
    fingerprint = Sampling(0.7, top_k=20, presence_penalty=0.5).fingerprint(engine="mine", weight_dtype="fp8_e4m3")
    assert (fingerprint.temperature, fingerprint.top_k, fingerprint.presence_penalty) == (0.7, 20, 0.5)
    assert (fingerprint.engine, fingerprint.weight_dtype, fingerprint.logprobs_mode) == (
        "mine",
        "fp8_e4m3",
        "processed",
    )
    assert fingerprint.truncates
