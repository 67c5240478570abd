"""Validation: every kind of wrong rollout is refused, and the message names row, position, field and value."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.buffer_faults import VOCAB, make_group
from megatron_sc.rollouts import (
    BufferRefusedError,
    HeadPolicy,
    Manifest,
    Rollout,
    RolloutTable,
    SamplerFingerprint,
    Trainer,
)
from megatron_sc.rollouts.codec import encode_heads
from megatron_sc.rollouts.ragged import Ragged
from megatron_sc.rollouts.schema import ExpertRoutes
from megatron_sc.rollouts.validate import check_fingerprint, find_problems
from tests.rollouts import make_routes

MANIFEST = Manifest(VOCAB)


def group() -> list[Rollout]:
    return make_group(5, length=24)


def changed(field: str, at, value) -> list[Rollout]:
    """Rollout 2 of a group with one value changed."""
    rollouts = group()
    values = getattr(rollouts[2], field).copy()
    values[at] = value
    rollouts[2] = replace(rollouts[2], **{field: values})
    return rollouts


def problems(rollouts, manifest=MANIFEST, encoded=False):
    table = rollouts if isinstance(rollouts, RolloutTable) else RolloutTable.from_rollouts(rollouts)
    return find_problems(table, manifest, encoded=encoded, file="f")[0]


@pytest.mark.parametrize("policy", [HeadPolicy(), HeadPolicy.lossless()])
def test_valid_rollouts_pass_before_and_after_the_codec(policy):
    for number in range(20):
        table = RolloutTable.from_rollouts(make_group(number))
        assert not problems(table)
        assert not problems(encode_heads(table, policy), Manifest(VOCAB, heads=policy), encoded=True)


@pytest.mark.parametrize(
    ("field", "at", "value", "named", "shown"),
    [
        ("prompt_ids", 1, VOCAB, "prompt_ids", str(VOCAB)),
        ("response_ids", 3, -1, "response_ids", "-1"),
        ("response_ids", 3, 20571 + 65536, "response_ids", "86107"),
        ("sampled_logprobs", 2, 0.01, "sampled_logprobs", "0.01"),
        ("sampled_logprobs", 2, -0.0001, "sampled_logprobs", "-1e-04"),
        ("weight_version", 2, 0, "weight_version", "0"),
        ("head_ids", (1, 4), VOCAB, "head_ids", str(VOCAB)),
        ("head_logprobs", (1, 0), 0.1, "head_logprobs", "0.1"),
        ("head_logprobs", (1, 4), np.nan, "head_logprobs", "nan"),
        ("head_logprobs", (1, 4), -0.5, "head_logprobs", "-0.5"),
        ("log_tail_mass", 1, 0.2, "log_tail_mass", "0.2"),
        ("log_tail_mass", 1, -20.0, "head and tail mass", "0."),
    ],
)
def test_one_wrong_value_is_found(field, at, value, named, shown):
    found = [p for p in problems(changed(field, at, value)) if p.field == named]
    assert found
    position = at[0] if isinstance(at, tuple) else at
    assert (found[0].file, found[0].row, found[0].position) == ("f", 2, position)
    assert shown in found[0].value
    assert f"f, row 2, position {position}: {named} is {found[0].value}; " in str(found[0])


def test_sampled_token_prepended_to_the_list():
    """Engines return k + 1 entries, the sampled token twice: q sums to 1.6."""
    ids = np.array([[42, 42, 7, 9, 11]] * 3, np.int32)
    logprobs = np.log(np.array([[0.70, 0.70, 0.12, 0.05, 0.03]] * 3, np.float32))
    rollout = Rollout(
        np.zeros(1, np.int32), np.full(3, 42, np.int32), np.ones(3, bool), np.full(3, np.log(0.7), np.float32),
        np.zeros(3, np.int32), 0.0, 0, head_ids=ids, head_logprobs=logprobs,
    )  # fmt: skip
    found = {p.field: p for p in problems([rollout])}
    assert found["head_ids"].value == "42"
    assert "twice" in found["head_ids"].rule
    assert found["head and tail mass"].value == "1.600000"


def test_every_alternative_carries_the_chosen_id():
    found = problems(changed("head_ids", slice(None), 3))
    assert any(p.field == "head_ids" and "twice" in p.rule and p.row == 2 for p in found)


def test_end_of_sequence_with_log_probability_zero():
    """An appended token with log q = 0 and mask 1: a ratio of e^-3."""
    found = problems(changed("sampled_logprobs", -1, 0.0))
    assert found[0].field == "sampled_logprobs"
    assert found[0].value == "0.0"


def test_raw_mixed_with_processed():
    """Logits [2, 1, 0] at T = 0.5: -.4076 raw, -.1429 processed."""
    logits = np.array([2.0, 1.0, 0.0])
    raw, processed = (x - np.log(np.exp(x).sum()) for x in (logits, logits / 0.5))
    rollout = Rollout(
        np.zeros(1, np.int32), np.zeros(2, np.int32), np.ones(2, bool), np.full(2, raw[0], np.float32),
        np.zeros(2, np.int32), 0.0, 0, temperature=0.5, head_ids=np.tile(np.arange(3, dtype=np.int32), (2, 1)),
        head_logprobs=np.tile(processed.astype(np.float32), (2, 1)),
    )  # fmt: skip
    found = problems([rollout], Manifest(3))
    assert "differs from the sampled token's entry" in found[0].rule


def _with_heads(change) -> list[Rollout]:
    rollouts = group()
    ids, logprobs = rollouts[2].head_ids.copy(), rollouts[2].head_logprobs.copy()
    ids, logprobs = change(ids, logprobs)
    rollouts[2] = replace(rollouts[2], head_ids=ids, head_logprobs=logprobs, log_tail_mass=None)
    return rollouts


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda ids, logprobs: (ids, np.full_like(logprobs, np.log(1 / 20))), "same for all tokens"),
        (lambda ids, logprobs: (np.tile(np.arange(16, dtype=np.int32), (len(ids), 1)), logprobs), "0, 1, 2"),
        (
            lambda ids, logprobs: (np.tile(ids[:1], (len(ids), 1)), np.tile(logprobs[:1], (len(ids), 1))),
            "again and again",
        ),
    ],
)
def test_degenerate_heads(change, rule):
    found = [p for p in problems(_with_heads(change)) if rule in p.rule]
    assert [p.row for p in found] == [2]
    assert "%" in found[0].value


@pytest.mark.parametrize(("by", "name"), [(1, "previous"), (-1, "next")])
def test_heads_shifted_by_one_position(by, name):
    rollouts = [_concentrated(seed) for seed in range(3)]
    assert not problems(rollouts)
    shifted = rollouts[1]
    rollouts[1] = replace(
        shifted,
        head_ids=np.roll(shifted.head_ids, by, axis=0),
        head_logprobs=np.roll(shifted.head_logprobs, by, axis=0),
    )
    other = {"previous": "next", "next": "previous"}[name]  # heads rolled forward: a token's head stands one later
    found = [p for p in problems(rollouts) if "shifted" in p.rule]
    assert [(p.row, p.field) for p in found] == [(1, "head_ids")]
    assert other in found[0].rule


def _concentrated(seed: int) -> Rollout:
    """Heads of 6 of 96 tokens that hold almost all mass, so that a token is in no other position's head by chance."""
    rng = np.random.default_rng(seed)
    length = 24
    ids = np.stack([rng.permutation(VOCAB)[:6] for _ in range(length)]).astype(np.int32)
    q = np.array([0.6, 0.2, 0.1, 0.05, 0.03, 0.0199])
    at = rng.choice(6, length, p=q / q.sum())
    return Rollout(
        np.zeros(1, np.int32), ids[np.arange(length), at], np.ones(length, bool), np.log(q[at]).astype(np.float32),
        np.zeros(length, np.int32), 0.0, seed, head_ids=ids, log_tail_mass=np.full(length, np.log(1e-4), np.float32),
        head_logprobs=np.tile(np.log(q).astype(np.float32), (length, 1)),
    )  # fmt: skip


