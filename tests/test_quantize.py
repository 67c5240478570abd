"""Quantizers against grids decoded from their bits, with scales and neighbors computed in NumPy, block by block."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sc.precision.quantize import GRIDS, Placement, Quantizer, _outer_scale, fake_quantize


def decode(exponent_bits, mantissa_bits, bias, invalid=()):
    """Every non-negative finite value of a small float by its code, from the definition of its bits."""
    values = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        if code not in invalid:
            fraction = mantissa / (1 << mantissa_bits)
            values.append(fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))
    return np.array(values)


# Non-negative values in the order of their codes: the parity of the index is that of the code.
CODES = {
    "e4m3": decode(4, 3, 7, invalid={127}),
    "e5m2": decode(5, 2, 15, invalid={124, 125, 126, 127}),  # infinity and NaN
    "e2m1": decode(2, 1, 1),
    "int8": np.arange(128.0),
    "int4": np.arange(8.0),
}
QUANTIZERS = [
    *("e4m3/tensor", "e4m3/row", "e4m3/1x4", "e4m3/3x4", "e4m3/3x4/power_of_two", "mxfp8", "e5m2/tensor", "e5m2/row"),
    *("e5m2/1x4/power_of_two", "e2m1/tensor", "e2m1/row", "nvfp4", "e2m1/1x4/e4m3", "e2m1/1x4/e4m3_row", "mxfp4"),
    *("int8/tensor", "int8/row", "int8/3x4", "int4/tensor", "int4/row", "int4/1x4", "int4/1x4/power_of_two"),
]


def nearest(values, grid):
    """The nearest value of a grid by its code; ties to the even code. Float64 in and out."""
    codes = CODES[grid]
    magnitudes = np.abs(values)
    above = np.clip(np.searchsorted(codes, magnitudes), 1, len(codes) - 1)
    low, high = codes[above - 1], codes[above]
    take_high = (high - magnitudes < magnitudes - low) | ((high - magnitudes == magnitudes - low) & (above % 2 == 0))
    return np.sign(values) * np.where(take_high, high, low)


def blocks(shape, quantizer):
    """The index ranges of each block of a matrix."""
    rows, columns = quantizer.rows or shape[0], quantizer.columns or shape[1]
    starts = itertools.product(range(0, shape[0], rows), range(0, shape[1], columns))
    return [(slice(r, r + rows), slice(c, c + columns)) for r, c in starts]


def reference(x, quantizer):
    """Quantized values and each entry's scale, block by block; x float32."""
    largest = np.float32(CODES[quantizer.grid_name][-1])
    quantized, scales = np.zeros_like(x), np.zeros_like(x)
    for block in blocks(x.shape, quantizer):
        amax = np.abs(x[block]).max()
        scale = np.float32(amax / largest)
        if quantizer.scale == "power_of_two":
            scale = np.float32(2.0 ** math.ceil(math.log2(scale))) if scale else scale
        elif quantizer.scale.startswith("e4m3"):
            whole = x if quantizer.scale == "e4m3" else x[block[0]]
            outer = np.abs(whole).max() / largest / np.float32(448)
            outer = outer * np.float32(448) * largest / largest / np.float32(448)
            scale = np.float32(nearest(np.float64(amax / largest / outer), "e4m3")) * outer if outer else outer
        if scale:
            codes = nearest((x[block] / scale).astype(np.float64), quantizer.grid_name)
            quantized[block] = codes.astype(np.float32) * scale
        scales[block] = scale
    return quantized, scales


def matrix(seed, shape=(7, 37), spread=8):
    """Normal numbers whose rows and columns differ in size by powers of two, with a row of zeros; float32."""
    generator = np.random.default_rng(seed)
    size = 2.0 ** (generator.integers(-spread, spread, (shape[0], 1)) + generator.integers(-spread, spread, shape[1]))
    values = (generator.standard_normal(shape) * size).astype(np.float32)
    values[shape[0] // 2] = 0
    return values


@pytest.mark.parametrize("grid", CODES)
def test_every_code_is_its_own_nearest_value(grid):
    codes = np.concatenate([CODES[grid], -CODES[grid]])
    assert len(codes) == {"e4m3": 254, "e5m2": 248, "e2m1": 16, "int8": 256, "int4": 16}[grid]
    quantized = fake_quantize(torch.tensor(codes[None]).float(), f"{grid}/tensor/one")
    assert np.array_equal(quantized[0].double().numpy(), codes)


@pytest.mark.parametrize("grid", CODES)
def test_ties_neighbors_and_saturation_match_the_bits(grid):
    codes = CODES[grid]
    ties = (codes[1:] + codes[:-1]) / 2
    points = np.concatenate([codes, ties, [codes[-1] * 1.01, codes[-1] * 2, 3e38, 1e-45]]).astype(np.float32)
    beside = [np.nextafter(points, np.float32(limit)) for limit in (-np.inf, np.inf)]
    points = np.concatenate([points, *(b[np.isfinite(b)] for b in beside)])
    points = np.concatenate([points, -points])
    quantized = fake_quantize(torch.from_numpy(points[None]), f"{grid}/tensor/one")
    assert np.array_equal(quantized[0].double().numpy(), nearest(points.astype(np.float64), grid))


@pytest.mark.parametrize("grid", CODES)
def test_every_bfloat16_goes_to_its_nearest_value(grid):
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.isfinite()]
    assert np.array_equal(GRIDS[grid].round(values).double().numpy(), nearest(values.double().numpy(), grid))


