"""Tinker: ``SamplingClient.sample`` with ``topk_sample_logprobs``.

Follows the package tinker 0.38.0 (``tinker.types.SampleResponse``, ``SampledSequence``, ``TopkLogprobs``): tokens,
their log-probabilities and dense ``[R, k]`` matrices of the top k, where positions that are not filled have id 0 and
log-probability -99999. The sampled token is not added to them. The package does not say whether log-probabilities are
those after temperature and truncation, and a response does not name the weights that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import arrays
from .request import Request
from .response import Response
from .sampling import LogprobsMode, Sampling

ENGINE = "tinker"
MASKED = -99999.0
"""``tinker.types.topk_logprobs.MASK_LOGPROB``."""


def responses(
    response: Any,
    prompt: Any,
    params: Any,
    *,
    weight_version: int,
    logprobs: LogprobsMode | None = None,
) -> list[Response]:
    """The sequences of one ``SampleResponse``.

    Args:
        response: of ``sample(..., topk_sample_logprobs=k).result()``.
        prompt: the ``ModelInput``, or its token ids.
        params: the request's ``SamplingParams``.
        weight_version: the trainer's step whose weights the sampling client has.
        logprobs: what the log-probabilities are of (``Sampling.logprobs``). None: not known, which is enough at
            temperature 1 without truncation, where it makes no difference.

    Raises:
        CaptureError: see ``arrays.response``.
    """
    request = Request(ENGINE, "sample")
    top_k = params.top_k if params.top_k > 0 else 0
    sampling = Sampling(
        float(params.temperature),
        float(params.top_p),
        top_k,
        logprobs=logprobs or "raw",
        advice="sample at temperature 1 without top_p and top_k, or pass logprobs= if you know what Tinker reports",
    )
    sampling.check(request)
    ids = prompt.to_ints() if hasattr(prompt, "to_ints") else prompt
    with request.reading("a SampleResponse"):
        return [_response(ids, sequence, sampling, weight_version) for sequence in response.sequences]


def _response(prompt: Sequence[int], sequence: Any, sampling: Sampling, weight_version: int) -> Response:
    request = Request(ENGINE, str(sequence.sequence_id))
    tokens = sequence.tokens_np if sequence.tokens_np is not None else np.asarray(sequence.tokens, np.int32)
    logprobs = sequence.logprobs_np if sequence.logprobs_np is not None else sequence.logprobs
    if logprobs is None:
        raise request.error("logprobs is None", "ask for sampled tokens' log-probabilities")
    head_ids, head_logprobs, head_sizes = _top(sequence, request)
    return arrays.response(
        prompt,
        tokens,
        logprobs,
        weight_version,
        sampling,
        head_ids=head_ids,
        head_logprobs=head_logprobs,
        head_sizes=head_sizes,
        finish_reason=str(sequence.stop_reason),
        request=request,
    )


def _top(sequence: Any, request: Request) -> tuple[npt.NDArray[Any] | None, ...]:
    """Ids, log-probabilities, and sizes where they are lists."""
    dense = sequence.topk_logprobs_np
    if dense is not None:
        return np.where(dense.logprobs == MASKED, -1, dense.token_ids), dense.logprobs, None
    rows = sequence.topk_logprobs
    if rows is None:
        return None, None, None
    if None in rows:
        raise request.error("topk_logprobs is None", "set topk_sample_logprobs", rows.index(None))
    entries = [entry for row in rows for entry in row]
    return (
        np.array([token for token, _ in entries], np.int32),
        np.array([value for _, value in entries], np.float32),
        np.array([len(row) for row in rows], np.int32),
    )
