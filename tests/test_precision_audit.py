"""The layer audit: names against the real models, rules against the systems' own cases, and the planted mlp.gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_sc.cli import main
from megatron_sc.commands.trainer_flags import FLAGS, parse_trainer_flags
from megatron_sc.precision.audit import Audit, SamplerLayers, TrainerLayers, audit, by_layers
from megatron_sc.precision.ignore_rules import RULES, Module, PartlyIgnoredError, rule_for
from megatron_sc.precision.names import projections
from tests.distributed import run_ranks

DENSE = {"model_type": "qwen3", "num_hidden_layers": 4}
MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 3, "mlp_only_layers": [1]}
BLOCKWISE = "--bf16 --fp8-format e4m3 --fp8-recipe blockwise"


def compare(
    config: dict[str, Any],
    trainer: str,
    quantization: dict[str, Any] | None,
    engine: Any = "vllm",
    rule: str | None = None,
) -> Audit:
    args = parse_trainer_flags(trainer)
    layers = TrainerLayers.from_args(args, config["num_hidden_layers"])
    return audit(config, layers, SamplerLayers.from_config(quantization, engine, rule), args.moe_grouped_gemm)


# Names


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_checkpoint_names_are_those_of_transformers(kind):
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40,
    }  # fmt: skip
    with torch.device("meta"):
        if kind == "dense":
            config: Any = Qwen3Config(**sizes)
            model: nn.Module = Qwen3ForCausalLM(config)
        else:
            config = Qwen3MoeConfig(
                **sizes, num_experts=3, moe_intermediate_size=16, mlp_only_layers=[1], decoder_sparse_step=1
            )
            model = Qwen3MoeForCausalLM(config)
    theirs = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    theirs |= {name for name, _ in model.named_modules() if name.endswith((".experts", ".gate"))}
    found = projections(config.to_dict())
    ours = {part.engine if part.kind == "expert" else part.checkpoint for part in found}
    assert ours == theirs
    per_expert = [part.checkpoint for part in found if part.kind == "expert"]
    assert len(per_expert) == (0 if kind == "dense" else 3 * 3 * 3)
    if per_expert:
        assert per_expert[0] == "model.layers.0.mlp.experts.0.gate_proj"


def megatron_names(moe: bool) -> set[str]:
    """Linear modules of a two-layer GPTModel."""
    from tests.sampling_models import build_model

    model = build_model(moe=moe, tied=False)
    kinds = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router", "output_layer")
    return {name for name, _ in model.named_modules() if name.split(".")[-1] in kinds}


@pytest.mark.parametrize("moe", [False, True])
def test_megatron_names_are_those_of_the_model(moe):
    config = {"model_type": "qwen3_moe" if moe else "qwen3", "num_hidden_layers": 2, "num_experts": 4}
    ours = {part.megatron for part in projections(config, grouped_experts=False)}
    (theirs,) = run_ranks(megatron_names, 1, moe, megatron=True)
    assert ours == theirs


def test_grouped_experts_have_one_name():
    names = {part.megatron for part in projections(MOE) if part.kind == "expert" and part.layer == 0}
    assert names == {"decoder.layers.0.mlp.experts.linear_fc1", "decoder.layers.0.mlp.experts.linear_fc2"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "num_hidden_layers": 1}, "model_type 'llama' is not known; known: qwen3, qwen3_moe"),
        ({"model_type": "qwen3"}, "key 'num_hidden_layers' is missing"),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 1}, "key 'num_experts' is missing"),
    ],
)
def test_models_without_known_names_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        projections(config)


# Rules

LAYER = "model.layers.0"
QKV = Module(f"{LAYER}.self_attn.qkv_proj", tuple(f"{LAYER}.self_attn.{x}_proj" for x in "qkv"), "attention")
OUT = Module(f"{LAYER}.self_attn.o_proj", (f"{LAYER}.self_attn.o_proj",), "attention")
GATE_UP = Module(f"{LAYER}.mlp.gate_up_proj", (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"), "mlp")
DOWN = Module(f"{LAYER}.mlp.down_proj", (f"{LAYER}.mlp.down_proj",), "mlp")
ROUTER = Module(f"{LAYER}.mlp.gate", (f"{LAYER}.mlp.gate",), "router")
EXPERTS = Module(
    f"{LAYER}.mlp.experts",
    tuple(f"{LAYER}.mlp.experts.{e}.{x}_proj" for e in range(2) for x in ("gate", "up", "down")),
    "expert",
)
HEAD = Module("lm_head", ("lm_head",), "head")
SHARDS = list(QKV.shards)

CASES = [
    # vLLM FP8: AutoFP8 writes full paths, and all shards of a fused module (vllm pull 6657)
    ("vllm-fp8", QKV, SHARDS, SHARDS[0]),
    ("vllm-fp8", OUT, [f"{LAYER}.self_attn.o_proj"], f"{LAYER}.self_attn.o_proj"),
    ("vllm-fp8", OUT, ["self_attn.o_proj"], None),  # a short entry matches nothing (vllm pull 44628)
    ("vllm-fp8", OUT, ["self_attn"], None),
    ("vllm-fp8", QKV, SHARDS[:2], PartlyIgnoredError),
    ("vllm-fp8", GATE_UP, ["mlp.gate"], None),
    ("vllm-fp8", EXPERTS, [f"{LAYER}.mlp.experts.1.down_proj"], f"{LAYER}.mlp.experts.1.down_proj"),
    ("vllm-fp8", EXPERTS, ["model.layers.1.mlp.experts.1.down_proj"], None),
    # vLLM AWQ: parts of the text, shard by shard
    ("vllm-awq", OUT, ["self_attn"], "self_attn"),
    ("vllm-awq", QKV, ["layers.0.self_attn"], "layers.0.self_attn"),
    ("vllm-awq", GATE_UP, ["mlp.gate"], PartlyIgnoredError),
    ("vllm-awq", QKV, ["model.layers.1"], None),
    # SGLang FP8: whole components (sglang pull 23467), with and without "model." (pull 18742)
    ("sglang-fp8", GATE_UP, ["mlp.gate"], None),
    ("sglang-fp8", ROUTER, ["mlp.gate"], "mlp.gate"),
    ("sglang-fp8", OUT, ["layers.0.self_attn.o_proj"], "layers.0.self_attn.o_proj"),
    ("sglang-fp8", QKV, ["model.layers.0."], "model.layers.0."),
    ("sglang-fp8", EXPERTS, [f"{LAYER}.mlp.experts.0.up_proj"], f"{LAYER}.mlp.experts.0.up_proj"),
    ("sglang-fp8", EXPERTS, ["layers.0.mlp.experts.1.up_proj"], "layers.0.mlp.experts.1.up_proj"),
    ("sglang-fp8", GATE_UP, [f"{LAYER}.mlp.gate_proj"], PartlyIgnoredError),
    # The planted case
    ("substring", GATE_UP, ["mlp.gate"], "mlp.gate"),
    ("substring", DOWN, ["mlp.gate"], None),
    # compressed-tensors: llm-compressor writes re:.*mlp.gate$ for routers
    ("compressed-tensors", ROUTER, ["re:.*mlp.gate$"], "re:.*mlp.gate$"),
    ("compressed-tensors", GATE_UP, ["re:.*mlp.gate$"], None),
    ("compressed-tensors", GATE_UP, ["re:.*mlp.gate"], PartlyIgnoredError),
    ("compressed-tensors", GATE_UP, ["re:.*mlp.*"], "re:.*mlp.*"),
    ("compressed-tensors", GATE_UP, ["re:mlp.*"], None),  # from the start of the path
    ("compressed-tensors", GATE_UP, [GATE_UP.path], GATE_UP.path),
    ("compressed-tensors", HEAD, ["lm_head"], "lm_head"),
    ("compressed-tensors", EXPERTS, [f"re:{LAYER}.mlp.experts.*"], f"re:{LAYER}.mlp.experts.*"),
    ("compressed-tensors", EXPERTS, [f"{LAYER}.mlp.experts.1.down_proj"], None),  # only expert 0 is asked
    ("compressed-tensors", EXPERTS, [f"{LAYER}.mlp.experts.0.down_proj"], PartlyIgnoredError),
    ("compressed-tensors", OUT, ["self_attn.o_proj"], None),
    ("compressed-tensors-sglang", OUT, ["self_attn.o_proj"], "self_attn.o_proj"),
    ("compressed-tensors-sglang", DOWN, [f"{LAYER}.mlp"], None),  # never a prefix
    # ModelOpt: globs over the path; vLLM also takes parts of the text, SGLang globs over components
    ("vllm-modelopt", OUT, ["model.layers.0.self_attn*"], "model.layers.0.self_attn*"),
    ("vllm-modelopt", GATE_UP, ["mlp.gate"], "mlp.gate"),
    ("vllm-modelopt", HEAD, ["lm_head"], "lm_head"),
    ("sglang-modelopt", GATE_UP, ["mlp.gate"], None),
    ("sglang-modelopt", GATE_UP, ["*mlp.gate*"], "*mlp.gate*"),
    ("sglang-modelopt", OUT, ["self_attn"], "self_attn"),
    ("sglang-modelopt", EXPERTS, ["experts"], "experts"),
    ("sglang-modelopt", EXPERTS, [f"{LAYER}.mlp.experts.0.up_proj"], None),
]


@pytest.mark.parametrize(("rule", "module", "entries", "expected"), CASES)
def test_rules_read_entries_as_the_systems_do(rule, module, entries, expected):
    if expected is PartlyIgnoredError:
        with pytest.raises(PartlyIgnoredError, match=module.path):
            RULES[rule](module, entries)
    else:
        assert RULES[rule](module, entries) == expected


@pytest.mark.parametrize(
    "entry", ["mlp.gate", "lm_head", "model.layers.0", "model.layers.*", "layers.0", "o_proj", ".*gate.*", "a|b"]
)
def test_transformers_rule_is_transformers_own(entry):
    from transformers.quantizers.quantizers_utils import should_convert_module

    paths = [part.checkpoint for part in projections({**MOE, "num_hidden_layers": 12})]
    for path in paths:
        expected = not should_convert_module(path, [entry])
        assert (RULES["transformers"](Module(path, (path,), "mlp"), [entry]) is not None) == expected, path


def test_unknown_methods_and_rules_are_refused_with_what_is_known():
    assert rule_for("vllm", "modelopt_fp4") == "vllm-modelopt"
    assert rule_for("vllm", "awq_marlin") == "vllm-awq"
    with pytest.raises(ValueError, match="quant_method 'gguf' in vllm; known: vllm fp8"):
        rule_for("vllm", "gguf")
    with pytest.raises(ValueError, match="no ignore rule 'glob'; known: vllm-fp8"):
        SamplerLayers("fp8", "glob")
    with pytest.raises(ValueError, match="'quant_method' is missing"):
        SamplerLayers.from_config({"bits": 4}, "vllm")


# Both sides


def test_planted_gate_case():
    """56 dense layers whose ignore list was written for a MoE: read as text, it takes every gate_up_proj."""
    config = {"model_type": "qwen3", "num_hidden_layers": 56}
    quantization = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "mlp.gate"]}
    result = compare(config, BLOCKWISE, quantization, "sglang", "substring")
    assert {d.projection.checkpoint for d in result.differences} == {
        f"model.layers.{layer}.mlp.{name}" for layer in range(56) for name in ("gate_proj", "up_proj")
    }
    assert set(result.partial_names) == {("mlp.gate", f"model.layers.{layer}.mlp.gate_up_proj") for layer in range(56)}
    lines = by_layers(result.differences)
    assert [(pattern, layers, count) for pattern, layers, _, count in lines] == [
        ("model.layers.*.mlp.gate_proj", "0-55", 56),
        ("model.layers.*.mlp.up_proj", "0-55", 56),
    ]
    assert lines[0][2].sampler.because == "ignored by 'mlp.gate'"
    fixed = compare(config, BLOCKWISE, quantization, "sglang")
    assert fixed.agrees
    assert not fixed.partial_names
    assert fixed.unused == ("mlp.gate",)
    assert not result.unused


def test_first_and_last_layers_of_the_trainer_must_be_ignored_by_the_sampler():
    trainer = f"{BLOCKWISE} --first-last-layers-bf16 --num-layers-at-end-in-bf16 2 --moe-grouped-gemm"
    result = compare(MOE, trainer, {"quant_method": "fp8"})
    assert {d.projection.layer for d in result.differences} == {0, 2, 3}
    assert all(d.sampler.is_quantized and d.trainer.because == "--first-last-layers-bf16" for d in result.differences)
    ignored = [f"model.layers.{layer}" for layer in (0, 2, 3)]
    assert compare(MOE, trainer, {"quant_method": "fp8", "modules_to_not_convert": ignored}, "sglang").agrees
    assert not compare(MOE, trainer, {"quant_method": "fp8", "modules_to_not_convert": ignored}).agrees


def is_bf16_layer(flags: str, layer: int) -> bool:
    """Megatron's own decision."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    args = parse_trainer_flags(flags)
    args.num_layers = 6
    return bool(is_first_last_bf16_layer(args, layer))


