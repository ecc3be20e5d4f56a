"""Turns scores that lie on the device into the log-probabilities of messages: of drawn tokens, and of a prompt's own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from holdfast.engine.sampling import Drawn, Scores, score_tokens
from holdfast.engine.sequence import SequenceSpan
from holdfast.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of the prompt tokens that follow the positions of one chunk, still on the device."""

    token_ids: tuple[int, ...]
    scores: Scores

    def arrays(self) -> list[mx.array]:
        """What has to be evaluated."""
        parts = (self.scores.chosen, self.scores.top_ids, self.scores.top_logprobs)
        return [array for array in parts if array is not None]

    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Read them back; waits if they are not evaluated."""
        chosen: list[float] = self.scores.chosen.tolist()  # type: ignore[assignment]
        tops = _top_rows(self.scores.top_ids, self.scores.top_logprobs, rows=len(chosen))
        return tuple(
            TokenLogprob(token_id, value, top) for token_id, value, top in zip(self.token_ids, chosen, tops, strict=True)
        )


def score_prompt(logits: mx.array, each: SequenceSpan) -> PromptScores | None:
    """Score the tokens that follow a chunk's positions within the prompt; None when the chunk has no position with a follower.

    logits: [tokens of the span, vocabulary].
    """
    first = each.span.start + 1
    prompt = each.sequence.request.prompt_token_ids
    token_ids = prompt[first : first + each.span.tokens]
    if not token_ids:
        return None
    followers = mx.array(token_ids, dtype=mx.int32)
    scores = score_tokens(logits[: len(token_ids)], followers, top_logprobs=each.sequence.request.top_logprobs)
    return PromptScores(token_ids, scores)


def drawn_logprobs(drawn: Drawn, tokens: list[int]) -> list[TokenLogprob]:
    """The log-probability of every drawn row, with as many rivals as any row wants; empty when no row wants them."""
    if drawn.chosen_logprobs is None:
        return []
    chosen: list[float] = drawn.chosen_logprobs.tolist()  # type: ignore[assignment]
    tops = _top_rows(drawn.top_ids, drawn.top_logprobs, rows=len(chosen))
    return [TokenLogprob(token_id, value, top) for token_id, value, top in zip(tokens, chosen, tops, strict=True)]


def _top_rows(ids: mx.array | None, values: mx.array | None, *, rows: int) -> list[tuple[tuple[int, float], ...]]:
    if ids is None or values is None:
        return [()] * rows
    id_rows: list[list[int]] = ids.tolist()  # type: ignore[assignment]
    value_rows: list[list[float]] = values.tolist()  # type: ignore[assignment]
    return [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in zip(id_rows, value_rows, strict=True)]
