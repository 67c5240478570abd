"""Fake quantization against an enumeration of every representable value."""

import math

import numpy as np
import pytest
import torch

from megatron_sc.precision.quantize import fake_quantize, row_magnitudes


def e4m3_values():
    """Every finite value of float8 e4m3 (sign, 4 bits of exponent with bias 7, 3 of mantissa), from its definition."""
    values = []
    for code in range(128):
        exponent, mantissa = code >> 3, code & 7
        if code == 127:  # NaN
            continue
        values.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(sorted({*values, *(-value for value in values)}))


GRIDS = {"int8": np.arange(-127, 128.0), "int4": np.arange(-7, 8.0), "fp8": e4m3_values()}


def distances(weight, weight_format):
    """From every weight to the nearest value of its row's grid, and the scale of each row; float64."""
    grid = GRIDS[weight_format]
    scales = np.abs(weight).max(axis=1, keepdims=True) / grid.max()
    scaled = np.abs(weight[..., None] / scales[..., None] - grid)
    distance = scaled.min(axis=-1)
    return distance * scales, scales


@pytest.mark.parametrize("weight_format", ["int8", "int4", "fp8"])
def test_every_weight_goes_to_the_nearest_representable_value(weight_format):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)) * torch.logspace(-4, 2, 16)[:, None]
    quantized = fake_quantize(weight, weight_format).double().numpy()
    distance, scales = distances(weight.double().numpy(), weight_format)
    moved = np.abs(quantized - weight.double().numpy())
    assert np.abs((moved - distance) / scales).max() < 1e-4
    on_grid = np.abs(quantized[..., None] / scales[..., None] - GRIDS[weight_format]).min(axis=-1)
    assert on_grid.max() < 1e-4


def test_the_formats_differ_by_their_step():
    weight = torch.linspace(-1, 1, 1000).unsqueeze(0)
    errors = {name: (fake_quantize(weight, name) - weight).abs().max().item() for name in ("int8", "int4", "fp8")}
    assert errors["int8"] == pytest.approx(0.5 / 127, rel=0.02)
    assert errors["int4"] == pytest.approx(0.5 / 7, rel=0.02)
    assert errors["fp8"] == pytest.approx(16 / 448, rel=0.02)  # the coarsest step of e4m3 is 32 below 448


def test_ties_go_to_the_even_step():
    weight = torch.tensor([[0.5, 1.5, 2.5, -0.5, 7.0]])
    assert fake_quantize(weight, "int4").tolist() == [[0.0, 2.0, 2.0, -0.0, 7.0]]


def test_each_row_has_its_own_scale():
    weight = torch.tensor([[7.0, 3.0, 1.0], [0.07, 0.03, 0.01]])
    assert torch.allclose(fake_quantize(weight, "int4"), weight, rtol=1e-6)


def test_columns_of_a_row_parallel_layer_use_the_scale_of_the_whole_row():
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    whole = fake_quantize(weight, "int4")
    amax = row_magnitudes(weight)
    parts = [fake_quantize(part, "int4", amax) for part in weight.split(8, dim=1)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert not torch.equal(torch.cat([fake_quantize(part, "int4") for part in weight.split(8, dim=1)], dim=1), whole)


@pytest.mark.parametrize("weight_format", ["int8", "int4", "fp8"])
def test_zero_and_denormal_rows_are_finite(weight_format):
    weight = torch.tensor([[0.0, 0.0], [1e-45, 0.0], [1.0, -1.0]])
    quantized = fake_quantize(weight, weight_format)
    assert quantized.isfinite().all()
    assert quantized[0].tolist() == [0.0, 0.0]
    assert torch.allclose(quantized[2], weight[2])


@pytest.mark.parametrize("weight_format", ["int8", "int4", "fp8"])
def test_bfloat16_is_quantized_from_the_rounded_value_and_stays_bfloat16(weight_format):
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    quantized = fake_quantize(weight, weight_format)
    assert quantized.dtype == torch.bfloat16
    assert torch.equal(quantized, fake_quantize(weight.float(), weight_format).bfloat16())


def test_the_weight_is_not_modified():
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    before = weight.clone()
    fake_quantize(weight, "int4")
    assert torch.equal(weight, before)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="needs a matrix"):
        fake_quantize(torch.zeros(4), "int8")
    with pytest.raises(ValueError, match="row_amax has shape"):
        fake_quantize(torch.zeros(4, 2), "int8", torch.ones(2))


def test_not_a_number_is_not_hidden():
    assert math.isnan(fake_quantize(torch.tensor([[math.nan, 1.0]]), "int8")[0, 0].item())
