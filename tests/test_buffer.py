"""Writer, reader, ledger and manifest: nothing lost, nothing twice, nothing half-visible."""

import json
import os
import uuid
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.dataset
import pytest

from benchmarks.buffer_faults import VOCAB, fill, make_group
from megatron_sc.rollouts import (
    BufferRefusedError,
    Cursor,
    EndOfBufferError,
    GroupRef,
    HeadPolicy,
    Manifest,
    RolloutReader,
    RolloutTable,
    RolloutWriter,
    SamplerFingerprint,
    balanced_shares,
)
from megatron_sc.rollouts.check import validate_buffer
from megatron_sc.rollouts.ledger import Ledger
from megatron_sc.rollouts.prefetch import Prefetcher
from megatron_sc.rollouts.schema import SCHEMA_VERSION
from megatron_sc.rollouts.storage import open_storage

MANIFEST = Manifest(VOCAB)


def numbers(groups) -> list[int]:
    """Of the groups that ``make_group`` made."""
    return [int(group.table.reward[0]) for group in groups]


def files(path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name != ".lock")


# --- Writer


def test_nothing_is_visible_before_commit(tmp_path):
    writer = RolloutWriter(tmp_path, MANIFEST, row_group_tokens=1)
    writer.write(make_group(0))
    assert validate_buffer(tmp_path).rollouts == 0
    writer.commit()
    assert validate_buffer(tmp_path).rollouts == 4
    writer.commit()
    assert validate_buffer(tmp_path).shards == 1


def test_an_error_in_the_block_leaves_nothing(tmp_path):
    def fail() -> None:
        with RolloutWriter(tmp_path, MANIFEST, row_group_tokens=1) as writer:
            writer.write(make_group(0))
            assert ".tmp" in " ".join(files(tmp_path))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert files(tmp_path) == ["ledger.jsonl", "manifest.json"]
    assert validate_buffer(tmp_path).ok


def test_rotation_by_size(tmp_path):
    with RolloutWriter(tmp_path, MANIFEST, shard_bytes=10_000, row_group_tokens=1) as writer:
        for number in range(12):
            writer.write(make_group(number))
    report = validate_buffer(tmp_path)
    assert report.ok
    assert 2 < report.shards < 12
    assert report.rollouts == 48
    largest = max(entry.size for entry in Ledger(open_storage(tmp_path)).shards)
    assert 10_000 <= largest < 25_000


def test_refused_rollouts_stage_nothing(tmp_path):
    with RolloutWriter(tmp_path, MANIFEST) as writer:
        bad = [replace(rollout, reward=np.nan) for rollout in make_group(1)]
        with pytest.raises(BufferRefusedError, match=r"row 4: reward is nan"):
            writer.write([*make_group(0), *bad])
        writer.write(make_group(2))
    with RolloutReader(tmp_path) as reader:
        assert numbers(reader.take(1, 0)) == [2]
        with pytest.raises(EndOfBufferError):
            reader.take(1, 0)


@pytest.mark.parametrize("policy", ["drop", "quarantine"])
def test_bad_groups_are_left_out_and_counted(tmp_path, policy):
    bad = make_group(1)
    bad[2] = replace(bad[2], response_ids=np.full_like(bad[2].response_ids, VOCAB))
    with RolloutWriter(tmp_path, MANIFEST, policy=policy) as writer:
        writer.write([*make_group(0), *bad, *make_group(2)])
    assert writer.dropped == 4
    with RolloutReader(tmp_path) as reader:
        assert numbers(reader.take(2, 0)) == [0, 2]
    aside = files(tmp_path / "quarantine") if policy == "quarantine" else []
    assert [name.partition(".")[2] for name in aside] == (["json", "parquet"] if policy == "quarantine" else [])
    if aside:
        (problem, *_) = json.loads((tmp_path / "quarantine" / aside[0]).read_text())
        assert (problem["field"], problem["value"], problem["row"]) == ("response_ids", str(VOCAB), 6)
        assert len(pyarrow.dataset.dataset(tmp_path / "quarantine" / aside[1]).to_table()) == 4


