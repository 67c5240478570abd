"""Fake quantization: a tensor rounded to a low-precision format and back, in plain PyTorch.

A :class:`Quantizer` is a grid (the values that the format has), blocks of entries that share a scale, and the rule of
the scale:

    s = scale rule(max |x| over the block),   Q(x) = s * grid(x / s),   ties to the even neighbor, saturating

Error bound, for x inside a block with scale s (float32 arithmetic adds 2^-22 |x|):

    integers       |x - Q(x)| <= s / 2
    floats         |x - Q(x)| <= max(|x| 2^-(m+1), s 2^(e-m-1))      m mantissa bits, e exponent of the least normal

and, where the scale is rounded down (``e4m3`` scales), |x| - largest * s for entries beyond the largest value.

The result is float32 unless asked otherwise, and quantizing it again changes no bit (blocks whose e4m3 scale is
subnormal excepted: there the scale itself has too few digits). In bfloat16 the product of grid value and scale is
rounded once more, which is neither idempotent nor what an engine multiplies with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

GridName = Literal["e4m3", "e5m2", "e2m1", "int8", "int4"]
ScaleRule = Literal["fp32", "power_of_two", "e4m3", "e4m3_row", "one"]

ALIASES = {
    "fp8": "e4m3/row",
    "int8": "int8/row",
    "int4": "int4/row",
    "mxfp8": "e4m3/1x32/power_of_two",
    "mxfp4": "e2m1/1x32/power_of_two",
    "nvfp4": "e2m1/1x16/e4m3",
}
"""Short names of whole quantizers."""

LEAST_SCALE = 2.0**-126
"""The least normal float32: a smaller scale would have too few digits."""


def fake_quantize(
    x: Tensor, quantizer: Quantizer | str, place: Placement | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Round a matrix to a format and back.

    The arithmetic is float32, from the values as stored: give a bfloat16 matrix if the engine gets bfloat16 weights.

    Args:
        x: [rows, columns] floating point, finite; not modified.
        quantizer: the rule, or its name (see ``Quantizer.parse``).
        place: where ``x`` lies in the matrix whose blocks share scales, if it is a shard; None: it is that matrix.
            Collective over the ranks that hold the matrix, if a block spans two of them.
        dtype: of the result; None: float32. See the module's docstring about bfloat16.

    Returns:
        [rows, columns], on the device of ``x``.

    Raises:
        ValueError: ``x`` is not a matrix, or holds infinities or NaN. On a GPU an asynchronous device assertion fails
            for these instead, so that the host does not wait.
    """
    if isinstance(quantizer, str):
        quantizer = Quantizer.parse(quantizer)
    if x.dim() != 2:
        raise ValueError(f"fake_quantize needs a matrix [rows, columns], not shape {tuple(x.shape)}")
    values = x.detach().float()
    if x.numel() == 0:
        return values.to(dtype or torch.float32)
    if quantizer.scale == "one":
        _require_finite(values)
        return quantizer.grid.round(values).to(dtype or torch.float32)
    place = place or Placement(*x.shape)
    rows = _Axis(x.shape[0], place.row, place.rows, quantizer.rows)
    columns = _Axis(x.shape[1], place.column, place.columns, quantizer.columns)
    amax = _block_maxima(values, rows, columns)
    if rows.is_cut or columns.is_cut:
        whole = amax.new_zeros(rows.total, columns.total)
        whole[rows.blocks, columns.blocks] = amax
        amax = place.maximum(whole)[rows.blocks, columns.blocks]
    _require_finite(amax)
    is_shared = x.shape[1] < place.columns or (quantizer.scale == "e4m3" and x.shape[0] < place.rows)
    scales = _scales(quantizer, amax, place.maximum if is_shared else lambda own: own)
    scale = columns.spread(rows.spread(scales, 0), 1)
    divisor = torch.where(scale > 0, scale, 1.0)  # a scale of 0: a block of zeros, or of what an e4m3 scale rounds to 0
    return (quantizer.grid.round(values / divisor) * scale).to(dtype or torch.float32)


