"""Memory of weights, gradients and optimizer, from numbers of parameters.

Bytes a parameter under Adam, as Megatron-Core keeps them (its ``docs/user-guide/features/dist_optimizer.md``); d is the
number of ranks that share optimizer state, 1 without ``--use-distributed-optimizer``:

    parameters            weight    gradient                        optimizer
    float32               4         4                               8/d    two moments
    bf16, fp16            2         4 (2: --grad-reduce-in-bf16)    12/d   float32 weight, two moments
    precision-aware       2         4                               as the flags for main weight and moments say

Parameters of experts have their own d. Padding of gradient buckets is left out: below 0.1 % at these sizes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from .stages import Stage


@dataclass(frozen=True)
class ModelState:
    """Bytes on one rank that live as long as the job.

    Attributes:
        weights: what layers multiply with.
        gradients: Megatron's contiguous buffers.
        optimizer: main weights and moments on the GPU.
        offloaded: the part that ``--optimizer-cpu-offload`` keeps in the host's memory, with its gradients.
    """

    weights: float
    gradients: float
    optimizer: float
    offloaded: float


def model_state(args: argparse.Namespace, stage: Stage) -> ModelState:
    """Weights, gradients and optimizer state of one rank of ``stage``; see the module for the bytes."""
    parameters = stage.parameters
    shared = parameters.embedding + parameters.dense
    sharded: float = shared / stage.optimizer_ranks + parameters.expert / stage.expert_optimizer_ranks
    if not args.use_distributed_optimizer:
        sharded = parameters.total
    offload = args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0
    return ModelState(
        weights=parameters.total * args.params_dtype.itemsize,
        gradients=parameters.total * gradient_bytes(args),
        optimizer=sharded * (1 - offload) * optimizer_bytes(args),
        offloaded=sharded * offload * (8 + 4 + 4),  # moments, weight and gradient in float32
    )


def gradient_bytes(args: argparse.Namespace) -> int:
    """Bytes of a parameter's gradient in the buffer: float32 where gradients are accumulated so."""
    width: int = torch.float32.itemsize if args.accumulate_allreduce_grads_in_fp32 else args.params_dtype.itemsize
    return width


def optimizer_bytes(args: argparse.Namespace) -> float:
    """Bytes of optimizer state a parameter, before sharding.

    The precision-aware optimizer keeps of a float32 main weight only the 16 bits that the bf16 weight lacks
    (``store_param_remainders``), unless it is on the host.
    """
    has_main_weight = args.params_dtype != torch.float32
    main, moments = (4 if has_main_weight else 0), 8
    if args.optimizer == "sgd":
        moments = 4 if args.sgd_momentum > 0 else 0
    elif args.use_precision_aware_optimizer:
        moments = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
        main = args.main_params_dtype.itemsize if has_main_weight else 0
        if main == 4 and args.bf16 and not args.optimizer_cpu_offload:
            main = 2
    return main + moments