def test_group_ids_of_different_calls_are_different_groups(tmp_path):
    with RolloutWriter(tmp_path, MANIFEST) as writer:
        for number in (7, 7, 8):
            writer.write(make_group(number))
    with RolloutReader(tmp_path) as reader:
        groups = reader.take(3, 0)
    assert numbers(groups) == [7, 7, 8]
    assert [{r.group_id for r in group.rollouts()} for group in groups] == [{0}, {1}, {2}]
    with pytest.raises(BufferRefusedError, match=r"row 8: group_id is 7; rollouts of a group must stand next to"):
        RolloutWriter(tmp_path, MANIFEST).write([*make_group(7), *make_group(8), *make_group(7)])


def test_one_buffer_one_manifest(tmp_path):
    RolloutWriter(tmp_path, MANIFEST).close()
    with pytest.raises(BufferRefusedError, match=r"manifest.json: sampler is .*0\.5"):
        RolloutWriter(tmp_path, Manifest(VOCAB, sampler=SamplerFingerprint(temperature=0.5)))


def test_a_torn_last_line_is_ignored_then_cut_off(tmp_path):
    fill(tmp_path, [0, 1])
    with open(tmp_path / "ledger.jsonl", "ab") as ledger:
        ledger.write(b'{"shard":"shard-x')
    report = validate_buffer(tmp_path)
    assert report.ok
    assert report.rollouts == 8
    assert [warning.file for warning in report.warnings] == ["ledger.jsonl"]
    fill(tmp_path, [2])
    report = validate_buffer(tmp_path)
    assert (report.ok, report.rollouts, report.warnings) == (True, 12, [])


def test_files_that_the_ledger_does_not_name_are_ignored(tmp_path):
    fill(tmp_path, [0])
    (shard,) = tmp_path.glob("*.parquet")
    (tmp_path / "shard-lost.parquet").write_bytes(shard.read_bytes())
    (tmp_path / ".tmp-shard-dead.parquet").write_bytes(b"PAR1")
    report = validate_buffer(tmp_path)
    assert (report.ok, report.rollouts) == (True, 4)
    assert {warning.file for warning in report.warnings} == {"shard-lost.parquet", ".tmp-shard-dead.parquet"}


def test_a_lost_ledger_is_never_started_anew(tmp_path):
    fill(tmp_path, [0])
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(BufferRefusedError, match=r"ledger.jsonl: missing"):
        RolloutWriter(tmp_path, MANIFEST)
    assert validate_buffer(tmp_path).problems[0].file == "ledger.jsonl"


def test_a_closed_buffer_takes_no_more(tmp_path):
    writer, other = RolloutWriter(tmp_path, MANIFEST), RolloutWriter(tmp_path, MANIFEST)
    writer.write(make_group(0))
    writer.finish_buffer()
    other.write(make_group(1))
    with pytest.raises(BufferRefusedError, match="closed"):
        other.commit()
    assert validate_buffer(tmp_path).rollouts == 4


def test_other_programs_read_a_shard(tmp_path):
    """pyarrow.dataset needs nothing of ours; pandas and DuckDB read the same standard types and encodings."""
    fill(tmp_path, [0, 1, 2])
    data = pyarrow.dataset.dataset(sorted(str(path) for path in tmp_path.glob("*.parquet"))).to_table()
    assert data.num_rows == 12
    wanted = RolloutTable.from_rollouts([rollout for number in range(3) for rollout in make_group(number)])
    assert data["response_ids"].to_pylist() == [wanted.response_ids[i].tolist() for i in range(12)]
    assert data["reward"].to_pylist() == wanted.reward.tolist()
    assert data["advantage"].null_count == 12
    first = data["head_logprobs"][0].as_py()
    np.testing.assert_allclose(first, wanted.head_logprobs[0][: len(first)], rtol=2**-11)


# --- Reader


def everything(path, ranks: int, step_groups: int = 4, **arguments) -> list[list[int]]:
    """What each rank got, in order, until the end."""
    readers = [RolloutReader(path, rank=rank, ranks=ranks, **arguments) for rank in range(ranks)]
    found: list[list[int]] = [[] for _ in readers]
    for step in range(1000):
        try:
            for mine, reader in zip(found, readers, strict=True):
                mine += numbers(reader.take(step_groups, step))
        except EndOfBufferError:
            break
    for reader in readers:
        reader.close()
    return found


