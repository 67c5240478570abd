"""Score centering for Megatron-Core: reinforcement learning that is stable when the sampler is not the trainer."""

from .vocab_parallel import (
    CenteredLmHeadOutput,
    CenteredLossOutput,
    VocabShard,
    centered_lm_head_loss,
    centered_loss,
)

__version__ = "0.1.0"

__all__ = [
    "CenteredLmHeadOutput",
    "CenteredLossOutput",
    "VocabShard",
    "__version__",
    "centered_lm_head_loss",
    "centered_loss",
]
