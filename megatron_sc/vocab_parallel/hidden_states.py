"""Hidden states over the tensor-parallel group, as Megatron's column-parallel layer moves them.

Every rank needs all tokens for its columns of the vocabulary, and each rank's columns give a part of every token's
gradient. Without sequence parallelism all ranks hold all tokens, and the parts are all-reduced. With it a rank holds
its share of the tokens: they are gathered, and the parts are reduce-scattered.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def gather_hidden(hidden: Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """All tokens, ``[n, h]``, from this rank's: ``[n / ranks, h]`` under sequence parallelism, else ``[n, h]``."""
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1 or not sequence_parallel:
        return hidden
    gathered = hidden.new_empty((ranks * hidden.shape[0], hidden.shape[1]))
    dist.all_gather_into_tensor(gathered, hidden.contiguous(), group=group)
    return gathered


class HiddenReduction:
    """The sum over ranks of their parts of the hidden states' gradient, under way while the caller does other work.

    Args:
        part: ``[n, h]``, this rank's part; overwritten.
        group: tensor-parallel group.
        sequence_parallel: whether the caller gets its own tokens only.
    """

    def __init__(self, part: Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool):
        ranks = 1 if group is None else dist.get_world_size(group)
        self._result = part
        self._work: dist.Work | None = None
        if ranks == 1:
            return
        if sequence_parallel:
            self._result = part.new_empty((part.shape[0] // ranks, part.shape[1]))
            self._work = dist.reduce_scatter_tensor(self._result, part, group=group, async_op=True)
        else:
            self._work = dist.all_reduce(part, group=group, async_op=True)

    def wait(self) -> Tensor:
        """``[n, h]``, or ``[n / ranks, h]`` under sequence parallelism."""
        if self._work is not None:
            self._work.wait()
        return self._result