@pytest.mark.parametrize("window", [1, 5, 100])
def test_ranks_share_one_order(tmp_path, window):
    fill(tmp_path, range(24), shard_groups=5)
    (alone,) = everything(tmp_path, 1, shuffle_window=window, seed=3)
    assert sorted(alone) == list(range(24))
    assert (alone == list(range(24))) == (window == 1)
    for ranks in (2, 4):
        shares = everything(tmp_path, ranks, shuffle_window=window, seed=3)
        each = 4 // ranks
        joined = [n for step in range(6) for share in shares for n in share[step * each : (step + 1) * each]]
        assert joined == alone
    if window > 1:
        assert everything(tmp_path, 1, shuffle_window=window, seed=4) != [alone]


def test_resume_with_other_ranks(tmp_path):
    fill(tmp_path, range(24), shard_groups=5)
    (alone,) = everything(tmp_path, 1, shuffle_window=7)
    found: list[int] = []
    saved = None
    for ranks in (1, 2, 4, 1, 2, 4):
        readers = [RolloutReader(tmp_path, rank=r, ranks=ranks, cursor=saved, shuffle_window=7) for r in range(ranks)]
        for reader in readers:
            found += numbers(reader.take(4, 0))
        assert len({reader.cursor for reader in readers}) == 1
        saved = Cursor.from_json(readers[0].cursor.to_json())
        for reader in readers:
            reader.close()
    assert found == alone


def test_a_snapshot_that_grew_is_resumed_without_loss(tmp_path):
    """The last window of a snapshot is short; what comes later is another window."""
    fill(tmp_path, range(6))
    with RolloutReader(tmp_path, shuffle_window=4) as reader:
        found = numbers(reader.take(5, 0))
    fill(tmp_path, range(6, 12))
    with RolloutReader(tmp_path, shuffle_window=4, cursor=reader.cursor) as reader:
        found += numbers(reader.take(7, 0))
    assert sorted(found) == list(range(12))


def test_stale_groups_are_skipped_and_counted(tmp_path):
    """``make_group(n)`` has weight version n // 4."""
    fill(tmp_path, range(16))
    with RolloutReader(tmp_path, max_staleness=1) as reader:
        assert numbers(reader.take(2, 0)) == [0, 1]
        assert numbers(reader.take(2, 3)) == [8, 9]
        assert reader.cursor.skipped == 6
        with pytest.raises(EndOfBufferError) as caught:
            reader.take(7, 3)
        assert caught.value.left == 6
        assert numbers(reader.take(6, 3)) == list(range(10, 16))


def test_staleness_is_of_the_oldest_trained_token(tmp_path):
    group = make_group(8)  # version 2
    versions = np.full(len(group[1].response_ids), 2, np.int32)
    versions[:2] = [0, 1]
    mask = np.ones(len(versions), bool)
    mask[0] = False
    group[1] = replace(group[1], weight_version=versions, response_mask=mask)
    with RolloutWriter(tmp_path, MANIFEST) as writer:
        writer.write(group)
    with RolloutReader(tmp_path, max_staleness=1) as reader:
        (found,) = reader.take(1, 2)
        assert found.ref.oldest_version == 1
    with RolloutReader(tmp_path, max_staleness=1) as reader, pytest.raises(EndOfBufferError):
        reader.take(1, 3)


def test_following_waits_for_a_window_and_stops_at_the_end(tmp_path):
    fill(tmp_path, range(5))
    arguments = {"follow": True, "shuffle_window": 4, "poll_seconds": 0.01, "timeout_seconds": 0.05}
    with RolloutReader(tmp_path, **arguments) as reader:
        assert sorted(numbers(reader.take(4, 0))) == [0, 1, 2, 3]
        with pytest.raises(TimeoutError, match="nothing was committed"):
            reader.take(1, 0)
        fill(tmp_path, range(5, 9))
        assert sorted(numbers(reader.take(4, 0))) == [4, 5, 6, 7]
        RolloutWriter(tmp_path, MANIFEST).finish_buffer()
        with pytest.raises(EndOfBufferError) as caught:
            reader.take(2, 0)
        assert caught.value.left == 1
        assert numbers(reader.take(1, 0)) == [8]


