"""Distorted weights: their values, that no layout changes them, and that the trainer gets its own back."""

import math

import numpy as np
import pytest
import torch
from distributed import run_ranks
from sampling_models import VOCAB, build_model, groups
from torch import nn

from megatron_sc.precision.quantize import fake_quantize
from megatron_sc.sampling import GaussianWeights, NoDistortion, ParallelGroups, QuantizedWeights
from megatron_sc.sampling.distortion import distorted_weights, gaussian_direction, sampler_weights, swapped_weights
from megatron_sc.sampling.shards import ShardLayout, weight_shards

DISTORTIONS = {
    "gaussian": GaussianWeights(scale=0.5, seed=3),
    "int8": QuantizedWeights("int8"),
    "int4": QuantizedWeights("int4"),
    "fp8": QuantizedWeights("fp8"),
}


class Toy(nn.Module):
    """Parameters with the names of a GPTModel's."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Module()
        self.embedding.word_embeddings = nn.Embedding(24, 8, dtype=dtype)
        self.linear_fc1 = nn.Linear(8, 6, dtype=dtype)
        self.mlp = nn.Module()
        self.mlp.router = nn.Linear(8, 4, bias=False, dtype=dtype)
        self.mlp.router_like = nn.Linear(8, 4, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(8, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def test_gaussian_noise_is_scaled_by_the_deviation_of_the_true_rows():
    toy = Toy()
    toy.embedding.word_embeddings.weight.data[VOCAB:] = 1000.0
    values = sampler_weights(toy, GaussianWeights(scale=0.5, seed=3), VOCAB)
    weight = toy.embedding.word_embeddings.weight.detach()
    noise = (values[toy.embedding.word_embeddings.weight] - weight) / (0.5 * weight[:VOCAB].std(correction=0))
    direction = gaussian_direction(3, "embedding.word_embeddings.weight", (24, 8))
    assert np.allclose(noise[:VOCAB], direction[:VOCAB], atol=1e-5)
    assert torch.equal(noise[VOCAB:], torch.zeros(24 - VOCAB, 8))
    assert set(values) == {parameter for parameter in toy.parameters() if parameter.dim() == 2}


def test_the_gaussian_direction_is_fixed_and_depends_on_seed_and_name():
    direction = gaussian_direction(1, "a", (50, 40))
    assert np.array_equal(direction, gaussian_direction(1, "a", (50, 40)))
    assert abs(direction.mean()) < 0.1
    assert abs(direction.std() - 1) < 0.05
    for other in (gaussian_direction(2, "a", (50, 40)), gaussian_direction(1, "b", (50, 40))):
        assert abs(np.corrcoef(direction.ravel(), other.ravel())[0, 1]) < 0.1
    assert np.array_equal(gaussian_direction(1, "a", (60, 40))[:50], direction)  # more padding, the same noise


def test_the_direction_is_added_to_the_current_weights():
    toy, distortion = Toy(), GaussianWeights(scale=0.1)
    weight = toy.linear_fc1.weight
    first = sampler_weights(toy, distortion, VOCAB)[weight] - weight.detach()
    with torch.no_grad():
        weight.mul_(2)
    second = sampler_weights(toy, distortion, VOCAB)[weight] - weight.detach()
    assert torch.allclose(second, 2 * first, atol=1e-5)  # twice the deviation, the same direction


@pytest.mark.parametrize("weight_format", ["int8", "int4", "fp8"])
def test_quantized_samplers_keep_embeddings_and_router(weight_format):
    toy = Toy()
    values = sampler_weights(toy, QuantizedWeights(weight_format), VOCAB)
    assert set(values) == {toy.linear_fc1.weight, toy.mlp.router_like.weight}
    assert torch.equal(values[toy.linear_fc1.weight], fake_quantize(toy.linear_fc1.weight.detach(), weight_format))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distortion", DISTORTIONS.values(), ids=DISTORTIONS)
def test_the_trainer_gets_its_own_storage_back(distortion, dtype):
    toy = Toy(dtype)
    storages = [parameter.data_ptr() for parameter in toy.parameters()]
    before = [parameter.detach().clone() for parameter in toy.parameters()]
    parameters = list(toy.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
        parameter.main_grad = torch.full_like(parameter, 3.0)
    for fails in (False, True):
        try:
            with distorted_weights(toy, distortion, VOCAB):
                assert not torch.equal(toy.linear_fc1.weight, before[1])
                assert toy.linear_fc1.weight.dtype == dtype
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        assert all(a is b for a, b in zip(parameters, toy.parameters(), strict=True))
        assert [parameter.data_ptr() for parameter in toy.parameters()] == storages
        for parameter, value in zip(parameters, before, strict=True):
            assert torch.equal(parameter, value)
            assert (parameter.grad == 2).all()
            assert (parameter.main_grad == 3).all()


def test_a_swap_that_fails_half_way_is_undone():
    toy = Toy()
    before = toy.linear_fc1.weight.detach().clone()
    values = {toy.linear_fc1.weight: torch.zeros(6, 8), toy.mlp.router.weight: "not a tensor"}
    with pytest.raises(TypeError), swapped_weights(toy, values):
        pass
    assert torch.equal(toy.linear_fc1.weight, before)


def test_no_distortion_changes_nothing():
    assert sampler_weights(Toy(), NoDistortion(), VOCAB) == {}


def test_transformer_engine_is_told_that_weights_changed():
    toy, told = Toy(), []
    toy.set_is_first_microbatch = lambda: told.append(toy.linear_fc1.weight.detach().clone())
    trainer = toy.linear_fc1.weight.detach().clone()
    with distorted_weights(toy, QuantizedWeights("int4"), VOCAB):
        assert len(told) == 1
        assert not torch.equal(told[0], trainer)
    assert torch.equal(told[1], trainer)


def test_fp8_parameters_are_refused():
    class Stored(torch.Tensor):
        pass

    toy = Toy()
    toy.linear_fc1.weight = nn.Parameter(torch.randn(6, 8).as_subclass(Stored))
    with pytest.raises(ValueError, match="--fp8-param-gather"):
        sampler_weights(toy, QuantizedWeights("int8"), VOCAB)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("blocks", [(6,), (3, 3), (4, 2)])
def test_shards_put_together_are_the_full_matrix(dim, blocks):
    size = 2
    shape = (6, 5) if dim == 0 else (5, 6)
    layouts = [ShardLayout(shape, dim, blocks, rank, size) for rank in range(size)]
    full = np.arange(60).reshape(layouts[0].full_shape)
    by_rank = [np.split(layout.local_part(full), np.cumsum(blocks)[:-1], axis=dim) for layout in layouts]
    joined = np.concatenate([by_rank[rank][i] for i in range(len(blocks)) for rank in range(size)], axis=dim)
    assert np.array_equal(joined, full)


def test_grouped_experts_have_the_names_and_layout_of_sequential_ones():
    """Transformer Engine's grouped experts number their weights and record no stride for the gated layer."""
    experts = nn.Module()
    for layer, dim in (("linear_fc1", 0), ("linear_fc2", 1)):
        module = nn.Module()
        for i in range(2):
            weight = nn.Parameter(torch.zeros(4, 4))
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, 1
            module.register_parameter(f"weight{i}", weight)
        setattr(experts, layer, module)
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = experts
    model.config = type("Config", (), {"num_moe_experts": 2, "gated_linear_unit": True})
    shards = list(weight_shards(model, VOCAB, ParallelGroups()))
    assert [shard.name for shard in shards] == [
        f"mlp.experts.local_experts.{i}.{layer}.weight" for layer in ("linear_fc1", "linear_fc2") for i in range(2)
    ]
    assert [(shard.layout.dim, shard.layout.blocks) for shard in shards] == [(0, (2, 2))] * 2 + [(1, (4,))] * 2


