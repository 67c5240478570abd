"""Break the rollout buffer in every way we know: the tests run a few of each, this script as many as asked.

python -m benchmarks.buffer_faults mutate --count 10000
python -m benchmarks.buffer_faults kill-writer --count 200
python -m benchmarks.buffer_faults kill-trainer --count 200
python -m benchmarks.buffer_faults follow --seconds 60
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sc.rollouts import (
    BufferRefusedError,
    Cursor,
    EndOfBufferError,
    Manifest,
    Rollout,
    RolloutReader,
    RolloutTable,
    RolloutWriter,
)
from megatron_sc.rollouts.check import validate_buffer
from megatron_sc.rollouts.ledger import Ledger
from megatron_sc.rollouts.ragged import Ragged
from megatron_sc.rollouts.shard import ShardWriter
from megatron_sc.rollouts.storage import LEDGER, open_storage

VOCAB = 96


def make_group(number: int, samples: int = 4, length: int = 12, head: int = 16) -> list[Rollout]:
    """A group whose contents follow from its number; the number is its reward and group id."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(0, VOCAB, 4).astype(np.int32)
    group = []
    for sample in range(samples):
        size = int(rng.integers(4, length + 1))
        logits = 2 * rng.normal(size=(size, VOCAB))
        logq = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        order = np.argsort(-logq, axis=1)
        sampled = np.array([rng.choice(VOCAB, p=np.exp(row) / np.exp(row).sum()) for row in logq], np.int32)
        ranked = np.take_along_axis(logq, order, axis=1)
        group.append(
            Rollout(
                prompt_ids=prompt,
                response_ids=sampled,
                response_mask=np.ones(size, bool),
                sampled_logprobs=logq[np.arange(size), sampled].astype(np.float32),
                weight_version=np.full(size, number // 4, np.int32),
                reward=float(number),
                group_id=number,
                head_ids=order[:, :head].astype(np.int32),
                head_logprobs=ranked[:, :head].astype(np.float32),
                log_tail_mass=np.logaddexp.reduce(ranked[:, head:], axis=1, initial=-np.inf).astype(np.float32),
                metadata={"sample": sample},
            )
        )
    return group


def fill(path: Path, groups: Sequence[int], manifest: Manifest | None = None, shard_groups: int = 3) -> None:
    """A buffer of these groups, ``shard_groups`` a shard, two row groups each."""
    with RolloutWriter(path, manifest or Manifest(VOCAB), row_group_tokens=64) as writer:
        for index, number in enumerate(groups):
            writer.write(make_group(number))
            if index % shard_groups == shard_groups - 1:
                writer.commit()


def read_all(path: Path) -> list[tuple[Any, ...]]:
    """Everything that a reader hands out, comparable: one tuple a rollout."""
    rows = []
    with RolloutReader(path, prefetch_bytes=1) as reader:
        ledger = Ledger(open_storage(path))
        for _ in range(sum(entry.groups for entry in ledger.shards)):
            (group,) = reader.take(1, 0)
            for row in range(len(group.table)):
                one = group.table.slice(row, row + 1)
                columns = [getattr(one, field.name) for field in fields(one)]
                rows.append(
                    tuple(
                        (c.values.tobytes(), c.offsets.tobytes()) if isinstance(c, Ragged) else
                        tuple(c) if isinstance(c, list) else c.tobytes()
                        for c in columns
                    )
                )  # fmt: skip
    return rows


# --- Mutations of a buffer's bytes, then of what it says with all checksums made right again.


def mutate(path: Path, rng: np.random.Generator) -> str:
    """Change one thing; its description."""
    kind = BYTE_KINDS[rng.integers(len(BYTE_KINDS))] if rng.random() < 0.6 else None
    if kind is not None:
        return kind(path, rng)
    name = list(MEANINGS)[rng.integers(len(MEANINGS))]
    return _rewrite(path, name, rng)


def check_mutation(path: Path, original: list[tuple[Any, ...]]) -> str:
    """How a mutated buffer fares: "refused", "warned" or "unaffected".

    Raises:
        AssertionError: if it is none of them: silent, or a message without a place.
    """
    report = validate_buffer(path)
    names = [*report.problems, *report.warnings]
    assert all(problem.file for problem in names), [str(problem) for problem in names]
    refusal = None
    try:
        found = read_all(path)
    except BufferRefusedError as error:
        refusal = error
    if refusal is not None:
        assert refusal.problem.file, str(refusal)
        assert report.problems, f"the reader refuses what the validator accepts: {refusal}"
        return "refused"
    assert not report.problems, f"the reader accepts what the validator refuses: {report.problems[0]}"
    if report.warnings:
        assert found == original[: len(found)], "what is left is not what was written"
        return "warned"
    assert found == original, "silently changed"
    return "unaffected"


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.name != ".lock")


