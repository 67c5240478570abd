"""``megatron-sc validate`` and ``inspect``."""

import json

import pytest

from benchmarks.buffer_faults import VOCAB, fill
from megatron_sc.cli import main
from megatron_sc.rollouts.ledger import Ledger
from megatron_sc.rollouts.storage import open_storage


def test_validate_accepts(tmp_path, capsys):
    fill(tmp_path, range(4))
    assert main(["validate", str(tmp_path)]) == 0
    assert "valid; 2 shards, 16 rollouts (0 bad)" in capsys.readouterr().out


def test_validate_names_the_place(tmp_path, capsys):
    fill(tmp_path, range(4))
    shard = Ledger(open_storage(tmp_path)).shards[0].shard
    content = bytearray((tmp_path / shard).read_bytes())
    content[50] ^= 255
    (tmp_path / shard).write_bytes(content)
    assert main(["validate", str(tmp_path)]) == 1
    assert f"error: {shard}: sha256 is " in capsys.readouterr().err
    assert main(["validate", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["shards"], report["rollouts"]) == (False, 2, 4)
    assert [problem["file"] for problem in report["problems"]] == [shard]


def test_validate_against_the_trainer(tmp_path, capsys):
    fill(tmp_path, range(2))
    assert main(["validate", str(tmp_path), "--true-vocab-size", str(VOCAB)]) == 0
    assert main(["validate", str(tmp_path), "--true-vocab-size", "100"]) == 1
    assert "manifest.json: true_vocab_size is 96; the trainer has 100" in capsys.readouterr().err


def test_validate_of_no_buffer(tmp_path, capsys):
    assert main(["validate", str(tmp_path / "none")]) == 1
    assert "not a rollout buffer" in capsys.readouterr().err


def test_inspect(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    fill(tmp_path, range(6))
    assert main(["inspect", str(tmp_path), "--row", "21", "--positions", "3"]) == 0
    out = capsys.readouterr().out
    for text in (
        "6, 24",
        "bytes a generated token",
        "head size",
        "sampled token in head",
        "rollout 21: group 5",
        "tail mass",
    ):
        assert text in out
    assert main(["inspect", str(tmp_path), "--row", "24"]) == 1
    assert "row 24: the buffer has 24 rollouts" in capsys.readouterr().err


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
