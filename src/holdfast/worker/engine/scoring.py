"""Turns scores that lie on the device into the log-probabilities of messages: of drawn tokens, and
of a prompt's own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from holdfast.wire.events import TokenLogprob
from holdfast.worker.engine.head_seam import LaterLogits
from holdfast.worker.engine.host_rows import Scores
from holdfast.worker.engine.sampling import DrawnRows, score_tokens

# of float32 logits that are there at a time; half as much more where the model computes in 16 bits
PIECE_BYTES = 32 << 20


def prompt_logprobs(
    logits: LaterLogits,
    token_ids: Sequence[int],
    *,
    top_logprobs: int,
    vocab_size: int,
    piece_bytes: int = PIECE_BYTES,
) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of prompt tokens; logits: of the positions before each of them.

    Computed and read back a piece after the other, none of which has more logits than fit in
    `piece_bytes` or one row.
    """
    rows = max(1, piece_bytes // (4 * vocab_size))
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), rows):
        piece = token_ids[start : start + rows]
        scores = score_tokens(
            logits.of(start, start + len(piece)),
            mx.array(list(piece), dtype=mx.int32),
            top_logprobs=top_logprobs,
        )
        found.extend(_logprobs(scores, piece))
    return tuple(found)


def drawn_logprobs(drawn: DrawnRows, tokens: list[int]) -> list[TokenLogprob]:
    """The log-probability of every drawn row, with as many rivals as any row wants; empty when no
    row wants them.
    """
    return [] if drawn.scores is None else list(_logprobs(drawn.scores, tokens))


def _logprobs(scores: Scores, token_ids: Sequence[int]) -> Iterator[TokenLogprob]:
    chosen: list[float] = scores.chosen.tolist()  # type: ignore[assignment]
    tops = _top_rows(scores.top_ids, scores.top_logprobs, rows=len(chosen))
    return (
        TokenLogprob(token_id, value, top)
        for token_id, value, top in zip(token_ids, chosen, tops, strict=True)
    )


def _top_rows(
    ids: mx.array | None, values: mx.array | None, *, rows: int
) -> list[tuple[tuple[int, float], ...]]:
    if ids is None or values is None:
        return [()] * rows
    id_rows: list[list[int]] = ids.tolist()  # type: ignore[assignment]
    value_rows: list[list[float]] = values.tolist()  # type: ignore[assignment]
    return [
        tuple(zip(row_ids, row_values, strict=True))
        for row_ids, row_values in zip(id_rows, value_rows, strict=True)
    ]
