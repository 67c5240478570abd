"""All flags of the plugin, in one argument group."""

from __future__ import annotations

import argparse

from ..sampling import SamplerConfig
from . import cpu
from .config import ObjectiveConfig
from .flags import add_flags


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags to Megatron's parser: pass it as ``extra_args_provider``.

    Also sets the defaults of Megatron's own flags for accelerators that are not there (Apex, Transformer Engine, a
    GPU); what is given on the command line wins.
    """
    group = parser.add_argument_group("score centering")
    add_flags(group, ObjectiveConfig)
    add_flags(group, SamplerConfig)
    cpu.set_parser_defaults(parser)
    return parser
