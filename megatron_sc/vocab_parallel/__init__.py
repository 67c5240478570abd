"""The centered loss over vocabulary shards: one autograd operation."""

from .loss import CenteredLossOutput, centered_loss
from .shard import VocabShard

__all__ = ["CenteredLossOutput", "VocabShard", "centered_loss"]
