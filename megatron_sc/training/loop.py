"""Megatron's own training loop, with four additions: it leaves everything alone on a step that trains no token, it
begins a step by agreeing on its recorded rollouts, it starts from and publishes Hugging Face weights where the flags
ask for it, and it can write a metrics file.

    from megatron_sc.training.loop import pretrain

    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step, metrics_path="metrics.jsonl")

All are wrappers around functions of ``megatron.training.training`` for the length of one call; nothing stays replaced.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .weights import RunWeights


def pretrain(
    full_config: Any,
    datasets_provider: Callable[..., Any],
    model_type: Any,
    forward_step_func: Callable[..., Any],
    *,
    metrics_path: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> None:
    """``megatron.training.pretrain`` inside :func:`hooked_training_loop`.

    Args:
        full_config: Megatron's ``PretrainConfigContainer``.
        datasets_provider: ``train_valid_test_datasets_provider`` of Megatron's pretrain.
        model_type: Megatron's ``ModelType``.
        forward_step_func: Megatron's forward step.
        metrics_path: See :func:`hooked_training_loop`.
        kwargs: Passed on to Megatron's pretrain.
    """
    from megatron.training import training

    with hooked_training_loop(metrics_path):
        training.pretrain(full_config, datasets_provider, model_type, forward_step_func, **kwargs)


@contextlib.contextmanager
def hooked_training_loop(metrics_path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Hook into Megatron's training loop for the ``pretrain`` call made inside.

    A step whose global batch (data-parallel and context-parallel ranks, all micro-batches) has no trainable token is
    skipped: parameters, optimizer state and learning-rate schedule stay bit-identical, and Megatron counts it under
    "skipped iterations". Megatron alone would run the optimizer on zero gradients, and momentum and weight decay would
    move the weights. (An MoE router's expert bias is no parameter: Megatron updates it before the optimizer's turn.)
    This needs ``--calculate-per-token-loss``, with which Megatron counts tokens in the first place.

    Where rollouts come from a buffer (see ``feed``), a step first takes its share of them, on all ranks or on none; the
    place in the buffer is saved with Megatron's checkpoints and taken up again; and when the buffer has ended, training
    ends as ``--exit-interval`` would end it, with a checkpoint.

    Args:
        metrics_path: Append one JSON object per logged step (``--log-interval``) and per evaluation to this file. Keys:
            "step", "split" ("train", "valid" or "test"), "skipped" (steps skipped so far), for "train" also "grad_norm"
            and "learning_rate", then the values that Megatron reduced from the loss function's report, for that step
            alone. What is not finite or not there is null. The last rank writes, because it holds the reduced values.
            Lines of steps after the checkpoint that training continues from are dropped first, so the file tells of
            one run however often it was interrupted; a run from step 0 starts it afresh.

    Raises:
        ValueError: inside, for ``--optimizer-cuda-graph``: a captured step cannot be skipped.
    """
    from megatron.training import checkpointing, training

    hooks = _Hooks(training, MetricsFile(Path(metrics_path)) if metrics_path is not None else None)
    with contextlib.ExitStack() as stack:
        for name in HOOKED:
            stack.callback(setattr, training, name, getattr(training, name))
            setattr(training, name, getattr(hooks, name))
        stack.callback(setattr, checkpointing, "check_checkpoint_args", checkpointing.check_checkpoint_args)
        checkpointing.check_checkpoint_args = taking_up_cursor(checkpointing.check_checkpoint_args)
        stack.callback(hooks.close)
        yield


HOOKED = (
    "setup_model_and_optimizer",
    "train_step",
    "training_log",
    "evaluate_and_print_results",
    "evaluate",
    "save_checkpoint",
)
"""Functions of ``megatron.training.training``."""


