"""The simulated sampler: against plain PyTorch, under every layout, and that the trainer keeps every bit."""

import dataclasses
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed import run_ranks
from sampling_models import VOCAB, build_model, groups
from simulated_models import (
    TOKENS,
    make_config,
    plain_logprobs,
    scored,
    scored_by_stages,
    scored_by_stand_ins,
    scored_under,
    state_hash,
    weights_and_scores,
)
from test_quantize import reference
from test_sampling_embedded import assert_same

from megatron_sc.precision.quantize import Quantizer
from megatron_sc.precision.simulate import _normalize, linear_names, simulate_sampler
from megatron_sc.precision.specs import SPECS, SamplerSpec
from megatron_sc.sampling import EmbeddedSampler, simulated

CUT = SamplerSpec(
    weights=Quantizer.parse("e4m3/16x16"),  # blocks that two ranks share, in every matrix
    activations=Quantizer.parse("int8/1x32"),
    expert_weights=Quantizer.parse("nvfp4"),
    keys=Quantizer.parse("int8/row"),
    noise=0.05,
)
PAPER = ["fp8-fp8kv", "fp8-fp4kv", "int8-int4kv"]
LAYOUT_SPECS = [SPECS["trainer"], *(SPECS[name] for name in PAPER), SPECS["nvfp4"], SPECS["fp8-tensor"], CUT]


def quantized(x, name):
    """By the reference of the quantizers' own test."""
    values = x.float().numpy().reshape(-1, x.shape[-1])
    return torch.from_numpy(reference(values, Quantizer.parse(name))[0]).view(x.shape)


@pytest.mark.parametrize(
    ("name", "weights", "activations", "cache"),
    [
        ("fp8-fp8kv", "e4m3/128x128", "e4m3/1x128", "e4m3/row"),
        ("fp8-fp4kv", "e4m3/128x128", "e4m3/1x128", "e2m1/1x16/e4m3_row"),
        ("int8-int4kv", "int8/row", "int8/row", "int4/row"),
        ("nvfp4", "nvfp4", "e2m1/1x16/e4m3_row", "e4m3/row"),
    ],
)
def test_the_named_samplers_are_these_formulas(name, weights, activations, cache):
    """Each projection of a fused matrix by itself, activations by token, cache by head and token, from bfloat16."""
    ((parameters, (trainer, sampler)),) = run_ranks(
        weights_and_scores, 1, [SPECS["trainer"], SPECS[name]], megatron=True
    )
    tokens = torch.from_numpy(TOKENS)
    plain = plain_logprobs(parameters, tokens, lambda x, w: x @ w.T, lambda x: x)
    assert (plain - trainer).abs().max() < 1e-4
    expected = plain_logprobs(
        parameters,
        tokens,
        lambda x, w: quantized(x, activations) @ quantized(w.bfloat16(), weights).T,
        lambda x: quantized(x, cache),
    )
    assert (expected - sampler).abs().max() < 1e-4
    assert (trainer - sampler).abs().max() > 0.05


@pytest.mark.parametrize(
    ("layout", "bf16"),
    [
        ({"tp": 2}, False),
        ({"tp": 2}, True),
        ({"tp": 2, "moe": True}, True),
        ({"ep": 2, "moe": True}, False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "bf16" if value else "fp32",
)
def test_the_layout_changes_no_more_than_the_order_of_summation(layout, bf16):
    """The measure: the same rank with every inner product summed in two halves, as two row-parallel ranks do."""
    single = {key: value for key, value in layout.items() if key not in ("tp", "ep")}
    (alone,) = run_ranks(scored, 1, LAYOUT_SPECS, bf16=bf16, megatron=True, **single)
    (halved,) = run_ranks(scored, 1, LAYOUT_SPECS, split_sums=True, bf16=bf16, megatron=True, **single)
    first, second = run_ranks(scored, 2, LAYOUT_SPECS, bf16=bf16, megatron=True, **layout)
    rows = zip(LAYOUT_SPECS, alone, halved, first, second, strict=True)
    for i, (spec, one, order, parallel, same) in enumerate(rows):
        assert torch.equal(parallel, same)
        noise = (one - order).abs().max()
        assert (one - parallel).abs().max() <= max(2 * noise, 1e-5), spec
        assert i == 0 or (one - alone[0]).abs().max() > 0.01, spec  # something was simulated
    if not bf16:
        assert all((one - parallel).abs().max() < 1e-5 for one, parallel in zip(alone, first, strict=True))


def test_a_pipeline_has_the_numerics_of_one_rank():
    specs = [dataclasses.replace(spec, noise=0.0) for spec in LAYOUT_SPECS]
    specs.append(dataclasses.replace(SPECS["fp8-fp4kv"], ignored=("decoder.layers.1.*",)))
    (alone,) = run_ranks(scored, 1, specs, tied=False, megatron=True)
    _, last = run_ranks(scored_by_stages, 2, specs, megatron=True)
    for one, staged in zip(alone, last, strict=True):
        assert torch.equal(one, staged)
    assert not torch.equal(alone[2], alone[-1])


@pytest.mark.parametrize(
    "layout",
    [{}, {"tp": 2}, {"tp": 2, "moe": True, "bf16": True}, {"ep": 2, "moe": True}],
    ids=lambda layout: "-".join(layout) or "one rank",
)
def test_transformer_engines_layers_have_the_numerics_of_megatrons_own(layout):
    """On stand-ins with the attributes of Megatron's wrappers; the norm in front of a layer is part of it."""
    specs = [spec for spec in LAYOUT_SPECS if spec.weights is not None]
    specs.append(dataclasses.replace(SPECS["int8-int4kv"], activations=None))  # weights and cache only
    ranks = max(layout.get("tp", 1), layout.get("ep", 1))
    own = run_ranks(scored, ranks, specs, megatron=True, **layout)[-1]
    engines = run_ranks(scored_by_stand_ins, ranks, specs, megatron=True, **layout)[-1]
    for spec, one, other in zip(specs, own, engines, strict=True):
        assert (one - other).abs().max() < 1e-5, spec


@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_fused_norms_are_their_formulas(zero_centered):
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0)).double()
    weight, bias = torch.linspace(0.5, 1.5, 16).double(), torch.linspace(-1, 1, 16).double()
    module = types.SimpleNamespace(
        layer_norm_weight=(weight - float(zero_centered)).float(), layer_norm_bias=bias.float(), eps=1e-3,
        zero_centered_gamma=zero_centered, normalization="RMSNorm",
    )  # fmt: skip
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    assert torch.allclose(_normalize(module, x.float()).double(), expected, atol=1e-5)
    module.normalization = "LayerNorm"
    centered = x - x.mean(-1, keepdim=True)
    expected = centered / (centered.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight + bias
    assert torch.allclose(_normalize(module, x.float()).double(), expected, atol=1e-5)
    assert _normalize(module, x.bfloat16()).dtype == torch.bfloat16


def changed_components(moe):
    """Which scores differ from the trainer's for each component alone, and what a context says it quantizes."""
    model = build_model(moe=moe)
    e4m3 = Quantizer.parse("e4m3/row")
    linears = SamplerSpec(weights=e4m3, activations=e4m3)
    specs = {
        "weights": SamplerSpec(weights=e4m3, expert_weights=None),
        "activations": SamplerSpec(activations=e4m3, expert_activations=None),
        "expert_weights": SamplerSpec(expert_weights=e4m3),
        "expert_activations": SamplerSpec(expert_activations=e4m3),
        "keys": SamplerSpec(keys=e4m3),
        "values": SamplerSpec(values=e4m3),
        "head": SamplerSpec(head="bfloat16"),
        "head in float32": SamplerSpec(head="float32"),
        "noise": SamplerSpec(noise=0.01),
        "all ignored": dataclasses.replace(linears, ignored=("decoder.*",)),
        "layer 1": dataclasses.replace(linears, ignored=("decoder.layers.0.*",)),
    }
    trainer = scored_under(model, SamplerSpec())
    changed = {name for name, spec in specs.items() if (scored_under(model, spec) != trainer).any()}
    some = dataclasses.replace(SPECS["fp8-fp8kv"], ignored=("*.layers.0.*", "*_fc?"), ignored_caches=("*.1.*",))
    with simulate_sampler(model, some) as names:
        return changed, names, linear_names(model)


@pytest.mark.parametrize("moe", [False, True])
def test_each_component_acts_alone(moe):
    ((changed, names, linears),) = run_ranks(changed_components, 1, moe, megatron=True)
    expected = {"weights", "activations", "keys", "values", "head", "noise", "layer 1"}
    assert changed == expected | ({"expert_weights", "expert_activations"} if moe else set())
    assert names.linears == tuple(f"decoder.layers.1.self_attention.linear_{part}" for part in ("proj", "qkv"))
    assert names.caches == ("decoder.layers.0.self_attention.core_attention",)
    assert len(linears) == (2 * (2 + 2 * 4) if moe else 2 * 4)


def hashes_around(wrapped, lazy_gather):
    """State hashes before and after sampling, scoring, and an exception inside; and the states inside, to be sure."""
    model = build_model(moe=True, dropout=0.1, wrapped=wrapped, lazy_gather=lazy_gather)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    spec = dataclasses.replace(SPECS["fp8-fp4kv"], head="bfloat16", noise=0.1)
    sampler = EmbeddedSampler(make_config(sampler="gaussian", sampler_precision="int8-int4kv"), VOCAB, groups())
    hashes = [state_hash(model)]
    with simulated(model, spec, VOCAB, groups()):
        inside = state_hash(model)
    hashes.append(state_hash(model))
    sampler.sample(model, 0)
    hashes.append(state_hash(model))
    try:
        with simulated(model, spec, VOCAB, groups()):
            scored_under(model, dataclasses.replace(spec, noise=float("nan")))
    except ValueError:
        hashes.append(state_hash(model))
    try:  # fails half way into the context: the weight is not finite in the last layer only
        name = "decoder.layers.1.self_attention.linear_proj.weight"
        last = next(p for n, p in model.named_parameters() if n.endswith(name))
        last.data[0, 0] = float("inf")
        broken = state_hash(model)
        with simulate_sampler(model, SPECS["fp8-fp8kv"]):
            raise AssertionError("an infinite weight was accepted")
    except ValueError:
        assert state_hash(model) == broken
    return hashes, inside


@pytest.mark.parametrize(("wrapped", "lazy_gather"), [(False, False), (True, False), (True, True)])
def test_the_trainer_and_its_random_streams_keep_every_bit(wrapped, lazy_gather):
    ((hashes, inside),) = run_ranks(hashes_around, 1, wrapped, lazy_gather, megatron=True)
    assert len(hashes) == 4
    assert len(set(hashes)) == 1
    assert inside != hashes[0]  # the hash sees what the context does


def refusals():
    """The messages for what cannot be simulated."""
    messages = {}

    def attempt(name, model, spec):
        try:
            with simulate_sampler(model, spec):
                messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)

    model = build_model()
    fp8 = SPECS["fp8-fp8kv"]
    attempt("noise", model, dataclasses.replace(fp8, noise=0.1))
    attempt("staleness", model, dataclasses.replace(fp8, staleness=2))
    attempt("pattern", model, dataclasses.replace(fp8, ignored=("linear_qkv",)))
    with simulate_sampler(model, fp8):
        attempt("nested", model, fp8)
    with torch.autocast("cpu", torch.bfloat16):
        attempt("autocast", model, fp8)
    layer = model.decoder.layers[1].mlp.linear_fc1
    layer.__class__ = type("TEColumnParallelGroupedLinear", (type("TEGroupedLinear", (torch.nn.Module,), {}),), {})
    attempt("te", model, fp8)
    attempt("te ignored", model, dataclasses.replace(fp8, ignored=("decoder.layers.1.mlp.linear_fc1",)))
    model.config.multi_latent_attention = True
    attempt("mla", model, SamplerSpec(keys=Quantizer.parse("e4m3/row")))
    return messages


