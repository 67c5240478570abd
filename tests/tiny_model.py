"""A tiny GPT, and a training run of it in Megatron's own loop.

``train`` runs inside the workers of ``run_ranks(..., megatron=True)``. Its data are Python objects from an external
iterator and its loss is a plain masked likelihood: what it tests is the loop, not an objective.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

DENSE = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --tokenizer-type NullTokenizer --vocab-size 32 --make-vocab-size-divisible-by 16
    --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --lr-decay-style constant --seed 1
    --log-interval 1 --eval-interval 1000 --eval-iters 0
    --dataloader-type external --calculate-per-token-loss
""")
MOE = shlex.split("--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear")


@dataclass(frozen=True)
class MicroBatch:
    """What the external iterator yields: an object that Megatron knows nothing of."""

    tokens: Tensor  # [b, s + 1] int64
    mask: Tensor  # [b, s] int32: 1 where a position trains


@dataclass
class Run:
    """What a training run did, as one rank saw it: one entry per step."""

    losses: list[float] = field(default_factory=list)  # reduced by Megatron; NaN on ranks without the last stage
    skipped: list[int] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)  # digest of parameters, optimizer and schedule after the step
    scalars: dict[str, list[float]] = field(default_factory=dict)  # TensorBoard's, on the last rank


def train(
    flags: Sequence[str],
    steps: int,
    empty: Sequence[tuple[int, int]] = (),
    metrics_path: str | None = None,
    model: Sequence[str] = DENSE,
) -> Run:
    """Train the tiny model on one repeated batch.

    Args:
        flags: Megatron's, after those of ``model``.
        steps: ``--train-iters``.
        empty: (step, data-parallel rank) pairs without trainable tokens; steps count from 1.
        metrics_path: passed to our ``pretrain``.
        model: ``DENSE``, or that with ``MOE``.

    Returns:
        This rank's view of the run.
    """
    from megatron.core import mpu
    from megatron.core.enums import ModelType
    from megatron.training import training
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_sc.training import cpu
    from megatron_sc.training.loop import pretrain

    def add_defaults(parser: Any) -> Any:
        cpu.set_parser_defaults(parser)
        return parser

    with mock.patch.object(sys, "argv", ["train", *model, "--train-iters", str(steps), *flags]):
        args = parse_and_validate_args(extra_args_provider=add_defaults)

    def datasets_provider(sizes: Any, vp_stage: int | None = None) -> tuple[Any, Any, None]:
        rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        first = args.iteration + 1
        empty_steps = {step for step, empty_rank in empty if empty_rank == rank}
        return micro_batches(rank, size, first, empty_steps), micro_batches(rank, size, first, set()), None

    datasets_provider.is_distributed = True  # type: ignore[attr-defined]

    run = Run()
    trained: list[Any] = []
    stock_setup, stock_log = training.setup_model_and_optimizer, training.training_log

    def setup(*args: Any, **kwargs: Any) -> Any:
        trained[:] = stock_setup(*args, **kwargs)
        return tuple(trained)

    def log(
        loss_dict: Any,
        total: Any,
        rate: Any,
        iteration: int,
        scale: Any,
        report: Any,
        skipped: int,
        *rest: Any,
        **kw: Any,
    ) -> Any:
        run.losses.append(loss_dict["loss"].item() if "loss" in loss_dict else float("nan"))
        run.skipped.append(skipped)
        run.states.append(digest(*trained))
        return stock_log(loss_dict, total, rate, iteration, scale, report, skipped, *rest, **kw)

    class Writer(mock.MagicMock):
        def add_scalar(self, name: str, value: Any, step: int) -> None:
            run.scalars.setdefault(name, []).append(float(value))

    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    with (
        mock.patch.object(training, "setup_model_and_optimizer", setup),
        mock.patch.object(training, "training_log", log),
        mock.patch.object(training, "get_tensorboard_writer", return_value=Writer() if is_last else None),
    ):
        config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step, metrics_path=metrics_path)
    return run


def micro_batches(rank: int, size: int, first_step: int, empty_steps: set[int]) -> Iterator[MicroBatch]:
    """The same 8 sequences in every step, in micro-batches of 2, dealt to the data-parallel ranks."""
    tokens = torch.randint(32, (4, 2, 17), generator=torch.Generator().manual_seed(0))
    step = first_step
    while True:
        for micro_batch in tokens[rank::size]:
            mask = torch.full((2, 16), int(step not in empty_steps), dtype=torch.int32)
            yield MicroBatch(micro_batch, mask)
        step += 1


def forward_step(data_iterator: Iterator[MicroBatch], model: Any) -> Any:
    """Megatron's forward step with a masked negative log-likelihood."""
    batch = next(data_iterator)
    positions = torch.arange(16).expand(2, -1)
    output = model(batch.tokens[:, :-1], positions, None, labels=batch.tokens[:, 1:])

    def loss_func(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, count = (losses.float() * batch.mask).sum(), batch.mask.sum()
        report = torch.stack([loss.detach(), count.float()])
        return loss, count.int(), {"loss": report, "negative": -report * torch.tensor([1.0, -1.0])}

    return output, loss_func


def digest(model: Any, optimizer: Any, scheduler: Any) -> bytes:
    """Of every bit that a step may change: parameters, optimizer state, schedule."""
    import hashlib
    import io

    optimizers = [inner.optimizer for inner in getattr(optimizer, "chained_optimizers", [optimizer])]
    main_parameters = [weight for inner in optimizers for group in inner.param_groups for weight in group["params"]]
    parameters = [weight for chunk in model for weight in chunk.parameters()]
    buffer = io.BytesIO()
    torch.save([weight.detach() for weight in parameters + main_parameters], buffer)
    torch.save([*(inner.state_dict() for inner in optimizers), scheduler.state_dict()], buffer)
    return hashlib.sha256(buffer.getvalue()).digest()
