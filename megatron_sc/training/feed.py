"""A step's micro-batches from recorded rollouts, on every rank.

At the start of a step the ranks that read take their share, all ranks agree on how many micro-batches there are (see
``agreement``), and each tensor-parallel group learns their shapes. A micro-batch is put together when its forward pass
comes, on tensor-parallel rank 0, and broadcast from there.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ..rollouts import Rollout, RolloutError, RolloutReader
from ..rollouts.reader import Availability
from .agreement import Status, agree
from .batch import Batch, BatchLayout, check_rollout, collate
from .config import ObjectiveConfig
from .packing import PackedMicroBatch, pack_by_tokens, pack_in_order, spread
from .source import RolloutSource, step_advantages

WIDTH_MULTIPLE = 8
"""A micro-batch's recorded entries a position are padded to a multiple of this: few shapes, few compiled kernels."""


class StepSource(Protocol):
    """A step's rollouts for this data-parallel rank, when they are there."""

    def poll(self, step: int) -> Availability:
        """Whether ``rollouts(step)`` would return at once. Never waits."""
        ...

    def rollouts(self, step: int) -> Sequence[Rollout]:
        """See ``RolloutSource``."""
        ...

    def why_ended(self, step: int) -> str:
        """Why ``poll(step)`` says "ended"."""
        return "the rollouts are used up"


class BufferSource(StepSource):
    """A rollout buffer as a source of steps.

    Args:
        reader: of this data-parallel rank.
        groups_per_step: over all ranks.
        notify: called with a line of text when rollouts are left out.
    """

    def __init__(self, reader: RolloutReader, groups_per_step: int, notify: Callable[[str], None] | None = None):
        self.reader = reader
        self._groups = groups_per_step
        self._notify = notify

    def poll(self, step: int) -> Availability:
        """See ``StepSource``."""
        return self.reader.poll(self._groups, step)

    def why_ended(self, step: int) -> str:
        """See ``StepSource``."""
        left = self.reader.left(self._groups, step)
        text = f"a step takes {self._groups} groups (--prompts-per-step), but the rollout buffer has {left} left"
        return text if self.reader.closed else f"{text} (--rollout-follow waits for more)"

    def rollouts(self, step: int) -> Sequence[Rollout]:
        """The next groups; they are behind the reader's cursor afterwards."""
        reader = self.reader
        dropped, skipped = reader.dropped, reader.cursor.skipped
        found = [rollout for group in reader.take(self._groups, step) for rollout in group.rollouts()]
        if self._notify is not None and reader.dropped > dropped:
            self._notify(
                f"> step {step}: left out {reader.dropped - dropped} rollouts that failed validation, {reader.dropped} "
                "so far on this rank"
            )
        if self._notify is not None and reader.cursor.skipped > skipped:
            self._notify(
                f"> step {step}: skipped {reader.cursor.skipped - skipped} groups that exceed --max-staleness, "
                f"{reader.cursor.skipped} so far"
            )
        return found


class AlwaysReady(StepSource):
    """A ``RolloutSource`` that never waits, as a ``StepSource``."""

    def __init__(self, source: RolloutSource):
        self._source = source

    def poll(self, step: int) -> Availability:
        """See ``StepSource``."""
        return "ready"

    def rollouts(self, step: int) -> Sequence[Rollout]:
        """See ``RolloutSource``."""
        return self._source.rollouts(step)


@dataclass(frozen=True)
class FeedLayout:
    """How rollouts become micro-batches.

    Attributes:
        batch: shape of a micro-batch; with ``budget`` its rows, positions and width vary, and these are the most.
        budget: ``--micro-batch-tokens``; None: every micro-batch has the shape of ``batch``.
        multiple: padded lengths are multiples of this.
        count_multiple: the number of micro-batches is a multiple of this (interleaved pipelines).
        rollouts: that each rank must get in a step; None: any number.
    """

    batch: BatchLayout
    budget: int | None
    multiple: int
    count_multiple: int
    rollouts: int | None


@dataclass(frozen=True)
class Place:
    """This rank's place in the layout.

    Attributes:
        replica: data-parallel rank.
        replicas: data-parallel size.
        tensor_group: the tensor-parallel group.
        device: of collectives.
        trains: this pipeline stage needs micro-batches; on tensor-parallel rank 0 it also reads them.
    """

    replica: int
    replicas: int
    tensor_group: dist.ProcessGroup
    device: torch.device
    trains: bool

    @property
    def reads(self) -> bool:
        """Whether this rank reads rollouts."""
        return self.trains and dist.get_rank(self.tensor_group) == 0


