"""Weight versions: the engine's labels become the trainer's steps, one a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..rollout import Int32
from .request import Request

WeightVersion = int | Mapping[str, int] | None
"""The step of all tokens; or the step of each label that the engine reports; or None: labels are steps."""

ADVICE = (
    "pass weight_version=, the trainer's step whose weights the engine held, or name the weights after the step when "
    "they are updated"
)


def token_versions(spans: Sequence[Any] | None, length: int, weight_version: WeightVersion, request: Request) -> Int32:
    """int32 ``[R]``.

    Args:
        spans: what the engine reports: mappings or objects with ``version`` (a label), ``start`` and ``end`` (response
            positions), side by side from 0 to R. None: nothing.
        length: R.
        weight_version: see ``WeightVersion``.
        request: for errors.

    Raises:
        CaptureError: if the step of a token is not known: no label and no ``weight_version``; a label that is no step;
            several labels and one ``weight_version``; spans that leave a gap.
    """
    if spans is None:
        if not isinstance(weight_version, int | np.integer):
            raise request.error("no weight version is reported", ADVICE)
        return np.full(length, weight_version, np.int32)
    versions = np.empty(length, np.int32)
    labels = set()
    position = 0
    for span in spans:
        label, start, end = (_get(span, key) for key in ("version", "start", "end"))
        if start != position or not start <= end <= length:
            raise request.error(
                f"weight_versions has [{start}, {end}) where [{position}, ...) follows, of {length} tokens",
                "spans must cover the response without gaps: capture the finished output",
            )
        labels.add(label)
        if isinstance(weight_version, int | np.integer):
            versions[start:end] = weight_version
        else:
            versions[start:end] = _step(label, weight_version, request)
        position = end
    if position != length:
        raise request.error(
            f"weight_versions ends at {position} of {length} tokens",
            "spans must cover the response without gaps: capture the finished output",
        )
    if isinstance(weight_version, int | np.integer) and len(labels) > 1:
        raise request.error(
            f"weights changed during the response ({', '.join(map(repr, sorted(labels)))})",
            "one weight_version= cannot describe it: pass a mapping from these labels to trainer steps",
        )
    return versions


def _step(label: str, steps: Mapping[str, int] | None, request: Request) -> int:
    if steps is not None:
        if label not in steps:
            raise request.error(f"weight_version is {label!r}, which weight_version= does not map", ADVICE)
        return steps[label]
    try:
        if isinstance(label, float):
            raise TypeError
        return int(label)
    except (TypeError, ValueError):
        raise request.error(f"weight_version is {label!r}, not a step of the trainer", ADVICE) from None


def _get(span: Any, key: str) -> Any:
    return span[key] if isinstance(span, Mapping) else getattr(span, key)