def megatron_bf16_layers(flags: list[str]) -> list[list[bool]]:
    return [[is_bf16_layer(flag, layer) for layer in range(6)] for flag in flags]


def test_first_and_last_layers_are_megatrons():
    flags = [
        BLOCKWISE,
        f"{BLOCKWISE} --first-last-layers-bf16",
        f"{BLOCKWISE} --first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 0",
    ]
    (expected,) = run_ranks(megatron_bf16_layers, 1, flags, megatron=True)
    config = {"model_type": "qwen3", "num_hidden_layers": 6}
    for flag, layers in zip(flags, expected, strict=True):
        trainer = TrainerLayers.from_args(parse_trainer_flags(flag), 6)
        for part in projections(config)[:-1]:
            assert trainer.verdict(part).is_quantized != layers[part.layer]


PRECISION_FILE = """
configs:
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  fine: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {fp8_quantization_recipe: mxfp8}}
  forced:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: mxfp8, override_nonquantized_autocast: true}
matchers:
  off: {config: bf16, type: glob, pattern: "*", enabled: false}
  attention: {config: bf16, type: glob, pattern: "*.linear_qkv", enabled: true}
  first: {config: forced, type: glob, pattern: "*layers.0.mlp.linear_fc2", enabled: true}
  experts: {config: fine, type: glob, pattern: "*mlp.*", enabled: true}
"""


def overridden(text: str, folder: str, flags: str) -> dict[str, tuple[str, str]]:
    """Verdicts by Megatron name."""
    path = Path(folder) / "precision.yaml"
    path.write_text(text)
    trainer = TrainerLayers.from_args(parse_trainer_flags(f"{flags} --te-precision-config-file {path}"), 4)
    return {part.megatron: (v.precision, v.because) for part in projections(DENSE) for v in (trainer.verdict(part),)}


def test_precision_file_overrides_as_megatron_documents(tmp_path):
    first = f"{BLOCKWISE} --first-last-layers-bf16 --num-layers-at-end-in-bf16 0"
    (found,) = run_ranks(overridden, 1, PRECISION_FILE, str(tmp_path), first, megatron=True)
    assert found["decoder.layers.1.self_attention.linear_qkv"] == ("bf16", "'bf16' of the precision file")
    assert found["decoder.layers.1.self_attention.linear_proj"] == ("fp8 blockwise", "recipe of the run")
    assert found["decoder.layers.1.mlp.linear_fc1"] == ("fp8 mxfp8", "'fine' of the precision file")
    assert found["decoder.layers.0.mlp.linear_fc1"] == ("bf16", "--first-last-layers-bf16")  # not overridden
    assert found["decoder.layers.0.mlp.linear_fc2"] == ("fp8 mxfp8", "'forced' of the precision file")
    (piped,) = run_ranks(
        overridden, 1, PRECISION_FILE, str(tmp_path), f"{first} --pipeline-model-parallel-size 2", megatron=True
    )
    assert piped["decoder.layers.2.mlp.linear_fc2"] == ("fp8 mxfp8", "'forced' of the precision file")  # 0 of stage 1
    assert found["decoder.layers.2.mlp.linear_fc2"] == ("fp8 mxfp8", "'fine' of the precision file")


def test_precision_file_with_uneven_stages_is_refused(tmp_path):
    path = tmp_path / "precision.yaml"
    path.write_text(PRECISION_FILE)
    flags = f"{BLOCKWISE} --te-precision-config-file {path} --decoder-first-pipeline-num-layers 1"
    with pytest.raises(ValueError, match=r"--decoder-first-pipeline-num-layers: .* stages differ"):
        TrainerLayers.from_args(parse_trainer_flags(flags), 4)


def test_router_and_head_are_left_alone_by_both_sides():
    result = compare(MOE, f"{BLOCKWISE} --moe-grouped-gemm", {"quant_method": "fp8"})
    assert result.agrees
    head = compare(DENSE, "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-output-proj", {"quant_method": "fp8"})
    assert [d.projection.checkpoint for d in head.differences] == ["lm_head"]


def test_a_trainer_without_transformer_engine_quantizes_nothing():
    result = compare(DENSE, f"{BLOCKWISE} --transformer-impl local", {"quant_method": "fp8"})
    assert len(result.differences) == 7 * 4
    assert compare(DENSE, "--bf16", None).agrees


def test_partly_ignored_modules_are_reported_as_refused():
    quantization = {"quant_method": "fp8", "ignored_layers": ["model.layers.2.self_attn.q_proj"]}
    result = compare(DENSE, BLOCKWISE, quantization)
    assert not result.agrees
    assert "model.layers.2.self_attn.qkv_proj: model.layers.2.self_attn.q_proj ignored" in result.refused[0]