@dataclass(frozen=True)
class Grid:
    """The values of a number format, symmetric around 0.

    Floats: 0, and +- (1 + i/2^m) 2^e for e >= ``least_exponent``, with subnormals below, up to ``largest``. Integers
    (``mantissa`` None): -largest .. largest; -128 and -8 are unused, as in every symmetric engine.
    """

    largest: float
    mantissa: int | None = None  # stored bits, m
    least_exponent: int = 0  # of the smallest normal value

    def round(self, x: Tensor) -> Tensor:
        """The nearest values of the grid, float32; ties go to the even neighbor, magnitudes beyond saturate."""
        x = x.clamp(-self.largest, self.largest)
        if self.mantissa is None:
            return x.round()
        exponent = (torch.frexp(x).exponent - 1).clamp(min=self.least_exponent)  # 2^exponent <= |x| < 2^(exponent + 1)
        step = torch.ldexp(torch.ones_like(x), exponent - self.mantissa)
        return (x / step).round() * step  # a multiple of an even number of steps has an even mantissa


GRIDS: dict[GridName, Grid] = {
    "e4m3": Grid(448.0, 3, -6),  # float8_e4m3fn: no infinities, one NaN code a sign
    "e5m2": Grid(57344.0, 2, -14),
    "e2m1": Grid(6.0, 1, 0),  # FP4
    "int8": Grid(127.0),
    "int4": Grid(7.0),
}


@dataclass(frozen=True)
class Quantizer:
    """A grid, blocks that share a scale, and how the scale follows from a block's largest magnitude.

    Scale rules:
        fp32: amax / largest, in float32.
        power_of_two: the least power of two that is at least amax / largest (E8M0; UE8M0 in DeepGEMM).
        e4m3: NVFP4's two levels: a float32 scale g of the whole matrix, and for each block a float8 e4m3 b,
            s = b g, where b is at most 448.
        e4m3_row: the same, with one g for each row: what a cache or an activation can know of a token by itself.
        one: no scale, as in an FP8 KV cache without calibration; larger magnitudes saturate.
    """

    grid_name: GridName
    rows: int | None  # of a block; None: all
    columns: int | None
    scale: ScaleRule = "fp32"

    def __post_init__(self) -> None:
        """Check the parts."""
        if self.grid_name not in GRIDS:
            raise ValueError(f"no grid {self.grid_name!r}; there are {', '.join(GRIDS)}")
        if self.scale not in get_args(ScaleRule):
            raise ValueError(f"no scale rule {self.scale!r}; there are {', '.join(get_args(ScaleRule))}")
        if any(size is not None and size < 1 for size in (self.rows, self.columns)):
            raise ValueError(f"blocks of {self.rows} x {self.columns} entries: both sizes must be at least 1")
        if self.scale == "e4m3_row" and self.rows != 1:
            raise ValueError("scale rule e4m3_row needs blocks inside one row, such as 1x16")

    @classmethod
    def parse(cls, name: str) -> Quantizer:
        """A quantizer by its name GRID/BLOCK[/SCALE], or by an alias.

        GRID: e4m3, e5m2, e2m1, int8, int4. BLOCK: ``tensor``, ``row``, or rows x columns as in ``1x128``, ``128x128``.
        SCALE: a scale rule, default fp32. For example ``e4m3/128x128/power_of_two``, ``int4/1x32``, ``mxfp8``.

        Raises:
            ValueError: naming the part that does not exist.
        """
        grid, *rest = ALIASES.get(name, name).split("/")
        if not 1 <= len(rest) <= 2:
            raise ValueError(
                f"quantizer {name!r} is neither GRID/BLOCK[/SCALE], such as e4m3/1x128, nor one of {', '.join(ALIASES)}"
            )
        block, scale = rest[0], rest[1] if len(rest) == 2 else "fp32"
        rows: int | None = None if block == "tensor" else 1
        columns: int | None = None
        if block not in ("tensor", "row"):
            high, cross, wide = block.partition("x")
            if not (cross and high.isdecimal() and wide.isdecimal()):
                raise ValueError(f"quantizer {name!r}: block {block!r} is not tensor, row or ROWSxCOLUMNS")
            rows, columns = int(high), int(wide)
        try:
            return cls(grid, rows, columns, scale)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"quantizer {name!r}: {error}") from None

    @property
    def name(self) -> str:
        """What ``parse`` reads, without aliases."""
        if self.rows is None and self.columns is None:
            block = "tensor"
        elif self.rows == 1 and self.columns is None:
            block = "row"
        else:
            block = f"{self.rows}x{self.columns}"
        return "/".join([self.grid_name, block] + [self.scale] * (self.scale != "fp32"))

    @property
    def grid(self) -> Grid:
        """The values."""
        return GRIDS[self.grid_name]

    @property
    def is_rowwise(self) -> bool:
        """Whether a row's result depends on that row alone: a token's, whatever else is in the batch."""
        return self.scale == "one" or (self.rows == 1 and self.scale != "e4m3")


