"""The passes over a shard's columns as Triton kernels: one read forward; one read and one write backward.

A program works on a row at a time, in tiles of ``TILE`` columns, in float32. Its online softmax keeps one maximum a row
and ``TILE`` partial sums, so that a column costs one exponential: two would outrun the memory of an H200 in bfloat16.

Columns of recorded tokens are left out of the online softmax, not subtracted from it: a tail of 1e-12 would drown in
the rounding of the head. They are known by a mask of V bits (19 KB for 151936 columns: 6 % of a bfloat16 row, read from
the L2 cache), which a program sets before it scans a row and clears after. Programs are persistent, a few on each
multiprocessor, so that all masks together (20 MB on an H200) stay in that cache and are made once. What else there is,
for k = 8 to 512: comparing every column with the tokens costs V k; a sorted list, searched tile by tile, costs a sort a
row and V k / tiles comparisons; writing a sentinel over the logits needs their storage, which is not always ours. The
mask costs the same for every k, but for setting k bits.

Backward needs no test at all: the program writes all columns of its row as if none was recorded, and behind a barrier
the recorded tokens once more, with the values that were computed for them.
"""

# mypy: allow-untyped-defs
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e30)
"""``statistics.NOTHING``."""


@triton.jit
def statistics_kernel(
    logits,  # [rows, >= valid], any float but float64
    row_stride,
    valid,  # columns to read
    temperature,  # [rows] float32
    mask,  # [rows] bool
    columns,  # int32 [rows, k], or [m] when ragged: local columns of recorded tokens; -1: none
    starts,  # int64 [rows + 1] when ragged: where each row begins in columns
    k,
    bits,  # int32 [programs, words], all 0 before and after
    words,
    result,  # float32 [rows, result_stride]: maximum, sum and dot are written
    result_stride,
    rows,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EXCLUDE: tl.constexpr,
    RAGGED: tl.constexpr,
    WITH_DOT: tl.constexpr,
    TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``local_statistics`` of every row that trains; (NOTHING, 0, 0) of the others, which are not read."""
    program = tl.program_id(0)
    bits += program * words
    for row in range(program, rows, tl.num_programs(0)):
        trains = True
        if HAS_MASK:
            trains = tl.load(mask + row) != 0
        maximum = NOTHING * 1.0
        total = 0.0
        dot = 0.0
        if trains:
            if EXCLUDE:
                first, last = _entries(starts, row, k, RAGGED)
                for entry in range(first, last, ENTRIES):
                    _mark(bits, columns, entry, last, ENTRIES)
                tl.debug_barrier()
            values = logits + tl.cast(row, tl.int64) * row_stride
            scale, reciprocal = _temperature(temperature, row, HAS_TEMPERATURE)
            sums = tl.zeros((TILE // 32, 32), tl.float32)
            dots = tl.zeros((TILE // 32, 32), tl.float32)
            whole = valid // TILE * TILE
            # Whole tiles without a test of the bounds: their loads are vectors, whatever the number of columns.
            for start in tl.range(0, whole, TILE, num_stages=STAGES):
                x = _load(values, start, valid, scale, reciprocal, HAS_TEMPERATURE, False, TILE)
                if EXCLUDE:
                    x = _exclude(x, bits, start, TILE)
                maximum, sums, dots = _accumulate(x, maximum, sums, dots, WITH_DOT)
            if whole < valid:
                x = _load(values, whole, valid, scale, reciprocal, HAS_TEMPERATURE, True, TILE)
                if EXCLUDE:
                    x = _exclude(x, bits, whole, TILE)
                maximum, sums, dots = _accumulate(x, maximum, sums, dots, WITH_DOT)
            total = tl.sum(sums)
            dot = tl.sum(dots)
            if EXCLUDE:
                tl.debug_barrier()
                first, last = _entries(starts, row, k, RAGGED)
                for entry in range(first, last, ENTRIES):
                    _clear(bits, columns, entry, last, ENTRIES)
                tl.debug_barrier()
        present = (maximum > NOTHING) | (total != total)  # a NaN is not hidden, whatever the maximum made of it
        tl.store(result + row * result_stride, maximum)
        tl.store(result + row * result_stride + 1, tl.where(present, total, 0.0))
        tl.store(result + row * result_stride + 2, tl.where(present, dot, 0.0))


@triton.jit
def gradient_kernel(
    logits,  # [rows, >= valid], any float but float64; may be result
    row_stride,
    result,  # like logits, overwritten in the valid columns
    result_stride,
    valid,
    temperature,  # [rows] float32
    dense_maximum,  # [rows] float32
    dense,  # [rows] float32: coefficient of exp(x - dense_maximum); a row where it is 0 is not read
    direct,  # [rows] float32: added at the sampled token
    sampled,  # int32 [rows]: local column of the sampled token; -1: nothing to add
    columns,  # int32 [rows, k], or [m] when ragged: local columns of recorded tokens; -1: none
    starts,  # int64 [rows + 1] when ragged
    k,
    values,  # float32, like columns: the gradient at recorded tokens
    HAS_TEMPERATURE: tl.constexpr,
    RECORDED: tl.constexpr,
    RAGGED: tl.constexpr,
    TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program a row: dense exp(x - dense_maximum) everywhere, then the recorded tokens."""
    row = tl.program_id(0)
    source = logits + tl.cast(row, tl.int64) * row_stride
    target = result + tl.cast(row, tl.int64) * result_stride
    coefficient = tl.load(dense + row)
    peak = tl.load(dense_maximum + row)
    at_sampled = tl.load(direct + row)
    sampled_column = tl.load(sampled + row)
    whole = valid // TILE * TILE
    if coefficient != 0.0:
        scale, reciprocal = _temperature(temperature, row, HAS_TEMPERATURE)
        for start in tl.range(0, whole, TILE, num_stages=STAGES):
            x = _load(source, start, valid, scale, reciprocal, HAS_TEMPERATURE, False, TILE)
            _write(target, coefficient * tl.exp(x - peak), start, valid, sampled_column, at_sampled, False, TILE)
        if whole < valid:
            x = _load(source, whole, valid, scale, reciprocal, HAS_TEMPERATURE, True, TILE)
            _write(target, coefficient * tl.exp(x - peak), whole, valid, sampled_column, at_sampled, True, TILE)
    else:
        zero = tl.zeros((TILE // 32, 32), tl.float32)
        for start in tl.range(0, whole, TILE, num_stages=STAGES):
            _write(target, zero, start, valid, sampled_column, at_sampled, False, TILE)
        if whole < valid:
            _write(target, zero, whole, valid, sampled_column, at_sampled, True, TILE)
    if RECORDED:
        tl.debug_barrier()
        first, last = _entries(starts, row, k, RAGGED)
        for entry in range(first, last, ENTRIES):
            index = entry + tl.arange(0, ENTRIES)
            column = tl.load(columns + index, mask=index < last, other=-1)
            value = tl.load(values + index, mask=index < last, other=0.0)
            tl.store(target + column, value.to(result.dtype.element_ty), mask=column >= 0)


@triton.jit
def _entries(starts, row, k, RAGGED: tl.constexpr):
    """Where a row's recorded tokens are."""
    first = tl.cast(row, tl.int64) * k
    last = first + k
    if RAGGED:
        first = tl.load(starts + row)
        last = tl.load(starts + row + 1)
    return first, last


@triton.jit
def _mark(bits, columns, entry, last, ENTRIES: tl.constexpr):
    """Set the bits of some recorded tokens: atomically, because several may share a word."""
    index = entry + tl.arange(0, ENTRIES)
    column = tl.load(columns + index, mask=index < last, other=-1)
    bit = tl.full((ENTRIES,), 1, tl.int32) << (column & 31)
    tl.atomic_or(bits + (column >> 5), bit, mask=column >= 0, sem="relaxed", scope="cta")


@triton.jit
def _clear(bits, columns, entry, last, ENTRIES: tl.constexpr):
    """Clear the words of some recorded tokens."""
    index = entry + tl.arange(0, ENTRIES)
    column = tl.load(columns + index, mask=index < last, other=-1)
    tl.store(bits + (column >> 5), tl.zeros((ENTRIES,), tl.int32), mask=column >= 0)


@triton.jit
def _temperature(temperature, row, HAS_TEMPERATURE: tl.constexpr):
    """T of the row and 1/T, correctly rounded."""
    scale = 1.0
    reciprocal = 1.0
    if HAS_TEMPERATURE:
        scale = tl.load(temperature + row)
        reciprocal = tl.div_rn(1.0, scale)
    return scale, reciprocal


@triton.jit
def _columns(TILE: tl.constexpr):
    """Column offsets of a tile, ``[TILE / 32, 32]``: a row of the tile is a word of the bit mask."""
    return tl.arange(0, TILE // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def _load(
    row, start, valid, scale, reciprocal, HAS_TEMPERATURE: tl.constexpr, PARTIAL: tl.constexpr, TILE: tl.constexpr
):
    """x = z/T of a tile, NOTHING beyond the last column."""
    column = start + _columns(TILE)
    if PARTIAL:
        z = tl.load(row + column, mask=column < valid, other=NOTHING).to(tl.float32)
    else:
        z = tl.load(row + column).to(tl.float32)
    if HAS_TEMPERATURE:
        # Correctly rounded without dividing: the remainder z - q T is exact in a fused multiply-add.
        quotient = z * reciprocal
        quotient = tl.fma(tl.fma(-quotient, scale, z), reciprocal, quotient)
        z = tl.where(tl.abs(z) < float("inf"), quotient, z)
    if PARTIAL:
        z = tl.where(column < valid, z, NOTHING)
    return z


@triton.jit
def _exclude(x, bits, start, TILE: tl.constexpr):
    """NOTHING at recorded tokens."""
    word = tl.load(bits + start // 32 + tl.arange(0, TILE // 32))
    recorded = (word[:, None] >> tl.arange(0, 32)[None, :]) & 1
    return tl.where(recorded != 0, NOTHING, x)


@triton.jit
def _accumulate(x, maximum, sums, dots, WITH_DOT: tl.constexpr):
    """The online softmax: one more tile. What a tile of NOTHING leaves is wiped by the first real maximum."""
    larger = tl.maximum(maximum, tl.max(x))
    shift = maximum - larger
    scale = tl.exp(shift)
    shifted = x - larger
    exponential = tl.exp(shifted)
    if WITH_DOT:
        dots = scale * (dots + sums * shift) + tl.where(exponential > 0.0, exponential * shifted, 0.0)  # 0 * -inf = 0
    return larger, sums * scale + exponential, dots


@triton.jit
def _write(row, value, start, valid, sampled_column, at_sampled, PARTIAL: tl.constexpr, TILE: tl.constexpr):
    """Store a tile of the gradient, with the sampled token's own part."""
    column = start + _columns(TILE)
    value = (value + tl.where(column == sampled_column, at_sampled, 0.0)).to(row.dtype.element_ty)
    if PARTIAL:
        tl.store(row + column, value, mask=column < valid)
    else:
        tl.store(row + column, value)
