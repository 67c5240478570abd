"""The only communication of the loss: a few scalars a token, gathered over the tensor-parallel group.

Gathering and reducing in rank order, rather than all-reducing, makes the result the same bits on every rank and in
every run, and lets maxima and sums travel together. A rank contributes ``values.shape[1]`` numbers a token whatever k
is.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def gather_rows(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' values: ``[n, c]`` -> ``[ranks, n, c]``. One collective, or none without a group of several ranks."""
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1:
        return values.unsqueeze(0)
    gathered = values.new_empty((ranks * values.shape[0], *values.shape[1:]))
    dist.all_gather_into_tensor(gathered, values.contiguous(), group=group)
    return gathered.view(ranks, *values.shape)
