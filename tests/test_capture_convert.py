"""``megatron-sc convert``: files of other stacks become a buffer that reads back as the sampler's distributions."""

import gzip
import json
import random
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_sc.cli import main
from megatron_sc.rollouts import RolloutError, RolloutReader
from megatron_sc.rollouts.capture import Sampling, to_table
from megatron_sc.rollouts.capture.records import Record, Rows, records
from megatron_sc.rollouts.capture.sources import ColumnSource
from tests.payloads import (
    PROMPT,
    Truth,
    mutate,
    npy_base64,
    sglang_output,
    truth,
    vllm_chat_json,
    vllm_completion_json,
    vllm_generate_json,
)

K = 4
FLAGS = ["--true-vocab-size", "50", "--lossless", "--k", str(K)]
PROCESSED = ["--logprobs-mode", "processed"]
SOURCES = [truth(6 + i, seed=i) for i in range(6)]


def write(path, rows) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def test_parquet_lists_of_all_kinds(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {
            "small": rng.integers(0, 9, i % 3).tolist() if i % 7 else None,
            "large": rng.integers(0, 9, i % 4).tolist(),
            "fixed": rng.random(2).tolist(),
            "nested": [rng.random(j % 3).tolist() for j in range(i % 5)] if i % 11 else None,
            "rectangle": [rng.random(3).tolist() for _ in range(i % 2)],
            "holes": [1, None],
            "name": f"row {i}",
        }
        for i in range(150)
    ]
    number = pa.float64()
    schema = pa.schema(
        {
            "small": pa.list_(pa.int32()),
            "large": pa.large_list(pa.int64()),
            "fixed": pa.list_(number, 2),
            "nested": pa.list_(pa.list_(number)),
            "rectangle": pa.large_list(pa.list_(number, 3)),
            "holes": pa.list_(number),
            "name": pa.string(),
        }
    )
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "rows.parquet", row_group_size=100)

    def plain(value):
        if isinstance(value, Rows):
            return (
                [part.tolist() for part in np.split(value.flat, np.cumsum(value.sizes)[:-1])]
                if len(value.sizes)
                else []
            )
        return value.tolist() if isinstance(value, np.ndarray) else value

    found = list(records(tmp_path / "rows.parquet"))
    assert [{name: plain(value) for name, value in record.values.items()} for record in found] == rows
    assert found[-1].place.endswith("rows.parquet, row 149")
    assert found[-1].read == (tmp_path / "rows.parquet").stat().st_size
    assert isinstance(found[1].values["rectangle"], Rows)


def slime_row(index: int, source: Truth) -> dict:
    """``Sample.to_dict`` of slime and miles."""
    ids = source.top(K)
    return {
        "group_index": index // 2,
        "tokens": [*PROMPT, *source.tokens.tolist()],
        "response_length": len(source.tokens),
        "response": "text",
        "reward": float(index),
        "loss_mask": [1] * len(source.tokens),
        "weight_versions": ["3", "3"],
        "rollout_log_probs": source.sampled.tolist(),
        "rollout_topk_token_ids": ids.tolist(),
        "rollout_topk_log_probs": source.at(ids).tolist(),
        "status": "completed",
        "temperature": 1.0,
        "metadata": {"n": index},
    }


def own_row(index: int, source: Truth) -> dict:
    """The names of this schema, an advantage, versions by token, heads padded with -1."""
    ids, logprobs = source.top(K), source.at(source.top(K)).tolist()
    padded = ids.tolist()
    padded[0][-1] = -1
    return {
        "prompt_ids": PROMPT,
        "response_ids": source.tokens.tolist(),
        "sampled_logprobs": source.sampled.tolist(),
        "head_ids": padded,
        "head_logprobs": logprobs,
        "weight_version": [3] * 5 + [4] * (len(source.tokens) - 5),
        "reward": index,
        "advantage": -0.5,
        "group_id": f"prompt-{index // 3}",
    }


def rollouts(path, groups: int) -> list:
    with RolloutReader(path) as reader:
        return [rollout for group in reader.take(groups, step=4) for rollout in group.rollouts()]


def check(rollout, source: Truth, *, first: int = K) -> None:
    np.testing.assert_array_equal(rollout.prompt_ids, PROMPT)
    np.testing.assert_array_equal(rollout.response_ids, source.tokens)
    np.testing.assert_array_equal(rollout.sampled_logprobs, source.sampled.astype(np.float32))
    np.testing.assert_array_equal(rollout.head_ids[1:], source.top(K)[1:])
    np.testing.assert_array_equal(rollout.head_ids[0, :first], source.top(K)[0, :first])
    np.testing.assert_array_equal(rollout.head_logprobs[1:], source.at(source.top(K))[1:])


