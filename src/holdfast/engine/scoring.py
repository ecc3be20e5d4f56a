"""Turns scores that lie on the device into the log-probabilities of messages: of drawn tokens, and of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from holdfast.engine.sampling import Drawn, Scores, score_tokens
from holdfast.engine.step_logits import LaterLogits
from holdfast.messages.events import TokenLogprob

PIECE_BYTES = 32 << 20  # of float32 logits that are there at a time; half as much more where the model computes in 16 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """What it takes to score the prompt tokens that follow the first positions of one chunk."""

    token_ids: tuple[int, ...]
    logits: LaterLogits  # of the positions before each of them
    top_logprobs: int
    vocab_size: int

    def logprobs(self, *, piece_bytes: int = PIECE_BYTES) -> tuple[TokenLogprob, ...]:
        """Compute and read back, a piece after the other, none of which has more logits than fit in `piece_bytes` or one row."""
        rows = max(1, piece_bytes // (4 * self.vocab_size))
        starts = range(0, len(self.token_ids), rows)
        return tuple(logprob for start in starts for logprob in self._piece(start, start + rows))

    def _piece(self, start: int, stop: int) -> Iterator[TokenLogprob]:
        token_ids = self.token_ids[start:stop]
        logits = self.logits.of(start, start + len(token_ids))
        scores = score_tokens(logits, mx.array(token_ids, dtype=mx.int32), top_logprobs=self.top_logprobs)
        return _logprobs(scores, token_ids)


def drawn_logprobs(drawn: Drawn, tokens: list[int]) -> list[TokenLogprob]:
    """The log-probability of every drawn row, with as many rivals as any row wants; empty when no row wants them."""
    if drawn.chosen_logprobs is None:
        return []
    scores = Scores(chosen=drawn.chosen_logprobs, top_ids=drawn.top_ids, top_logprobs=drawn.top_logprobs)
    return list(_logprobs(scores, tokens))


def _logprobs(scores: Scores, token_ids: Sequence[int]) -> Iterator[TokenLogprob]:
    chosen: list[float] = scores.chosen.tolist()  # type: ignore[assignment]
    tops = _top_rows(scores.top_ids, scores.top_logprobs, rows=len(chosen))
    return (TokenLogprob(token_id, value, top) for token_id, value, top in zip(token_ids, chosen, tops, strict=True))


def _top_rows(ids: mx.array | None, values: mx.array | None, *, rows: int) -> list[tuple[tuple[int, float], ...]]:
    if ids is None or values is None:
        return [()] * rows
    id_rows: list[list[int]] = ids.tolist()  # type: ignore[assignment]
    value_rows: list[list[float]] = values.tolist()  # type: ignore[assignment]
    return [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in zip(id_rows, value_rows, strict=True)]
