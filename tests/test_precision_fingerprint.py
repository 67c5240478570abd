"""What contradicts between trainer and sampler, how severe it is, and what is printed and stored."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_sc.cli import main
from megatron_sc.commands.trainer_flags import parse_trainer_flags
from megatron_sc.precision.fingerprint import (
    Contradiction,
    PrecisionRefusedError,
    TrainerFingerprint,
    contradictions,
    report,
    sampler_fields,
)
from megatron_sc.rollouts import Manifest, RolloutWriter, SamplerFingerprint
from tests.distributed import run_ranks
from tests.rollouts import make_rollouts
from tests.train_fixed import TINY

BLOCKWISE = "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --true-vocab-size 100"
KNOWN: dict[str, Any] = {
    "engine": "vllm",
    "weight_dtype": "fp8_e4m3",
    "kv_cache_dtype": "bfloat16",
    "scale_type": "power-of-two",
    "logits_dtype": "bfloat16",
    "true_vocab_size": 100,
}


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"):
        monkeypatch.delenv(name, raising=False)


def trainer(flags: str = BLOCKWISE, temperature: float | None = None) -> TrainerFingerprint:
    return TrainerFingerprint.from_args(parse_trainer_flags(flags), temperature)


def found(flags: str, sampler: dict[str, Any]) -> dict[str, str]:
    """{what: severity}."""
    return {item.what: item.severity for item in contradictions(trainer(flags), KNOWN | sampler)}


def test_sides_that_agree_have_nothing_to_say():
    assert found(BLOCKWISE, {}) == {}


@pytest.mark.parametrize(
    ("flags", "sampler", "what", "severity"),
    [
        (BLOCKWISE, {"true_vocab_size": 99}, "true_vocab_size", "refuse"),
        (f"{BLOCKWISE} --rollout-tokenizer-hash a", {"tokenizer_hash": "b"}, "tokenizer_hash", "refuse"),
        (BLOCKWISE, {"temperature": 0.0}, "temperature", "refuse"),
        (BLOCKWISE, {"logprobs_mode": "raw", "temperature": 0.7}, "logprobs_mode", "refuse"),
        (BLOCKWISE, {"top_p": 0.9}, "truncation", "refuse"),
        (f"{BLOCKWISE} --sampler-distribution full", {"min_p": 0.1}, "truncation", "refuse"),
        (BLOCKWISE, {"repetition_penalty": 1.1}, "repetition_penalty", "warn"),
        (f"{BLOCKWISE} --sc-logits-dtype fp32", {}, "logits", "warn"),
        (f"{BLOCKWISE} --sc-logits-dtype fp32", {"logits_dtype": ""}, "logits", "warn"),
        (BLOCKWISE, {"logits_dtype": "float32"}, "logits", "warn"),
        (BLOCKWISE, {"scale_type": "float32"}, "scales", "warn"),
        (BLOCKWISE, {"scale_type": ""}, "scales", "note"),
        (BLOCKWISE, {"kv_cache_dtype": ""}, "KV cache", "warn"),
        (f"{BLOCKWISE} --fp8-recipe delayed --micro-batch-size 2", {}, "scales of a micro-batch", "warn"),
        (f"{BLOCKWISE} --fp8-recipe tensorwise --micro-batch-tokens 64", {}, "scales of a micro-batch", "warn"),
        (f"{BLOCKWISE} --num-experts 4 --moe-expert-capacity-factor 1", {}, "padding", "warn"),
        ("--bf16 --true-vocab-size 100", {}, "quantization", "note"),
        (BLOCKWISE, {"weight_dtype": "bfloat16"}, "quantization", "note"),
        (BLOCKWISE, {"weight_dtype": ""}, "weights", "note"),
        (f"{BLOCKWISE} --first-last-layers-bf16 --num-layers 4", {}, "unquantized layers", "note"),
    ],
)
def test_contradiction(flags, sampler, what, severity):
    assert found(flags, sampler).get(what) == severity


@pytest.mark.parametrize(
    ("flags", "sampler"),
    [
        (BLOCKWISE, {"tokenizer_hash": "b"}),  # the trainer's is not known
        (BLOCKWISE, {"temperature": 0.7}),  # each rollout's own
        (BLOCKWISE, {"logprobs_mode": "raw", "temperature": 1.0}),
        (f"{BLOCKWISE} --sampler-distribution support", {"top_p": 0.9}),
        (BLOCKWISE, {"top_k": -1}),  # vLLM's none
        (BLOCKWISE, {"scale_type": "", "quantization": "w8a8-block128-ue8m0"}),
        (BLOCKWISE, {"kv_cache_dtype": "", "engine": "embedded"}),
        (f"{BLOCKWISE} --fp8-recipe delayed", {"scale_type": "float32"}),  # one row a micro-batch
        (f"{BLOCKWISE} --micro-batch-size 4", {}),
    ],
)
def test_no_contradiction(flags, sampler):
    assert found(flags, sampler) == {}


def test_temperature_is_compared_where_the_trainer_fixes_one():
    assert contradictions(trainer(temperature=0.7), KNOWN | {"temperature": 0.7}) == []
    items = contradictions(trainer(temperature=1.0), KNOWN | {"temperature": 0.7})
    assert [(item.what, item.severity) for item in items] == [("temperature", "refuse")]


@pytest.mark.parametrize(
    ("recipe", "knobs", "expected"),
    [
        ("blockwise", {}, "power-of-two"),
        ("blockwise", {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}, "float32"),
        ("tensorwise", {}, "float32"),
        ("tensorwise", {"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1"}, "power-of-two"),
        ("delayed", {}, "float32"),
        ("mxfp8", {}, "power-of-two"),
    ],
)
def test_scale_type_follows_recipe_and_environment(recipe, knobs, expected, monkeypatch):
    for name, value in knobs.items():
        monkeypatch.setenv(name, value)
    mark = trainer(f"{BLOCKWISE} --fp8-recipe {recipe}")
    assert mark.scale_type == expected
    assert {name: mark.environment[name] for name in knobs} == knobs


def test_trainer_side():
    flags = f"{BLOCKWISE} --fp8-recipe delayed --fp8-margin 1 --num-layers 5 --first-last-layers-bf16"
    mark = trainer(f"{flags} --num-layers-at-end-in-bf16 2 --fp8-param-gather --sc-logits-dtype fp32")
    assert mark.quantization == "fp8 delayed"
    assert "margin=1" in mark.recipe
    assert mark.bf16_layers == (0, 3, 4)
    assert (mark.params_dtype, mark.logits_dtype, mark.param_gather) == ("bfloat16", "float32", True)
    assert mark.versions["megatron-core"].startswith("0.19")
    plain = trainer("--bf16 --fp8-format e4m3 --transformer-impl local")
    assert (plain.quantization, plain.recipe, plain.scale_type) == ("", "", "")


def test_precision_file_is_hashed_and_its_evaluation_recipes_are_named(tmp_path):
    path = tmp_path / "precision.yaml"
    path.write_text(
        "configs:\n  a: {training_recipe: {fp8_quantization_recipe: tensorwise}, evaluation_recipe: {}}\n"
        "  b: {training_recipe: {}}\n"
    )
    flags = f"{BLOCKWISE} --te-precision-config-file {path}"
    mark = run_ranks(trainer, 1, flags, megatron=True)[0]
    assert mark.precision_file == hashlib.sha256(path.read_bytes()).hexdigest()
    assert mark.evaluates_in == ("a: bf16",)
    assert not mark.shares_scales
    items = contradictions(mark, KNOWN)
    assert [(item.what, item.severity) for item in items] == [("evaluation recipes", "warn")]


def test_fingerprint_file_round_trips_and_refuses_others(tmp_path):
    mark = trainer(f"{BLOCKWISE} --num-layers 3 --first-last-layers-bf16")
    assert TrainerFingerprint.from_json(mark.to_json(), "a.json") == mark
    body = json.loads(mark.to_json())
    body["trainer"]["colour"] = 1
    for text, message in (
        ("{", "a.json: not a trainer's fingerprint"),
        ("{}", "a.json: not a trainer's fingerprint: 'trainer'"),
        (json.dumps(body), "a.json: unknown key 'colour'"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainerFingerprint.from_json(text, "a.json")


def test_manifest_is_a_sampler():
    manifest = Manifest(100, "hash", SamplerFingerprint("vllm", "0.20", "fp8_e4m3", kv_cache_dtype="fp8_e5m2"))
    fields = sampler_fields(manifest)
    assert (fields["true_vocab_size"], fields["tokenizer_hash"], fields["engine"]) == (100, "hash", "vllm")
    assert "sampler" not in fields
    assert {item.what for item in contradictions(trainer(), manifest)} == {"scales"}
    assert {item.what for item in contradictions(trainer(), manifest.sampler)} == {"scales"}


def test_report_prints_the_table_saves_and_refuses(tmp_path, capsys):
    args = parse_trainer_flags(f"{BLOCKWISE} --sc-logits-dtype fp32")
    items = report(args, KNOWN, save=tmp_path / "trainer.json")
    printed = capsys.readouterr().out
    for text in ("fp8 blockwise", "power-of-two", "vllm", "warn: logits: trainer float32, sampler bfloat16"):
        assert text in printed
    assert [item.severity for item in items] == ["warn"]
    assert TrainerFingerprint.from_json((tmp_path / "trainer.json").read_text(), "").logits_dtype == "float32"
    with pytest.raises(PrecisionRefusedError, match=r"refuse: true_vocab_size: trainer 100, sampler 99: .*set --true"):
        report(args, KNOWN | {"true_vocab_size": 99})
    assert "99" in capsys.readouterr().out
    assert report(args, show=False) == []
    assert capsys.readouterr().out == ""


def test_the_worst_comes_first():
    items = contradictions(trainer(f"{BLOCKWISE} --sc-logits-dtype fp32"), {"true_vocab_size": 99})
    assert [item.severity for item in items] == sorted(
        (i.severity for i in items), key=["refuse", "warn", "note"].index
    )
    assert items[0].what == "true_vocab_size"


def reported(flags: str) -> list[Contradiction]:
    """``report`` on arguments of Megatron's own parser, validated."""
    import sys
    from unittest import mock

    from megatron.training.arguments import parse_args, validate_args

    from megatron_sc.training.arguments import add_arguments

    with mock.patch.object(sys, "argv", ["train", *TINY.split(), *flags.split()]):
        args = parse_args(extra_args_provider=add_arguments)
        validate_args(args)
    mark = TrainerFingerprint.from_args(args)
    assert (mark.true_vocab_size, mark.distribution) == (30, "head")
    return report(args, KNOWN | {"true_vocab_size": 30})


