"""The rollout buffer: bytes a token, error, speed and memory.

    python -m benchmarks.rollouts [--tokens 1000000] [--lossless] [--jitter 0.3]

The sampler's rows are p_i ~ i^-s over V = 151936 shuffled ids, recorded to k = 128, with s = 4, 2 and 1.3 in shares
70/20/10; the trainer's logits are the sampler's plus N(0, 0.05). Such rows have only three different sets of
log-probabilities, which compress to nothing: ``--jitter`` varies them, as a real model does.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from megatron_sc.rollouts import HeadPolicy, Manifest, RolloutReader, RolloutTable, RolloutWriter
from megatron_sc.rollouts.check import validate_buffer
from megatron_sc.rollouts.codec import encode_heads
from megatron_sc.rollouts.ragged import Ragged, offsets_of

VOCAB = 151936
EXPONENTS = (4.0, 2.0, 1.3)
SHARES = (0.7, 0.2, 0.1)
NOISE = 0.05


def make_table(
    rollouts: int,
    length: int,
    k: int,
    seed: int,
    shares: tuple[float, ...] = SHARES,
    jitter: float = 0.0,
    group: int = 0,
) -> tuple[RolloutTable, npt.NDArray[np.int64]]:
    """Rollouts of one group, and the exponent's number of each token.

    Args:
        rollouts: in the group.
        length: response tokens of each.
        k: of the head.
        seed: of everything random.
        shares: of the exponents.
        jitter: standard deviation of noise on the sampler's head logits.
        group: its id.
    """
    rng = np.random.default_rng(seed)
    tokens = rollouts * length
    kind = rng.choice(len(EXPONENTS), tokens, p=shares)
    ranks = np.arange(1, VOCAB + 1, dtype=np.float64)
    full = np.stack([ranks**-s / (ranks**-s).sum() for s in EXPONENTS])
    logits = np.log(full[:, :k])[kind]
    tail = full[:, k:].sum(axis=1)[kind]
    if jitter:
        logits = -np.sort(-(logits + jitter * rng.normal(size=logits.shape)), axis=1)
        total = np.exp(logits).sum(axis=1) + tail
        logits, tail = logits - np.log(total)[:, None], tail / total
    logprobs = logits.astype(np.float32)
    # Steps of a stride prime to V = 2^7 * 1187 are distinct; the one after the head is the token outside it.
    stride = 2 * rng.integers(VOCAB // 2, size=(tokens, 1)) + 1
    stride += 2 * (stride % 1187 == 0)
    ids = ((rng.integers(VOCAB, size=(tokens, 1)) + stride * np.arange(k + 1)) % VOCAB).astype(np.int32)
    ids, outside = np.ascontiguousarray(ids[:, :k]), ids[:, k]
    at = (np.cumsum(np.exp(logits), axis=1) < rng.random((tokens, 1))).sum(axis=1)
    inside = at < k
    row = np.arange(tokens)
    sampled = np.where(inside, ids[row, np.minimum(at, k - 1)], outside)
    lowest = np.log(np.maximum(tail / (VOCAB - k), 1e-30)).astype(np.float32)
    chosen = np.where(inside, logprobs[row, np.minimum(at, k - 1)], np.minimum(lowest, logprobs[:, -1]))
    responses = offsets_of(np.full(rollouts, length))
    empty = Ragged(np.empty(0, np.int32), np.zeros(rollouts + 1, np.int64))
    table = RolloutTable(
        prompt_ids=Ragged(rng.integers(0, VOCAB, rollouts * 64).astype(np.int32), offsets_of(np.full(rollouts, 64))),
        response_ids=Ragged(sampled, responses),
        response_mask=Ragged(np.ones(tokens, np.bool_), responses),
        sampled_logprobs=Ragged(chosen.astype(np.float32), responses),
        weight_version=Ragged(np.zeros(tokens, np.int32), responses),
        head_sizes=Ragged(np.full(tokens, k, np.int32), responses),
        head_ids=Ragged(ids.reshape(-1), responses * k),
        head_logprobs=Ragged(logprobs.reshape(-1), responses * k),
        log_tail_mass=Ragged(np.log(tail).astype(np.float32), responses),
        draw_ids=empty,
        draw_logprobs=Ragged(np.empty(0, np.float32), empty.offsets),
        expert_routes=Ragged(np.empty(0, np.int16), empty.offsets),
        head_is_support=np.zeros(rollouts, np.bool_),
        temperature=np.ones(rollouts),
        reward=rng.random(rollouts),
        advantage=np.full(rollouts, np.nan),
        group_id=np.full(rollouts, group),
        finish_reason=["stop"] * rollouts,
        metadata=["{}"] * rollouts,
    )
    return table, kind


def measure_errors(policy: HeadPolicy, rows: int, jitter: float, seed: int = 7) -> dict[str, tuple[float, float]]:
    """Relative error of the gradient and of the correction alone against lossless heads, by the loss itself.

    Returns:
        For each exponent and for the mixture: 2-norms over all rows of the difference, divided by the lossless ones.
    """
    import torch

    from megatron_sc import centered_loss
    from megatron_sc.objective import TopKHead

    table, kind = make_table(1, rows, 128, seed, jitter=jitter)
    encoded = encode_heads(table, policy)
    rng = np.random.default_rng(seed)
    squares = np.zeros((len(EXPONENTS), 4))
    for start in range(0, rows, 32):
        stop = min(start + 32, rows)
        logits = torch.empty(stop - start, VOCAB)
        for i in range(start, stop):
            ids = table.head_ids.values[i * 128 : (i + 1) * 128]
            ranks = np.arange(1, VOCAB + 1)
            base = -EXPONENTS[kind[i]] * np.log(ranks)
            line = np.empty(VOCAB)
            line[np.setdiff1d(np.arange(VOCAB), ids, assume_unique=True)] = base[128:]
            # The jittered head keeps its mass relative to the tail.
            tail = np.logaddexp.reduce(base[128:])
            line[ids] = table.head_logprobs.values[i * 128 : (i + 1) * 128] - table.log_tail_mass.values[i] + tail
            logits[i - start] = torch.from_numpy(line + NOISE * rng.normal(size=VOCAB))
        ids = torch.from_numpy(table.response_ids.values[start:stop]).long()
        logq = torch.from_numpy(table.sampled_logprobs.values[start:stop])
        gradients = []
        for source in (None, table, encoded):
            sampler = None
            if source is not None:
                offsets = source.head_offsets[start : stop + 1]
                entries = slice(int(offsets[0]), int(offsets[-1]))
                sampler = TopKHead.ragged(
                    torch.from_numpy(source.head_ids.values[entries]).long(),
                    torch.from_numpy(source.head_logprobs.values[entries]),
                    torch.from_numpy(offsets - offsets[0]),
                    torch.from_numpy(source.log_tail_mass.values[start:stop]),
                )
            leaf = logits.clone().requires_grad_()
            centered_loss(leaf, ids, torch.ones(stop - start), sampler, logq).loss.sum().backward()
            assert leaf.grad is not None
            gradients.append(leaf.grad.double())
        plain, exact, coded = gradients
        parts = (coded - exact, exact, exact - plain)
        for i in range(start, stop):
            squares[kind[i], :3] += [float(part[i - start].square().sum()) for part in parts]
    names = [f"s = {s:g}" for s in EXPONENTS] + ["mixture"]
    return {
        name: (float(np.sqrt(e / g)), float(np.sqrt(e / c)))
        for name, (e, g, c, _) in zip(names, [*squares, squares.sum(axis=0)], strict=True)
    }


def bytes_a_token(policy: HeadPolicy, shares: tuple[float, ...], jitter: float, tokens: int) -> float:
    """Size of a buffer of these rows, all its files, by its tokens."""
    folder = Path(tempfile.mkdtemp())
    try:
        with RolloutWriter(folder, Manifest(VOCAB, heads=policy)) as writer:
            for group in range(max(tokens // 16384, 1)):
                writer.write(make_table(16, 1024, 128, group, shares, jitter, group)[0])
        return sum(file.stat().st_size for file in folder.iterdir()) / (max(tokens // 16384, 1) * 16384)
    finally:
        shutil.rmtree(folder)


def measure_speed(policy: HeadPolicy, jitter: float, tokens: int) -> dict[str, float]:
    """Speed of writer, validator and reader, and the peak memory of the process, which also makes the rollouts."""
    folder = Path(tempfile.mkdtemp())
    groups = max(tokens // 16384, 1)
    writing, validating, reading = _Clock(), _Clock(), _Clock()
    try:
        writer = RolloutWriter(folder, Manifest(VOCAB, heads=policy))
        for group in range(groups):
            table, _ = make_table(16, 1024, 128, group, SHARES, jitter, group)
            with writing:
                writer.write(table)
        with writing:
            writer.close()
        with validating:
            report = validate_buffer(folder)
        assert report.ok, report.problems
        with reading, RolloutReader(folder) as reader:
            read = sum(group.table.tokens for _ in range(groups) for group in reader.take(1, 0))
        assert read == report.tokens == groups * 16384
        speeds = {}
        for name, clock in (("writer", writing), ("validator", validating), ("reader", reading)):
            speeds[f"{name}, tokens a second"] = read / clock.wall
            speeds[f"{name}, tokens a second of CPU time"] = read / clock.cpu
        return {**speeds, "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    finally:
        shutil.rmtree(folder)


class _Clock:
    """Wall and CPU time of what is done inside; the latter says what an idle machine would do."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter() - self._began[0]
        self.cpu += time.process_time() - self._began[1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=512, help="positions whose error is measured")
    parser.add_argument("--lossless", action="store_true")
    parser.add_argument("--jitter", type=float, default=0.3)
    parser.add_argument("--target-mass", type=float, default=HeadPolicy.target_mass)
    parser.add_argument("--dropped-norm", type=float, default=HeadPolicy.dropped_norm)
    given = parser.parse_args()
    policy = HeadPolicy(target_mass=given.target_mass, dropped_norm=given.dropped_norm)
    policy = HeadPolicy.lossless() if given.lossless else policy
    console = Console()
    console.print(policy)
    for name, value in measure_speed(policy, given.jitter, given.tokens).items():
        console.print(f"{name}: {value:,.0f}")
    errors = measure_errors(policy, given.rows, given.jitter)
    table = Table("rows", "bytes a token", "error of the gradient", "error of the correction")
    single = [tuple(float(i == j) for j in range(len(EXPONENTS))) for i in range(len(EXPONENTS))]
    for (name, (gradient, correction)), shares in zip(errors.items(), [*single, SHARES], strict=True):
        size = bytes_a_token(policy, shares, given.jitter, given.tokens // 8)
        table.add_row(name, f"{size:.1f}", f"{gradient:.1e}", f"{correction:.1e}")
    console.print(table)


if __name__ == "__main__":
    main()
