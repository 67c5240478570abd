"""Command-line flags from frozen dataclasses: each field is one flag, and the dataclass checks its own values."""

from __future__ import annotations

import argparse
import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def flag_name(field: dataclasses.Field[Any]) -> str:
    """``tis_cap`` -> ``--tis-cap``; ``metadata["flag"]`` overrides it."""
    return field.metadata.get("flag", "--" + field.name.replace("_", "-"))


def add_flags(group: argparse._ArgumentGroup, config: type) -> None:
    """Add one flag a field of the dataclass ``config``.

    ``Literal`` fields become choices, ``bool`` fields switches, ``X | None`` fields take X. ``metadata["help"]`` is the
    help text and ``metadata["action"]`` an ``argparse`` action.
    """
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        options: dict[str, Any] = {"dest": field.name, "default": field.default, "help": field.metadata.get("help", "")}
        options["help"] = options["help"].replace("%", "%%") + " Default: %(default)s."
        if "action" in field.metadata:
            options["action"] = field.metadata["action"]
        kind = _without_none(hints[field.name])
        if kind is bool:
            options["action"] = "store_true"
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        else:
            options["type"] = kind
            options["metavar"] = kind.__name__.upper()
        group.add_argument(flag_name(field), **options)


def from_args[Config](config: type[Config], args: argparse.Namespace, **overrides: Any) -> Config:
    """The dataclass with the parsed values.

    Raises:
        ValueError: from the dataclass, naming the flag.
    """
    fields = dataclasses.fields(config)  # type: ignore[arg-type]
    return config(**{field.name: getattr(args, field.name) for field in fields} | overrides)


def _without_none(hint: Any) -> Any:
    """X | None -> X."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [part for part in get_args(hint) if part is not type(None)]
    return hint


def markdown_table(config: type) -> str:
    """The dataclass's flags as a table: flag, values, default, meaning."""
    hints = get_type_hints(config)
    rows = ["| Flag | Values | Default | Meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(config):
        kind = _without_none(hints[field.name])
        is_choice = get_origin(kind) is Literal
        values = ", ".join(f"`{value}`" for value in get_args(kind)) if is_choice else kind.__name__
        if kind is bool:
            values = "switch"
        default = "" if field.default is None or kind is bool else f"`{field.default}`"
        rows.append(
            f"| `{flag_name(field)}` | {values} | {default} | {field.metadata.get('help', '').replace('|', '&#124;')} |"
        )
    return "\n".join(rows)
