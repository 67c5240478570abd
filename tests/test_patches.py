"""The patches for a Megatron-LM checkout, and the script that applies them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed import run_megatron
from tests.test_launch import BACKEND_ONLY, ROLLOUTS, STEPS, printed_steps
from tests.tiny_model import DENSE

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "patches"
SCRIPTS = ("pretrain_gpt.py", "train_rl.py")

BEFORE = "import sys\n\nfrom megatron import core\n"
AFTER = "import sys\n\nimport ours\n\nfrom megatron import core\n"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def apply(checkout: Path, *flags: str, patches: Path = PATCHES) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(patches / "apply.py"), str(checkout), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def applied(checkout: Path, *flags: str, patches: Path = PATCHES) -> str:
    result = apply(checkout, *flags, patches=patches)
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(checkout: Path, *flags: str, patches: Path = PATCHES) -> str:
    result = apply(checkout, *flags, patches=patches)
    assert result.returncode == 1, result.stdout
    return result.stderr


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    """A copy of apply.py with two patches for scripts that are known here."""
    folder = tmp_path / "patches"
    (folder / "v1").mkdir(parents=True)
    shutil.copy(PATCHES / "apply.py", folder)
    for name in ("a", "b"):
        header = (
            f"Megatron-LM: v1\nBefore: {digest(BEFORE)}\nAfter: {digest(AFTER)}\n\n--- a/{name}.py\n+++ b/{name}.py\n"
        )
        (folder / "v1" / f"{name}.patch").write_text(header + "@@ -2,0 +3,2 @@\n+import ours\n+\n")
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Two scripts, inside a repository that is not theirs: git must not take its root for the patch's."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    folder = tmp_path / "vendored" / "Megatron-LM"
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 7\nPATCH = 3\n")
    for name in ("a.py", "b.py"):
        (folder / name).write_text(BEFORE)
    return folder


def test_apply_check_and_reverse(patches: Path, checkout: Path) -> None:
    assert applied(checkout, "--check", patches=patches).count("would patch") == 2
    assert (checkout / "a.py").read_text() == BEFORE
    for output in ("patched", "is patched already"):  # the second time there is nothing to do
        assert applied(checkout, patches=patches).count(output) == 2
        assert [(checkout / name).read_text() for name in ("a.py", "b.py")] == [AFTER, AFTER]
    for output in ("removed the patch", "has no patch to remove"):
        assert applied(checkout, "--reverse", patches=patches).count(output) == 2
        assert [(checkout / name).read_text() for name in ("a.py", "b.py")] == [BEFORE, BEFORE]


def test_a_script_that_is_not_known_leaves_all_alone(patches: Path, checkout: Path) -> None:
    (checkout / "b.py").write_text(BEFORE + "# mine\n")
    error = refused(checkout, patches=patches)
    assert f"{checkout / 'b.py'} is of no version that there is a patch for (v1), or has changes of its own" in error
    assert "its Megatron-Core is 0.7.3" in error
    assert "    import ours" in error, "the lines to add by hand"
    assert (checkout / "a.py").read_text() == BEFORE
    assert "patched" in applied(checkout, "--script", "a.py", patches=patches)
    (checkout / "b.py").unlink()
    assert f"{checkout / 'b.py'} is not there" in refused(checkout, patches=patches)


@pytest.mark.parametrize("damage", ["+import theirs\n+\n", "-import sys\n"])
def test_a_patch_that_does_not_keep_its_promise_changes_nothing(patches: Path, checkout: Path, damage: str) -> None:
    path = patches / "v1" / "b.patch"
    path.write_text(path.read_text().replace("+import ours\n+\n", damage))
    assert "git apply failed" in refused(checkout, patches=patches)
    assert [(checkout / name).read_text() for name in ("a.py", "b.py")] == [BEFORE, BEFORE]


def test_patches_hold_only_our_lines() -> None:
    paths = sorted(PATCHES.glob("*/*.patch"))
    assert {path.name for path in paths} == {"pretrain_gpt.patch", "train_rl.patch"}
    for path in paths:
        header, _, body = path.read_text().partition("\n\n")
        assert re.fullmatch(r"Megatron-LM: .+\nBefore: [0-9a-f]{64}\nAfter: [0-9a-f]{64}", header)
        (hunk,) = re.findall(r"^@@ -\d+,0 \+\d+,(\d+) @@$", body, re.M)
        added = body.splitlines()[3:]
        assert len(added) == int(hunk)
        assert all(line.startswith("+") for line in added)
        assert sum(line != "+" for line in added) <= 4
        compile("\n".join(line[1:] for line in added), path, "exec")


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """The checkout's scripts without its Megatron: the installed one needs no compiler for its datasets."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for script in Path(os.environ["MEGATRON_LM"]).glob("*.py"):
        shutil.copy(script, folder)
    return folder


@pytest.mark.checkout
def test_the_patches_fit_the_checkout(scripts: Path) -> None:
    before = {name: (scripts / name).read_text() for name in SCRIPTS}
    assert applied(scripts).count("patched") == len(SCRIPTS)
    for name in SCRIPTS:
        patched = (scripts / name).read_text()
        compile(patched, name, "exec")
        ours = patched.index("from megatron_sc")
        assert ours < min(patched.index("from megatron."), patched.index("from gpt_builders")), "before any of Megatron"
        kept = [line for line in patched.splitlines() if line not in patched[ours:].splitlines()[:4]]
        assert kept == [line for line in before[name].splitlines() if line not in patched[ours:].splitlines()[:4]]
    applied(scripts, "--reverse")
    assert {name: (scripts / name).read_text() for name in SCRIPTS} == before


@pytest.mark.checkout
def test_the_patched_script_gives_the_losses_of_our_own(scripts: Path, tmp_path: Path) -> None:
    applied(scripts)
    argv = [*DENSE, *STEPS, *ROLLOUTS, "--metrics-jsonl"]
    with ThreadPoolExecutor() as pool:
        example = [ROOT / "examples" / "pretrain_gpt_sc.py", *argv, tmp_path / "example.jsonl"]
        ours = pool.submit(run_megatron, example, 1, 200)
        patched = run_megatron([scripts / "pretrain_gpt.py", *argv, tmp_path / "patched.jsonl"], 1, 200)
    steps = printed_steps(patched[0])
    assert len(steps) == 3
    assert steps == printed_steps(ours.result()[0])
    records = (tmp_path / "patched.jsonl").read_text()  # the console leaves out averages below 0, which the loss is
    assert all(isinstance(json.loads(line)["loss"], float) for line in records.splitlines())
    assert len(records.splitlines()) == 3
    assert records == (tmp_path / "example.jsonl").read_text()


@pytest.mark.checkout
def test_without_the_flag_the_patched_script_is_the_unpatched_one(scripts: Path, tmp_path: Path) -> None:
    stock = shutil.copytree(scripts, tmp_path / "stock")
    (stock / "backend_only.py").write_text(BACKEND_ONLY)
    applied(scripts)
    stock_data = [flag for flag in DENSE if flag not in ("--dataloader-type", "external", "--calculate-per-token-loss")]
    argv = [*stock_data, "--mock-data", *STEPS]
    with ThreadPoolExecutor() as pool:
        unpatched = pool.submit(run_megatron, [stock / "backend_only.py", stock / "pretrain_gpt.py", *argv], 1, 200)
        patched = run_megatron([scripts / "pretrain_gpt.py", *argv], 1, 200)
    steps = printed_steps(patched[0])
    assert len(steps) == 3
    assert "lm loss: " in steps[0]
    assert steps == printed_steps(unpatched.result()[0])
