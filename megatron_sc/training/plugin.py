"""The plugin as Megatron's ``pretrain`` takes it: a datasets provider and a forward step."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.global_vars import get_signal_handler
from torch import Tensor

from ..precision import fingerprint
from ..precision.alignment import Parallel, accept_padding_mask, alignment, check_alignment, stage_padding_mask
from ..precision.head_dtype import check_head
from ..rollouts import ExpertRoutes, Manifest, RolloutWriter
from ..sampling import EmbeddedSampler, ParallelGroups, SamplerConfig
from ..sampling.record import sampler_manifest
from ..vocab_parallel.self_check import require_centered, self_check
from .batch import Batch, BatchLayout, broadcast, position_ids, slice_context
from .buffer import open_buffer
from .config import Distribution, ObjectiveConfig
from .feed import AlwaysReady, BufferSource, FedMicroBatches, FeedLayout, Place, RolloutFeed, StepSource
from .flags import from_args
from .hybrid import forward_with_loss, takes_output_processor
from .loss_func import loss_func
from .output_processor import LossContext, centered_output_processor
from .replay import RouteReplay
from .rollout_config import RolloutConfig
from .source import RolloutSource, SampledMicroBatches, SampledRollouts

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


class ScoreCentering:
    """One training run's objective and source of rollouts.

    Args:
        objective: the loss.
        sampler: the embedded sampler's settings; used when ``source`` is None.
        true_vocab_size: the vocabulary without padding.
        rollouts: the buffer's settings.
        source: where rollouts come from; None: the buffer, or where there is none the embedded sampler.
    """

    def __init__(
        self,
        objective: ObjectiveConfig,
        sampler: SamplerConfig,
        true_vocab_size: int,
        rollouts: RolloutConfig | None = None,
        source: Callable[[], RolloutSource] | None = None,
    ):
        self.objective = objective
        self.sampler = sampler
        self.true_vocab_size = true_vocab_size
        self.rollouts = rollouts or RolloutConfig()
        self._make_source = source
        self._is_embedded = source is None and self.rollouts.rollout_path is None
        self._embedded: EmbeddedSampler | None = None
        self._feed: RolloutFeed | None = None
        self._recorded_routes: ExpertRoutes | None = None
        self._chunks: dict[int, RouteReplay | None] = {}  # MoE model chunks that were prepared, by id
        self._checked = False
        if self._is_embedded and sampler.sampler == "demonstrations":
            self.distribution: Distribution = "none"
        else:
            self.distribution = objective.sampler_distribution

    @classmethod
    def from_args(cls, args: argparse.Namespace, source: Callable[[], RolloutSource] | None = None) -> ScoreCentering:
        """From Megatron's parsed and validated arguments.

        Args:
            args: with the flags of ``add_arguments``; ``--loss-correction`` must be given.
            source: makes this rank's source of rollouts, once Megatron's process groups exist; None: the buffer of
                ``--rollout-path``, or without one the embedded sampler.

        Raises:
            ValueError: naming the flags that contradict each other, and what to set.
        """
        objective = from_args(ObjectiveConfig, args)
        sampler = from_args(SamplerConfig, args)
        rollouts = from_args(RolloutConfig, args)
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
        check_head(args)
        if args.cuda_graph_impl == "full_iteration":
            raise ValueError(
                "--cuda-graph-impl full_iteration captures the loading of micro-batches, which rollouts do not go "
                "through; use local or transformer_engine"
            )
        if args.rampup_batch_size is not None or args.step_batch_size_schedule is not None:
            raise ValueError(
                "--rampup-batch-size and --step-batch-size-schedule change the samples of a step, but a step takes "
                "--prompts-per-step x --samples-per-prompt rollouts from the first on; remove them"
            )
        if getattr(args, "perform_rl_step", False):
            raise ValueError(
                "--perform-rl-step samples with Megatron's own engine, which does not keep the token ids of the "
                "sampler's head; remove it to train from recorded rollouts"
            )
        if args.mtp_num_layers:
            raise ValueError(
                "--mtp-num-layers trains on the sampled tokens without centering; not supported: remove it"
            )
        if objective.sampler_distribution == "draws" and sampler.num_draws == 0:
            raise ValueError("--sampler-distribution draws needs --num-draws >= 1")
        if objective.sampler_distribution in ("head", "support") and sampler.head_size == 0:
            raise ValueError(f"--sampler-distribution {objective.sampler_distribution} needs --head-size >= 1")
        if source is not None and rollouts.rollout_path is not None:
            raise ValueError("--rollout-path: this script brings its own source of rollouts; remove the flag")
        plugin = cls(objective, sampler, true_vocab_size, rollouts, source)
        if source is None:
            plugin._check_batch_size(args)
        if plugin._is_embedded:
            plugin._check_embedded(args)
        else:
            plugin._check_recorded(args)
            # Recorded rollouts have no validation set, and Megatron asks for one where this is not 0.
            args.eval_iters = 0
        return plugin

    def _check_batch_size(self, args: argparse.Namespace) -> None:
        rollouts = self.sampler.prompts_per_step * self.sampler.samples_per_prompt
        if args.global_batch_size != rollouts:
            raise ValueError(
                f"--global-batch-size {args.global_batch_size} must equal --prompts-per-step "
                f"{self.sampler.prompts_per_step} x --samples-per-prompt {self.sampler.samples_per_prompt} = {rollouts}"
            )
        if self.objective.advantage != "none" and self.sampler.samples_per_prompt == 1:
            raise ValueError(
                f"--advantage {self.objective.advantage} compares the rollouts of a prompt, but --samples-per-prompt "
                "is 1, so every advantage would be 0; use --advantage none"
            )
        if self.sampler.prompts_per_step % args.data_parallel_size:
            raise ValueError(
                f"--prompts-per-step {self.sampler.prompts_per_step} does not divide over {args.data_parallel_size} "
                "data-parallel ranks"
            )

    def _check_recorded(self, args: argparse.Namespace) -> None:
        for name in ("sampler", "sampler_precision", "sampler_noise", "sampler_staleness"):
            if self._make_source is None and getattr(self.sampler, name) != getattr(SamplerConfig, name):
                flag = "--" + name.replace("_", "-")
                raise ValueError(
                    f"{flag} is the embedded sampler's, but rollouts come from --rollout-path; remove it (where a "
                    f"configuration file sets it, with another file: flags: {{{flag[2:]}: null}})"
                )
        if args.iterations_to_skip:
            raise ValueError("--iterations-to-skip would skip a step but not its rollouts; remove it")
        if self.rollouts.micro_batch_tokens is None:
            check_alignment(args)
        else:
            if args.moe_token_dispatcher_type == "allgather" and args.num_experts:
                raise ValueError(
                    "--micro-batch-tokens makes micro-batches of different shapes, which --moe-token-dispatcher-type "
                    "allgather cannot take; use alltoall"
                )
            for flag, given, what in (
                ("--cuda-graph-impl", args.cuda_graph_impl != "none", "a captured graph"),
                ("--tp-comm-overlap", args.tp_comm_overlap, "Transformer Engine's communication buffers"),
            ):
                if given:
                    raise ValueError(
                        f"--micro-batch-tokens makes micro-batches of different shapes, which {what} cannot take; "
                        f"remove it or {flag}"
                    )

    def _check_embedded(self, args: argparse.Namespace) -> None:
        for flag, given in (
            ("--micro-batch-tokens", self.rollouts.micro_batch_tokens is not None),
            ("--moe-enable-routing-replay", args.moe_enable_routing_replay),
        ):
            if given:
                raise ValueError(f"{flag} needs recorded rollouts: --rollout-path")
        if self.sampler.sampler != "demonstrations" and self.sampler.head_size > self.true_vocab_size:
            raise ValueError(f"--head-size {self.sampler.head_size} exceeds --true-vocab-size {self.true_vocab_size}")
        if self.sampler.truncates and self.distribution == "head":
            raise ValueError("--sampler-top-p and --sampler-top-k truncate: use --sampler-distribution support")

    def datasets_provider(
        self, train_val_test_num_samples: list[int], vp_stage: int | None = None
    ) -> tuple[Iterator[tuple[Batch | None, BatchLayout]], SampledMicroBatches | None, None]:
        """``train_valid_test_datasets_provider``: iterators over micro-batches, on every rank.

        Validation draws rollouts of the trainer's own weights, so it reports the trainer's accuracy; it exists only for
        the embedded sampler.
        """
        args = get_args()
        if not self._is_embedded:
            if self._feed is None:  # one for all model chunks of an interleaved pipeline
                self._feed = self._make_feed(args)
            return FedMicroBatches(self._feed), None, None
        if self._embedded is None:
            self._report_precision(args, sampler_manifest(self.sampler, self.true_vocab_size))
            self._embedded = EmbeddedSampler(self.sampler, self.true_vocab_size, ParallelGroups.from_megatron())
        train = SampledRollouts(self._embedded, clean=False, record=self._recorder())
        validation = SampledRollouts(self._embedded, clean=True)
        return (
            SampledMicroBatches(train, self.objective, self._layout(args.micro_batch_size), _current_step),
            SampledMicroBatches(validation, self.objective, self._layout(args.eval_micro_batch_size), _current_step),
            None,
        )

    datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron: build it on every rank

    def forward_step(
        self, data_iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, LossFunction]:
        """Megatron's forward step.

        Args:
            data_iterator: from ``datasets_provider``.
            model: this stage's GPTModel or HybridModel, wrapped as Megatron wraps it.
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
        options = self._moe_options(batch, model, args)
        if not (_is_first_stage(vp_stage) or _is_last_stage(vp_stage)):
            return model(None, None, None, **options), _no_loss
        group = mpu.get_tensor_model_parallel_group()
        if not self._checked and mpu.is_pipeline_last_stage(ignore_virtual=True):
            self._self_check(batch.tokens.device)
        context = LossContext(
            batch, self.objective, self.distribution, self.true_vocab_size, group, metric_names=[],
            with_metrics=not model.training or _logs_step(args, args.curr_iteration + 1),
        )  # fmt: skip
        cp_rank, cp_size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
        inputs = (batch.tokens.long(), position_ids(batch, cp_rank, cp_size), None)
        hook = {"output_processor": centered_output_processor, "output_processor_context": context, **options}
        reported = tuple(name for name in Batch.PER_ROLLOUT if name != "accuracy" or self._is_embedded)
        finish = partial(loss_func, batch, context.metric_names, reported, args.check_for_nan_in_loss_and_grad)
        if return_schedule_plan:
            if not args.overlap_moe_expert_parallel_comm:
                raise ValueError("a schedule plan needs --overlap-moe-expert-parallel-comm")
            return model.build_schedule_plan(*inputs, **hook), finish
        if not takes_output_processor(model):
            return forward_with_loss(model, *inputs, context=context, **options), finish
        return model(*inputs, **hook), finish

    def _next_batch(self, data_iterator: Any, model: Any, vp_stage: int | None) -> Batch | None:
        """This rank's positions of the next micro-batch; None on a pipeline stage that needs none."""
        iterator = getattr(data_iterator, "iterable", data_iterator)  # Megatron wraps it for replays
        if isinstance(iterator, SampledMicroBatches):
            iterator.source.model = model  # sampling is collective; tensor-parallel rank 0's rollouts are the ones used
        elif not _trains(get_args(), vp_stage):
            return None
        batch, layout = next(data_iterator)
        group, device = mpu.get_tensor_model_parallel_group(), next(model.parameters()).device
        batch = broadcast(batch if mpu.get_tensor_model_parallel_rank() == 0 else None, layout, group, device)
        return slice_context(batch, mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size())

    def _moe_options(self, batch: Batch, model: Any, args: argparse.Namespace) -> dict[str, Any]:
        """What an MoE model's forward pass takes besides: routers must not count padding, and may have routes set."""
        if not args.num_experts:
            return {}
        config, parallel, rank = get_model_config(model), Parallel.from_args(args), mpu.get_tensor_model_parallel_rank()
        if id(model) not in self._chunks:
            accept_padding_mask(model)
            routes = self._recorded_routes
            self._chunks[id(model)] = None if routes is None else RouteReplay(model, config, routes)
        replay = self._chunks[id(model)]
        if replay is not None:
            parts = parallel.tensor if parallel.sequence else 1
            replay.set_routes(batch.routes, args.curr_iteration, rank % parts, parts)
        if "quantile_balancing" in config.moe_router_load_balancing_type:
            return {}  # takes no padding mask
        is_first = get_attr_wrapped_model(model, "pre_process")
        return {"padding_mask": stage_padding_mask(batch.padding.bool(), is_first, parallel, rank)}

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

    def _make_feed(self, args: argparse.Namespace) -> RolloutFeed:
        """Collective over all ranks."""
        place = Place(
            mpu.get_data_parallel_rank(),
            mpu.get_data_parallel_world_size(),
            mpu.get_tensor_model_parallel_group(),
            torch.empty(0, device="cuda").device,  # the CPU, under training/cpu.py
            any(_trains(args, stage) for stage in range(args.virtual_pipeline_model_parallel_size or 1)),
        )
        source: StepSource | None = None
        if self._make_source is not None:
            source = AlwaysReady(self._make_source()) if place.reads else None
        else:
            assert self.rollouts.rollout_path is not None
            opened = open_buffer(
                self.rollouts,
                self.distribution,
                self.true_vocab_size,
                args.seq_length,
                place,
                getattr(args, "rollout_cursor", None),
            )
            if opened.reader is not None:
                is_first = _is_first_stage(None) and mpu.get_context_parallel_rank() == 0
                source = BufferSource(opened.reader, self.sampler.prompts_per_step, print if is_first else None)
            self._report_precision(args, opened.manifest)
            self._recorded_routes = self._check_routes(args, opened.manifest.expert_routes)
        routes = self._recorded_routes
        batch = self._layout(args.micro_batch_size, 0 if routes is None else routes.layers * routes.topk)
        is_exact = self.rollouts.micro_batch_tokens is None and self.rollouts.rollout_policy == "refuse"
        layout = FeedLayout(
            batch,
            self.rollouts.micro_batch_tokens,
            alignment(args),
            _micro_batch_group(args),
            args.global_batch_size // args.data_parallel_size if is_exact else None,
        )
        return RolloutFeed(
            source, self.objective, layout, place, notify=print_rank_0, interrupted=partial(_is_told_to_exit, args),
            resumed=args.iteration > 0,
        )  # fmt: skip

    def _report_precision(self, args: argparse.Namespace, manifest: Manifest) -> None:
        """Print what numerics both sides run, and stop where they contradict each other."""
        fingerprint.report(
            args,
            manifest,
            show=torch.distributed.get_rank() == 0,
            save=None if args.save is None else Path(args.save) / "trainer-fingerprint.json",
        )

    def _check_routes(self, args: argparse.Namespace, recorded: ExpertRoutes | None) -> ExpertRoutes | None:
        """The routes to replay."""
        if not args.moe_enable_routing_replay:
            if recorded is not None and args.num_experts:
                print_rank_0(
                    "> the buffer records expert routes, but --moe-enable-routing-replay is absent: the trainer's own "
                    "routers choose"
                )
            return None
        if recorded is None:
            raise ValueError(
                f"--moe-enable-routing-replay: the buffer {self.rollouts.rollout_path} records no expert routes"
            )
        if args.overlap_moe_expert_parallel_comm:
            raise ValueError("--moe-enable-routing-replay cannot be used with --overlap-moe-expert-parallel-comm")
        return recorded

    def _recorder(self) -> RolloutWriter | None:
        """On tensor-parallel rank 0 of each data-parallel rank, where ``--rollout-record`` is given."""
        if self.rollouts.rollout_record is None or mpu.get_tensor_model_parallel_rank() != 0:
            return None
        return RolloutWriter(self.rollouts.rollout_record, sampler_manifest(self.sampler, self.true_vocab_size))

    def _layout(self, micro_batch_size: int, route_width: int = 0) -> BatchLayout:
        widths = {
            "none": 0,
            "head": self.sampler.head_size,
            "support": self.sampler.head_size,
            "draws": self.sampler.num_draws,
            "full": self.true_vocab_size,
        }
        return BatchLayout(
            micro_batch_size, get_args().seq_length, self.distribution, widths[self.distribution], self.true_vocab_size,
            route_width,
        )  # fmt: skip


