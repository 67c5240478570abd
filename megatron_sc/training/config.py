"""The objective's settings: which loss is trained. Each field is a command-line flag."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..objective import ImportanceWeight, unread_setting, weight_of
from ..objective.advantages import Baseline

LossCorrection = Literal["none", "score_centering"]
Distribution = Literal["none", "head", "support", "draws", "full"]


class _SelectObjective(argparse.Action):
    """``--loss-correction``: also sets the Megatron flags that either value needs, before Megatron validates them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        namespace.loss_correction = values
        namespace.calculate_per_token_loss = True  # gradients are divided once, by the global number of tokens
        namespace.dataloader_type = "external"  # rollouts come from our iterator
        if getattr(namespace, "eval_interval", None) is None:
            namespace.eval_interval = 1000  # Megatron divides by it, and its own default is None


def _field(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True)
class ObjectiveConfig:
    """A row of the article's Appendix C table, and the terms beside it.

    Raises:
        ValueError: for values out of range or that contradict each other; the message names the flags.
    """

    loss_correction: LossCorrection | None = _field(
        None,
        "Train a policy from rollouts. score_centering: subtract the average score under the sampler from every "
        "token's update. none: the same objective without it. Absent: stock Megatron. Sets "
        "--calculate-per-token-loss and --dataloader-type external.",
        action=_SelectObjective,
    )
    importance_weight: Literal["none", "is", "tis", "mis", "ppo"] = _field(
        "none",
        "Weight of the sampled token: none 1, is r, tis min(r, C), mis r inside bounds, ppo r where not clipped.",
    )
    tis_cap: float = _field(2.0, "Cap C of --importance-weight tis.")
    mis_low: float = _field(0.5, "Lower bound of --importance-weight mis.")
    mis_high: float = _field(5.0, "Upper bound of --importance-weight mis.")
    ppo_clip_low: float = _field(0.2, "Lower clip of --importance-weight ppo: 1 - this.")
    ppo_clip_high: float = _field(0.2, "Upper clip of --importance-weight ppo: 1 + this.")
    ppo_dual_clip: float | None = _field(None, "Dual clip of --importance-weight ppo for negative advantages, > 1.")
    sampler_distribution: Distribution = _field(
        "head",
        "What rollouts record of the sampler: head (top-k), support (a truncating sampler's whole support), draws "
        "(independent draws), full (small vocabularies), none (nothing: needs --loss-correction none).",
    )
    advantage: Baseline = _field(
        "group", "Baseline of the advantage: group (mean of the prompt's rewards), loo (mean of the others), none."
    )
    advantage_std: bool = _field(False, "Divide advantages by the standard deviation of the group's rewards.")
    sampler_kl_coef: float = _field(0.0, "Coefficient of a KL(sampler || trainer) term that is added to the loss.")
    entropy_coef: float = _field(0.0, "Coefficient of the trainer's entropy, which is subtracted from the loss.")
    true_vocab_size: int | None = _field(
        None, "Vocabulary size without padding, as the sampler's softmax has it. Absent: --vocab-size."
    )
    fuse_lm_head: bool = _field(
        False,
        "Compute the loss and its gradients chunk by chunk inside the output layer, so that the logits are never all "
        "in memory. Needs room for the output weight's gradient in float32 from a micro-batch's forward to its "
        "backward.",
    )
    sc_logits_dtype: Literal["params", "fp32"] = _field(
        "params",
        "Dtype of the output layer's product: params (rounded to the parameters' dtype), or fp32 (sums and logits in "
        "float32, at twice the logits' memory). Set it as the sampler does: one side alone in float32 is worse than "
        "none.",
    )
    metrics_jsonl: str | None = _field(None, "Append one JSON object per logged step to this file.")

    def __post_init__(self) -> None:
        """Check ranges and combinations."""
        try:
            self.weight()
        except ValueError as error:
            raise ValueError(f"--importance-weight {self.importance_weight}: {error}") from None
        if (unread := unread_setting(self)) is not None:
            flag = "--" + unread[0].replace("_", "-")
            raise ValueError(f"{flag} is of --importance-weight {unread[1]}, not {self.importance_weight}")
        for flag, value in (("--sampler-kl-coef", self.sampler_kl_coef), ("--entropy-coef", self.entropy_coef)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{flag} must be >= 0 and finite, got {value}")
        if self.true_vocab_size is not None and self.true_vocab_size < 1:
            raise ValueError(f"--true-vocab-size must be positive, got {self.true_vocab_size}")
        if self.loss_correction == "score_centering" and self.sampler_distribution == "none":
            raise ValueError(
                "--loss-correction score_centering needs the sampler's distribution; "
                "set --sampler-distribution to what the rollouts record"
            )

    @property
    def centers(self) -> bool:
        """Whether the average score is subtracted."""
        return self.loss_correction == "score_centering"

    @property
    def float32_logits(self) -> bool:
        """Whether the output layer's product is kept in float32."""
        return self.sc_logits_dtype == "fp32"

    def weight(self) -> ImportanceWeight:
        """f, with its bounds."""
        return weight_of(self)
