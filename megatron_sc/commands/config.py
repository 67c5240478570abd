"""``megatron-sc config show``: the command line that configuration files stand for."""

from __future__ import annotations

import argparse
import sys

from . import Subcommands
from .job_file import add_job_arguments, require_before_file


def add(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser("config", help="what a configuration file stands for")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    show = actions.add_parser(
        "show",
        help="print the flags, after Megatron's own checks; exit status 2 if they are refused",
        usage="megatron-sc config show [-h] [--origins] [--unchecked] FILE [flag ...]",
    )
    show.add_argument("--origins", action="store_true", help="say where each flag was written")
    show.add_argument("--unchecked", action="store_true", help="do not run Megatron's checks: for a part of a job")
    add_job_arguments(show)
    show.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Its exit status. One line a flag, quoted for a shell: ``eval "ARGS=($(megatron-sc config show FILE))"``."""
    from ..training import cpu

    cpu.install()  # before anything of Megatron is imported
    from ..configuration import ConfigurationError, to_argv
    from ..planning.arguments import validated_arguments
    from ..training.config_files import flag_parser, read_command_line

    try:
        require_before_file(arguments, "config show")
        configuration, argv, rest = read_command_line([arguments.file], arguments.flags)
        if not arguments.unchecked:
            validated_arguments([*argv, *rest], configuration.cluster.world_size, configuration)
        parser = flag_parser()
        lines = [(to_argv({key: setting}, parser), setting.place) for key, setting in configuration.flags.items()]
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for words, place in lines:
        if words:
            _print(words, place if arguments.origins else "")
    for words in _by_flag(rest):
        _print(words, "command line" if arguments.origins else "")
    return 0


def _print(words: list[str], place: str) -> None:
    import shlex

    print(shlex.join(words) + (f"  # {place}" if place else ""))


def _by_flag(words: list[str]) -> list[list[str]]:
    """Each flag with its values."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups
