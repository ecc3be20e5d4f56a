"""Log-probabilities by numpy where the logits lie in host memory: on a CPU, for large vocabularies."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from holdfast.worker.engine.host_rows import LARGE_VOCABULARY, GroupedRow, on_host, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probabilities of given tokens.

    chosen: fp32 [n]; top_ids: uint32 [n, k] and top_logprobs: fp32 [n, k], most likely first, None
    when k is 0.
    """

    chosen: mx.array
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """All arrays that are there."""
        return [
            array for array in (self.chosen, self.top_ids, self.top_logprobs) if array is not None
        ]


def scoring_pays(*, vocab_size: int) -> bool:
    """Whether numpy is faster than MLX here; the same for all rows of a model."""
    return vocab_size >= LARGE_VOCABULARY and on_host()


def score_on_host(logits: mx.array, token_ids: mx.array, *, top_logprobs: int) -> Scores:
    """Log-probabilities of one given token per row, and of each row's `top_logprobs` most likely,
    NaN for rows without any.

    logits: fp32 [n, vocab], token_ids: int [n]; both are evaluated. Needs the room of one row
    beside them.
    """
    mx.eval(logits, token_ids)
    rows, tokens = rows_of(logits), np.array(token_ids)
    top_ids = np.zeros((len(rows), top_logprobs), np.uint32)
    top = np.full((len(rows), top_logprobs), np.nan, np.float32)
    chosen = np.full(len(rows), np.nan, np.float32)
    room = np.empty(rows.shape[1], np.float32)
    with np.errstate(all="ignore"):
        for index, row in enumerate(rows):
            peak = row.max()
            if not np.isfinite(peak):
                continue
            total = float(peak) + float(
                np.log(np.exp(np.subtract(row, peak, out=room), out=room).sum(dtype=np.float64))
            )
            chosen[index] = float(row[tokens[index]]) - total
            if top_logprobs:
                top_ids[index] = GroupedRow(row).largest(top_logprobs)
                top[index] = row[top_ids[index]] - np.float64(total)
    if top_logprobs == 0:
        return Scores(chosen=mx.array(chosen))
    return Scores(chosen=mx.array(chosen), top_ids=mx.array(top_ids), top_logprobs=mx.array(top))
