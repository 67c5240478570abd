"""Which rows of a framework's logits predict which response tokens, under packing and context parallelism.

slime and miles lay a micro-batch out alike. ``thd``: sequences one after the other, each split over context-parallel
ranks into 2c chunks of ceil(length / 2c) positions, of which rank r holds chunks r and 2c - 1 - r. ``bshd``: the same,
with every sequence padded to ``max_seq_len`` first. Rows at the end may be padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of a response that this rank's logits predict.

    Attributes:
        sample: index in the micro-batch.
        row: row of the flattened logits that predicts the first of them.
        start: their first index in the response.
        stop: after their last.
    """

    sample: int
    row: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def response_spans(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    cp_rank: int,
    cp_size: int,
    max_seq_len: int | None = None,
) -> tuple[list[Span], int]:
    """The spans of this context-parallel rank in the frameworks' order: by sample, then by position.

    Args:
        total_lengths: tokens of prompt and response, by sample.
        response_lengths: tokens of the response, by sample.
        cp_rank: this context-parallel rank.
        cp_size: context-parallel ranks.
        max_seq_len: padded length of every sequence (``bshd``); None: packed (``thd``).

    Returns:
        The spans, and the rows that the sequences take, without the padding behind the last.

    Raises:
        ValueError: if a sample has no prompt, so that nothing predicts its first token.
    """
    chunks = 2 * cp_size if cp_size > 1 else 1
    held = (cp_rank, chunks - 1 - cp_rank) if cp_size > 1 else (0,)
    spans, base = [], 0
    for sample, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        if response >= total:
            raise ValueError(
                f"sample {sample} has {total} tokens, {response} of them in the response: without a prompt nothing "
                "predicts the first"
            )
        first, end = total - response - 1, total - 1  # positions that predict a response token
        size = -(-(total if max_seq_len is None else max_seq_len) // chunks)
        for local, chunk in enumerate(held):
            start, stop = max(chunk * size, first), min((chunk + 1) * size, end)
            if start < stop:
                spans.append(Span(sample, base + local * size + start - chunk * size, start - first, stop - first))
        base += len(held) * size
    return spans, base