@pytest.mark.parametrize("suffix", [".jsonl", ".json.gz", ".parquet"])
def test_slime_and_miles_rows(tmp_path, capsys, suffix):
    rows = [slime_row(i, source) for i, source in enumerate(SOURCES)]
    file, buffer = tmp_path / f"rows{suffix}", tmp_path / "buffer"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=4)
    else:
        write(file, rows)
    assert main(["convert", str(file), str(buffer), *FLAGS, *PROCESSED]) == 0
    out = capsys.readouterr().out
    assert "head_ids from rollout_topk_token_ids" in out
    assert "columns that were not used: response" in out
    assert f"{buffer}: 3 groups, 6 rollouts, {sum(len(s.tokens) for s in SOURCES)} tokens" in out
    assert main(["validate", str(buffer), "--true-vocab-size", "50"]) == 0
    found = rollouts(buffer, 3)
    for i, (rollout, source) in enumerate(zip(found, SOURCES, strict=True)):
        check(rollout, source)
        assert (rollout.reward, rollout.finish_reason, rollout.metadata) == (i, "completed", {"n": i})
        assert set(rollout.weight_version) == {3}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_own_names_of_two_files(tmp_path, suffix):
    files = [tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"]
    rows = [own_row(i, source) for i, source in enumerate(SOURCES)]
    for file, part in zip(files, (rows[:4], rows[4:]), strict=True):  # a group goes on in the second file
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(part), file)
        else:
            write(file, part)
    buffer = tmp_path / "buffer"
    buffer.mkdir()
    flags = [*FLAGS, *PROCESSED, "--temperature", "1"]
    assert main(["convert", *map(str, files), str(buffer), *flags]) == 0
    assert main(["validate", str(buffer), "--temperature", "1"]) == 0
    found = rollouts(buffer, 2)
    for rollout, source in zip(found, SOURCES, strict=True):
        check(rollout, source, first=K - 1)
        assert rollout.head_ids[0, -1] == -1
        assert rollout.weight_version.tolist() == [3] * 5 + [4] * (len(source.tokens) - 5)
        assert rollout.advantage == -0.5


def test_columns_chosen_and_groups_counted(tmp_path):
    rows = []
    for i, source in enumerate(SOURCES):
        row = own_row(i, source) | {"weights": 4, "r": 1.5}
        rows.append({key: value for key, value in row.items() if key not in ("group_id", "weight_version", "reward")})
    write(tmp_path / "rows.jsonl", rows)
    command = ["convert", str(tmp_path / "rows.jsonl"), str(tmp_path / "buffer"), *FLAGS, *PROCESSED]
    command += ["--temperature", "1", "--column", "weight_version=weights", "--column", "reward=r", "--group-size", "3"]
    assert main(command) == 0
    found = rollouts(tmp_path / "buffer", 2)
    assert {rollout.reward for rollout in found} == {1.5}
    assert {int(version) for rollout in found for version in rollout.weight_version} == {4}


def test_group_size_must_divide(tmp_path, capsys):
    write(tmp_path / "rows.jsonl", [slime_row(i, source) for i, source in enumerate(SOURCES)])
    command = ["convert", str(tmp_path / "rows.jsonl"), str(tmp_path / "buffer"), *FLAGS, *PROCESSED]
    assert main([*command, "--group-size", "4"]) == 1
    assert "6 records are no multiple of --group-size 4" in capsys.readouterr().err
    assert not (tmp_path / "buffer").exists()