def test_what_cannot_be_simulated_is_refused_by_name():
    (messages,) = run_ranks(refusals, 1, megatron=True)
    assert "megatron_sc.sampling.simulated" in messages["noise"] == messages["staleness"]
    assert (
        "'linear_qkv' matches nothing that could be quantized; patterns match whole paths, such as decoder."
        in messages["pattern"]
    )
    assert "decoder.layers.0.self_attention.linear_proj is simulated already" in messages["nested"]
    assert "autocast" in messages["autocast"]
    assert "decoder.layers.1.mlp.linear_fc1 is a TEColumnParallelGroupedLinear" in messages["te"]
    assert "--moe-grouped-gemm" in messages["te"]
    assert messages["te ignored"] == "accepted"
    assert "multi-latent" in messages["mla"]


def quantized_infinity():
    """What an activation that overflowed does."""
    model = build_model()
    model.embedding.word_embeddings.weight.data[:] = float("inf")
    try:
        scored_under(model, SPECS["fp8-fp8kv"])
    except ValueError as error:
        return str(error)
    return None


def test_an_overflowed_activation_is_refused():
    (message,) = run_ranks(quantized_infinity, 1, megatron=True)
    assert "cannot quantize infinities or NaN" in message


def sampled(layout=None, steps=(0,), clean=False, **settings):
    """Rollouts of some steps, as dictionaries."""
    model = build_model(**(layout or {}))
    sampler = EmbeddedSampler(make_config(**settings), VOCAB, groups())
    return [[vars(rollout) for rollout in sampler.sample(model, step, clean)] for step in steps]


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ({"tp": 2}, {"sampler_precision": "fp8-fp4kv", "sampler": "gaussian", "sampler_noise": 0.1}),
        ({"ep": 2, "moe": True}, {"sampler_precision": "int8-int4kv"}),
    ],
    ids=["tp2", "ep2"],
)
def test_rollouts_of_the_simulated_sampler_do_not_depend_on_the_layout(layout, settings):
    single = {key: value for key, value in layout.items() if key not in ("tp", "ep")}
    ((alone,),) = run_ranks(sampled, 1, single, megatron=True, **settings)
    ((first,), (second,)) = run_ranks(sampled, 2, layout, megatron=True, **settings)
    together = first if "tp" in layout else first + second
    assert_same(alone, together)
    ((trainer,),) = run_ranks(sampled, 1, single, megatron=True)
    assert (
        max(np.abs(a["head_logprobs"] - b["head_logprobs"]).max() for a, b in zip(alone, trainer, strict=True)) > 0.01
    )