def test_damage_is_refused_at_its_place_and_moves_nothing(tmp_path):
    fill(tmp_path, range(6))
    second = Ledger(open_storage(tmp_path)).shards[1].shard
    content = bytearray((tmp_path / second).read_bytes())
    content[100] ^= 1
    (tmp_path / second).write_bytes(content)
    with RolloutReader(tmp_path) as reader:
        assert numbers(reader.take(3, 0)) == [0, 1, 2]
        before = reader.cursor
        for _ in range(2):
            with pytest.raises(BufferRefusedError, match=rf"{second}: sha256 is .*row group 0, bytes 0 to"):
                reader.take(3, 0)
        assert reader.cursor == before


def test_a_cursor_of_another_buffer_is_refused(tmp_path):
    fill(tmp_path / "a", range(3))
    fill(tmp_path / "b", range(3), Manifest(VOCAB, heads=HeadPolicy.lossless()))
    fill(tmp_path / "c", range(1))
    with RolloutReader(tmp_path / "a") as reader:
        reader.take(3, 0)
    with pytest.raises(ValueError, match="another buffer"):
        RolloutReader(tmp_path / "b", cursor=reader.cursor)
    with pytest.raises(BufferRefusedError, match="has used 3 groups, but only 1 are committed"):
        RolloutReader(tmp_path / "c", cursor=reader.cursor)


def test_shares_must_divide(tmp_path):
    fill(tmp_path, range(3))
    with RolloutReader(tmp_path, ranks=2) as reader, pytest.raises(ValueError, match="3 groups a step do not divide"):
        reader.take(3, 0)


def test_shares_by_another_rule(tmp_path):
    fill(tmp_path, range(4))

    def stride(groups, ranks):
        return [groups[rank::ranks] for rank in range(ranks)]

    with RolloutReader(tmp_path, ranks=2, rank=1, share=stride) as reader:
        assert numbers(reader.take(4, 0)) == [1, 3]


def test_prefetch_is_used_and_bounded(tmp_path):
    loaded: list[int] = []

    def load(key: int) -> int:
        loaded.append(key)
        if key == 13:
            raise ValueError("thirteen")
        return key * 10

    prefetcher = Prefetcher(load, lambda key: 100, budget=250)
    prefetcher.want([1, 2, 3, 4])
    while len(loaded) < 2:
        pass
    assert prefetcher.get(1) == 10
    assert prefetcher.get(2) == 20
    assert prefetcher.used == 200
    assert loaded == [1, 2]  # 3 does not fit
    prefetcher.want([3, 13])
    assert prefetcher.get(3) == 30
    with pytest.raises(ValueError, match="thirteen"):
        prefetcher.get(13)
    assert prefetcher.used <= 250
    prefetcher.close()


def test_reader_memory_stays_within_the_budget(tmp_path):
    fill(tmp_path, range(24), shard_groups=24)
    with RolloutReader(tmp_path, prefetch_bytes=100_000) as reader:
        most = 0
        for _ in range(12):
            reader.take(2, 0)
            most = max(most, reader._prefetcher.used)
    assert 0 < most <= 100_000


# --- Manifest and stores


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_unknown_versions_are_refused(version):
    body = json.loads(MANIFEST.to_json())
    body["schema_version"] = version
    with pytest.raises(BufferRefusedError, match=rf"manifest.json: schema_version is .*reads {SCHEMA_VERSION} only"):
        Manifest.from_json(json.dumps(body).encode())


def test_manifest_round_trip():
    manifest = Manifest(VOCAB, "hash", SamplerFingerprint("vllm", "0.20", temperature=0.7), HeadPolicy(k=20))
    assert Manifest.from_json(manifest.to_json()) == manifest
    edited = manifest.to_json().replace(b"vllm", b"vlln")
    with pytest.raises(BufferRefusedError, match="edited"):
        Manifest.from_json(edited)


def test_not_a_buffer(tmp_path):
    with pytest.raises(BufferRefusedError, match="not a rollout buffer"):
        RolloutReader(tmp_path)