def test_entries_of_a_multimodal_wrapper_name_nothing():
    """transformers issue 48349: paths with the wrapper's prefix match no layer of the text model."""
    wrapped = "model.language_model.layers.0.self_attn.o_proj"
    result = compare(DENSE, BLOCKWISE, {"quant_method": "fp8", "modules_to_not_convert": [wrapped]}, "transformers")
    assert result.unused == (wrapped,)


def test_compressed_tensors_groups_decide_what_is_quantized():
    attention = {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8}}
    quantization: dict[str, Any] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": attention},
        "ignore": ["lm_head"],
    }  # fmt: skip
    result = compare(DENSE, BLOCKWISE, quantization)
    assert {d.projection.kind for d in result.differences} == {"mlp"}
    assert {d.sampler.because for d in result.differences} == {"no group targets it"}
    attention["targets"] = ["re:.*[qkv]_proj"]
    assert {d.projection.megatron.split(".")[-1] for d in compare(DENSE, BLOCKWISE, quantization).differences} == {
        "linear_proj", "linear_fc1", "linear_fc2",
    }  # fmt: skip
    attention["targets"] = ["re:.*q_proj", "re:.*o_proj", "re:.*mlp.*"]  # not all shards of qkv_proj
    assert {d.projection.checkpoint[-6:] for d in compare(DENSE, BLOCKWISE, quantization).differences} == {
        "q_proj", "k_proj", "v_proj",
    }  # fmt: skip
    attention["targets"] = ["Linear"]
    quantization["ignore"] += ["re:.*mlp.gate$", "re:.*visual.*"]
    assert compare(MOE, f"{BLOCKWISE} --moe-grouped-gemm", quantization).unused == ("re:.*visual.*",)
    assert compare(DENSE, BLOCKWISE, quantization).agrees
    assert compare(MOE, f"{BLOCKWISE} --moe-grouped-gemm", quantization).agrees