ENGINES = {
    "generate": ("vllm", vllm_generate_json, K),
    "completion": ("vllm", vllm_completion_json, K),
    "chat": ("vllm", vllm_chat_json, K + 1),
    "sglang": ("sglang", sglang_output, K),
    "sglang-b64": ("sglang", lambda source, k: sglang_output(source, k, "b64"), K),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_replies_of_engines(tmp_path, kind):
    engine, make, k = ENGINES[kind]
    request = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0.0}
    lines = []
    for i, source in enumerate(SOURCES):
        reply = make(source, k)
        record = {"response": reply, "request": request} if i % 2 else dict(reply)  # wrapped, or the record itself
        lines.append(
            record | {"reward": i, "group_id": i // 2, "weight_version": {"7": 3} if engine == "sglang" else 3}
        )
    write(tmp_path / "replies.jsonl", lines)
    command = ["convert", str(tmp_path / "replies.jsonl"), str(tmp_path / "buffer"), "--format", engine]
    command += ["--true-vocab-size", "50", "--lossless", "--k", str(k), "--temperature", "1"]
    assert main([*command, *(PROCESSED if engine == "vllm" else [])]) == 0
    assert main(["validate", str(tmp_path / "buffer")]) == 0
    for i, (rollout, source) in enumerate(zip(rollouts(tmp_path / "buffer", 3), SOURCES, strict=True)):
        check(rollout, source)
        assert (rollout.reward, set(rollout.weight_version)) == (i, {3})


def test_choices_and_routes(tmp_path):
    reply = vllm_generate_json(SOURCES[0], K)
    reply["choices"] += vllm_generate_json(SOURCES[1], K)["choices"]
    for choice in reply["choices"]:
        total = len(PROMPT) + len(choice["token_ids"])
        choice["routed_experts"] = npy_base64(np.broadcast_to(np.arange(1, 4, dtype=np.uint8), (total - 1, 2, 3)))
    write(tmp_path / "replies.jsonl", [{"response": reply, "reward": [1, 0], "weight_version": 3}])
    command = ["convert", str(tmp_path / "replies.jsonl"), str(tmp_path / "buffer"), "--format", "vllm", *FLAGS]
    command += [*PROCESSED, "--temperature", "1", "--expert-routes", "2", "3", "8"]
    assert main(command) == 0
    with RolloutReader(tmp_path / "buffer") as reader:
        (group,) = reader.take(1, step=4)
    assert group.table.reward.tolist() == [1, 0]
    assert group.table.expert_routes[1].reshape(-1, 2, 3)[:, 0, 0].tolist() == [1] * (len(PROMPT) + 6) + [-1]


def test_truncated_sampler(tmp_path):
    source = truth(8, top_k=3)
    row = slime_row(0, source)
    for ids, logprobs in zip(row["rollout_topk_token_ids"], row["rollout_topk_log_probs"], strict=True):
        ids[3:], logprobs[3:] = [-1], [0.0]  # miles pads a support with -1
    write(tmp_path / "rows.jsonl", [row])
    command = ["convert", str(tmp_path / "rows.jsonl"), str(tmp_path / "buffer"), *FLAGS, *PROCESSED, "--top-k", "3"]
    assert main(command) == 0
    assert main(["validate", str(tmp_path / "buffer"), "--top-k", "3"]) == 0
    (rollout,) = rollouts(tmp_path / "buffer", 1)
    assert rollout.head_is_support
    np.testing.assert_array_equal(rollout.head_ids, source.top(3))


def change(**values):
    return lambda row: row.update(values)


BAD = {
    "a null": (lambda row: row["rollout_log_probs"].__setitem__(2, None), "position 2: the sampled token .* nan"),
    "lengths": (lambda row: row["rollout_log_probs"].pop(), "sampled_logprobs has 7 entries and response_ids 8"),
    "a reward": (change(reward={"score": 1}), "reward is {'score': 1}; must be a finite number"),
    "an advantage": (change(advantage=float("nan")), "has advantage, which the first record lacks"),
    "a mask": (change(loss_mask=[1, 0.5] + [1] * 6), "position 1: response_mask is 0.5; must be 0 or 1"),
    "half a version": (change(weight_versions=2.5), "weight version 2.5 is no step"),
    "half a token": (change(response_length=8.0), "response_length is 8.0; must be in"),
    "a text": (change(temperature="1"), "temperature is '1'; must be a number"),
    "versions": (change(weight_versions=["3", "4"]), r"2 weight versions \[3, 4\] for 8 tokens"),
    "a version": (change(weight_versions="default"), "weight version 'default' is no step"),
    "length": (change(response_length=99), "response_length is 99; must be in \\[0, 11\\]"),
    "a head": (lambda row: row["rollout_topk_token_ids"][3].pop(), "have rows of different lengths"),
    "text": (change(rollout_topk_token_ids="abc"), "rollout_topk_token_ids must be a list of lists"),
    "a repeated id": (lambda row: row["rollout_topk_token_ids"].__setitem__(1, [7, 7, 7, 7]), "position 1: token 7 is"),
    "temperature": (change(temperature=0), "temperature is 0.0; must be a number > 0"),
    "vocabulary": (lambda row: row["tokens"].__setitem__(0, 77), "prompt_ids is 77; must be in"),
    "a finish": (lambda row: row.pop("status"), "no status; every record must have the columns of the first one"),
    "metadata": (change(metadata=[1]), r"metadata is \[1\]; must be a JSON object"),
    "a group": (change(group_index=1.5), "group_id is 1.5; must be a whole number or a name"),
    "an old group": (change(group_index=0), "group 0 has ended before"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_rows_are_named_and_nothing_is_left(tmp_path, capsys, kind):
    spoil, message = BAD[kind]
    rows = [slime_row(i, SOURCES[2]) for i in range(6)]
    spoil(rows[4])
    write(tmp_path / "rows.jsonl", rows)
    command = ["convert", str(tmp_path / "rows.jsonl"), str(tmp_path / "buffer"), *FLAGS, *PROCESSED]
    assert main(command) == 1
    err = capsys.readouterr().err
    assert re.search(rf"error: .*rows.jsonl, line 5[:,] .*{message}", err), err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("make", [slime_row, own_row])
def test_mutated_rows_are_refused_by_name_or_read(make):
    text = json.dumps(make(0, SOURCES[2]))
    rng = random.Random(0)
    messages = []
    for _ in range(300):
        record = Record("rows.jsonl, line 1", mutate(json.loads(text), rng), 0)
        source = ColumnSource(Sampling(), k=K, group_size=1)
        try:
            source.group(record)
            to_table([sample.response for sample in source.samples(record)], [0.0], [0])
        except RolloutError as error:  # any other exception fails
            messages.append(str(error))
    assert len(messages) > 50
    assert all("rows.jsonl, line 1" in message for message in messages)


def test_groups_with_a_bad_rollout_can_be_dropped(tmp_path, capsys):
    rows = [slime_row(i, SOURCES[2]) for i in range(8)]
    rows[1]["rollout_log_probs"].pop()  # found when it is read
    rows[4]["tokens"][0] = 77  # found when it is written
    write(tmp_path / "rows.jsonl", rows)
    command = ["convert", str(tmp_path / "rows.jsonl"), str(tmp_path / "buffer"), *FLAGS, *PROCESSED, "--drop"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "2 groups, 4 rollouts" in captured.out
    assert "2 bad rollouts, whose groups were left out" in captured.out
    first, second = captured.err.splitlines()
    assert "rows.jsonl, line 2: sampled_logprobs has 7 entries" in first
    assert "rows.jsonl, line 5, position 0: prompt_ids is 77" in second
    assert [rollout.reward for rollout in rollouts(tmp_path / "buffer", 2)] == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ("{]", [], "rows.jsonl, line 1: no JSON"),
        ("[1]", [], "rows.jsonl, line 1: no JSON object"),
        ('{"reward": 1}', [], "no column for sampled_logprobs .*choose one of"),
        ('{"loss_mask": 1, "response_mask": 1}', [], "could each be response_mask: choose with --column"),
        ("{}", ["--column", "reward=x"], "no column x; there are"),
        ("{}", ["--column", "colour=x"], "--column colour=x: must be FIELD=NAME"),
        ("{}", ["--format", "vllm"], "--temperature is needed"),
        ('{"a": 1}', ["--format", "vllm", "--temperature", "1"], r"line 1: .*no choices in \['a'\]"),
        ('{"a": 1}', ["--format", "sglang", "--temperature", "1"], "line 1: sglang request 0: not a reply of SGLang"),
        (
            '{"response": {"choices": []}, "request": {"top_p": 0.9}}',
            ["--format", "vllm", "--temperature", "1"],
            "line 1: request has top_p 0.9, --top-p is 1.0; both must be the same",
        ),
    ],
)  # fmt: skip
def test_wrong_files_and_flags(tmp_path, capsys, content, flags, message):
    (tmp_path / "rows.jsonl").write_text(content + "\n")
    assert main(["convert", str(tmp_path / "rows.jsonl"), str(tmp_path / "b"), *FLAGS, *PROCESSED, *flags]) == 1
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert not (tmp_path / "b").exists()


def test_target_and_mode(tmp_path, capsys):
    write(tmp_path / "rows.jsonl", [slime_row(0, SOURCES[0])])
    command = ["convert", str(tmp_path / "rows.jsonl")]
    assert main([*command, str(tmp_path), *FLAGS, *PROCESSED]) == 1
    assert "exists; convert into a new directory" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "b"), *FLAGS]) == 1
    assert "--logprobs-mode is needed" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none.jsonl"), str(tmp_path / "b"), *FLAGS, *PROCESSED]) == 1
    assert "none.jsonl" in capsys.readouterr().err
