"""Flags, their documentation, and what is refused before training starts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_sc.objective import (
    ClippedSurrogate,
    ImportanceSampling,
    MaskedImportanceSampling,
    TruncatedImportanceSampling,
    Uniform,
)
from megatron_sc.sampling import SamplerConfig
from megatron_sc.training.arguments import flags_document
from megatron_sc.training.config import ObjectiveConfig
from megatron_sc.training.flags import add_flags, from_args
from tests.distributed import run_ranks
from tests.train_fixed import TINY


def parse(*argv: str, config: type = ObjectiveConfig) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--dataloader-type")
    add_flags(parser.add_argument_group("score centering"), config)
    return parser.parse_args(argv)


def test_document_is_what_the_dataclasses_say():
    document = Path(__file__).parents[1] / "docs" / "flags.md"
    assert document.read_text() == flags_document(), "run: python -m megatron_sc.training.arguments > docs/flags.md"


@pytest.mark.parametrize("value", ["none", "score_centering"])
def test_loss_correction_sets_what_megatron_needs(value):
    args = parse("--loss-correction", value)
    assert args.calculate_per_token_loss
    assert args.dataloader_type == "external"
    assert from_args(ObjectiveConfig, args).centers == (value == "score_centering")


def test_absent_loss_correction_touches_nothing():
    args = parse()
    assert (args.loss_correction, args.calculate_per_token_loss, args.dataloader_type) == (None, False, None)


@pytest.mark.parametrize(
    ("argv", "weight"),
    [
        ("none", Uniform()),
        ("is", ImportanceSampling()),
        ("tis --tis-cap 3", TruncatedImportanceSampling(3.0)),
        ("mis --mis-low 0.25 --mis-high 4", MaskedImportanceSampling(0.25, 4.0)),
        ("ppo --ppo-clip-low 0.1 --ppo-clip-high 0.3 --ppo-dual-clip 5", ClippedSurrogate(0.1, 0.3, 5.0)),
    ],
)
def test_importance_weight_and_its_bounds(argv, weight):
    assert from_args(ObjectiveConfig, parse(*f"--importance-weight {argv}".split())).weight() == weight


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--importance-weight tis --tis-cap 0", "--importance-weight tis: .*cap"),
        ("--importance-weight mis --mis-low 6", "--importance-weight mis: .*low=6"),
        ("--importance-weight ppo --ppo-dual-clip 0.5", "--importance-weight ppo: .*dual"),
        ("--sampler-kl-coef -1", "--sampler-kl-coef"),
        ("--entropy-coef inf", "--entropy-coef"),
        ("--true-vocab-size 0", "--true-vocab-size"),
        ("--loss-correction score_centering --sampler-distribution none", "--sampler-distribution"),
    ],
)
def test_bad_objective_names_its_flag(argv, message):
    with pytest.raises(ValueError, match=message):
        from_args(ObjectiveConfig, parse(*argv.split()))


@pytest.mark.parametrize("flag", ["--sampler-noise", "--head-size", "--num-draws", "--sampler-seed"])
def test_bad_sampler_names_its_flag(flag):
    with pytest.raises(ValueError, match=flag):
        from_args(SamplerConfig, parse(flag, "-1", config=SamplerConfig))


def refusals(cases: list[str], settings: dict[str, dict[str, object]]) -> list[str]:
    """What ``ScoreCentering.from_args`` says of each command line, through Megatron's own parser.

    ``settings`` changes a case's parsed arguments where Megatron refuses the flag without a GPU.
    """
    import sys
    from unittest import mock

    from megatron.training.arguments import parse_args, validate_args

    from megatron_sc.training.arguments import add_arguments
    from megatron_sc.training.plugin import ScoreCentering

    messages = []
    for case in cases:
        with mock.patch.object(sys, "argv", ["train", *TINY.split(), *case.split()]):
            args = parse_args(extra_args_provider=add_arguments)
            validate_args(args)
        vars(args).update(settings.get(case, {}))
        try:
            ScoreCentering.from_args(args)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_contradictions_are_refused_before_training():
    start = "--loss-correction score_centering --micro-batch-size 2 --train-iters 1 --prompts-per-step 4"
    cases = {
        f"{start} --samples-per-prompt 2": "",
        f"{start} --samples-per-prompt 4": "--global-batch-size 8 must equal",
        f"{start} --samples-per-prompt 2 --dataloader-type cyclic": "--dataloader-type external",
        f"{start} --samples-per-prompt 2 --num-draws 0 --sampler-distribution draws": "--num-draws",
        f"{start} --samples-per-prompt 2 --head-size 0": "--head-size",
        f"{start} --samples-per-prompt 2 --sampler-top-p 0.9": "--sampler-distribution support",
        f"{start} --samples-per-prompt 2 --mtp-num-layers 1": "--mtp-num-layers",
        f"{start} --samples-per-prompt 2 --perform-rl-step": "--perform-rl-step",
        f"{start} --samples-per-prompt 2 --tis-cap 3": "--tis-cap is of --importance-weight tis, not none",
        f"{start} --prompts-per-step 8 --samples-per-prompt 1": "every advantage would be 0; use --advantage none",
        f"{start} --samples-per-prompt 2 --max-staleness 3": "--max-staleness needs --rollout-path",
        f"{start} --samples-per-prompt 2 --rollout-path a --rollout-record b": "exclude each other",
        f"{start} --samples-per-prompt 2 --micro-batch-tokens 64": "--micro-batch-tokens needs recorded rollouts",
        f"{start} --samples-per-prompt 2 --rollout-path a --micro-batch-tokens 0": "--micro-batch-tokens is 0",
        f"{start} --samples-per-prompt 2 --rollout-path a --sampler int8": "--sampler is the embedded sampler's",
        f"{start} --samples-per-prompt 2 --head-size 31": "--head-size 31 exceeds --true-vocab-size 30",
    }
    (messages,) = run_ranks(refusals, 1, list(cases), {}, megatron=True)
    for (case, expected), message in zip(cases.items(), messages, strict=True):
        assert expected in message, case
        assert bool(expected) == bool(message), case


def test_what_cannot_train_from_rollouts_is_refused():
    start = "--loss-correction score_centering --micro-batch-size 2 --train-iters 1 --prompts-per-step 4"
    recorded = f"{start} --samples-per-prompt 2 --rollout-path a"
    packed = f"{recorded} --micro-batch-tokens 64"
    cases = (
        (f"{recorded} ", {"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl full_iteration captures"),
        (f"{recorded}  ", {"rampup_batch_size": [2, 2, 8]}, "--rampup-batch-size and --step-batch-size-schedule"),
        (f"{packed} ", {"cuda_graph_impl": "local"}, "remove it or --cuda-graph-impl"),
        (f"{packed}  ", {"tp_comm_overlap": True}, "remove it or --tp-comm-overlap"),
    )
    settings = {case: given for case, given, _ in cases}
    (messages,) = run_ranks(refusals, 1, list(settings), settings, megatron=True)
    for (case, _, expected), message in zip(cases, messages, strict=True):
        assert expected in message, case


def micro_batch_groups() -> list[int]:
    from argparse import Namespace

    from megatron_sc.training.plugin import _micro_batch_group

    def group(virtual: int | None, given: int | None) -> int:
        return _micro_batch_group(
            Namespace(
                virtual_pipeline_model_parallel_size=virtual,
                microbatch_group_size_per_vp_stage=given,
                pipeline_model_parallel_size=4,
            )
        )

    return [group(None, None), group(2, None), group(2, 6)]


def test_an_interleaved_pipeline_runs_whole_groups_of_micro_batches():
    assert run_ranks(micro_batch_groups, 1, megatron=True) == [[1, 4, 6]]