def test_noise_staleness_and_precision_come_from_one_file(tmp_path):
    path = tmp_path / "sampler.yaml"
    path.write_text("base: int8-int4kv\nnoise: 0.1\nnoise_seed: 1234\nstaleness: 2\n")
    ((_, stale, _),) = run_ranks(sampled, 1, None, (0, 1, 2), megatron=True, sampler_precision=str(path))
    flags = {"sampler": "gaussian", "sampler_noise": 0.1, "sampler_staleness": 2, "sampler_precision": "int8-int4kv"}
    ((_, same, _),) = run_ranks(sampled, 1, None, (0, 1, 2), megatron=True, **flags)
    assert_same(stale, same, atol=0)
    assert (stale[0]["weight_version"] == 0).all()
    ((clean,),) = run_ranks(sampled, 1, None, (1,), True, megatron=True, sampler_precision=str(path))
    ((trainer,),) = run_ranks(sampled, 1, None, (1,), True, megatron=True)
    assert_same(clean, trainer, atol=0)  # validation is the trainer's own


def test_specs_are_read_back_from_yaml(tmp_path):
    import yaml

    path = tmp_path / "spec.yml"
    for spec in [*SPECS.values(), dataclasses.replace(CUT, ignored=("*.linear_qkv",), head="float32", staleness=8)]:
        path.write_text(yaml.safe_dump(spec.as_dict()))
        assert SamplerSpec.load(str(path)) == spec
    path.write_text("{base: fp8-fp4kv, keys: none, values: e4m3/row, expert_weights: same}")
    expected = dataclasses.replace(SPECS["fp8-fp4kv"], keys=None, values=Quantizer.parse("e4m3/row"))
    assert SamplerSpec.load(str(path)) == expected


