"""The centered loss over vocabulary shards: one autograd operation."""

from .lm_head import CenteredLmHeadOutput, centered_lm_head_loss
from .loss import CenteredLossOutput, centered_loss
from .shard import VocabShard

__all__ = ["CenteredLmHeadOutput", "CenteredLossOutput", "VocabShard", "centered_lm_head_loss", "centered_loss"]
