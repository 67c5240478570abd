"""Expert routes as engines report them: one row a token that was fed forward, so none for the last one."""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

import numpy as np
import numpy.typing as npt

from ..schema import ExpertRoutes
from .request import Request
from .response import Int16

ADVICE = "pass the request that made this response, with its start of the returned routes"


def pad_routes(routes: npt.NDArray[Any], tokens: int, start: int, request: Request) -> Int16:
    """int16 ``[tokens, layers, top-k]``, -1 where the engine reports none: before ``start``, and for the last token.

    Args:
        routes: ``[n, layers, top-k]``: tokens [start, tokens - 1).
        tokens: P + R.
        start: first token whose routes were asked for.
        request: for errors.

    Raises:
        CaptureError: for another number of rows, or an expert that is no int16.
    """
    if routes.ndim != 3 or len(routes) != tokens - 1 - start:
        raise request.error(
            f"routed_experts has shape {list(routes.shape)}",
            f"must be [{tokens - 1 - start}, layers, top-k]: prompt and response have {tokens} tokens, routes start at "
            f"{start}, and the last token was not fed forward; {ADVICE}",
        )
    if routes.size and not 0 <= int(routes.min()) <= int(routes.max()) < 1 << 15:
        raise request.error(
            f"routed_experts has values in [{routes.min()}, {routes.max()}]", "must be experts, in [0, 32768)"
        )
    padded = np.full((tokens, *routes.shape[1:]), -1, np.int16)
    padded[start : tokens - 1] = routes
    return padded


def decode_npy(text: str, request: Request) -> npt.NDArray[Any]:
    """An array from base64 of the npy format (vLLM's servers)."""
    try:
        return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, binascii.Error, EOFError) as error:
        raise request.error(f"routed_experts is no base64 of an npy array ({error})", "pass it as it came") from None


def decode_int32(text: str, shape: ExpertRoutes | None, request: Request) -> npt.NDArray[np.int32]:
    """``[n, layers, top-k]`` from base64 of little-endian int32 without a shape (SGLang)."""
    if shape is None:
        raise request.error("routed_experts comes without a shape", "pass expert_routes=, as in the manifest")
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    except (ValueError, binascii.Error) as error:
        raise request.error(f"routed_experts is no base64 of int32 ({error})", "pass it as it came") from None
    if flat.size % (shape.layers * shape.topk):
        raise request.error(
            f"routed_experts has {flat.size} values, no multiple of {shape.layers} layers times top-{shape.topk}",
            "pass the expert_routes= of this model",
        )
    return flat.reshape(-1, shape.layers, shape.topk)
