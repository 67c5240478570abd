#!/usr/bin/env python3
"""Give a Megatron-LM checkout's own scripts the plugin's flags.

    python patches/apply.py PATH/Megatron-LM              # or --check, or --reverse
    torchrun PATH/Megatron-LM/pretrain_gpt.py <flags> --loss-correction score_centering

Each patch adds four lines above a script's first import of Megatron and changes none. A script is recognized by the
SHA-256 of its content, so nothing is patched that the patch was not made for; applying twice does nothing.
``python -m megatron_sc.launch PATH/pretrain_gpt.py`` does the same without a patch.

Needs Python and git, nothing else. Exit status: 0 done or nothing to do, 1 refused, 2 wrong usage.
"""

import argparse
import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PATCHES = Path(__file__).resolve().parent


class PatchError(Exception):
    """Why nothing was changed, and what to do instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, plan for every script, then change them: one that cannot be patched leaves the others alone too."""
    parser = argparse.ArgumentParser(prog="apply.py", description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of a Megatron-LM checkout")
    parser.add_argument("--reverse", action="store_true", help="remove the added lines")
    parser.add_argument("--check", action="store_true", help="say what would be done, change nothing")
    parser.add_argument(
        "--script", action="append", choices=sorted({patch.script for patch in all_patches()}), help="only this script"
    )
    options = parser.parse_args(argv)
    scripts = options.script or sorted({patch.script for patch in all_patches()})
    try:
        plan = {script: plan_script(options.checkout, script, options.reverse) for script in scripts}
        if not options.check:
            run_all([patch for patch in plan.values() if patch is not None], options.checkout, options.reverse)
    except PatchError as error:
        print(f"apply.py: nothing changed: {error}", file=sys.stderr)
        return 1
    for script, patch in plan.items():
        report(options, script, patch)
    return 0


class Patch:
    """A patch file: a header with the version and the script's SHA-256 before and after, then the diff.

    Args:
        path: the file.
    """

    def __init__(self, path: Path):
        self.path = path
        text = path.read_text()
        self.version = re.search(r"^Megatron-LM: (.*)$", text, re.M)[1]
        self.before = re.search(r"^Before: ([0-9a-f]{64})$", text, re.M)[1]
        self.after = re.search(r"^After: ([0-9a-f]{64})$", text, re.M)[1]
        self.script = re.search(r"^\+\+\+ b/(.*)$", text, re.M)[1]
        self.lines = re.findall(r"^\+(?!\+\+ )(.*)$", text, re.M)

    def run(self, checkout: Path, reverse: bool) -> None:
        """Apply with git, and check the result.

        Raises:
            PatchError: if git refuses, or gives another content than the patch promises.
        """
        script = checkout / self.script
        command = ["git", "apply", "--unidiff-zero", *(["--reverse"] if reverse else []), str(self.path)]
        result = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
        if result.returncode != 0 or digest(script) != (self.before if reverse else self.after):
            raise PatchError(f"git apply failed on {script}: {result.stderr.strip() or 'unexpected result'}")


def run_all(patches: Sequence[Patch], checkout: Path, reverse: bool) -> None:
    """Run all or none: on a failure every script is as it was."""
    originals = {checkout / patch.script: (checkout / patch.script).read_bytes() for patch in patches}
    try:
        for patch in patches:
            patch.run(checkout, reverse)
    except BaseException:
        for script, content in originals.items():
            script.write_bytes(content)
        raise


def all_patches() -> list[Patch]:
    """Every patch beside this file."""
    return [Patch(path) for path in sorted(PATCHES.glob("*/*.patch"))]


def plan_script(checkout: Path, name: str, reverse: bool) -> Patch | None:
    """The patch to run on a script; None where there is nothing to do.

    Raises:
        PatchError: if the script is missing or no version that a patch is for.
    """
    script = checkout / name
    if not script.is_file():
        raise PatchError(f"{script} is not there; give the folder of a Megatron-LM checkout, which holds {name}")
    patches = [patch for patch in all_patches() if patch.script == name]
    found = digest(script)
    for patch in patches:
        if found == (patch.after if reverse else patch.before):
            return patch
        if found == (patch.before if reverse else patch.after):
            return None
    known = "; ".join(patch.version for patch in patches)
    lines = "\n".join(f"    {line}" for line in patches[0].lines if line)
    raise PatchError(
        f"{script} is of no version that there is a patch for ({known}), or has changes of its own; its Megatron-Core "
        f"is {core_version(checkout)}. Do one of these:\n"
        f"  check out a version above: git -C {checkout} checkout core_v0.19.0\n"
        f"  run it without a patch: python -m megatron_sc.launch {script} ...\n"
        f"  {'remove' if reverse else 'add'} these lines by hand, above its first import of Megatron:\n{lines}"
    )


def report(options: argparse.Namespace, script: str, patch: Patch | None) -> None:
    """One line a script."""
    state = "has no patch to remove" if options.reverse else "is patched already"
    if patch is not None:
        verb = "remove the patch from" if options.reverse else "patch"
        done = "removed the patch from" if options.reverse else "patched"
        print(f"{f'would {verb}' if options.check else done} {options.checkout / script} ({patch.version})")
    else:
        print(f"{options.checkout / script} {state}")


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def core_version(checkout: Path) -> str:
    """What ``megatron/core/package_info.py`` says, without importing it."""
    info = checkout / "megatron" / "core" / "package_info.py"
    if not info.is_file():
        return "not there"
    parts = [re.search(rf"^{name} = (\d+)$", info.read_text(), re.M) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] if part else "?" for part in parts)


if __name__ == "__main__":
    sys.exit(main())
