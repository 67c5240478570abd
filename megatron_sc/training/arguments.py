"""All flags of the plugin, in one argument group. ``python -m megatron_sc.training.arguments`` prints docs/flags.md."""

from __future__ import annotations

import argparse

from ..sampling import SamplerConfig
from ..weights import WeightsConfig
from . import cpu
from .config import ObjectiveConfig
from .config_files import add_config_flag
from .flags import add_flags, markdown_table
from .rollout_config import RolloutConfig

_SECTIONS = {
    "Objective": ObjectiveConfig,
    "Rollout buffer": RolloutConfig,
    "Embedded sampler": SamplerConfig,
    "Weights": WeightsConfig,
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags to Megatron's parser: pass it as ``extra_args_provider``.

    Also sets the defaults of Megatron's own flags for accelerators that are not there (Apex, Transformer Engine, a
    GPU); what is given on the command line wins.
    """
    group = parser.add_argument_group("score centering")
    for config in _SECTIONS.values():
        add_flags(group, config)
    add_config_flag(group)
    cpu.set_parser_defaults(parser)
    return parser


def flags_document() -> str:
    """docs/flags.md: one table a section."""
    parts = [
        "# Flags",
        "",
        "Generated from the dataclasses: `python -m megatron_sc.training.arguments > docs/flags.md`.",
    ]
    for title, config in _SECTIONS.items():
        parts += ["", f"## {title} (`{config.__module__}.{config.__qualname__}`)", "", markdown_table(config)]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(flags_document(), end="")
