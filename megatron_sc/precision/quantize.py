"""Fake quantization: a weight matrix rounded to a low-precision format and back."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

WeightFormat = Literal["int8", "int4", "fp8"]

# The largest magnitude a format represents: symmetric integers (-128 and -8 are unused), float8 e4m3 (finite only).
LARGEST: dict[WeightFormat, float] = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}


def fake_quantize(weight: Tensor, weight_format: WeightFormat, row_amax: Tensor | None = None) -> Tensor:
    """Round a weight matrix to ``weight_format`` with one scale per output row, and return it in its own dtype.

    Row i has the scale s_i = max_j |w_ij| / LARGEST. Integers: s * round(w / s); 'fp8': s * e4m3(w / s); ties to even.
    The arithmetic is float32, from the values as stored: give a bfloat16 matrix if the sampler gets bfloat16 weights.

    Args:
        weight: [rows, columns] floating point; not modified.
        weight_format: 'int8', 'int4' or 'fp8' (e4m3).
        row_amax: [rows], the largest magnitude of each row where ``weight`` holds only some of its columns
            (row-parallel layers; the maximum over the tensor-parallel group). Default: ``weight``'s own.

    Returns:
        [rows, columns], the dtype and device of ``weight``. A row of zeros stays zero.

    Raises:
        ValueError: ``weight`` is not a matrix, or ``row_amax`` does not have one entry a row.
    """
    if weight.dim() != 2:
        raise ValueError(f"fake_quantize needs a matrix [rows, columns], not shape {tuple(weight.shape)}")
    amax = row_magnitudes(weight) if row_amax is None else row_amax
    if amax.shape != weight.shape[:1]:
        raise ValueError(f"row_amax has shape {tuple(amax.shape)} but the weight has {weight.shape[0]} rows")
    largest = LARGEST[weight_format]
    scale = (amax / largest).unsqueeze(1)
    scale = torch.where(scale > 0, scale, 1.0)  # a row of zeros, or so small that its scale underflows, becomes zeros
    scaled = (weight.float() / scale).clamp(-largest, largest)
    rounded = scaled.to(torch.float8_e4m3fn).float() if weight_format == "fp8" else scaled.round()
    return (rounded * scale).to(weight.dtype)


def row_magnitudes(weight: Tensor) -> Tensor:
    """The largest magnitude of each row, float32 [rows], of a weight [rows, columns]."""
    return weight.abs().amax(dim=1).float()