def test_lengths_name_the_row():
    table = RolloutTable.from_rollouts(group())
    mask = table.response_mask
    short = Ragged(np.delete(mask.values, mask.offsets[3] - 1), mask.offsets - (mask.offsets >= mask.offsets[3]))
    found, bad_rows = find_problems(replace(table, response_mask=short), MANIFEST, encoded=False)
    assert [(p.row, p.field) for p in found] == [(2, "length of response_mask")]
    assert bad_rows.tolist() == [False, False, True, False]


def test_rows_with_sound_lengths_are_checked_beside_others():
    table = RolloutTable.from_rollouts(changed("response_ids", 1, VOCAB))
    versions = table.weight_version
    short = Ragged(versions.values[1:], np.maximum(versions.offsets - 1, 0))
    found, bad_rows = find_problems(replace(table, weight_version=short), MANIFEST, encoded=False)
    assert {(p.row, p.field) for p in found} >= {(0, "length of weight_version"), (2, "response_ids")}
    assert bad_rows.tolist() == [True, False, True, False]


def test_positions_that_do_not_train_need_no_log_probability():
    rollouts = changed("response_mask", 2, False)
    sampled = rollouts[2].sampled_logprobs.copy()
    sampled[2] = np.nan
    rollouts[2] = replace(rollouts[2], sampled_logprobs=sampled)
    assert not problems(rollouts)