@pytest.mark.parametrize(("grid", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_float8_agrees_with_the_cast_of_torch_on_every_bfloat16(grid, dtype):
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.isfinite()]
    largest = CODES[grid][-1]
    assert torch.equal(GRIDS[grid].round(values), values.clamp(-largest, largest).to(dtype).float())


@pytest.mark.parametrize("name", QUANTIZERS)
def test_blocks_and_scales_match_the_reference(name):
    quantizer = Quantizer.parse(name)
    for seed in range(3):
        x = matrix(seed)
        expected, _ = reference(x, quantizer)
        assert np.array_equal(fake_quantize(torch.from_numpy(x), name).numpy(), expected)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(QUANTIZERS), st.integers(0, 2**31), st.integers(0, 40), st.sampled_from(["float32", "bfloat16"]))
def test_the_error_is_within_the_bound_and_quantizing_twice_changes_nothing(name, seed, spread, dtype):
    quantizer = Quantizer.parse(name)
    x = torch.from_numpy(matrix(seed, (5, 19), spread + 1)).to(getattr(torch, dtype)).float()
    once = fake_quantize(x, quantizer)
    _, scales = reference(x.numpy(), quantizer)
    grid = quantizer.grid
    x64, scales = x.double().numpy(), np.maximum(scales.astype(np.float64), 2.0**-126)
    bound = scales / 2
    if grid.mantissa is not None:
        bound = np.maximum(
            np.abs(x64) * 2.0 ** -(grid.mantissa + 1), bound * 2.0 ** (grid.least_exponent - grid.mantissa)
        )
    if quantizer.scale.startswith("e4m3"):
        bound = np.maximum(bound, np.abs(x64) - grid.largest * scales)
    assert (np.abs(once.double().numpy() - x64) <= bound + 2.0**-22 * np.abs(x64)).all()
    if quantizer.scale.startswith("e4m3"):  # the promise is for normal block scales
        largest = x.abs().amax(dim=1 if quantizer.scale == "e4m3_row" else (0, 1), keepdim=True)
        for block in blocks(x.shape, quantizer):
            amax = x[block].abs().amax()
            normal = amax >= 2.0**-6 / 448 * 1.1 * largest.expand_as(x)[block].amax()
            if not normal:
                x[block] = 0
        once = fake_quantize(x, quantizer)
    assert torch.equal(fake_quantize(once, quantizer), once)


