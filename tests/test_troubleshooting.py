"""docs/troubleshooting.md quotes messages that exist: ours in our source, Megatron's in the installed package."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
OTHERS = "## Messages of Megatron-Core"


def headings(text: str) -> list[str]:
    """The quoted messages."""
    return re.findall(r"^### `(.+)`$", text, re.MULTILINE)


def strings(source: str) -> Iterator[str]:
    """Every string of a module but docstrings, with NUL for what an f-string fills in."""
    tree = ast.parse(source)
    inside_f_strings = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
    } - {id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside_f_strings:
            yield node.value


def is_quoted_from(message: str, text: str) -> bool:
    """Whether the pieces between `...` stand in the text, in this order, with something filled in between."""
    pieces = [re.escape(piece.strip(" ")) for piece in message.split("...") if piece.strip(" ")]
    return re.search(r"[^\n]*\0[^\n]*".join(pieces) if len(pieces) > 1 else pieces[0], text) is not None


def test_our_messages_exist() -> None:
    ours, _, _ = PAGE.read_text().partition(OTHERS)
    paths = [*(ROOT / "megatron_sc").rglob("*.py"), ROOT / "patches" / "apply.py"]
    known = [text for path in paths for text in strings(path.read_text())]
    quoted = headings(ours)
    assert len(quoted) > 40
    assert len(set(quoted)) == len(quoted)
    missing = [message for message in quoted if not any(is_quoted_from(message, text) for text in known)]
    assert missing == []


def test_a_message_that_does_not_exist_is_found() -> None:
    (text,) = strings('raise ValueError(f"row {row}: needs " "a head")')
    assert is_quoted_from("row ...: needs a head", text)
    assert not is_quoted_from("row ...: needs a tail", text)
    assert not is_quoted_from("row needs a head", text)
    assert not is_quoted_from("needs ... head", text), "only what is filled in may be left out"
    assert list(strings('def f():\n    """Not a message."""\n')) == []


def test_megatron_messages_exist() -> None:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations
    files = [
        "core/datasets/utils.py",
        "core/tensor_parallel/layers.py",
        "core/optimizer_param_scheduler.py",
    ]
    texts = [(Path(spec.submodule_search_locations[0]) / file).read_text() for file in files]
    known = [text for source in texts for text in strings(source)]
    _, _, others = PAGE.read_text().partition(OTHERS)
    for message in headings(others):
        assert any(is_quoted_from(message, text) for text in known), message
