"""Earlier answers in a tokenized prompt, put in as the tokens that were generated. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from tokenizers import Encoding

from holdfast.intake.prompt import PromptText, PromptTokens


def splice(prompt: PromptText, encoding: Encoding) -> PromptTokens:
    """The tokens of a prompt's text with its answers put back.

    An answer is put back only where its edges are edges of tokens; elsewhere the tokenizer's tokens stay.
    """
    token_ids, offsets = encoding.ids, encoding.offsets  # the library makes them anew whenever it is asked
    parts: list[int] = []
    moves: list[tuple[int, int]] = []  # tokens behind this one are so much further on
    taken = put_back = 0  # tokens of the whole that are in `parts` or replaced
    for answer in prompt.answers:
        span = _token_span(offsets, answer.start, answer.end)
        if span is None:
            continue
        parts += token_ids[taken : span[0]]
        parts += answer.token_ids
        put_back += len(answer.token_ids)
        taken = span[1]
        moves.append((taken, len(parts) - taken))
    return PromptTokens(
        token_ids=(*parts, *token_ids[taken:]),
        branch_points=tuple(_moved(_tokens_before(at, offsets), moves) for at in prompt.branch_points),
        breakpoints=tuple(_moved(_tokens_before(at, offsets), moves) for at in prompt.breakpoints),
        put_back_tokens=put_back,
    )


def _tokens_before(character: int, offsets: Sequence[tuple[int, int]]) -> int:
    """Tokens that end at or before a character."""
    return bisect_right(offsets, character, key=lambda offset: offset[1])


def _moved(token: int, moves: Sequence[tuple[int, int]]) -> int:
    """Where a token is that is no part of an answer that was put back."""
    behind = bisect_right(moves, token, key=lambda move: move[0])
    return token + (moves[behind - 1][1] if behind else 0)


def _token_span(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int] | None:
    """Which tokens make up the characters from start to end exactly; None when one of them reaches over an edge."""
    first = bisect_left(offsets, start, key=lambda offset: offset[0])
    last = bisect_left(offsets, end, key=lambda offset: offset[0])
    if first >= last or offsets[first][0] != start or offsets[last - 1][1] != end:
        return None
    if first > 0 and offsets[first - 1][1] > start:
        return None
    return first, last
