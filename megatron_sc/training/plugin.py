"""The plugin as Megatron's ``pretrain`` takes it: a datasets provider and a forward step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers
from torch import Tensor

from ..sampling import EmbeddedSampler, ParallelGroups, SamplerConfig
from ..vocab_parallel.self_check import require_centered, self_check
from .batch import Batch, BatchLayout, broadcast, position_ids, slice_context
from .config import Distribution, ObjectiveConfig
from .flags import from_args
from .loss_func import loss_func
from .output_processor import LossContext, centered_output_processor
from .source import MicroBatches, RolloutSource, SampledRollouts

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


class ScoreCentering:
    """One training run's objective and source of rollouts.

    Args:
        objective: the loss.
        sampler: the embedded sampler's settings; used when ``source`` is None.
        source: where rollouts come from; None: the embedded sampler.
        true_vocab_size: the vocabulary without padding.
    """

    def __init__(
        self,
        objective: ObjectiveConfig,
        sampler: SamplerConfig,
        true_vocab_size: int,
        source: Callable[[], RolloutSource] | None = None,
    ):
        self.objective = objective
        self.sampler = sampler
        self.true_vocab_size = true_vocab_size
        self._make_source = source
        self._embedded: EmbeddedSampler | None = None
        self._checked = False
        if source is None and sampler.sampler == "demonstrations":
            self.distribution: Distribution = "none"
        else:
            self.distribution = objective.sampler_distribution

    @classmethod
    def from_args(cls, args: argparse.Namespace, source: Callable[[], RolloutSource] | None = None) -> ScoreCentering:
        """From Megatron's parsed and validated arguments.

        Args:
            args: with the flags of ``add_arguments``; ``--loss-correction`` must be given.
            source: makes this rank's source of rollouts, once Megatron's process groups exist; None: the embedded
                sampler.

        Raises:
            ValueError: naming the flags that contradict each other, and what to set.
        """
        objective = from_args(ObjectiveConfig, args)
        sampler = from_args(SamplerConfig, args)
        true_vocab_size = objective.true_vocab_size or args.vocab_size
        if objective.loss_correction is None:
            raise ValueError("--loss-correction is absent: nothing to train from rollouts")
        if true_vocab_size is None:
            raise ValueError(
                "--true-vocab-size is needed: the vocabulary of the sampler's softmax, with which a tokenizer need not "
                "agree (Qwen3: tokenizer 151669, model 151936)"
            )
        if not args.calculate_per_token_loss or args.dataloader_type != "external":
            raise ValueError(
                "--loss-correction sets --calculate-per-token-loss and --dataloader-type external; a later flag or a "
                f"configuration file set them to {args.calculate_per_token_loss} and {args.dataloader_type}"
            )
        if args.mtp_num_layers:
            raise ValueError(
                "--mtp-num-layers trains on the sampled tokens without centering; not supported: remove it"
            )
        if objective.sampler_distribution == "draws" and sampler.num_draws == 0:
            raise ValueError("--sampler-distribution draws needs --num-draws >= 1")
        if objective.sampler_distribution in ("head", "support") and sampler.head_size == 0:
            raise ValueError(f"--sampler-distribution {objective.sampler_distribution} needs --head-size >= 1")
        plugin = cls(objective, sampler, true_vocab_size, source)
        if source is None:
            plugin._check_embedded(args)
        else:
            args.eval_iters = (
                0  # recorded rollouts have no validation set, and Megatron asks for one where this is not 0
            )
        return plugin

    def _check_embedded(self, args: argparse.Namespace) -> None:
        rollouts = self.sampler.prompts_per_step * self.sampler.samples_per_prompt
        if args.global_batch_size != rollouts:
            raise ValueError(
                f"--global-batch-size {args.global_batch_size} must equal --prompts-per-step "
                f"{self.sampler.prompts_per_step} x --samples-per-prompt {self.sampler.samples_per_prompt} = {rollouts}"
            )
        truncates = self.sampler.sampler_top_p < 1 or self.sampler.sampler_top_k > 0
        if truncates and self.distribution == "head":
            raise ValueError("--sampler-top-p and --sampler-top-k truncate: use --sampler-distribution support")

    def datasets_provider(
        self, train_val_test_num_samples: list[int], vp_stage: int | None = None
    ) -> tuple[MicroBatches, MicroBatches | None, None]:
        """``train_valid_test_datasets_provider``: iterators over micro-batches, on every rank.

        Validation draws rollouts of the trainer's own weights, so it reports the trainer's accuracy; it exists only for
        the embedded sampler.
        """
        args = get_args()
        train = self._iterator(self._source(clean=False), args.micro_batch_size)
        if self._make_source is not None:
            return train, None, None
        validation = self._iterator(self._source(clean=True), args.eval_micro_batch_size, is_training=False)
        return train, validation, None

    datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron: build it on every rank

    def forward_step(
        self, data_iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, LossFunction]:
        """Megatron's forward step.

        Args:
            data_iterator: from ``datasets_provider``.
            model: this stage's GPTModel, wrapped as Megatron wraps it.
            return_schedule_plan: build a schedule plan instead (``--overlap-moe-expert-parallel-comm``).

        Returns:
            The model's output, and the function that turns it into (loss sum, number of tokens, report).
        """
        args, timers = get_args(), get_timers()
        timers("batch-generator", log_level=2).start()
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        batch = self._next_batch(data_iterator, model, vp_stage)
        timers("batch-generator").stop()

        if batch is None:
            return model(None, None, None), _no_loss
        group = mpu.get_tensor_model_parallel_group()
        if not self._checked and mpu.is_pipeline_last_stage(ignore_virtual=True):
            self._self_check(batch.tokens.device)
        context = LossContext(
            batch, self.objective, self.distribution, self.true_vocab_size, group, metric_names=[],
            with_metrics=not model.training or _logs_step(args, args.curr_iteration + 1),
        )  # fmt: skip
        cp_rank, cp_size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
        inputs = (batch.tokens.long(), position_ids(batch, cp_rank, cp_size), None)
        hook = {"output_processor": centered_output_processor, "output_processor_context": context}
        reported = tuple(name for name in Batch.PER_ROLLOUT if name != "accuracy" or self._make_source is None)
        finish = partial(loss_func, batch, context.metric_names, reported, args.check_for_nan_in_loss_and_grad)
        if return_schedule_plan:
            if not args.overlap_moe_expert_parallel_comm:
                raise ValueError("a schedule plan needs --overlap-moe-expert-parallel-comm")
            return model.build_schedule_plan(*inputs, **hook), finish
        return model(*inputs, **hook), finish

    def _next_batch(self, data_iterator: Any, model: Any, vp_stage: int | None) -> Batch | None:
        """This rank's positions of the next micro-batch; None on a middle pipeline stage, which needs none."""
        iterator: MicroBatches = getattr(data_iterator, "iterable", data_iterator)  # Megatron wraps it for replays
        is_sampled = isinstance(iterator.source, SampledRollouts)
        if isinstance(iterator.source, SampledRollouts):
            iterator.source.model = model
        elif not _needs_rollouts(vp_stage):
            return None
        # Sampling is collective, so every tensor-parallel rank takes part; rank 0's rollouts are the ones used.
        is_first = mpu.get_tensor_model_parallel_rank() == 0
        batch = next(data_iterator) if is_first or is_sampled else None
        device = next(model.parameters()).device
        batch = broadcast(batch if is_first else None, iterator.layout, mpu.get_tensor_model_parallel_group(), device)
        return slice_context(batch, mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size())

    def _self_check(self, device: torch.device) -> None:
        """Stop before the first step if the configured loss does not center; collective over tensor-parallel ranks."""
        self._checked = True
        if not self.objective.centers or self.distribution == "none":
            return
        group = mpu.get_tensor_model_parallel_group()
        what = f"--sampler-distribution {self.distribution} --importance-weight {self.objective.importance_weight}"
        result = self_check(self.distribution, self.objective.weight(), group=group, device=device)
        require_centered(result, what)
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            found = f"expected update {result.centered:.1e}, without centering {result.uncentered:.1e}"
            print(f"> self-check of {what}: {found}", flush=True)

    def _source(self, clean: bool) -> RolloutSource:
        if self._make_source is not None:
            return self._make_source()
        if self._embedded is None:
            self._embedded = EmbeddedSampler(self.sampler, self.true_vocab_size, ParallelGroups.from_megatron())
        return SampledRollouts(self._embedded, clean)

    def _iterator(self, source: RolloutSource, micro_batch_size: int, is_training: bool = True) -> MicroBatches:
        args = get_args()
        widths = {
            "none": 0,
            "head": self.sampler.head_size,
            "support": self.sampler.head_size,
            "draws": self.sampler.num_draws,
            "full": self.true_vocab_size,
        }
        width = widths[self.distribution]
        layout = BatchLayout(micro_batch_size, args.seq_length, self.distribution, width, self.true_vocab_size)
        per_step = get_num_microbatches if is_training else None
        return MicroBatches(source, self.objective, layout, lambda: args.curr_iteration, per_step)


def _needs_rollouts(vp_stage: int | None) -> bool:
    """Whether this pipeline stage reads tokens (the first) or computes the loss (the last)."""
    return mpu.is_pipeline_first_stage(
        ignore_virtual=vp_stage is None, vp_stage=vp_stage
    ) or mpu.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)


def _logs_step(args: argparse.Namespace, step: int) -> bool:
    """Whether Megatron prints the step's report, or writes it to TensorBoard or W&B."""
    to_writer = bool(args.tensorboard_dir or args.wandb_project) and step % args.tensorboard_log_interval == 0
    return to_writer or step % args.log_interval == 0


def _no_loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    raise RuntimeError("only the last pipeline stage computes a loss")
