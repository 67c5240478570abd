"""Where a step's rollouts come from, and the embedded sampler's micro-batches (see ``feed`` for recorded ones)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import nn

from ..objective import compute_advantages
from ..rollouts import Rollout, RolloutError, RolloutWriter
from ..sampling import EmbeddedSampler
from .batch import Batch, BatchLayout, collate
from .config import ObjectiveConfig


class RolloutSource(Protocol):
    """Gives this data-parallel rank its rollouts, as a function of the step and of the data-parallel rank alone.

    It is read on tensor-parallel rank 0 of the first and of the last pipeline stage and on every context-parallel rank,
    and again for the same step after a resume: all these calls must return the same rollouts, which is checked within a
    step. A queue whose items are gone once taken does not qualify.
    """

    def rollouts(self, step: int) -> Sequence[Rollout]:
        """All rollouts of optimizer step ``step`` (the first is 0): whole groups, contiguous.

        As many as ``--global-batch-size`` / data-parallel size.
        """
        ...


class FixedRollouts:
    """The same recorded rollouts, step after step: for tests and for replaying a step.

    Args:
        steps: rollouts of each step over all data-parallel ranks, groups contiguous; step i uses ``i % len(steps)``.
        rank: this data-parallel rank.
        ranks: data-parallel size. Consecutive equal shares go to consecutive ranks.

    Raises:
        ValueError: if a step does not divide over the ranks, or a group would be split between two.
    """

    def __init__(self, steps: Sequence[Sequence[Rollout]], rank: int, ranks: int):
        self._steps = []
        for index, step in enumerate(steps):
            share, rest = divmod(len(step), ranks)
            groups = [{r.group_id for r in step[i * share : (i + 1) * share]} for i in range(ranks)]
            if rest or sum(map(len, groups)) != len(set().union(*groups)):
                raise ValueError(f"step {index}: {len(step)} rollouts do not divide over {ranks} ranks in whole groups")
            self._steps.append(list(step[rank * share : (rank + 1) * share]))

    def rollouts(self, step: int) -> Sequence[Rollout]:
        """See ``RolloutSource``."""
        return self._steps[step % len(self._steps)]


class SampledRollouts:
    """The embedded sampler as a source. Megatron hands the model to the forward step, which binds it here.

    Args:
        sampler: see ``EmbeddedSampler``.
        clean: sample the trainer's own weights on other prompts: for validation.
        record: also write them there, a commit a step; None: nowhere.
    """

    def __init__(self, sampler: EmbeddedSampler, clean: bool, record: RolloutWriter | None = None):
        self._sampler = sampler
        self._clean = clean
        self._record = record
        self.model: nn.Module | None = None

    def rollouts(self, step: int) -> Sequence[Rollout]:
        """See ``RolloutSource``. Collective over the tensor- and expert-parallel groups."""
        if self.model is None:
            raise RuntimeError("the embedded sampler has no model: it is bound by the first forward step")
        rollouts = self._sampler.sample(self.model, step, clean=self._clean)
        if self._record is not None:
            self._record.write(rollouts)
            self._record.commit()
        return rollouts


class SampledMicroBatches:
    """Iterator over the embedded sampler's micro-batches, on the CPU, each with its shape.

    A new step begins when the last micro-batch is used up; sampling is collective, so every rank iterates.

    Args:
        source: the sampler.
        objective: how advantages are computed.
        layout: shapes of a micro-batch.
        current_step: the optimizer step that is being computed.

    Raises:
        RolloutError: from ``next``, if the sampler's rollouts do not fill whole micro-batches.
    """

    def __init__(
        self,
        source: SampledRollouts,
        objective: ObjectiveConfig,
        layout: BatchLayout,
        current_step: Callable[[], int],
    ):
        self.source = source
        self._objective = objective
        self.layout = layout
        self._current_step = current_step
        self._step = -1
        self._pending: deque[Batch] = deque()

    def __iter__(self) -> SampledMicroBatches:
        return self

    def __next__(self) -> tuple[Batch, BatchLayout]:
        step = self._current_step()
        if not self._pending:
            self._pending.extend(self._load(step))
            self._step = step
        elif step != self._step:
            raise RuntimeError(
                f"step {self._step} left {len(self._pending)} micro-batches unused: --global-batch-size must equal the "
                "number of rollouts of a step"
            )
        return self._pending.popleft(), self.layout

    def _load(self, step: int) -> list[Batch]:
        rollouts = list(self.source.rollouts(step))
        size = self.layout.micro_batch_size
        if not rollouts or len(rollouts) % size:
            raise RolloutError(
                f"step {step}: {len(rollouts)} rollouts do not fill micro-batches of --micro-batch-size {size}"
            )
        advantages = step_advantages(rollouts, self._objective)
        return [
            collate(rollouts[i : i + size], advantages[i : i + size].tolist(), step, self.layout)
            for i in range(0, len(rollouts), size)
        ]


def step_advantages(rollouts: Sequence[Rollout], objective: ObjectiveConfig) -> np.ndarray:
    """float32 ``[n]``: recorded advantages where every rollout has one, else from the rewards.

    Raises:
        RolloutError: where only some have one.
    """
    recorded = [rollout.advantage for rollout in rollouts]
    given = [value for value in recorded if value is not None]
    if len(given) == len(recorded):
        return np.array(given, np.float32)
    if given:
        index = recorded.index(None)
        raise RolloutError(
            f"rollout {index} (group {rollouts[index].group_id}) has no advantage, but others of the step do"
        )
    return compute_advantages(
        [rollout.reward for rollout in rollouts],
        [rollout.group_id for rollout in rollouts],
        objective.advantage,
        normalize_std=objective.advantage_std,
    )