def test_real_qwen3_moe_fp8_config():
    """The layout of Qwen3-30B-A3B-FP8: norms and routers by full path (llm-compressor issue 1758)."""
    names = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    ignored = ["lm_head", *(f"model.layers.{layer}.{name}" for layer in range(48) for name in names)]
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "mlp_only_layers": []}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ignored}
    for engine in ("vllm", "sglang"):
        result = compare(config, f"{BLOCKWISE} --moe-grouped-gemm", quantization, engine)
        assert result.agrees
        assert not result.partial_names
        assert all("layernorm" in entry for entry in result.unused)
        assert result.matrices == 48 * (4 + 1 + 3 * 128) + 1


# Command


def test_command_prints_the_difference(tmp_path, capsys):
    quantization = {"quant_method": "fp8", "modules_to_not_convert": ["mlp.gate"]}
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "quantization_config": quantization}))
    command = ["audit", str(tmp_path), "--trainer", BLOCKWISE, "--engine", "sglang"]
    assert main(command) == 0
    assert "entry 'mlp.gate' names nothing of this model" in capsys.readouterr().out
    assert main([*command, "--rule", "substring"]) == 1
    printed = capsys.readouterr().out
    assert "entry 'mlp.gate' takes 4 modules of which it is only a part of a name" in printed
    assert "0-3" in printed
    assert main([*command, "--rule", "substring", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [line["matrices"] for line in result["differences"]] == [
        "model.layers.*.mlp.gate_proj",
        "model.layers.*.mlp.up_proj",
    ]
    assert result["differences"][0]["trainer"] == "fp8 blockwise"


def test_command_reads_modelopts_file_and_online_quantization(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    command = ["audit", str(tmp_path / "config.json"), "--trainer", BLOCKWISE]
    assert main(command) == 1
    assert main([*command, "--quantization", "fp8"]) == 0
    modelopt = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.0.mlp*"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt))
    capsys.readouterr()
    assert main([*command, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert {line["layers"] for line in result["differences"]} == {"0"}


def test_command_names_what_is_wrong(tmp_path, capsys):
    assert main(["audit", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["audit", str(tmp_path)]) == 2
    assert "not JSON" in capsys.readouterr().err


def flags_of_megatron() -> dict[str, tuple[Any, Any, Any]]:
    """(destination, default, choices) of Megatron's flags."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser())
    return {
        name: (action.dest, action.default, tuple(action.choices) if action.choices else None)
        for action in parser._actions
        for name in action.option_strings
    }


def test_trainer_flags_are_megatrons():
    (theirs,) = run_ranks(flags_of_megatron, 1, megatron=True)
    defaults = vars(parse_trainer_flags(""))
    for flag, options in FLAGS.items():
        dest, default, choices = theirs[flag]
        assert options.get("dest", flag[2:].replace("-", "_")) == dest, flag
        if default is not None:  # Megatron sets these two when it validates
            assert defaults[dest] == default, flag
        if options.get("choices"):
            assert set(options["choices"]) == set(choices), flag
    args = parse_trainer_flags(f"python pretrain_gpt.py --lr 1e-6 {BLOCKWISE} --num-layers 3 --unknown 4")
    assert (args.fp8, args.fp8_recipe, args.num_layers) == ("e4m3", "blockwise", 3)
