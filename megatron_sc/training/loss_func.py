"""Megatron's loss function: sums and counts, which Megatron divides once by the global number of tokens."""

from __future__ import annotations

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from torch import Tensor

from .batch import Batch

NO_COUNT = 1e-12
"""Stands for a count of 0, so that Megatron's sum / count is 0, not NaN, when no rank has anything to report."""


def loss_func(
    batch: Batch, metric_names: list[str], per_rollout: tuple[str, ...], check_finite: bool, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The third contract of ``forward_step`` with ``--calculate-per-token-loss``.

    Args:
        batch: the micro-batch on this rank.
        metric_names: names of ``output[1:]``.
        per_rollout: which of ``Batch.PER_ROLLOUT`` are reported; the same on every rank.
        check_finite: ``--check-for-nan-in-loss-and-grad``.
        output: float32 ``[1 + M, s, b]`` from the output processor; 0 in masked positions.

    Returns:
        The loss summed over this rank's trained positions, their number (int32), and ``{name: [sum, count]}`` of
        detached values under keys that are the same on every rank and step. A micro-batch with no trained position has
        loss 0, count 0 and a gradient of zeros.
    """
    loss = output[0].sum()
    num_tokens = batch.mask.sum(dtype=torch.int32)
    detached = output.detach()
    count = num_tokens.float().clamp(min=NO_COUNT)
    report = {name: torch.stack([value.sum(), count]) for name, value in zip(metric_names, detached[1:], strict=True)}
    report["loss"] = torch.stack([detached[0].sum(), count])
    report["staleness"] = torch.stack([(batch.staleness * batch.mask).sum(), count])
    for name in per_rollout:
        value = batch.per_rollout[:, Batch.PER_ROLLOUT.index(name)]
        known = ~value.isnan()
        report[name] = torch.stack([torch.where(known, value, 0.0).sum(), known.sum().float().clamp(min=NO_COUNT)])
    if check_finite:
        for reject, what in ((torch.isnan, "NaN"), (torch.isinf, "infinity")):
            get_rerun_state_machine().validate_result(
                result=loss, rejection_func=reject, message=f"{what} in the centered loss", tolerance=0.0, fatal=True
            )
    return loss, num_tokens, report
