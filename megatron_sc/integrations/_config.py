"""The objective's settings in a framework's arguments: ``score_centering:`` in the file of ``--custom-config-path``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from ..objective import ImportanceWeight, unread_setting, weight_of

SECTION = "score_centering"

REPLACED = {
    "use_tis": "the importance weight is centered with the score: set score_centering.importance_weight",
    "use_opsm": "a mask over whole sequences would not be centered",
    "custom_pg_loss_reducer_function_path": "the loss is reduced as the framework's own metrics are",
    "use_score_centering": "that is the framework's own implementation; choose one",
}
"""Options of the frameworks that their policy loss reads and a custom loss would silently ignore."""


@dataclass(frozen=True)
class FrameworkObjective:
    """Names, meanings and defaults are those of the command-line flags in docs/flags.md.

    Attributes:
        loss_correction: ``none`` trains the same objective without centering.
        importance_weight: ``none``, ``is``, ``tis``, ``mis`` or ``ppo``, with the bounds below.
        sampler_distribution: ``head``: the recorded tokens are the most likely ones. ``support``: they are all that the
            sampler could draw (top-p, top-k, min-p).
        sampler_kl_coef: coefficient of KL(sampler || trainer).
        true_vocab_size: vocabulary of the sampler's softmax; None: the framework's ``vocab_size``.
    """

    loss_correction: Literal["score_centering", "none"] = "score_centering"
    importance_weight: Literal["none", "is", "tis", "mis", "ppo"] = "none"
    tis_cap: float = 2.0
    mis_low: float = 0.5
    mis_high: float = 5.0
    ppo_clip_low: float = 0.2
    ppo_clip_high: float = 0.2
    ppo_dual_clip: float | None = None
    sampler_distribution: Literal["head", "support"] = "head"
    sampler_kl_coef: float = 0.0
    true_vocab_size: int | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> FrameworkObjective:
        """From the framework's arguments.

        Raises:
            ValueError: naming what is missing, unknown, out of range or contradictory, and what to do.
        """
        section = getattr(args, SECTION, None)
        if section is None:
            raise ValueError(
                f"the arguments have no {SECTION}: pass --custom-config-path FILE.yaml with a section '{SECTION}:' "
                "(the defaults: 'score_centering: {}')"
            )
        if not isinstance(section, Mapping):
            raise ValueError(f"{SECTION} must be a mapping of settings, got {section!r}")
        hints = get_type_hints(cls)
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in section.items():
            if name not in known:
                raise ValueError(f"{SECTION}.{name} is unknown; the settings are {', '.join(known)}")
            _require_type(f"{SECTION}.{name}", value, hints[name])
        objective = cls(**section)
        try:
            objective.weight()
        except ValueError as error:
            raise ValueError(f"{SECTION}.importance_weight {objective.importance_weight}: {error}") from None
        if (unread := unread_setting(objective)) is not None:
            raise ValueError(
                f"{SECTION}.{unread[0]} is of importance_weight {unread[1]}, not {objective.importance_weight}"
            )
        objective._require_compatible(args)
        return objective

    @property
    def centers(self) -> bool:
        """Whether the average score is subtracted."""
        return self.loss_correction == "score_centering"

    def weight(self) -> ImportanceWeight:
        """f, with its bounds."""
        return weight_of(self)

    def vocab_size(self, args: argparse.Namespace) -> int:
        """The true vocabulary size.

        Raises:
            ValueError: if neither the section nor the framework names it.
        """
        size = self.true_vocab_size or getattr(args, "vocab_size", None)
        if size is None:
            raise ValueError(
                f"{SECTION}.true_vocab_size is needed: the arguments have no vocab_size, and the logits' padding "
                "columns must not be part of the softmax"
            )
        return int(size)

    def _require_compatible(self, args: argparse.Namespace) -> None:
        for option, reason in REPLACED.items():
            if getattr(args, option, None):
                raise ValueError(f"--{option.replace('_', '-')} does not go with this custom loss: {reason}")
        if getattr(args, "use_kl_loss", False) and getattr(args, "kl_loss_coef", 0.0):
            raise ValueError(
                "--use-kl-loss does not go with this custom loss: it returns no differentiable log-probabilities; use "
                "--kl-coef, or a --kl-loss-coef of 0"
            )
        truncates = getattr(args, "rollout_top_p", 1.0) != 1.0 or getattr(args, "rollout_top_k", -1) > 0
        if self.sampler_distribution == "head" and self.centers and truncates:
            raise ValueError(
                f"--rollout-top-p and --rollout-top-k truncate: set {SECTION}.sampler_distribution to support, and "
                "record the whole support"
            )


def _require_type(name: str, value: Any, hint: Any) -> None:
    """YAML gives a string where a number was misspelled (``2,0``), and a bool is an int to Python."""
    choices = get_args(hint)
    if choices and all(isinstance(choice, str) for choice in choices):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        return
    if value is None and type(None) in choices:
        return
    wanted = int if hint is int or int in choices else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise ValueError(f"{name} must be {'an integer' if wanted is int else 'a number'}, got {value!r}")
