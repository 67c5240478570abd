"""The embedded sampler's settings: what is refused, by which name, and what they build."""

import dataclasses

import pytest

from megatron_sc.sampling import (
    Countdown,
    GaussianWeights,
    NoDistortion,
    QuantizedWeights,
    Reverse,
    SamplerConfig,
    SamplingParameters,
)
from megatron_sc.sampling.record import sampler_manifest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sampler_noise", -0.1),
        ("sampler_noise", float("nan")),
        ("sampler_staleness", 0),
        ("sampler_seed", -1),
        ("sampler_temperature", 0.0),
        ("sampler_temperature", float("inf")),
        ("sampler_top_p", 0.0),
        ("sampler_top_p", 1.1),
        ("sampler_top_k", -1),
        ("head_size", -1),
        ("num_draws", -1),
        ("task_size", -1),
        ("prompts_per_step", 0),
        ("samples_per_prompt", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_flag(field, value):
    with pytest.raises(ValueError, match=f"^--{field.replace('_', '-')} is "):
        SamplerConfig(**{field: value})


def test_a_task_size_that_the_task_refuses_is_named():
    with pytest.raises(ValueError, match="--task-size 7: countdown needs 2 to 4 numbers"):
        SamplerConfig(task="countdown", task_size=7)


def test_every_field_has_a_help_text():
    assert all(len(field.metadata["help"]) > 20 for field in dataclasses.fields(SamplerConfig))


def test_what_the_settings_build():
    assert SamplerConfig().build_task() == Reverse(digits=6)
    assert SamplerConfig(task="countdown", task_size=4).build_task() == Countdown(count=4)
    assert SamplerConfig(sampler="trainer").build_distortion() == NoDistortion()
    assert SamplerConfig(sampler="demonstrations").build_distortion() == NoDistortion()
    assert SamplerConfig(sampler="int4").build_distortion() == QuantizedWeights("int4")
    gaussian = SamplerConfig(sampler="gaussian", sampler_noise=0.3, sampler_seed=7)
    assert gaussian.build_distortion() == GaussianWeights(scale=0.3, seed=7)
    drawn = SamplerConfig(sampler_temperature=0.7, sampler_top_k=5, sampler_top_p=0.9, head_size=3)
    assert drawn.sampling_parameters() == SamplingParameters(temperature=0.7, top_k=5, top_p=0.9, head_size=3)


def test_the_manifest_of_a_recording_names_the_samplers_numerics():
    sampler = sampler_manifest(SamplerConfig(sampler_precision="fp8-fp4kv", sampler_temperature=0.7), 30).sampler
    assert (sampler.weight_dtype, sampler.activation_dtype) == ("e4m3/128x128", "e4m3/1x128")
    assert sampler.kv_cache_dtype.startswith("e2m1/")
    assert (sampler.quantization, sampler.temperature, sampler.truncates) == ("fp8-fp4kv", 0.7, False)
    assert sampler_manifest(SamplerConfig(sampler="int8", sampler_top_p=0.9), 30).sampler.truncates