def _pick(path: Path, rng: np.random.Generator) -> Path:
    files = _files(path)
    return files[rng.integers(len(files))]


def _flip(path: Path, rng: np.random.Generator) -> str:
    file = _pick(path, rng)
    content = bytearray(file.read_bytes())
    at = int(rng.integers(len(content)))
    content[at] ^= int(rng.integers(1, 256))
    file.write_bytes(content)
    return f"flipped byte {at} of {file.name}"


def _truncate(path: Path, rng: np.random.Generator) -> str:
    file = _pick(path, rng)
    at = int(rng.integers(file.stat().st_size))
    os.truncate(file, at)
    return f"truncated {file.name} to {at}"


def _extend(path: Path, rng: np.random.Generator) -> str:
    file = _pick(path, rng)
    with open(file, "ab") as handle:
        handle.write(rng.bytes(int(rng.integers(1, 40))))
    return f"appended to {file.name}"


def _delete(path: Path, rng: np.random.Generator) -> str:
    file = _pick(path, rng)
    file.unlink()
    return f"deleted {file.name}"


def _swap_shards(path: Path, rng: np.random.Generator) -> str:
    first, second = rng.permutation([file for file in _files(path) if file.suffix == ".parquet"])[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    return "swapped two shards"


def _lines(path: Path, rng: np.random.Generator) -> str:
    file = path / LEDGER
    lines = file.read_bytes().splitlines(keepends=True)
    at, other = rng.permutation(len(lines))[:2]
    kind = ["remove", "repeat", "swap", "edit"][rng.integers(4)]
    if kind == "remove":
        del lines[at]
    elif kind == "repeat":
        lines.insert(other, lines[at])
    elif kind == "swap":
        lines[at], lines[other] = lines[other], lines[at]
    else:
        body = json.loads(lines[at])
        key = ["size", "footer", "rows", "groups", "tokens"][rng.integers(5)]
        body[key] += 1
        lines[at] = json.dumps(body).encode() + b"\n"
    file.write_bytes(b"".join(lines))
    return f"ledger: {kind} line {at}"


def _edit_manifest(path: Path, rng: np.random.Generator) -> str:
    """Another value, and its own digest made right: the ledger still knows."""
    file = path / "manifest.json"
    manifest = Manifest.from_json(file.read_bytes())
    changes: list[dict[str, Any]] = [
        {"true_vocab_size": 95}, {"tokenizer_hash": "other"}, {"sampler": replace(manifest.sampler, temperature=0.5)},
        {"heads": replace(manifest.heads, precision="float32")}, {"schema_version": 2},
    ]  # fmt: skip
    change = changes[rng.integers(len(changes))]
    file.write_bytes(replace(manifest, **change).to_json())
    return f"manifest: {change}"


BYTE_KINDS: list[Callable[[Path, np.random.Generator], str]] = [
    _flip, _flip, _flip, _truncate, _extend, _delete, _swap_shards, _lines, _edit_manifest,
]  # fmt: skip


def _set(name: str, value: Any) -> Callable[[RolloutTable, np.random.Generator], RolloutTable]:
    def change(table: RolloutTable, rng: np.random.Generator) -> RolloutTable:
        column = getattr(table, name)
        if not isinstance(column, Ragged):
            column = column.copy()
            column[rng.integers(len(column))] = value
            return replace(table, **{name: column})
        values = column.values.copy()
        values[rng.integers(len(values))] = value
        return replace(table, **{name: Ragged(values, column.offsets)})

    return change


def _swap_columns(first: str, second: str) -> Callable[[RolloutTable, np.random.Generator], RolloutTable]:
    def change(table: RolloutTable, rng: np.random.Generator) -> RolloutTable:
        return replace(table, **{first: getattr(table, second), second: getattr(table, first)})

    return change


def _shift_heads(table: RolloutTable, rng: np.random.Generator) -> RolloutTable:
    by = int(rng.integers(1, table.tokens))
    heads = table.head_offsets
    sizes = np.roll(np.diff(heads), by)
    ids = [np.roll(np.arange(table.tokens), by)]
    order = np.concatenate([np.arange(heads[i], heads[i + 1]) for i in ids[0]])
    head_sizes = Ragged(sizes.astype(np.int32), table.head_sizes.offsets)
    ends = np.concatenate([[0], np.cumsum([head_sizes[i].sum() for i in range(len(table))])]).astype(np.int64)
    return replace(
        table, head_sizes=head_sizes, head_ids=Ragged(table.head_ids.values[order], ends),
        head_logprobs=Ragged(table.head_logprobs.values[order], ends),
    )  # fmt: skip


def _lose_entry(name: str) -> Callable[[RolloutTable, np.random.Generator], RolloutTable]:
    def change(table: RolloutTable, rng: np.random.Generator) -> RolloutTable:
        column = getattr(table, name)
        at = int(rng.integers(len(column.values)))
        offsets = column.offsets - (column.offsets > at)
        return replace(table, **{name: Ragged(np.delete(column.values, at), offsets)})

    return change


def _duplicate_id(table: RolloutTable, rng: np.random.Generator) -> RolloutTable:
    values = table.head_ids.values.copy()
    wide = np.flatnonzero(np.diff(table.head_offsets) > 1)
    at = table.head_offsets[rng.choice(wide)]
    values[at + 1] = values[at]
    return replace(table, head_ids=Ragged(values, table.head_ids.offsets))


def _age_last_token(table: RolloutTable, rng: np.random.Generator) -> RolloutTable:
    values = table.weight_version.values.copy()
    values[table.weight_version.offsets[1:] - 1] -= 1
    return replace(table, weight_version=Ragged(values, table.weight_version.offsets))


def _raise_logprob(table: RolloutTable, rng: np.random.Generator) -> RolloutTable:
    values = table.head_logprobs.values.copy()
    at = int(rng.integers(len(values)))
    values[at] = values[at] / 2 + 0.01
    return replace(table, head_logprobs=Ragged(values, table.head_logprobs.offsets))


MEANINGS: dict[str, Callable[[RolloutTable, np.random.Generator], RolloutTable]] = {
    "head id outside the vocabulary": _set("head_ids", VOCAB),
    "negative head id": _set("head_ids", -1),
    "response id outside the vocabulary": _set("response_ids", VOCAB + 5),
    "prompt id outside the vocabulary": _set("prompt_ids", VOCAB),
    "positive log-probability": _set("sampled_logprobs", 0.5),
    "no log-probability": _set("sampled_logprobs", np.nan),
    "infinite head": _set("head_logprobs", -np.inf),
    "NaN head": _set("head_logprobs", np.nan),
    "other head entry": _raise_logprob,
    "tail mass above 1": _set("log_tail_mass", 0.5),
    "no tail": _set("log_tail_mass", -np.inf),
    "negative version": _set("weight_version", -1),
    "version of the past": _age_last_token,
    "greedy": _set("temperature", 0.0),
    "no temperature": _set("temperature", np.nan),
    "no reward": _set("reward", np.nan),
    "infinite advantage": _set("advantage", np.inf),
    "support without truncation": _set("head_is_support", True),
    "heads shifted": _shift_heads,
    "duplicate id": _duplicate_id,
    "swapped: sampled_logprobs, log_tail_mass": _swap_columns("sampled_logprobs", "log_tail_mass"),
    "swapped: response_ids, weight_version": _swap_columns("response_ids", "weight_version"),
    "swapped: prompt_ids, response_ids": _swap_columns("prompt_ids", "response_ids"),
    "swapped: head_ids, head_sizes": _swap_columns("head_ids", "head_sizes"),
    "lost: response_ids": _lose_entry("response_ids"),
    "lost: response_mask": _lose_entry("response_mask"),
    "lost: head_ids": _lose_entry("head_ids"),
    "lost: head_sizes": _lose_entry("head_sizes"),
    "lost: log_tail_mass": _lose_entry("log_tail_mass"),
}


def _rewrite(path: Path, meaning: str, rng: np.random.Generator) -> str:
    """The same buffer with a change of meaning, checksums and ledger made anew: only validation can tell."""
    manifest = Ledger(open_storage(path)).manifest
    tables = []
    with RolloutReader(path) as reader:
        for entry in range(sum(shard.groups for shard in Ledger(open_storage(path)).shards)):
            tables.append(reader.take(1, entry)[0].table)
    chosen = int(rng.integers(len(tables)))
    shutil.rmtree(path)
    storage = open_storage(path)
    ledger = Ledger.create(storage, manifest)
    shard = ShardWriter(storage, "shard.parquet", manifest)
    for number, table in enumerate(tables):
        shard.add(MEANINGS[meaning](table, rng) if number == chosen else table)
    ledger.commit(shard.finish())
    return meaning


def run_mutations(count: int, seed: int = 0) -> Counter[str]:
    """Mutate fresh copies of a buffer.

    Returns:
        How many were refused, warned of, unaffected.

    Raises:
        AssertionError: for the first that is silently changed, or crashes without naming a place.
    """
    outcome: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        source, copy = Path(folder, "source"), Path(folder, "copy")
        fill(source, range(8))
        original = read_all(source)
        for number in range(count):
            rng = np.random.default_rng((seed, number))
            shutil.copytree(source, copy)
            done = mutate(copy, rng)
            try:
                outcome[check_mutation(copy, original)] += 1
            except Exception as error:
                raise AssertionError(f"mutation {number} (seed {seed}), {done}: {error!r}") from error
            shutil.rmtree(copy)
    return outcome


# --- Processes that are killed. Each child announces through a pipe what it has safely done.


def run_writer(announce: Connection, path: Path, first: int) -> None:
    """Write groups first, first + 1, ... forever; announce each number once it is committed."""
    writer = RolloutWriter(path, Manifest(VOCAB), row_group_tokens=64)
    number = first
    while True:
        batch = range(number, number + 3)
        for group in batch:
            writer.write(make_group(group, samples=2, length=6))
        writer.commit()
        announce.send(list(batch))
        number += 3


def run_trainer(announce: Connection, path: Path, checkpoint: Path, used: Path) -> None:
    """Take two groups a step from a following reader until the buffer ends, with a checkpoint every third step.

    The groups that were used are part of the checkpoint, as the weights they made are: the surviving history. At the
    end they go to ``used``.
    """
    saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "cursor": None, "used": []}
    cursor = None if saved["cursor"] is None else Cursor.from_json(saved["cursor"])
    history = saved["used"]
    step = saved["step"]
    with RolloutReader(path, cursor=cursor, follow=True, shuffle_window=4, poll_seconds=0.01) as reader:
        while True:
            try:
                history += [int(group.table.reward[0]) for group in reader.take(2, step)]
            except EndOfBufferError:
                used.write_text(json.dumps(history))
                return
            step += 1
            if step % 3 == 0:
                temporary = checkpoint.with_suffix(".tmp")
                temporary.write_text(json.dumps({"step": step, "cursor": reader.cursor.to_json(), "used": history}))
                os.rename(temporary, checkpoint)
            announce.send(step)


