"""The arguments that ``config show`` and ``plan`` share: ``FILE [flag ...]``, flags as the script would get them."""

from __future__ import annotations

import argparse


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add FILE and the flags after it; the parser's own flags must all have been added before."""
    parser.add_argument("file", metavar="FILE", help="YAML file, see docs/configs.md")
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, metavar="flag", help="as on the script's command line; --sc-config FILE too"
    )
    parser.set_defaults(own_flags=frozenset(parser._option_string_actions))


def require_before_file(arguments: argparse.Namespace, command: str) -> None:
    """Refuse flags of the command after FILE, where they would be taken for the script's.

    Args:
        arguments: parsed by a parser of ``add_job_arguments``.
        command: as the user wrote it, for the message.

    Raises:
        ConfigurationError: naming the flag.
    """
    from ..configuration import ConfigurationError

    for word in arguments.flags:
        flag = word.partition("=")[0]
        if flag in arguments.own_flags:
            raise ConfigurationError(
                f"{flag} is a flag of megatron-sc {command}, not of the script: put it before FILE"
            )
