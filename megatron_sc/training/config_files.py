"""``--sc-config FILE``: flags from configuration files. Flags on the command line win over those of files.

sys.argv[1:] = expand_argv(sys.argv[1:])  # before Megatron parses; without --sc-config it does nothing
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..configuration import Configuration, ConfigurationError, read_files, to_argv

FLAG = "--sc-config"


def expand_argv(argv: Sequence[str]) -> list[str]:
    """Put the flags of every ``--sc-config FILE`` in front of the other words, in the order of the files.

    Argparse lets the later of two flags win. So what the command line says wins wherever it says it, and a later file
    wins over an earlier one. A switch that a file sets is taken back by a file that sets it to false.

    Args:
        argv: without the program's name.

    Returns:
        The words for Megatron's parser, without ``--sc-config``.

    Raises:
        SystemExit: with status 2 and a message that names file and key, as argparse does it.
    """
    try:
        files, rest = split_files(argv)
        return [*to_argv(read_files(files).flags, flag_parser()), *rest] if files else rest
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def split_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files of ``--sc-config``, and the other words.

    Raises:
        ConfigurationError: for ``--sc-config`` without a file.
    """
    files: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != FLAG:
            rest.append(word)
            continue
        file = value if equals else next(words, "")
        if not file or file.startswith("--"):
            raise ConfigurationError(f"{FLAG} needs a file, not {file!r}")
        files.append(file)
    return files, rest


def read_command_line(files: Sequence[str], argv: Sequence[str]) -> tuple[Configuration, list[str], list[str]]:
    """A command line that starts with files, as the tools take it.

    Args:
        files: as if each was given to ``--sc-config`` before ``argv``.
        argv: flags, ``--sc-config`` among them.

    Returns:
        The files' settings, their flags, and the other words of ``argv``.

    Raises:
        ConfigurationError: see ``read_files`` and ``to_argv``.
    """
    more, rest = split_files(argv)
    configuration = read_files([*files, *more])
    return configuration, to_argv(configuration.flags, flag_parser()), rest


def flag_parser() -> argparse.ArgumentParser:
    """Megatron's parser with the plugin's flags. It raises ``argparse.ArgumentError`` instead of exiting."""
    from . import cpu

    cpu.install()
    from megatron.training.arguments import add_megatron_arguments

    from .arguments import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_megatron_arguments(parser)
    if "--loss-correction" not in parser._option_string_actions:  # the launcher adds the plugin's flags on its own
        add_arguments(parser)
    return parser


def add_config_flag(group: argparse._ArgumentGroup) -> None:
    """Add ``--sc-config`` for ``--help``; a parser that meets it has not been given expanded words."""
    group.add_argument(
        FLAG,
        action=_NotExpanded,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="Take flags from a YAML file; repeatable. A later file wins over an earlier one, and flags on the command "
        "line win over files. See docs/configs.md.",
    )


class _NotExpanded(argparse.Action):
    """Refuse to ignore a file."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Say what the script must do."""
        parser.error(
            f"{FLAG}: this script does not read files; before Megatron parses the command line it must call "
            "megatron_sc.training.config_files.expand_argv: sys.argv[1:] = expand_argv(sys.argv[1:])"
        )
