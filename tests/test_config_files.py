"""Configuration files: how they combine, what they become, and what is refused with the key's path."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from megatron_sc.configuration import Cluster, ConfigurationError, read_files, to_argv
from megatron_sc.training.config_files import split_files
from tests.distributed import RankError, run_megatron

ROOT = Path(__file__).parents[1]


def parser() -> argparse.ArgumentParser:
    """One flag of each kind."""
    result = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    result.add_argument("--layers", type=int)
    result.add_argument("--rate", type=float)
    result.add_argument("--kind", choices=["none", "some"])
    result.add_argument("--swish", action="store_true")
    result.add_argument("--no-fusion", "--disable-fusion", action="store_false", dest="fusion")
    result.add_argument("--graph", action=argparse.BooleanOptionalAction)
    result.add_argument("--sizes", type=int, nargs="+")
    result.add_argument("--tokenizer-type")
    return result


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def argv_of(folder: Path, *names: str) -> list[str]:
    return to_argv(read_files(folder / f"{name}.yaml" for name in names).flags, parser())


def refusal(folder: Path, *names: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        argv_of(folder, *names)
    return str(error.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("flags", "argv"),
    [
        ("{layers: 48}", ["--layers", "48"]),
        ("{rate: 1e-6}", ["--rate", "1e-06"]),
        ("{rate: -1}", ["--rate=-1"]),
        ("{kind: none}", ["--kind", "none"]),
        ("{swish: true, graph: true}", ["--swish", "--graph"]),
        ("{swish: false, graph: false, layers: null}", ["--no-graph"]),
        ("{no-graph: false}", ["--graph"]),
        ("{disable-fusion: true}", ["--disable-fusion"]),
        ("{sizes: [1, 2]}", ["--sizes", "1", "2"]),
        ("{tokenizer-type: '${oc.env:SC_TEST_TOKENIZER}'}", ["--tokenizer-type", "a b"]),
    ],
)
def test_values_become_words(flags: str, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SC_TEST_TOKENIZER", "a b")
    write(tmp_path, a=f"flags: {flags}")
    assert argv_of(tmp_path, "a") == argv
    parser().parse_args(argv)


def test_a_file_wins_over_what_it_includes_and_a_later_file_over_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    write(tmp_path / "models", base="flags: {layers: 2, swish: true, kind: some}\ncluster: {gpu-memory-gib: 80}")
    write(
        tmp_path,
        a="include: [models/base.yaml]\ncluster: {nodes: 2, gpus-per-node: 4}\nflags: {layers: 3, kind: null}",
        b="flags: {swish: false, rate: 0.5}\ncluster: {nodes: 1}",
    )
    assert argv_of(tmp_path, "a") == ["--layers", "3", "--swish"]
    assert argv_of(tmp_path, "a", "b") == ["--layers", "3", "--rate", "0.5"]
    assert argv_of(tmp_path, "b", "a") == ["--swish", "--rate", "0.5", "--layers", "3"]
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    assert read_files(files[:1]).cluster == Cluster(2, 4, 80)
    assert read_files(files).cluster == Cluster(1, 4, 80)
    assert read_files(files[:1]).flags["swish"].place == f"{tmp_path}/models/base.yaml: flags.swish"


def test_one_file_may_be_included_twice(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="flags: {layers: 2}",
        left="include: [base.yaml]",
        right="include: [base.yaml]",
        top="include: [left.yaml, right.yaml]",
    )
    assert argv_of(tmp_path, "top") == ["--layers", "2"]


def test_included_files_that_contradict_are_refused_unless_the_file_decides(tmp_path: Path) -> None:
    write(
        tmp_path,
        one="flags: {layers: 1}\ncluster: {nodes: 1}",
        two="flags: {layers: 2}\ncluster: {nodes: 1}",
        many="cluster: {nodes: 9}",
        both="include: [one.yaml, two.yaml]",
        decided="include: [one.yaml, two.yaml]\nflags: {layers: 3}",
        size="include: [one.yaml, many.yaml]",
    )
    assert refusal(tmp_path, "both") == (
        "one.yaml: flags.layers = 1 contradicts two.yaml: flags.layers = 2; "
        "set layers in both.yaml, which includes both"
    )
    assert "cluster.nodes = 1 contradicts many.yaml: cluster.nodes = 9" in refusal(tmp_path, "size")
    assert argv_of(tmp_path, "decided") == ["--layers", "3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "flags: {layer: 1}",
            "a.yaml: flags.layer: neither Megatron nor the plugin has a flag --layer; did you mean lay",
        ),
        ("flags: {tokenizer_type: x}", "a.yaml: flags.tokenizer_type: .* did you mean tokenizer-type?"),
        ("flags: {layers: x}", "a.yaml: flags.layers = 'x': invalid int value"),
        ("flags: {kind: other}", "a.yaml: flags.kind = 'other': invalid choice"),
        ("flags: {layers: true}", "a.yaml: flags.layers = True: --layers takes a value"),
        ("flags: {layers: [1, 2]}", "a.yaml: flags.layers = .1, 2.: --layers takes one value, not a list"),
        ("flags: {swish: 1}", "a.yaml: flags.swish = 1: --swish is a switch; write true or false"),
        ("flags: {layers: {a: 1}}", "a.yaml: flags.layers: must be a number"),
        ("flags: {layers: 1, layers: 2}", "found duplicate key layers"),
        (
            "flags: {no-fusion: true, disable-fusion: true}",
            "flags.no-fusion = True and .*a.yaml: flags.disable-fusion = True set",
        ),
        ("flags: {layers: '${oc.env:SC_TEST_NOT_SET}'}", "a.yaml: flags.layers: .*SC_TEST_NOT_SET"),
        ("flags: {layers: '???'}", "a.yaml: flags.layers: Missing mandatory value"),
        ("flags: {sc-config: b.yaml}", "flags.sc-config: --sc-config cannot be set in a file; use include"),
        ("flags: [layers]", "a.yaml: flags: must map keys to values"),
        ("flag: {layers: 1}", "a.yaml: flag: unknown section; a file has include, cluster, flags"),
        ("- 1", "a.yaml: a file is a mapping"),
        ("flags: {", "a.yaml: not YAML: "),
        ("include: b.yaml", "a.yaml: include: must be a list of paths"),
        ("include: [a.yaml]", "a.yaml: include: this file includes itself"),
        ("include: [none.yaml]", "none.yaml: cannot be read: No such file"),
        ("cluster: {node: 1}", "a.yaml: cluster.node: unknown key; there are nodes, gpus-per-node, gpu-memory-gib"),
    ],
)
def test_what_is_wrong_is_refused_with_file_and_key(text: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, a=text)
    with pytest.raises(ConfigurationError, match=message):
        argv_of(tmp_path, "a")


@pytest.mark.parametrize(
    "cluster", ["nodes: 0", "nodes: 1.5", "gpus-per-node: many", "nodes: true", "gpu-memory-gib: -1"]
)
def test_a_cluster_has_positive_sizes(cluster: str, tmp_path: Path) -> None:
    write(tmp_path, a=f"cluster: {{{cluster}}}")
    with pytest.raises(ConfigurationError, match=rf"a.yaml: cluster.{cluster.partition(':')[0]} = .*above 0"):
        _ = read_files([tmp_path / "a.yaml"]).cluster


def test_files_are_taken_out_of_the_command_line() -> None:
    words = ["script.py", "--a", "1", "--sc-config", "x.yaml", "--b", "--sc-config=y.yaml", "--c"]
    assert split_files(words) == (["x.yaml", "y.yaml"], ["script.py", "--a", "1", "--b", "--c"])
    for wrong in (["--sc-config"], ["--sc-config", "--b"], ["--sc-config="]):
        with pytest.raises(ConfigurationError, match="--sc-config needs a file"):
            split_files(wrong)


def test_a_script_trains_from_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    write(tmp_path, mis=(ROOT / "configs/objectives/mis_score_centering.yaml").read_text())
    script, tiny = ROOT / "examples/pretrain_gpt_sc.py", ROOT / "configs/tiny/1x1.yaml"
    files = ["--sc-config", tiny, "--sc-config", tmp_path / "mis.yaml"]
    flags = ["--train-iters=2", "--log-interval", "1", "--metrics-jsonl", metrics]
    (output,) = run_megatron([script, "--micro-batch-size", "64", *files, *flags], 1, timeout=200)
    arguments = dict(line.split(" ", 1) for line in map(str.strip, output.splitlines()) if " ....." in line)
    values = {name: text.strip(". ") for name, text in arguments.items()}
    assert (values["micro_batch_size"], values["importance_weight"]) == ("64", "mis")
    assert (values["loss_correction"], values["sampler"]) == ("score_centering", "gaussian")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [step["step"] for step in steps if step["split"] == "train"] == [1, 2]
    assert steps[0]["grad_norm"] > 0


def test_a_script_refuses_a_wrong_file(tmp_path: Path) -> None:
    write(tmp_path, wrong="flags: {hiden-size: 64}")
    with pytest.raises(RankError, match=r"exit code 2(.|\n)*flags\.hiden-size.*did you mean hidden-size"):
        run_megatron([ROOT / "examples/pretrain_gpt_sc.py", "--sc-config", tmp_path / "wrong.yaml"], 1)
