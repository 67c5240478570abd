"""Score centering for Megatron-Core: reinforcement learning that is stable when the sampler is not the trainer."""

from .vocab_parallel import CenteredLossOutput, VocabShard, centered_loss

__version__ = "0.1.0"

__all__ = ["CenteredLossOutput", "VocabShard", "__version__", "centered_loss"]
