"""The embedded sampler: rollouts from a distorted, possibly stale copy of the trainer, on the trainer's own ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_sc.precision.simulate import simulate_sampler
from megatron_sc.precision.specs import SamplerSpec
from megatron_sc.rollouts import Rollout

from .config import SamplerConfig
from .distortion import Distortion, NoDistortion, sampler_weights, swapped_weights
from .generate import Generation, SamplingParameters, generate
from .groups import ParallelGroups, group_rank, group_size
from .isolation import inference_only
from .shards import unwrap
from .tasks import Ids, Task, reward

# Independent random streams, each a function of (seed, stream, step, index).
_PROMPTS, _DRAWS, _EVALUATION_PROMPTS, _EVALUATION_DRAWS = range(4)


@dataclass(frozen=True)
class Evaluation:
    """How many of this data-parallel rank's answers are right. Sums, so that ranks can be added up."""

    accuracy_sum: float
    correct: int
    count: int


class EmbeddedSampler:
    """Samples each step's rollouts from the trainer's weights, distorted and computed with as ``config`` says.

    Prompts are a function of (seed, step, index of the prompt), tokens of (seed, step, index of the sequence) and the
    sampler's probabilities. They do not depend on the data-parallel size, and a resumed run needs no saved state. With
    staleness above 1 the sampler's weights are state: a resumed run refreshes them at its first step, which the
    rollouts' ``weight_version`` shows.

    Every rank calls ``sample`` at the same steps: it is collective over the tensor- and expert-parallel groups. Call it
    between optimizer steps, not between the micro-batches of one.
    """

    def __init__(
        self,
        config: SamplerConfig,
        true_vocab_size: int,
        groups: ParallelGroups | None = None,
        pad_multiple: int = 1,
    ) -> None:
        """Check the settings against the vocabulary and the layout.

        Args:
            config: the settings.
            true_vocab_size: the model's vocabulary without padding.
            groups: this rank's process groups, ``ParallelGroups.from_megatron()``; None: one rank.
            pad_multiple: sequence lengths are rounded up to it (FP8 alignment).

        Raises:
            ValueError: naming the flag: a vocabulary smaller than the task's or the head, or prompts that do not divide
                over the data-parallel ranks.
        """
        self.config = config
        self.task: Task = config.build_task()
        self._true_vocab_size = true_vocab_size
        self._groups = groups or ParallelGroups()
        self._pad_multiple = pad_multiple
        self._distortion = config.build_distortion()
        self._precision, self._staleness = config.build_precision(), config.staleness
        self._held: tuple[int, dict[nn.Parameter, Tensor]] | None = None  # version, weights of a stale sampler

        if self.task.vocab_size > true_vocab_size:
            raise ValueError(
                f"--task {config.task} has {self.task.vocab_size} tokens but --true-vocab-size is {true_vocab_size}"
            )
        if config.head_size > true_vocab_size and config.sampler != "demonstrations":
            raise ValueError(f"--head-size {config.head_size} exceeds --true-vocab-size {true_vocab_size}")
        ranks = group_size(self._groups.data)
        if config.prompts_per_step % ranks:
            raise ValueError(
                f"--prompts-per-step {config.prompts_per_step} does not divide over {ranks} data-parallel ranks"
            )

    def sample(self, model: nn.Module, step: int, clean: bool = False) -> list[Rollout]:
        """This data-parallel rank's rollouts of a step: whole groups, contiguous, in the order of the prompts.

        Args:
            model: the trainer's GPTModel, possibly wrapped; left bit-identical, as are all random streams.
            step: the number of optimizer steps taken so far; also the version of the trainer's weights.
            clean: sample from the trainer's own current weights, on prompts that are not training prompts: validation.

        Returns:
            prompts_per_step / data-parallel size * samples_per_prompt rollouts, with ``metadata``
            {"accuracy": float, "correct": bool}. Responses end at the task's end token.
        """
        prompts = self._prompts(step, _EVALUATION_PROMPTS if clean else _PROMPTS)
        if self.config.sampler == "demonstrations" and not clean:
            return [self._demonstration(prompt, group, step) for prompt, group in self._repeated(prompts, step)]
        parameters = self.config.sampling_parameters()
        with inference_only(model):
            version, weights = (step, {}) if clean else self._weights(model, step)
            with swapped_weights(model, weights), simulate_sampler(model, SamplerSpec() if clean else self._precision):
                generation = self._generate(model, prompts, step, parameters, _EVALUATION_DRAWS if clean else _DRAWS)
        return self._rollouts(self._repeated(prompts, step), generation, version)

    def evaluate(self, model: nn.Module, step: int, greedy: bool = False) -> Evaluation:
        """How well the trainer's own weights do on prompts that are not training prompts.

        Args:
            model: as for ``sample``.
            step: chooses the prompts.
            greedy: take the most likely token instead of sampling.
        """
        if greedy:
            prompts = self._prompts(step, _EVALUATION_PROMPTS)
            parameters = SamplingParameters(temperature=0)
            generation = self._generate(model, prompts, step, parameters, _EVALUATION_DRAWS, samples=1)
            judged = [
                self._judge(p, self._until_end(ids)) for p, ids in zip(prompts, generation.ids.numpy(), strict=True)
            ]
        else:
            judged = [tuple(rollout.metadata.values()) for rollout in self.sample(model, step, clean=True)]
        return Evaluation(sum(a for a, _ in judged), sum(c for _, c in judged), len(judged))

    def _weights(self, model: nn.Module, step: int) -> tuple[int, dict[nn.Parameter, Tensor]]:
        """The version and the values of the weights that the sampler holds at a step."""
        if self._staleness == 1:
            return step, self._distorted(model, self._distortion)
        due = step - step % self._staleness
        if self._held is None or not due <= self._held[0] <= step:
            copies = {parameter: parameter.detach().clone() for parameter in unwrap(model).parameters()}
            self._held = step, copies | self._distorted(model, self._distortion)
        return self._held

    def _distorted(self, model: nn.Module, distortion: Distortion) -> dict[nn.Parameter, Tensor]:
        if isinstance(distortion, NoDistortion):
            return {}
        return sampler_weights(model, distortion, self._true_vocab_size, self._groups)

    def _prompts(self, step: int, stream: int) -> list[Ids]:
        """This rank's prompts of a step."""
        seed = self.config.sampler_seed
        return [self.task.prompt(np.random.default_rng([seed, stream, step, i])) for i in self._prompt_indices()]

    def _prompt_indices(self) -> range:
        """The global indices, within a step, of this rank's prompts."""
        count = self.config.prompts_per_step // group_size(self._groups.data)
        return range(group_rank(self._groups.data) * count, (group_rank(self._groups.data) + 1) * count)

    def _repeated(self, prompts: Sequence[Ids], step: int) -> list[tuple[Ids, int]]:
        """Each prompt once for every sample, with its group: unique over ranks and steps."""
        first = step * self.config.prompts_per_step
        pairs = zip(prompts, self._prompt_indices(), strict=True)
        return [(prompt, first + i) for prompt, i in pairs for _ in range(self.config.samples_per_prompt)]

    def _generate(
        self,
        model: nn.Module,
        prompts: Sequence[Ids],
        step: int,
        parameters: SamplingParameters,
        stream: int,
        samples: int | None = None,
    ) -> Generation:
        """Responses to each prompt, ``samples`` times (default: samples_per_prompt)."""
        samples = samples or self.config.samples_per_prompt
        lengths = np.array([len(prompt) for prompt in prompts])
        padded = np.zeros((len(prompts), lengths.max()), dtype=np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        shape = self.task.response_length, 1 + self.config.num_draws
        keys = [
            (self.config.sampler_seed, stream, step, i * samples + j)
            for i in self._prompt_indices()
            for j in range(samples)
        ]
        uniforms = np.stack([np.random.default_rng(key).random(shape) for key in keys])
        return generate(
            model,
            torch.from_numpy(padded.repeat(samples, axis=0)),
            torch.from_numpy(lengths.repeat(samples)),
            torch.from_numpy(uniforms),
            self._true_vocab_size,
            parameters,
            self._groups.tensor,
            self._pad_multiple,
        )

    def _rollouts(self, prompts: list[tuple[Ids, int]], generation: Generation, version: int) -> list[Rollout]:
        """One rollout for each row, cut after its end token."""
        arrays = {
            "sampled_logprobs": generation.logprobs,
            "head_ids": generation.head_ids,
            "head_logprobs": generation.head_logprobs,
            "log_tail_mass": generation.log_tail_mass,
            "draw_ids": generation.draw_ids,
            "draw_logprobs": generation.draw_logprobs,
        }
        recorded: dict[str, Any] = {name: tensor.numpy() for name, tensor in arrays.items() if tensor is not None}
        all_ids = generation.ids.numpy()
        rollouts = []
        for i, (prompt, group) in enumerate(prompts):
            response = self._until_end(all_ids[i])
            length = len(response)
            accuracy, correct = self._judge(prompt, response)
            rollouts.append(
                Rollout(
                    prompt_ids=prompt,
                    response_ids=response,
                    response_mask=np.ones(length, dtype=np.bool_),
                    weight_version=np.full(length, version, dtype=np.int32),
                    reward=reward(self.config.reward_mode, accuracy, correct),
                    group_id=group,
                    temperature=self.config.sampler_temperature,
                    head_is_support=generation.head_is_support,
                    finish_reason="stop" if length and response[-1] == self.task.end_id else "length",
                    metadata={"accuracy": accuracy, "correct": correct},
                    **{name: array[i, :length] for name, array in recorded.items()},
                )
            )
        return rollouts

    def _demonstration(self, prompt: Ids, group: int, step: int) -> Rollout:
        """A correct answer with reward 1. Nothing sampled it: its log-probabilities are 0 and it has no head."""
        response = self.task.demonstration(prompt)
        length = len(response)
        return Rollout(
            prompt_ids=prompt,
            response_ids=response,
            response_mask=np.ones(length, dtype=np.bool_),
            sampled_logprobs=np.zeros(length, dtype=np.float32),
            weight_version=np.full(length, step, dtype=np.int32),
            reward=1.0,
            group_id=group,
            finish_reason="stop" if response[-1] == self.task.end_id else "length",
            metadata={"accuracy": 1.0, "correct": True},
        )

    def _until_end(self, ids: Ids) -> Ids:
        """A response up to and including its first end token."""
        if self.task.end_id is None:
            return ids
        ends = np.flatnonzero(ids == self.task.end_id)
        return ids[: ends[0] + 1] if ends.size else ids

    def _judge(self, prompt: Ids, response: Ids) -> tuple[float, bool]:
        return self.task.accuracy(prompt, response), self.task.correct(prompt, response)
