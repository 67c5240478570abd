"""Recorded rollouts with every field, made from a seed: the same whatever the layout that trains on them."""

from __future__ import annotations

import numpy as np

from megatron_sc.rollouts import Rollout


def make_routes(tokens: int, layers: int, topk: int, experts: int, rng: np.random.Generator) -> np.ndarray:
    """int16 ``[tokens, layers, topk]``, distinct; the last token, which no engine feeds to the model, has none."""
    every = np.broadcast_to(np.arange(experts, dtype=np.int16), (tokens, layers, experts))
    routes = rng.permuted(every, axis=-1)[..., :topk].copy()
    routes[-1] = -1
    return routes


def make_rollouts(
    groups: int,
    samples: int,
    vocab: int,
    head: int,
    *,
    seed: int = 0,
    draws: int = 4,
    prompt: int = 5,
    longest: int = 9,
) -> list[Rollout]:
    """``groups * samples`` rollouts of random lengths; heads hold ``head`` tokens and about 0.9 of the mass."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for group in range(groups):
        prompt_ids = rng.integers(0, vocab, prompt).astype(np.int32)
        for _ in range(samples):
            length = int(rng.integers(2, longest + 1))
            logits = rng.normal(size=(length, vocab)) * 2
            logq = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            order = np.argsort(-logq, axis=1)[:, :head].astype(np.int32)
            sampled = np.array([rng.choice(vocab, p=np.exp(row) / np.exp(row).sum()) for row in logq], np.int32)
            drawn = np.stack([rng.choice(vocab, size=draws, p=np.exp(row) / np.exp(row).sum()) for row in logq])
            tail = logq.copy()
            np.put_along_axis(tail, order, -np.inf, axis=1)
            with np.errstate(divide="ignore"):
                log_tail = np.log(np.exp(tail).sum(axis=1))
            mask = np.ones(length, bool)
            mask[rng.integers(0, length)] = length < 4  # a tool's token in the longer ones
            rollouts.append(
                Rollout(
                    prompt_ids=prompt_ids,
                    response_ids=sampled,
                    response_mask=mask,
                    sampled_logprobs=np.take_along_axis(logq, sampled[:, None], axis=1)[:, 0].astype(np.float32),
                    weight_version=np.zeros(length, np.int32),
                    reward=float(rng.random()),
                    group_id=group,
                    temperature=1.0,
                    head_ids=order,
                    head_logprobs=np.take_along_axis(logq, order, axis=1).astype(np.float32),
                    log_tail_mass=log_tail.astype(np.float32),
                    draw_ids=drawn.astype(np.int32),
                    draw_logprobs=np.take_along_axis(logq, drawn, axis=1).astype(np.float32),
                )
            )
    return rollouts
