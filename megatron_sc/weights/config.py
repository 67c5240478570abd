"""Settings of publishing and of the start from a Hugging Face checkpoint: flags are generated from them."""

from __future__ import annotations

from dataclasses import dataclass, field


def _help(text: str) -> dict[str, str]:
    """A field's metadata: the text its flag shows."""
    return {"help": text}


@dataclass(frozen=True)
class WeightsConfig:
    """Where weights come from and go to.

    Raises:
        ValueError: for a missing flag or a value out of range; the message names the flag.
    """

    hf_checkpoint: str | None = field(
        default=None,
        metadata=_help(
            "Folder of the Hugging Face checkpoint (Qwen3, Qwen3-MoE) whose architecture the model has: config.json, "
            "and the tokenizer's files where there are any. Needed by --load-hf-weights and --publish-weights."
        ),
    )
    load_hf_weights: bool = field(
        default=False,
        metadata=_help(
            "Start from the weights in --hf-checkpoint. A run that continues from a checkpoint of Megatron (--load) "
            "keeps that one's."
        ),
    )
    publish_weights: str | None = field(
        default=None,
        metadata=_help(
            "Publish the policy as Hugging Face checkpoints in this folder, for the sampler: at the start and after "
            "every --publish-interval steps. All nodes must see the folder. One folder for one run."
        ),
    )
    publish_interval: int = field(default=1, metadata=_help("Steps between two published versions."))
    publish_keep: int = field(
        default=2,
        metadata=_help(
            "Published versions that stay; older ones are deleted. With less than 2 a version can be deleted while "
            "the sampler loads it."
        ),
    )

    def __post_init__(self) -> None:
        """Check ranges and combinations."""
        for flag, value in (("--publish-interval", self.publish_interval), ("--publish-keep", self.publish_keep)):
            if value < 1:
                raise ValueError(f"{flag} is {value} but must be at least 1")
        if self.hf_checkpoint is None:
            for flag, given in (
                ("--load-hf-weights", self.load_hf_weights),
                ("--publish-weights", self.publish_weights),
            ):
                if given:
                    raise ValueError(f"{flag} needs --hf-checkpoint: a folder with the architecture's config.json")