def _is_told_to_exit(args: argparse.Namespace) -> bool:
    """Whether this rank received the signal of ``--exit-signal-handler``. Megatron's own question is collective."""
    return bool(args.exit_signal_handler) and bool(get_signal_handler()._signal_received)


def _micro_batch_group(args: argparse.Namespace) -> int:
    """What the number of micro-batches is a multiple of, as Megatron's interleaved schedule demands."""
    if not args.virtual_pipeline_model_parallel_size:
        return 1
    return args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size


def _current_step() -> int:
    step: int = get_args().curr_iteration
    return step


def _is_first_stage(vp_stage: int | None) -> bool:
    """Whether this pipeline stage reads tokens."""
    return mpu.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)


def _is_last_stage(vp_stage: int | None) -> bool:
    """Whether this pipeline stage computes the loss."""
    return mpu.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)


def _trains(args: argparse.Namespace, vp_stage: int | None) -> bool:
    """Whether this pipeline stage needs micro-batches: the first, the last, and any whose routers must know padding."""
    return bool(args.num_experts) or _is_first_stage(vp_stage) or _is_last_stage(vp_stage)


def _logs_step(args: argparse.Namespace, step: int) -> bool:
    """Whether Megatron prints the step's report, or writes it to TensorBoard or W&B."""
    to_writer = bool(args.tensorboard_dir or args.wandb_project) and step % args.tensorboard_log_interval == 0
    return to_writer or step % args.log_interval == 0


def _no_loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    raise RuntimeError("only the last pipeline stage computes a loss")
