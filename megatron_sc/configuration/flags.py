"""From settings to a command line, by the parser that will read it: no list of flags is kept here."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from typing import Any

from .files import ConfigurationError, Setting

NOT_IN_FILES = ("help", "sc-config", "yaml-cfg")
"""Flags that mean something on the command line only."""


def to_argv(settings: Mapping[str, Setting], parser: argparse.ArgumentParser) -> list[str]:
    """The command line that sets them, in their order.

    ``true`` gives a switch, ``false`` leaves it out (``--no-x`` where the parser has it), ``null`` leaves any flag
    out, a list gives a flag with several values.

    Args:
        settings: by key, a flag without its dashes.
        parser: of the script; it must not exit on errors (``exit_on_error=False``).

    Raises:
        ConfigurationError: for a key that is no flag, a value that the flag refuses, or two keys for one flag.
    """
    argv: list[str] = []
    owners: dict[str, Setting] = {}
    for setting in settings.values():
        action = _action(setting, parser)
        if setting.value is None:
            continue
        owner = owners.setdefault(action.dest, setting)
        if owner is not setting:
            raise ConfigurationError(f"{owner} and {setting} set the same; remove one")
        argv += _words(setting, action)
    try:
        parser.parse_args(argv)
    except argparse.ArgumentError as error:
        name = (error.argument_name or "").split("/")[0].lstrip("-")
        places = [str(setting) for setting in settings.values() if setting.key == name]
        places = places or [str(owners[action.dest]) for action in _named(parser, error) if action.dest in owners]
        raise ConfigurationError(f"{' and '.join(places) or error.argument_name}: {error.message}") from None
    return argv


def _action(setting: Setting, parser: argparse.ArgumentParser) -> argparse.Action:
    """The parser's action of a key."""
    flag = f"--{setting.key}"
    if setting.key in NOT_IN_FILES:
        advice = "use include" if setting.key == "sc-config" else "it belongs on the command line"
        raise ConfigurationError(f"{setting.place}: {flag} cannot be set in a file; {advice}")
    actions = parser._option_string_actions
    if flag in actions:
        return actions[flag]
    known = [name.removeprefix("--") for name in actions if name.startswith("--")]
    near = difflib.get_close_matches(setting.key.lstrip("-").replace("_", "-"), known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigurationError(f"{setting.place}: neither Megatron nor the plugin has a flag {flag}{hint}")


def _words(setting: Setting, action: argparse.Action) -> list[str]:
    """The setting's part of the command line."""
    flag, value = f"--{setting.key}", setting.value
    is_switch = action.nargs == 0
    if is_switch and not isinstance(value, bool):
        raise ConfigurationError(f"{setting}: {flag} is a switch; write true or false")
    if is_switch:
        is_pair = isinstance(action, argparse.BooleanOptionalAction)  # --x and --no-x
        off = [name for name in action.option_strings if name != flag][:1] if is_pair else []
        return [flag] if value else off
    if isinstance(value, list):
        if action.nargs not in ("*", "+") and not isinstance(action.nargs, int):
            raise ConfigurationError(f"{setting}: {flag} takes one value, not a list")
        return [flag, *(_text(setting, item) for item in value)]
    return [f"{flag}={_text(setting, value)}"] if str(value).startswith("-") else [flag, _text(setting, value)]


def _text(setting: Setting, value: Any) -> str:
    if isinstance(value, bool):
        raise ConfigurationError(f"{setting}: --{setting.key} takes a value; quote it if a word is meant")
    return str(value)


def _named(parser: argparse.ArgumentParser, error: argparse.ArgumentError) -> list[argparse.Action]:
    """The action that an error names by all its option strings."""
    names = set((error.argument_name or "").split("/"))
    return [action for action in parser._actions if names & set(action.option_strings)]