def test_expert_routes_are_checked():
    manifest = Manifest(VOCAB, expert_routes=ExpertRoutes(2, 2, 8))
    cases = ([8, 1], "must be in [-1, 8)"), ([1, 1], "an expert is there twice"), ([-1, 3], "all of a token's experts")
    for experts, rule in cases:
        rollouts = [replace(r, expert_routes=make_routes(len(r), 2, 2, 8, np.random.default_rng(0))) for r in group()]
        rollouts[1].expert_routes[3, 1] = experts
        (found,) = problems(RolloutTable.from_rollouts(rollouts), manifest)
        assert (found.row, found.field) == (1, "expert_routes")
        assert rule in str(found)
    (found,) = problems(RolloutTable.from_rollouts(rollouts))
    assert found.field == "length of expert_routes"


def test_truncating_sampler_needs_supports():
    manifest = Manifest(VOCAB, sampler=SamplerFingerprint(top_p=0.8))
    assert [p.field for p in problems(group(), manifest)] == ["head_is_support"]
    support = [replace(_concentrated(0), head_is_support=True, log_tail_mass=None)]
    found = problems(support, manifest)
    assert not [p for p in found if p.field != "head and tail mass"]
    q = np.array([0.6, 0.2, 0.1, 0.05, 0.03, 0.02])
    logprobs = np.tile(np.log(q).astype(np.float32), (24, 1))
    at = (support[0].head_ids == support[0].response_ids[:, None]).argmax(axis=1)
    support = [replace(support[0], head_logprobs=logprobs, sampled_logprobs=logprobs[np.arange(24), at])]
    assert not problems(support, manifest)
    outside = support[0].response_ids.copy()
    outside[4] = next(v for v in range(VOCAB) if v not in support[0].head_ids[4])
    found = problems([replace(support[0], response_ids=outside)], manifest)
    assert any((p.position, p.field, p.value) == (4, "response_ids", str(outside[4])) for p in found)


@pytest.mark.parametrize(
    ("sampler", "trainer", "key"),
    [
        ({}, Trainer(true_vocab_size=VOCAB + 1), "true_vocab_size"),
        ({}, Trainer(tokenizer_hash="b"), "tokenizer_hash"),
        ({"temperature": 0.7}, Trainer(temperature=1.0), "sampler.temperature"),
        ({"top_p": 0.8}, Trainer(top_p=1.0), "sampler.top_p"),
        ({"top_k": 20}, Trainer(top_k=0), "sampler.top_k"),
        ({"logprobs_mode": "raw", "temperature": 0.7}, Trainer(), "sampler.logprobs_mode"),
        ({"logprobs_mode": "other"}, Trainer(), "sampler.logprobs_mode"),
    ],
)
def test_fingerprint_against_the_trainer(sampler, trainer, key):
    manifest = Manifest(VOCAB, "a", SamplerFingerprint(**sampler))
    with pytest.raises(BufferRefusedError) as caught:
        check_fingerprint(manifest, trainer)
    assert (caught.value.problem.file, caught.value.problem.field) == ("manifest.json", key)


def test_fingerprint_that_fits():
    manifest = Manifest(VOCAB, "a", SamplerFingerprint(temperature=1.0, logprobs_mode="raw"))
    check_fingerprint(manifest, Trainer(VOCAB, 1.0, 1.0, 0, "a"))