def taking_up_cursor(check_checkpoint_args: Callable[..., None]) -> Callable[..., None]:
    """Wrap what Megatron calls with the arguments of the checkpoint it resumes from (not with ``--finetune``).

    The place in the rollout buffer is one of them, so it is saved and found with the checkpoint, never beside it.
    """

    def checked(checkpoint_args: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.training import get_args

        check_checkpoint_args(checkpoint_args, *args, **kwargs)
        get_args().rollout_cursor = getattr(checkpoint_args, "rollout_cursor", None)

    return checked


class _Hooks:
    """Wrappers of the functions of ``megatron.training.training`` whose names they bear."""

    def __init__(self, training: Any, metrics: MetricsFile | None):
        self._stock = {name: getattr(training, name) for name in HOOKED}
        self._finalize_model_grads = training.finalize_model_grads
        self._tokens = TrainableTokens()
        self._metrics = metrics
        self._weights: RunWeights | None = None
        self._evaluation: tuple[int, str] | None = None  # step and split of the evaluation under way

    def close(self) -> None:
        """Close the metrics file."""
        if self._metrics is not None:
            self._metrics.close()

    def setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Watch the token count, guard the optimizer, and open the metrics file at the step that was loaded.

        Also start from Hugging Face weights, and publish what the run starts from.
        """
        from megatron.core.utils import get_model_config
        from megatron.training import get_args

        from .weights import RunWeights

        if hasattr(get_args(), "publish_weights"):  # the plugin's flags were parsed
            self._weights = RunWeights.from_args(get_args())  # before the model is built: it may refuse
        model, optimizer, scheduler = self._stock["setup_model_and_optimizer"](*args, **kwargs)
        if optimizer is not None:
            if get_args().optimizer_cuda_graph:
                raise ValueError(
                    "--optimizer-cuda-graph: a captured optimizer step cannot be skipped where no token trains; "
                    "remove the flag"
                )
            config = get_model_config(model[0])
            config.finalize_model_grads_func = self._tokens.watch(
                config.finalize_model_grads_func or self._finalize_model_grads
            )
            optimizer.step = self._tokens.guard(optimizer.step)
        if self._metrics is not None and _is_last_rank():
            self._metrics.open(get_args().iteration)
        if self._weights is not None:
            self._weights.start(model, optimizer, get_args().iteration)
        return model, optimizer, scheduler

    def train_step(
        self,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Begin with the step's rollouts, where they come from a feed: it says how many micro-batches there are.

        Publish the weights afterwards, if it is time.
        """
        from megatron.training import get_args

        from .feed import feed_of

        def train_step(forward_backward_func: Callable[..., Any]) -> Any:
            return self._stock["train_step"](
                forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func,
                *args, **kwargs,
            )  # fmt: skip

        feed, step = feed_of(data_iterator), get_args().curr_iteration
        if feed is not None:
            count = feed.begin_step(step)
            if count is None:
                return {}, 0, _is_unsaved(get_args(), step), True, 0, None, None, 0
            if feed.varies:
                config.variable_seq_lengths = True  # pipeline stages tell each other the shapes
            forward_backward_func = functools.partial(_with_micro_batches, forward_backward_func, count)
        result = train_step(forward_backward_func)
        exits = result[3]  # the step was not finished
        if not exits and feed is not None:
            get_args().rollout_cursor = feed.cursor
        if not exits and self._weights is not None:
            self._weights.after_step(model, step + 1)
        return result

    def training_log(
        self,
        loss_dict: dict[str, Tensor],
        total_loss_dict: dict[str, Any],
        learning_rate: float | None,
        iteration: int,
        loss_scale: float,
        report_memory_flag: bool,
        skipped_iter: int,
        grad_norm: float | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Write the step to the metrics file. A step without tokens has no means (0/0), so none are logged for it."""
        from megatron.training import get_args

        if self._tokens.are_none():
            loss_dict = {}
        if self._metrics is not None and self._metrics.is_open:
            self._metrics.skipped += skipped_iter
            if iteration % get_args().log_interval == 0:
                step = {"grad_norm": grad_norm, "learning_rate": learning_rate}
                self._metrics.write(iteration, "train", {**step, **_to_floats(loss_dict)})
        return self._stock["training_log"](
            loss_dict,
            total_loss_dict,
            learning_rate,
            iteration,
            loss_scale,
            report_memory_flag,
            skipped_iter,
            grad_norm,
            *args,
            **kwargs,
        )

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Save the first rank's place in the buffer on all ranks: it is the same wherever rollouts are read."""
        from megatron.training import get_args

        if getattr(get_args(), "rollout_path", None) is not None:
            cursor = [getattr(get_args(), "rollout_cursor", None)]
            torch.distributed.broadcast_object_list(cursor, src=0)
            get_args().rollout_cursor = cursor[0]
        return self._stock["save_checkpoint"](*args, **kwargs)

    def evaluate_and_print_results(
        self,
        prefix: str,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        iteration: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Remember what is evaluated: ``evaluate`` is not told."""
        self._evaluation = iteration, "test" if "test set" in prefix else "valid"
        self._stock["evaluate_and_print_results"](
            prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs
        )
        self._evaluation = None

    def evaluate(self, forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Leave FP8 state as training left it, and write the result to the metrics file."""
        from ..precision.scoring_guard import scoring

        with scoring(*model):
            result = self._stock["evaluate"](forward_step_func, data_iterator, model, *args, **kwargs)
        means = result[0]  # None where the time limit ended the evaluation
        if self._evaluation is not None and means and self._metrics is not None and self._metrics.is_open:
            self._metrics.write(*self._evaluation, _to_floats(means))
        return result


class TrainableTokens:
    """The number of trainable tokens in the global batch of the step under way, and what follows from it being 0."""

    def __init__(self) -> None:
        self._count: Tensor | None = None
        self._none = False

    def watch(self, finalize_model_grads: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``finalize_model_grads(model, num_tokens, ...)``, which sums ``num_tokens`` over ranks in place."""

        def watched(model: Any, num_tokens: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
            finalize_model_grads(model, num_tokens, *args, **kwargs)
            self._count, self._none = num_tokens, False

        return watched

    def guard(self, step: Callable[[], tuple[bool, Any, Any]]) -> Callable[[], tuple[bool, Any, Any]]:
        """Wrap ``optimizer.step``: without tokens it is not called, and the answer is that of a failed update.

        Reading the count waits for the device, as the optimizer's own check of the gradient norm does right after. The
        count is the same on every rank, so all skip or none does, without another exchange.
        """

        def guarded() -> tuple[bool, Any, Any]:
            self._none = self._count is not None and self._count.item() == 0
            return (False, 0.0, 0) if self._none else step()  # (successful, gradient norm, zeros in it)

        return guarded

    def are_none(self) -> bool:
        """Whether tokens were counted and there were none, as read when the optimizer's turn came."""
        return self._none


class MetricsFile:
    """A JSON-lines file with one object per logged step and evaluation.

    Args:
        path: The file; its folder is created.
    """

    def __init__(self, path: Path):
        self.path = path
        self.skipped = 0  # steps skipped so far, also before an interruption
        self._file: IO[str] | None = None

    @property
    def is_open(self) -> bool:
        """Whether this rank writes the file."""
        return self._file is not None

    def open(self, iteration: int) -> None:
        """Drop the lines of steps after ``iteration``, and a line that an interruption tore; then append."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise OSError(f"--metrics-jsonl {self.path} cannot be written: {error}") from error
        kept = [record for record in self._read() if record["step"] <= iteration]
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_text("".join(map(_line, kept)))
        temporary.replace(self.path)
        self.skipped = kept[-1]["skipped"] if kept else 0
        self._file = self.path.open("a")

    def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
        """Append one object and flush it."""
        assert self._file is not None, "open the file before writing to it"
        self._file.write(_line({"step": step, "split": split, "skipped": self.skipped, **values}))
        self._file.flush()

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


def _with_micro_batches(forward_backward_func: Callable[..., Any], count: int, **kwargs: Any) -> Any:
    """Megatron's schedule with another number of micro-batches than the batch-size flags say."""
    return forward_backward_func(**{**kwargs, "num_microbatches": count})


def _is_unsaved(args: Any, step: int) -> bool:
    """Whether the state after ``step`` steps should be saved and has not been."""
    saved = step == args.iteration or (args.save_interval and step % args.save_interval == 0)
    return args.save is not None and not saved


def _line(record: Mapping[str, Any]) -> str:
    """JSON has no NaN and no infinity: null stands for both."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def _to_floats(values: Mapping[str, Tensor]) -> dict[str, float]:
    """All values in one transfer from the device."""
    if not values:
        return {}
    stacked = torch.stack([value.detach().float().reshape(()) for value in values.values()])
    return dict(zip(values, stacked.tolist(), strict=True))


def _is_last_rank() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
