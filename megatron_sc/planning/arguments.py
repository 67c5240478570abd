"""Megatron's own parser and checks for a job of any size, in one process on any machine."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import io
import linecache
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from ..configuration import Configuration, ConfigurationError


def validated_arguments(argv: Sequence[str], world_size: int, configuration: Configuration) -> argparse.Namespace:
    """Parse and validate as rank 0 of a job with ``world_size`` processes would.

    Args:
        argv: without the program's name.
        world_size: processes of the job.
        configuration: names the places of the settings in messages.

    Returns:
        Megatron's arguments, after ``validate_args``.

    Raises:
        ConfigurationError: where Megatron or the plugin refuses them; the message names the settings involved.
    """
    from ..training import cpu

    cpu.install()
    from megatron.training.arguments import parse_args, validate_args

    from ..training.arguments import add_arguments
    from ..training.plugin import ScoreCentering

    with _rank_zero(argv, world_size), refusals(configuration):
        args = parse_args(add_arguments)
        args.tokenizer_type = args.tokenizer_type or "NullTokenizer"  # the example script's default
        validate_args(args)
        if args.loss_correction is not None:
            ScoreCentering.from_args(_from_recorded_rollouts(args))
    return args


def _from_recorded_rollouts(args: argparse.Namespace) -> argparse.Namespace:
    """A copy for the plugin's checks: where no source is named yet, a buffer will be.

    The embedded sampler allows less, so what it refuses is left to the start of the job.
    """
    from ..sampling import SamplerConfig

    copy = argparse.Namespace(**vars(args))
    if copy.rollout_path is None and copy.rollout_record is None:
        copy.rollout_path = "named at the start"
        for field in dataclasses.fields(SamplerConfig):
            if field.name.startswith("sampler"):
                setattr(copy, field.name, field.default)
    return copy


@contextlib.contextmanager
def refusals(configuration: Configuration) -> Iterator[None]:
    """Turn what Megatron raises into a ``ConfigurationError``, and keep what it prints to itself.

    Megatron's checks are assertions about ``args.name``, many of them without a message. The names in the condition
    that failed, in those around it and in the message lead back to the settings.
    """
    output = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            warnings.simplefilter("ignore")
            yield
    except SystemExit:
        lines = [line for line in output.getvalue().splitlines() if line.strip()]
        reason = lines[-1].rpartition("error: ")[2] if lines else "Megatron gave no reason"
        raise ConfigurationError(_with_places(reason, set(), configuration)) from None
    except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
        conditions = _failed_conditions(error)
        reason = str(error) or "Megatron requires " + ", where ".join(ast.unparse(test) for test in conditions)
        names = {name for test in conditions for name in _names(test)}
        raise ConfigurationError(_with_places(reason, names, configuration)) from error


@contextlib.contextmanager
def _rank_zero(argv: Sequence[str], world_size: int) -> Iterator[None]:
    """What Megatron reads outside its arguments: the command line and the environment of rank 0."""
    environment = {"RANK": "0", "WORLD_SIZE": str(world_size)}
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    saved = {name: os.environ.get(name) for name in environment}
    command_line, sys.argv = sys.argv, ["megatron-sc", *argv]
    os.environ.update(environment)
    try:
        yield
    finally:
        sys.argv = command_line
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _failed_conditions(error: BaseException) -> list[ast.expr]:
    """The assertion that failed, if it is one, and the conditions under which it is made, innermost first."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    node: ast.AST = ast.parse("".join(linecache.getlines(frame.filename)))
    line = frame.lineno or 0
    conditions: list[ast.expr] = []
    while True:
        inner = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.excepthandler) and child.lineno <= line <= (child.end_lineno or 0)
        ]
        if not inner:
            return conditions
        node = inner[0]
        if isinstance(node, ast.If) or (isinstance(node, ast.Assert) and isinstance(error, AssertionError)):
            conditions.insert(0, node.test)


def _names(expression: ast.expr) -> set[str]:
    """Variables and attributes in it."""
    nodes = list(ast.walk(expression))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | {node.id for node in nodes if isinstance(node, ast.Name)}


def _with_places(reason: str, names: set[str], configuration: Configuration) -> str:
    """The reason, and a line for each setting that it or the failed condition names."""
    names = names | set(re.findall(r"[A-Za-z]\w*", reason.replace("-", "_")))
    names |= {name.removeprefix("eval_").removeprefix("transformer_") for name in names}
    is_about_ranks = bool(names & {"world_size", "world", "total_model_size", "data_parallel_size"})
    settings = [
        setting
        for key, setting in configuration.flags.items()
        if key.removeprefix("no-").replace("-", "_") in names or (is_about_ranks and key.endswith("-parallel-size"))
    ]
    settings += configuration.cluster_settings.values() if is_about_ranks else ()
    return "\n  ".join([reason, *map(str, settings)])


def shape_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """A copy of the arguments that gives the same parameters without Transformer Engine or a GPU.

    Whose layers multiply, in which precision and with which overlap changes no parameter. Sequence and context
    parallelism split activations, not weights, and Megatron's local layers lack them: they are off.
    """
    changed: dict[str, Any] = {
        "transformer_impl": "local",
        "sequence_parallel": False,
        "context_parallel_size": 1,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "no_persist_layer_norm": True,
        "tp_comm_overlap": False,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "fp8": None,
        "fp8_param_gather": False,
        "fp4": None,
        "fp4_param_gather": False,
        "cuda_graph_impl": "none",
    }
    return argparse.Namespace(
        **{**vars(args), **{name: value for name, value in changed.items() if hasattr(args, name)}}
    )
