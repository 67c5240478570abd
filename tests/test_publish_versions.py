"""The folder of published weights: what a sampler sees while a trainer publishes, dies and comes back."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_sc.cli import main
from megatron_sc.weights import PublishedWeights, latest, versions, wait_for


def publish(root: Path, version: int, keep: int = 2, content: str = "weights") -> PublishedWeights:
    folder = versions.begin(root, version)
    (folder / "file").write_text(content)
    return versions.commit(folder, keep)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_nothing_is_published_before_the_first_commit(tmp_path):
    root = tmp_path / "weights"
    assert latest(root) is None
    folder = versions.begin(root, 0)
    (folder / "file").write_text("half")
    assert latest(root) is None
    published = versions.commit(folder, keep=1)
    assert latest(root) == published
    assert published.version == 0
    assert (published.path / "file").read_text() == "half"


def test_the_last_versions_stay(tmp_path):
    published = [publish(tmp_path, version, keep=3) for version in (0, 5, 10, 15, 20)]
    assert latest(tmp_path) == published[-1]
    assert names(tmp_path) == {"latest.json", *(weights.path.name for weights in published[-3:])}


def test_a_run_that_comes_back_withdraws_what_came_after_its_checkpoint(tmp_path):
    before = {version: publish(tmp_path, version, keep=9) for version in (0, 4, 8, 12)}
    again = publish(tmp_path, 8, keep=2, content="of the second attempt")
    assert latest(tmp_path) == again
    assert again.path != before[8].path  # a reader that still loads the first attempt's 8 never sees it change
    assert names(tmp_path) == {"latest.json", again.path.name, before[4].path.name}


def test_leftovers_of_an_interrupted_trainer_are_deleted(tmp_path):
    (versions.begin(tmp_path, 3) / "file").write_text("half")
    (tmp_path / ".tmp-latest.json").write_text("{")
    published = publish(tmp_path, 4)
    assert names(tmp_path) == {"latest.json", published.path.name}


def test_large_versions_are_in_order(tmp_path):
    publish(tmp_path, 99_999_999)
    later = publish(tmp_path, 100_000_000, keep=2)
    assert latest(tmp_path) == later
    assert len(names(tmp_path)) == 3


def test_waiting_ends_when_another_version_is_published(tmp_path):
    first = publish(tmp_path, 10)
    assert wait_for(tmp_path) == first
    timer = threading.Timer(0.2, publish, (tmp_path, 4))  # the trainer came back from step 4
    timer.start()
    second = wait_for(tmp_path, other_than=first, timeout=20, interval=0.01)
    timer.join()
    assert second.version == 4


def test_waiting_ends_at_the_timeout_and_says_what_there_is(tmp_path):
    with pytest.raises(TimeoutError, match="nothing is published after 0 s"):
        wait_for(tmp_path, timeout=0)
    held = publish(tmp_path, 7)
    with pytest.raises(TimeoutError, match=r"still version 7 is published after 0\.05 s"):
        wait_for(tmp_path, other_than=held, timeout=0.05, interval=0.01)


def test_the_command_prints_the_folder(tmp_path, capsys):
    root = tmp_path / "weights"
    assert main(["weights", str(root)]) == 1
    assert "nothing is published" in capsys.readouterr().err
    first = publish(root, 3)
    assert main(["weights", str(root), "--wait", "5"]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{first.path}\n"
    assert main(["weights", str(root), "--other-than", printed.strip()]) == 1
    assert "still version 3 is published" in capsys.readouterr().err
    timer = threading.Timer(0.2, publish, (root, 4))
    timer.start()
    assert main(["weights", str(root), "--wait", "inf", "--other-than", printed.strip() + "/"]) == 0
    timer.join()
    assert capsys.readouterr().out == f"{latest(root).path}\n"
    assert main(["weights", str(root), "--other-than", "elsewhere"]) == 1
    assert "'elsewhere' is no name of a published version" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps({"version": 1, "directory": "00000002-0123abcd"}),
        json.dumps({"version": 1, "directory": "../00000001-0123abcd"}),
        json.dumps({"version": 1, "directory": None}),
    ],
)
def test_a_foreign_pointer_is_refused(tmp_path, content):
    (tmp_path / "latest.json").write_text(content)
    with pytest.raises(ValueError, match=r"latest\.json does not name published weights"):
        latest(tmp_path)


PUBLISH_FOR_EVER = """
import runpy, sys
from pathlib import Path
versions = runpy.run_path(sys.argv[1])
version = int(sys.argv[3])
while True:
    folder = versions["begin"](Path(sys.argv[2]), version)
    for part in range(4):
        versions["write_synced"](folder / f"part{part}", f"{folder.name[5:]} " * 500)
    versions["commit"](folder, 2)
    version += 1
"""


def test_a_killed_trainer_leaves_whole_versions_only(tmp_path):
    seen = set()
    for attempt in range(8):
        start = 0 if (found := latest(tmp_path)) is None else found.version
        command = [sys.executable, "-c", PUBLISH_FOR_EVER, versions.__file__, str(tmp_path), str(start)]
        trainer = subprocess.Popen(command)
        try:
            held = wait_for(tmp_path, other_than=found, timeout=20, interval=0.001)
            deadline = time.monotonic() + 0.05 + attempt * 0.013
            while time.monotonic() < deadline:
                seen.add(held)
                held = wait_for(tmp_path, other_than=held, timeout=20, interval=0.0005)
        finally:
            trainer.kill()
            trainer.wait()
        weights = latest(tmp_path)
        for part in range(4):
            assert (weights.path / f"part{part}").read_text() == f"{weights.path.name} " * 500
        # Whatever the kill left behind: at most the two versions that stay, one more, and one unfinished.
        assert len([path for path in tmp_path.iterdir() if path.is_dir()]) <= 4
    assert len(seen) > 8