def distorted_shards(distortion, **layout):
    """The distorted values of every matrix by global name, and how this rank's shard lies in it."""
    model = build_model(**layout)
    values = sampler_weights(model, distortion, VOCAB, groups())
    return {
        shard.name: (values.get(shard.parameter, shard.parameter.detach()), shard.layout)
        for shard in weight_shards(model, VOCAB, groups())
    }


def joined(name, ranks, gated):
    """The full matrix from the ranks' shards, put together by hand."""
    held = [rank[name][0] for rank in ranks if name in rank]
    if len(held) == 1:
        return held[0]
    if torch.equal(held[0], held[1]):  # replicated
        return held[0]
    if any(part in name for part in ("linear_proj", "linear_fc2")):
        return torch.cat(held, dim=1)
    if "linear_fc1" in name and gated:
        return torch.cat([shard.chunk(2)[half] for half in (0, 1) for shard in held])
    return torch.cat(held)


@pytest.mark.parametrize("distortion", ["gaussian", "int4"])
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"tp": 2, "gated": False, "tied": False},
        {"tp": 2, "moe": True},  # experts are split too
        {"ep": 2, "moe": True},
    ],
    ids=lambda layout: "-".join(layout),
)
def test_the_distortion_does_not_depend_on_the_layout(layout, distortion):
    single = {key: value for key, value in layout.items() if key not in ("tp", "ep")}
    (whole,) = run_ranks(distorted_shards, 1, DISTORTIONS[distortion], megatron=True, **single)
    ranks = run_ranks(distorted_shards, 2, DISTORTIONS[distortion], megatron=True, **layout)
    assert set().union(*ranks) == set(whole)
    for name, (expected, _) in whole.items():
        value = joined(name, ranks, layout.get("gated", True))
        if "word_embeddings" in name or "output_layer" in name:
            value, expected = value[:VOCAB], expected[:VOCAB]
        assert value.shape == expected.shape, name
        assert torch.allclose(value, expected, rtol=1e-6, atol=1e-6), name
    assert any(shard_layout.size == 2 for _, shard_layout in ranks[0].values()) == ("tp" in layout)


def test_the_undistorted_matrices_differ_from_the_distorted_ones():
    """Guards the comparison above: it would also hold if nothing were distorted."""
    (plain,) = run_ranks(distorted_shards, 1, NoDistortion(), megatron=True)
    (noisy,) = run_ranks(distorted_shards, 1, DISTORTIONS["gaussian"], megatron=True)
    for name, (value, _) in plain.items():
        noise = noisy[name][0][:VOCAB] - value[:VOCAB]
        assert math.isclose(noise.std(), 0.5 * value[:VOCAB].std(), rel_tol=0.15), name