@dataclass(frozen=True)
class Placement:
    """Where a shard lies in the matrix whose blocks share scales. All shards of a matrix have the same shape."""

    rows: int  # of the whole matrix
    columns: int
    row: int = 0  # the shard's first
    column: int = 0
    maximum: Callable[[Tensor], Tensor] = lambda values: values  # elementwise, over the ranks that hold the matrix


@dataclass(frozen=True)
class _Axis:
    """One dimension of a shard, in blocks."""

    length: int
    start: int
    full: int
    block: int | None

    @property
    def size(self) -> int:
        return self.block or self.full

    @property
    def is_cut(self) -> bool:
        """Whether a block spans two shards: the same answer on all of them."""
        return self.length < self.full and self.length % self.size != 0

    @property
    def total(self) -> int:
        """Blocks of the whole matrix."""
        return -(-self.full // self.size)

    @property
    def blocks(self) -> slice:
        """The blocks that the shard touches."""
        return slice(self.start // self.size, -(-(self.start + self.length) // self.size))

    @cached_property
    def padding(self) -> tuple[int, int]:
        """Entries of the first and last of these blocks that are not the shard's; one block is not padded."""
        if self.blocks.stop - self.blocks.start == 1:
            return 0, 0
        return self.start % self.size, self.blocks.stop * self.size - self.start - self.length

    def spread(self, values: Tensor, dim: int) -> Tensor:
        """A value for each block to one for each entry, along ``dim``."""
        if values.shape[dim] == 1:
            return values
        return values.repeat_interleave(self.size, dim).narrow(dim, self.padding[0], self.length)


def _block_maxima(values: Tensor, rows: _Axis, columns: _Axis) -> Tensor:
    """The largest magnitude of each block the shard touches, [row blocks, column blocks]."""
    padded = pad(values.abs(), (*columns.padding, *rows.padding))
    row_blocks, column_blocks = (axis.blocks.stop - axis.blocks.start for axis in (rows, columns))
    shape = (row_blocks, padded.shape[0] // row_blocks, column_blocks, padded.shape[1] // column_blocks)
    return padded.view(shape).amax(dim=(1, 3))


def _scales(quantizer: Quantizer, amax: Tensor, maximum: Callable[[Tensor], Tensor]) -> Tensor:
    """The scale of each block, from its largest magnitude; ``maximum`` completes that of a matrix or a row."""
    largest = quantizer.grid.largest
    match quantizer.scale:
        case "power_of_two":
            mantissa, exponent = torch.frexp(amax / largest)
            exponent = exponent - (mantissa == 0.5).int()  # of the least power of two that is not below
            scale = torch.ldexp(torch.ones_like(amax), exponent).clamp(min=LEAST_SCALE)
            return torch.where(amax > 0, scale, 0.0)
        case "e4m3" | "e4m3_row":
            most = amax.amax().view(1, 1) if quantizer.scale == "e4m3" else amax.amax(dim=1, keepdim=True)
            blocks = GRIDS["e4m3"]
            outer = _outer_scale(maximum(most), largest, blocks.largest)
            block = blocks.round(amax / largest / torch.where(outer > 0, outer, 1.0))
            return torch.where(block > 0, (block * outer).clamp(min=LEAST_SCALE), 0.0)
        case _:
            return _float32_scale(amax, largest)


def _float32_scale(amax: Tensor, largest: float) -> Tensor:
    """amax / largest: for the largest values of our grids also the scale of its result, (s largest) / largest = s."""
    return torch.where(amax > 0, (amax / largest).clamp(min=LEAST_SCALE), 0.0)


def _outer_scale(amax: Tensor, largest: float, largest_block: float) -> Tensor:
    """amax / (largest largest_block), moved by at most a last bit to the scale of what it gives."""
    scale = amax / largest / largest_block
    scale = ((scale * largest_block) * largest) / largest / largest_block
    return torch.where(amax > 0, scale.clamp(min=LEAST_SCALE), 0.0)


def _require_finite(values: Tensor) -> None:
    finite = values.isfinite().all()
    what = "cannot quantize infinities or NaN: a scale would become infinite and everything beside them 0"
    if values.device.type != "cpu":
        torch._assert_async(finite, what)
    elif not finite:
        raise ValueError(f"{what}. Look for what overflowed before this tensor")
