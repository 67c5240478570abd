"""Measure simulated samplers against a model on responses that they sample themselves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ..precision.specs import SamplerSpec
from ..sampling import ParallelGroups, SamplingParameters, generate, simulated, unwrap
from ..sampling.score import next_token_logprobs
from .mismatch import (
    Attribution,
    Mismatch,
    Positions,
    attribute,
    component_names,
    layer_names,
    with_components,
    with_layers,
)

ELEMENTS = 1 << 25
"""Log-probabilities that are held at once: 128 MiB in float32."""


class SamplerProbe:
    """Prompts and a model; each sampler answers with the same random numbers.

    Args:
        model: a GPTModel, possibly wrapped; left bit-identical, as are all random streams.
        prompts: token ids, int [P_i].
        response_length: tokens sampled after each.
        true_vocab_size: the vocabulary without padding.
        groups: this rank's process groups; every rank passes the same prompts.
        seed: of the draws.
        temperature: of sampler and model.
        head_size: see ``Positions.of``.

    Raises:
        ValueError: a prompt with an id outside the vocabulary.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[np.ndarray],
        response_length: int,
        true_vocab_size: int,
        groups: ParallelGroups,
        seed: int = 1,
        temperature: float = 1.0,
        head_size: int = 128,
    ):
        for i, prompt in enumerate(prompts):
            if prompt.max() >= true_vocab_size:
                raise ValueError(f"prompt {i} has token {prompt.max()}, but the vocabulary has {true_vocab_size}")
        self._model = model
        self._prompts = prompts
        self._length = response_length
        self._vocab_size = true_vocab_size
        self._groups = groups
        self._parameters = SamplingParameters(temperature=temperature)
        self._head_size = head_size
        self._uniforms = torch.from_numpy(np.random.default_rng(seed).random((len(prompts), response_length, 1)))

    def measure(self, spec: SamplerSpec, by: str = "component") -> tuple[Mismatch, Attribution | None]:
        """The mismatch of a sampler on its own responses, and its attribution on the same responses.

        Args:
            spec: the sampler, with fresh weights: its staleness does not enter.
            by: 'component', 'layer' or 'nothing'.
        """
        responses = self._sample(spec)
        trainer = self._scores(SamplerSpec(), responses)
        mismatch = Mismatch.of(self._compare(spec, responses, trainer))
        config = unwrap(self._model).config
        if by == "nothing":
            return mismatch, None
        if by == "component":
            names = component_names(spec, bool(config.num_moe_experts))
            restrict = partial(with_components, spec)
        else:
            names = layer_names(spec, config.num_layers)
            restrict = partial(with_layers, spec, config.num_layers)

        def kl(on: Sequence[str]) -> float:
            return self._compare(restrict(on), responses, trainer).kl.mean().item()

        return mismatch, attribute(names, kl)

    def _batches(self) -> list[slice]:
        longest = max(map(len, self._prompts)) + self._length
        rows = max(1, ELEMENTS // (longest * self._vocab_size))
        return [slice(start, start + rows) for start in range(0, len(self._prompts), rows)]

    def _sample(self, spec: SamplerSpec) -> Tensor:
        """[prompts, response length] int64."""
        with simulated(self._model, spec, self._vocab_size, self._groups):
            ids = [
                generate(
                    self._model, *self._padded(rows), self._uniforms[rows], self._vocab_size, self._parameters,
                    self._groups.tensor,
                ).ids
                for rows in self._batches()
            ]  # fmt: skip
        return torch.cat(ids).long()

    def _padded(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The prompts [b, P] int64 and their lengths [b]."""
        prompts = self._prompts[rows]
        lengths = [len(prompt) for prompt in prompts]
        padded = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
        return padded, torch.tensor(lengths)

    def _scores(self, spec: SamplerSpec, responses: Tensor) -> list[Tensor]:
        """For each batch the distributions that the responses' tokens are drawn from, [tokens, V] on the CPU."""
        scores = []
        with simulated(self._model, spec, self._vocab_size, self._groups):
            for rows in self._batches():
                prompts, lengths = self._padded(rows)
                tokens = nn.functional.pad(prompts, (0, self._length))
                places = lengths.unsqueeze(1) + torch.arange(self._length)
                tokens.scatter_(1, places, responses[rows])
                logprobs = next_token_logprobs(
                    self._model, tokens, self._vocab_size, self._parameters.temperature, self._groups.tensor
                ).cpu()
                own = places.unsqueeze(2).expand(-1, -1, logprobs.shape[2]) - 1
                scores.append(logprobs.gather(1, own).flatten(0, 1))
        return scores

    def _compare(self, spec: SamplerSpec, responses: Tensor, trainer: list[Tensor]) -> Positions:
        batches = zip(trainer, self._scores(spec, responses), self._batches(), strict=True)
        return Positions.join(
            [Positions.of(p, q, responses[rows].flatten(), self._head_size) for p, q, rows in batches]
        )