class RolloutFeed:
    """The micro-batches of one step at a time.

    Args:
        source: this data-parallel rank's rollouts; used only where ``place.reads``.
        objective: how advantages are computed.
        layout: see ``FeedLayout``.
        place: see ``Place``.
        poll_seconds: between looks at a source that is waiting.
        notify: called with a line of text when the wait begins, and when nothing follows.
        interrupted: whether this rank was told to exit; asked while waiting.
        resumed: whether earlier steps were trained: then a source that has ended is no error.
    """

    def __init__(
        self,
        source: StepSource | None,
        objective: ObjectiveConfig,
        layout: FeedLayout,
        place: Place,
        poll_seconds: float = 1.0,
        notify: Callable[[str], None] = print,
        interrupted: Callable[[], bool] = lambda: False,
        resumed: bool = False,
    ):
        self.source = source
        self._objective, self._layout, self._place = objective, layout, place
        self._poll, self._notify, self._interrupted = poll_seconds, notify, interrupted
        self._resumed = resumed
        self._step = -1
        self._rollouts: list[Rollout] = []
        self._advantages: list[float] = []
        self._packed: list[PackedMicroBatch] = []
        self._shapes: list[tuple[int, int, int]] = []  # rows, positions, width of each micro-batch
        self._digest: int | None = None

    @property
    def step(self) -> int:
        """The step under way; -1 before the first."""
        return self._step

    @property
    def varies(self) -> bool:
        """Whether micro-batches have different shapes."""
        return self._layout.budget is not None

    @property
    def cursor(self) -> str | None:
        """The place after the step under way, as text, to be saved with a checkpoint of it."""
        return self.source.reader.cursor.to_json() if isinstance(self.source, BufferSource) else None

    def begin_step(self, step: int) -> int | None:
        """Take the step's rollouts; collective over all ranks.

        Args:
            step: the optimizer step that comes next (the first is 0).

        Returns:
            The number of micro-batches on every rank; None: the source has ended, or a rank was told to exit while it
            waited. Then training must end: what was taken for this step is not behind the cursor that was saved.

        Raises:
            RolloutError: for rollouts that cannot be trained on, on the rank that read them; and where the source has
                ended before the first step.
            RuntimeError: on the other ranks then, and where two ranks that read for the same data-parallel rank hold
                different rollouts.
        """
        error: Exception | None = None
        waiting_since: float | None = None
        while True:
            status, count = Status.READY, 0
            try:
                if error is None and self._place.reads:
                    status, count = self._take(step)
            except Exception as caught:  # whatever it is, all ranks must stop together
                status, error = Status.FAILED, caught
            place = self._place
            agreed = agree(
                status, count, self._digest, place.replica, place.replicas, place.device, self._interrupted()
            )
            if agreed.status == Status.FAILED:
                raise error or RuntimeError(
                    f"step {step}: another rank could not read its rollouts; its error says why"
                )
            if agreed.status == Status.ENDED:
                reason = "the rollouts are used up" if self.source is None else self.source.why_ended(step)
                if self._step < 0 and not self._resumed:
                    raise RolloutError(f"step {step}: nothing to train on: {reason}")
                self._notify(f"> step {step}: {reason}; training ends")
                return None
            if agreed.status == Status.WAITING and agreed.interrupted:
                self._notify(f"> step {step}: told to exit while waiting for rollouts")
                return None
            if agreed.status == Status.READY:
                break
            if waiting_since is None:
                waiting_since = time.monotonic()
                self._notify(f"step {step}: waiting for rollouts")
            time.sleep(self._poll)
        if waiting_since is not None:
            self._notify(f"step {step}: waited {time.monotonic() - waiting_since:.1f} s for rollouts")
        if agreed.disagreeing:
            raise RuntimeError(
                f"step {step}: the ranks that read for data-parallel rank {agreed.disagreeing[0]} hold different "
                "rollouts. A source must be a function of the step and the data-parallel rank alone"
            )
        multiple = self._layout.count_multiple
        return self._settle(step, max(-(-agreed.micro_batches // multiple), 1) * multiple)

    def batch(self, index: int) -> tuple[Batch | None, BatchLayout]:
        """Micro-batch ``index`` of the step on tensor-parallel rank 0, None elsewhere; and its shape everywhere."""
        if index >= len(self._shapes):
            raise RuntimeError(
                f"step {self._step} has {len(self._shapes)} micro-batches, but another was asked for: train through "
                "megatron_sc.training.loop.pretrain or megatron_sc.launch"
            )
        rows, positions, width = self._shapes[index]
        layout = replace(self._layout.batch, micro_batch_size=rows, seq_length=positions, width=width)
        if not self._place.reads:
            return None, layout
        chosen = self._packed[index].rollouts
        rollouts = [self._rollouts[i] for i in chosen]
        advantages = [self._advantages[i] for i in chosen]
        return collate(rollouts, advantages, self._step, layout, checked=True), layout

    def _take(self, step: int) -> tuple[Status, int]:
        """This rank's share, if it is there and not yet taken."""
        if self._step == step:
            return Status.READY, len(self._packed)
        assert self.source is not None, "a rank that reads has a source"
        there = self.source.poll(step)
        if there != "ready":
            return (Status.WAITING if there == "waiting" else Status.ENDED), 0
        rollouts = list(self.source.rollouts(step))
        wanted = self._layout.rollouts
        if wanted is not None and len(rollouts) != wanted:
            raise RolloutError(
                f"step {step}: the source gave {len(rollouts)} rollouts to this data-parallel rank, but a step takes "
                f"{wanted} (--global-batch-size / data-parallel size). --micro-batch-tokens packs any number"
            )
        lengths = [len(rollout) for rollout in rollouts]
        fixed = self._layout.batch
        widest = fixed if fixed.distribution not in ("head", "support") else replace(fixed, width=sys.maxsize)
        for rollout in rollouts:  # all of them now, when all ranks can still stop together
            check_rollout(rollout, widest)
        if self._layout.budget is None:
            self._packed = pack_in_order(len(rollouts), fixed.micro_batch_size, fixed.seq_length)
        else:
            self._packed = pack_by_tokens(lengths, self._layout.budget, self._layout.multiple)
        self._advantages = step_advantages(rollouts, self._objective).tolist() if rollouts else []
        self._rollouts, self._step, self._digest = rollouts, step, _digest(rollouts)
        return Status.READY, len(self._packed)

    def _settle(self, step: int, count: int) -> int:
        """``count`` micro-batches on this rank, and their shapes on every rank of the tensor-parallel group."""
        self._step = step
        place, fixed = self._place, self._layout.batch
        if place.reads:
            if self._layout.budget is None:
                empty = PackedMicroBatch((), fixed.micro_batch_size, fixed.seq_length)
                self._packed += [empty] * (count - len(self._packed))
            else:
                lengths = [len(rollout) for rollout in self._rollouts]
                self._packed = spread(self._packed, count, lengths, self._layout.multiple)
            self._shapes = [(each.rows, each.positions, self._width(each)) for each in self._packed]
        if place.trains and dist.get_world_size(place.tensor_group) > 1:
            shapes = torch.zeros((count, 3), dtype=torch.int64, device=place.device)
            if place.reads:
                shapes.copy_(torch.tensor(self._shapes, dtype=torch.int64))
            source = dist.get_process_group_ranks(place.tensor_group)[0]
            dist.broadcast(shapes, src=source, group=place.tensor_group)
            self._shapes = [(rows, positions, width) for rows, positions, width in shapes.tolist()]
        return count

    def _width(self, packed: PackedMicroBatch) -> int:
        """Recorded entries a position of a micro-batch: its widest head's, or what the layout fixes."""
        layout = self._layout.batch
        if layout.distribution not in ("head", "support"):
            return layout.width
        heads = [self._rollouts[i].head_ids for i in packed.rollouts]
        widest = max((head.shape[1] for head in heads if head is not None), default=1)
        return -(-widest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


class FedMicroBatches:
    """What Megatron's loop iterates over: the feed's micro-batches, one step after another.

    Each model chunk of an interleaved pipeline has its own.
    """

    def __init__(self, feed: RolloutFeed):
        self.feed = feed
        self._step = -1
        self._index = 0

    def __iter__(self) -> FedMicroBatches:
        return self

    def __next__(self) -> tuple[Batch | None, BatchLayout]:
        """On tensor-parallel rank 0 the batch, elsewhere None; and its shape."""
        if self._step != self.feed.step:
            self._step, self._index = self.feed.step, 0
        self._index += 1
        return self.feed.batch(self._index - 1)


def feed_of(data_iterator: Any) -> RolloutFeed | None:
    """The feed behind what Megatron passes to ``train_step``: an iterator, wrapped or not, or one a model chunk."""
    first = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    iterator = getattr(first, "iterable", first)
    return iterator.feed if isinstance(iterator, FedMicroBatches) else None


def _digest(rollouts: Sequence[Rollout]) -> int:
    """In [0, 2^63): what ranks that read the same share compare."""
    digest = hashlib.blake2b(digest_size=8)
    for rollout in rollouts:
        for values in (rollout.prompt_ids, rollout.response_ids, rollout.sampled_logprobs):
            digest.update(np.ascontiguousarray(values).data)
        digest.update(np.float64(rollout.reward).tobytes())
    return int.from_bytes(digest.digest()) >> 1