def test_the_document_names_every_spec_and_its_example_loads(tmp_path):
    text = (Path(__file__).parent.parent / "docs" / "samplers.md").read_text()
    rows = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    documented = {row[0]: row[1:] for row in rows if len(row) == 4 and row[0] in SPECS}
    for name, spec in SPECS.items():
        weights, activations, cache = documented.pop(name)
        if activations == "same":
            activations = weights
        assert spec.keys == spec.values
        for quantizer, written in ((spec.weights, weights), (spec.activations, activations), (spec.keys, cache)):
            assert (quantizer.name if quantizer else "") == written, name
    path = tmp_path / "sampler.yaml"
    path.write_text(text.split("```yaml")[1].split("```")[0])
    spec = SamplerSpec.load(str(path))
    assert (spec.noise, spec.staleness, spec.values) == (0.02, 8, SPECS["fp8-fp4kv"].values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: fp9", "base: no sampler precision 'fp9'; there are trainer, fp8-fp8kv"),
        ("weight: int8", "no field 'weight'; there are base, weights"),
        ("weights: int9/row", "weights: quantizer 'int9/row': no grid"),
        ("weights: 8", "weights: 8 is not the name of a quantizer"),
        ("activations: e4m3/tensor", "activations: e4m3/tensor shares scales between tokens"),
        ("keys: nvfp4", "keys: e2m1/1x16/e4m3 shares scales between tokens"),
        ("head: fp32", "head is 'fp32' but must be one of trainer, float32, bfloat16"),
        ("received: fp16", "received is 'fp16'"),
        ("ignored: decoder", "ignored: 'decoder' is not a list"),
        ("noise: -1", "noise is -1 but"),
        ("noise: much", "noise: 'much' is not a number"),
        ("staleness: 0", "staleness is 0"),
        ("staleness: 1.5", "staleness: 1.5 is not a whole number"),
        ("noise_seed: -1", "noise_seed is -1"),
        ("[1]", "is not a mapping"),
        ("a: [", "while parsing"),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_field(tmp_path, text, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^.*wrong\.yaml") as error:
        SamplerSpec.load(str(path))
    assert message in str(error.value)


def test_a_name_takes_noise_and_staleness():
    spec = SamplerSpec.load("fp8-fp4kv+noise=0.02+noise_seed=3+staleness=64")
    assert spec == dataclasses.replace(SPECS["fp8-fp4kv"], noise=0.02, noise_seed=3, staleness=64)
    assert SamplerSpec.load("trainer+noise=1") == SamplerSpec(noise=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp9+noise=1", "no sampler precision 'fp9'; there are"),
        ("trainer+noise=0.1+noise=0.2", "'noise=0.2' is not one of noise=X"),
        ("trainer+keys=e4m3/row", "'keys=e4m3/row' is not one of noise=X"),
        ("trainer+noise", "noise: None is not a number"),
        ("trainer+noise=-1", "noise is -1 but must be at least 0"),
        ("trainer+staleness=1.5", "staleness: 1.5 is not a whole number"),
    ],
)
def test_a_wrong_addition_to_a_name_is_refused(name, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        SamplerSpec.load(name)


def test_an_unknown_name_or_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no sampler precision 'fp8'; there are trainer, fp8-fp8kv"):
        SamplerSpec.load("fp8")
    with pytest.raises(ValueError, match=r"absent\.yaml"):
        SamplerSpec.load(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "int8"}, "--sampler-precision fp8-fp8kv and --sampler int8, which quantizes"),
        ({"sampler": "demonstrations"}, "which samples nothing"),
        ({"sampler_precision": "fp7"}, "^--sampler-precision: no sampler precision 'fp7'"),
        ({"sampler_precision": "noisy", "sampler": "gaussian"}, "has noise 0.1 and --sampler gaussian adds more"),
        ({"sampler_precision": "noisy", "sampler_staleness": 3}, "has staleness 4 and --sampler-staleness is 3"),
    ],
)
def test_flags_that_contradict_are_refused(tmp_path, settings, message):
    noisy = tmp_path / "noisy.yaml"
    noisy.write_text("{base: fp8-fp8kv, noise: 0.1, staleness: 4}")
    settings = {"sampler_precision": "fp8-fp8kv"} | settings
    if settings["sampler_precision"] == "noisy":
        settings["sampler_precision"] = str(noisy)
    with pytest.raises(ValueError, match=message):
        make_config(**settings)


def test_query_groups_that_ranks_split_are_refused_for_blocks_of_rows():
    from megatron_sc.precision.simulate import _projections

    config = types.SimpleNamespace(num_attention_heads=4, num_query_groups=1, kv_channels=8, gated_linear_unit=False)
    with pytest.raises(ValueError, match=r"^a\.linear_qkv: 2 tensor-parallel ranks split its 1 query groups"):
        _projections("a.linear_qkv", 24, 2, config)
