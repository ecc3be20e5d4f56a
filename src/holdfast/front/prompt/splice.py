"""Earlier answers in a tokenized prompt, put in as the tokens that were generated. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from holdfast.front.prompt.token_places import TokenizedText
from holdfast.wire.prompt import PromptText, PromptTokens
from holdfast.wire.token_ids import TokenIds


def splice(prompt: PromptText, text: TokenizedText) -> PromptTokens:
    """The tokens of a prompt's text with its answers put back.

    An answer is put back only where its edges are edges of tokens; elsewhere the tokenizer's tokens
    stay.
    """
    token_ids = text.token_ids
    parts: list[TokenIds] = []
    behind = 0  # tokens in `parts`
    moves: list[tuple[int, int]] = []  # tokens behind this one are so much further on
    taken = put_back = 0  # tokens of the whole that are in `parts` or replaced
    for answer in prompt.answers:
        span = text.span(answer.start, answer.end)
        if span is None:
            continue
        parts += (token_ids[taken : span[0]], TokenIds.of(answer.token_ids))
        behind += span[0] - taken + len(answer.token_ids)
        put_back += len(answer.token_ids)
        taken = span[1]
        moves.append((taken, behind - taken))
    return PromptTokens(
        token_ids=TokenIds.joined((*parts, token_ids[taken:])) if taken else token_ids,
        branch_points=tuple(_moved(text.tokens_before(at), moves) for at in prompt.branch_points),
        breakpoints=tuple(_moved(text.tokens_before(at), moves) for at in prompt.breakpoints),
        put_back_tokens=put_back,
    )


def _moved(token: int, moves: Sequence[tuple[int, int]]) -> int:
    """Where a token is that is no part of an answer that was put back."""
    behind = bisect_right(moves, token, key=lambda move: move[0])
    return token + (moves[behind - 1][1] if behind else 0)