@pytest.mark.parametrize("largest", [448.0, 57344.0, 6.0, 127.0, 7.0])
def test_a_float32_scale_is_the_scale_of_what_it_gives_for_every_mantissa(largest):
    """What idempotence rests on: for the largest values of our grids, not for every number."""
    amax = (torch.arange(1 << 23, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    scale = amax / largest
    assert torch.equal((scale * largest) / largest, scale)
    outer = _outer_scale(amax, largest, 448.0)
    assert torch.equal(_outer_scale((outer * 448.0) * largest, largest, 448.0), outer)
    assert (outer / (amax / (largest * 448.0)) - 1).abs().max() < 2**-21


def test_the_formats_differ_by_their_step():
    x = torch.linspace(-1, 1, 1000).unsqueeze(0)
    errors = {name: (fake_quantize(x, name) - x).abs().max().item() for name in ("int8", "int4", "fp8", "e2m1/row")}
    assert errors["int8"] == pytest.approx(0.5 / 127, rel=0.02)
    assert errors["int4"] == pytest.approx(0.5 / 7, rel=0.02)
    assert errors["fp8"] == pytest.approx(16 / 448, rel=0.02)  # the coarsest step of e4m3 is 32 below 448
    assert errors["e2m1/row"] == pytest.approx(1 / 6, rel=0.02)  # and of e2m1 2, below 6


@pytest.mark.parametrize("name", [*QUANTIZERS, "e4m3/tensor/one"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinities_and_nan_are_refused(name, bad):
    x = torch.ones(3, 8)
    x[1, 5] = bad
    with pytest.raises(ValueError, match="cannot quantize infinities or NaN"):
        fake_quantize(x, name)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_zeros_and_denormals(name):
    x = torch.tensor([[0.0, 0.0], [1e-45, -1e-42], [1.0, -1.0]])
    quantized = fake_quantize(x, name)
    assert quantized[0].tolist() == [0.0, 0.0]
    assert quantized.isfinite().all()
    assert quantized[2].tolist() == pytest.approx([1.0, -1.0], rel=0.2)
    assert fake_quantize(torch.zeros(0, 4), name).shape == (0, 4)


def quantized_in_shards(x, quantizer, dim, count):
    """The shards' results put together; what the ranks would exchange is combined between two passes."""
    exchanged: list[list[torch.Tensor]] = [[] for _ in range(count)]
    shards = x.chunk(count, dim)

    def run(answers):
        results = []
        for rank, shard in enumerate(shards):
            queue = list(answers)

            def maximum(values, rank=rank, queue=queue):
                exchanged[rank].append(values)
                return queue.pop(0) if queue else values

            start = [0, 0]
            start[dim] = rank * shard.shape[dim]
            results.append(fake_quantize(shard, quantizer, Placement(*x.shape, *start, maximum)))
        return torch.cat(results, dim)

    combined = []
    while True:
        result = run(combined)
        calls = [exchanged[rank] for rank in range(count)]
        assert len({len(call) for call in calls}) == 1, "the ranks exchange different numbers of times"
        if len(combined) == len(calls[0]):
            return result, len(combined)
        combined.append(torch.stack([call[len(combined)] for call in calls]).amax(0))
        exchanged = [[] for _ in range(count)]


@pytest.mark.parametrize("name", [*QUANTIZERS, "int8/5x8", "e4m3/4x12", "e4m3/16x16"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("count", [2, 4])
def test_shards_get_the_scales_of_the_whole_matrix(name, dim, count):
    x = torch.from_numpy(matrix(5, (24, 48), 4))
    quantizer = Quantizer.parse(name)
    result, exchanges = quantized_in_shards(x, quantizer, dim, count)
    assert torch.equal(result, fake_quantize(x, quantizer))
    size = (quantizer.rows, quantizer.columns)[dim]
    is_cut = size is None or (x.shape[dim] // count) % size != 0
    outer = quantizer.scale == "e4m3" or (quantizer.scale == "e4m3_row" and dim == 1)
    assert exchanges == is_cut + outer  # blocks that align with the shards need no exchange


def test_rows_are_independent_where_the_quantizer_says_so():
    x = torch.from_numpy(matrix(1, (6, 32)))
    for name in [*QUANTIZERS, "e4m3/tensor/one"]:
        quantizer = Quantizer.parse(name)
        alone = torch.cat([fake_quantize(row[None], quantizer) for row in x])
        assert torch.equal(alone, fake_quantize(x, quantizer)) == quantizer.is_rowwise, name


def test_bfloat16_is_quantized_from_the_rounded_value_and_not_modified():
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = x.clone()
    quantized = fake_quantize(x, "int8", dtype=torch.bfloat16)
    assert quantized.dtype == torch.bfloat16
    assert torch.equal(quantized, fake_quantize(x.float(), "int8").bfloat16())
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", [*QUANTIZERS, "e4m3/tensor/one"])
def test_names_are_read_back(name):
    assert Quantizer.parse(Quantizer.parse(name).name) == Quantizer.parse(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("e4m3", "neither GRID/BLOCK"),
        ("e4m4/row", "no grid 'e4m4'; there are e4m3"),
        ("e4m3/column", "block 'column' is not tensor, row"),
        ("e4m3/0x4", "at least 1"),
        ("e2m1/4x4/e4m3_row", "needs blocks inside one row"),
        ("e4m3/row/e8m0", "no scale rule 'e8m0'; there are fp32"),
    ],
)
def test_wrong_names_say_which_part(name, message):
    with pytest.raises(ValueError, match=message) as error:
        Quantizer.parse(name)
    assert name in str(error.value)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="needs a matrix"):
        fake_quantize(torch.zeros(4), "int8")