def test_object_store():
    """An fsspec URL: the same buffer, with one object a commit."""
    url = f"memory://{uuid.uuid4().hex}"
    writers = [RolloutWriter(url, MANIFEST) for _ in range(2)]
    for number in range(6):
        writers[number % 2].write(make_group(number))
        writers[number % 2].commit()
    assert validate_buffer(url).as_dict()["rollouts"] == 24
    assert everything(url, 2) == [[0, 1], [2, 3]]
    filesystem = fsspec.filesystem("memory")
    names = sorted(name.rpartition("/")[2] for name in filesystem.ls(f"{url[8:]}/ledger", detail=False))
    assert names == [f"{number:010d}.json" for number in range(6)]
    second = Ledger(open_storage(url)).shards[1].shard
    filesystem.pipe_file(f"{url[8:]}/{second}", b"x" + filesystem.cat_file(f"{url[8:]}/{second}")[1:])
    assert [problem.file for problem in validate_buffer(url).problems] == [second]


def test_the_worked_example_of_the_documentation(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parent.parent / "docs" / "rollout-schema.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "rollout-schema.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed == [line.partition("  # ")[2] for line in code.splitlines() if line.strip().startswith("print(")]
    (shard,) = tmp_path.glob("buffer/*.parquet")
    data = pyarrow.dataset.dataset(shard).to_table()
    columns = text.partition("## Columns")[2].partition("## Manifest")[0].splitlines()
    assert [line.split("`")[1] for line in columns if line.startswith("| `")] == data.column_names


# --- Poll and shares


def test_poll_tells_ready_from_waiting_from_ended(tmp_path):
    writer = RolloutWriter(tmp_path, MANIFEST)
    writer.write(make_group(0))
    writer.commit()
    with RolloutReader(tmp_path, follow=True) as follower, RolloutReader(tmp_path) as reader:
        for each in (follower, reader):
            assert each.poll(1, 0) == "ready"
            assert each.cursor.used == 0  # nothing is taken
        assert (follower.poll(2, 0), reader.poll(2, 0)) == ("waiting", "ended")
        writer.write(make_group(1))
        writer.commit()
        assert follower.poll(2, 0) == "ready"
        assert numbers(follower.take(2, 0)) == [0, 1]
        assert follower.poll(1, 1) == "waiting"
        writer.finish_buffer()
        assert follower.poll(1, 1) == "ended"


def test_poll_gives_up_when_nothing_is_committed(tmp_path):
    RolloutWriter(tmp_path, MANIFEST)
    with RolloutReader(tmp_path, follow=True, timeout_seconds=0) as reader:
        assert reader.poll(1, 0) == "waiting"
        with pytest.raises(TimeoutError, match="nothing was committed for 0 s"):
            reader.poll(1, 0)


def test_balanced_shares_hold_equally_many_groups_and_about_equal_tokens():
    tokens = [9, 1, 1, 8, 2, 7, 3, 1]
    groups = [GroupRef(i, 1, count, 0) for i, count in enumerate(tokens)]
    shares = balanced_shares(groups, 2)
    assert sorted(ref.index for share in shares for ref in share) == list(range(8))
    assert [len(share) for share in shares] == [4, 4]
    assert [[ref.index for ref in share] for share in shares] == [sorted(ref.index for ref in s) for s in shares]
    assert abs(sum(ref.tokens for ref in shares[0]) - sum(tokens) / 2) <= 2
    with pytest.raises(ValueError, match="8 groups a step do not divide over 3 data-parallel ranks"):
        balanced_shares(groups, 3)


def test_another_buffer_with_an_equal_manifest_is_told_apart(tmp_path):
    for name, first in (("one", 0), ("other", 10)):
        fill(tmp_path / name, range(first, first + 6))
    with RolloutReader(tmp_path / "one") as reader:
        reader.take(4, 0)
        cursor = Cursor.from_json(reader.cursor.to_json())
    with RolloutReader(tmp_path / "one", cursor=cursor) as reader:
        assert numbers(reader.take(2, 1)) == [4, 5]
    with pytest.raises(ValueError, match=r"saved for another buffer than .*other: other shards were committed to it"):
        RolloutReader(tmp_path / "other", cursor=cursor)