class Child:
    """A function in another process, forked from a server that has imported everything."""

    def __init__(self, run: Callable[..., None], *arguments: object):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["megatron_sc.rollouts", "megatron_sc.rollouts.check"])
        self._announcements, there = context.Pipe(duplex=False)
        self._process = context.Process(target=run, args=(there, *arguments), daemon=True)
        self._process.start()
        there.close()

    def heard(self) -> Any:
        """The next announcement; None when the child has ended."""
        try:
            return self._announcements.recv()
        except (EOFError, OSError):
            return None

    def kill(self) -> list[Any]:
        """SIGKILL. Returns what it had announced."""
        self._process.kill()
        self._process.join()
        return list(iter(self.heard, None))

    def end(self) -> int | None:
        """Wait; the exit status."""
        while self.heard() is not None:
            pass
        self._process.join()
        return self._process.exitcode


def kill_writer(count: int, seed: int = 0) -> tuple[int, int]:
    """Kill a writer with -9 after random delays, each time another one on the same buffer.

    Returns:
        Groups that were announced as committed, and groups in the buffer.

    Raises:
        AssertionError: if one of the former is missing or incomplete, or any group is there twice.
    """
    rng = np.random.default_rng(seed)
    announced: set[int] = set()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "buffer")
        fill(path, [0, 1, 2])
        for attempt in range(count):
            child = Child(run_writer, path, 1_000_000 * (attempt + 1))
            announced |= set(child.heard())  # it is at work
            time.sleep(rng.uniform(0, 0.1))
            announced |= {number for batch in child.kill() for number in batch}
        report = validate_buffer(path)
        assert report.ok, report.problems
        with RolloutReader(path) as reader:
            total = sum(entry.groups for entry in Ledger(open_storage(path)).shards)
            groups = [reader.take(1, 0)[0].table for _ in range(total)]
        numbers = [int(table.reward[0]) for table in groups]
        assert len(set(numbers)) == len(numbers), "a group is there twice"
        assert announced <= set(numbers), f"lost: {sorted(announced - set(numbers))}"
        assert all(len(table) == (4 if number < 3 else 2) for number, table in zip(numbers, groups, strict=True))
    return len(announced), len(numbers)


