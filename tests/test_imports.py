"""Imports go one way: what each folder may import of ours, and which parts must not need Megatron or process groups."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_sc"

MAY_IMPORT = {
    "objective": set(),
    "precision": set(),
    "configuration": set(),
    "vocab_parallel": {"objective"},
    "rollouts": {"objective", "precision"},
    "sampling": {"objective", "precision", "rollouts"},
    "weights": {"sampling"},
    "diagnostics": {"objective", "precision", "rollouts", "sampling"},
    "integrations": {"objective", "vocab_parallel"},
    "probe": {"objective", "vocab_parallel"},
}
"""Folders that are not named here stand at the end of the flow: training, planning and the commands import all."""

NEEDS_NEITHER = {"objective": ("megatron", "torch.distributed"), "rollouts": ("megatron", "torch.distributed")}
NEEDS_NEITHER["vocab_parallel"] = NEEDS_NEITHER["configuration"] = ("megatron",)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, wherever in it."""
    package = ["megatron_sc", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)


def files(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", [name for name in MAY_IMPORT if (PACKAGE / name).is_dir()])
def test_a_folder_imports_only_what_comes_before_it(folder):
    ours = {path.stem for path in PACKAGE.iterdir()}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in files(folder)
        for line, name in imported(path)
        if name.startswith("megatron_sc.") and name.split(".")[1] in ours - MAY_IMPORT[folder] - {folder}
    ]
    assert not wrong


@pytest.mark.parametrize("folder", NEEDS_NEITHER)
def test_what_is_used_without_megatron_does_not_import_it(folder):
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in files(folder)
        for line, name in imported(path)
        for outside in NEEDS_NEITHER[folder]
        if name == outside or name.startswith(f"{outside}.")
    ]
    assert not wrong


def test_no_two_folders_import_each_other():
    flow = TopologicalSorter[str]()
    for path in files("."):
        parts = path.relative_to(PACKAGE).parts
        if len(parts) > 1:
            names = [name.split(".") for _, name in imported(path)]
            flow.add(parts[0], *(n[1] for n in names if n[0] == "megatron_sc" and n[1] != parts[0]))
    flow.prepare()  # raises CycleError