def test_megatrons_own_arguments_are_read():
    flags = "--loss-correction score_centering --micro-batch-size 2 --train-iters 1 --bf16 --fp8-format hybrid"
    (items,) = run_ranks(reported, 1, f"{flags} --transformer-impl transformer_engine", megatron=True)
    assert {item.what for item in items} == {"scales of a micro-batch", "scales"}
    (items,) = run_ranks(reported, 1, flags, megatron=True)  # without Transformer Engine nothing is quantized
    assert {item.what for item in items} == {"quantization"}


@pytest.fixture
def buffer(tmp_path: Path) -> Path:
    path = tmp_path / "buffer"
    sampler = SamplerFingerprint(engine="sglang", weight_dtype="fp8_e4m3", kv_cache_dtype="bfloat16", temperature=1.0)
    with RolloutWriter(path, Manifest(30, sampler=sampler)) as writer:
        writer.write(make_rollouts(1, 2, vocab=30, head=8))
    return path


def test_command_compares_a_trainer_with_a_buffer(buffer, tmp_path, capsys):
    flags = BLOCKWISE.replace("100", "30")
    saved = str(tmp_path / "trainer.json")
    assert main(["fingerprint", str(buffer), "--trainer", flags, "--save", saved]) == 0
    assert "sglang" in capsys.readouterr().out
    assert main(["fingerprint", saved, str(buffer), "--json"]) == 0
    items = json.loads(capsys.readouterr().out)["contradictions"]
    assert [(item["what"], item["severity"]) for item in items] == [("scales", "note")]
    assert main(["fingerprint", str(buffer), "--trainer", flags, "--temperature", "0.7"]) == 1
    assert main(["fingerprint", str(buffer), "--trainer", BLOCKWISE]) == 1
    assert "refuse: true_vocab_size: trainer 100, sampler 30" in capsys.readouterr().out


def test_command_compares_two_of_a_kind(buffer, tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(trainer().to_json())
    second.write_text(trainer(f"{BLOCKWISE} --fp8-recipe mxfp8").to_json())
    assert main(["fingerprint", str(first), str(first)]) == 0
    assert main(["fingerprint", str(first), str(second)]) == 1
    assert "quantization: 'fp8 blockwise' and 'fp8 mxfp8'" in capsys.readouterr().out
    assert main(["fingerprint", str(buffer), str(buffer), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"differences": {}}


def test_command_names_what_is_wrong(tmp_path, capsys):
    assert main(["fingerprint", str(tmp_path)]) == 2
    assert "not a rollout buffer" in capsys.readouterr().err
    (tmp_path / "trainer.json").write_text(trainer().to_json())
    assert main(["fingerprint", str(tmp_path / "trainer.json")]) == 2
    assert "compares 2 sides, got 1" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_recipe_is_printed_by_transformer_engine(recipe):
    assert trainer(f"{BLOCKWISE} --fp8-recipe {recipe}").recipe.startswith("recipe_type=")