def kill_trainer(count: int, seed: int = 0, groups: int = 0) -> int:
    """Kill a trainer with -9 after a random step, ``count`` times, then let it end. Returns the groups it used.

    Raises:
        AssertionError: if the surviving history has not used every group exactly once.
    """
    rng = np.random.default_rng(seed)
    groups = groups or 8 * max(count, 4)
    with tempfile.TemporaryDirectory() as folder:
        path, checkpoint, used = Path(folder, "buffer"), Path(folder, "checkpoint"), Path(folder, "used")
        fill(path, range(groups), shard_groups=5)
        RolloutWriter(path, Manifest(VOCAB)).finish_buffer()
        for _ in range(count):
            child = Child(run_trainer, path, checkpoint, used)
            for _ in range(rng.integers(1, 6)):
                child.heard()
            time.sleep(rng.uniform(0, 0.01))
            child.kill()
        assert Child(run_trainer, path, checkpoint, used).end() == 0
        history = json.loads(used.read_text())
        assert sorted(history) == list(range(groups)), "not every group exactly once"
    return len(history)


def follow(seconds: float, writers: int = 2) -> int:
    """Writers and a following reader at once. Returns the groups read.

    Raises:
        AssertionError: if a committed group is not read exactly once.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "buffer")
        RolloutWriter(path, Manifest(VOCAB)).close()
        children = [Child(run_writer, path, 1_000_000 * (1 + number)) for number in range(writers)]
        found: list[int] = []
        with RolloutReader(path, follow=True, shuffle_window=4, poll_seconds=0.02, timeout_seconds=60) as reader:
            deadline = None
            while deadline is None or time.monotonic() < deadline:
                found += [int(group.table.reward[0]) for group in reader.take(4, 0)]
                deadline = deadline or time.monotonic() + seconds
            announced = {number for child in children for batch in child.kill() for number in batch}
            RolloutWriter(path, Manifest(VOCAB)).finish_buffer()
            total = sum(entry.groups for entry in Ledger(open_storage(path)).shards)
            while len(found) < total:
                found += [int(group.table.reward[0]) for group in reader.take(min(4, total - len(found)), 0)]
        assert len(set(found)) == len(found), "a group was read twice"
        assert announced <= set(found), "a committed group was not read"
        assert {number // 1_000_000 for number in found} == set(range(1, writers + 1)), "a writer wrote nothing"
    return len(found)


def main() -> None:
    """Run what is asked for, and say how it went; an AssertionError is a failure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("mutate", "kill-writer", "kill-trainer"):
        command = commands.add_parser(name)
        command.add_argument("--count", type=int, required=True)
        command.add_argument("--seed", type=int, default=0)
    commands.add_parser("follow").add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    if given.command == "mutate":
        print(dict(run_mutations(given.count, given.seed)))
    elif given.command == "kill-writer":
        print("announced, found:", kill_writer(given.count, given.seed))
    elif given.command == "kill-trainer":
        print("groups, each used once:", kill_trainer(given.count, given.seed))
    else:
        print("groups, each read once:", follow(given.seconds))


if __name__ == "__main__":
    main()
