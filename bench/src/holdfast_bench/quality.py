"""Compares answers token by token: speed counts only if answers agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast_bench.results import Agreement

Cut = Callable[[str], list[str]]


def agreement(expected: Sequence[str], got: Sequence[str], *, cut: Cut) -> Agreement | None:
    """Compare greedy answers to the same prompts; None if there are none.

    cut: splits a text into tokens. Tokens agree up to the first difference, after which two correct
    answers have nothing in common. An answer that is longer than expected differs at its end.
    """
    if not expected or not got:
        return None
    tokens = agreeing = equal = 0
    for wanted, given in zip(expected, got, strict=False):
        # Texts are stripped; with a space before it, the first word is one token.
        wanted_tokens, given_tokens = cut(f" {wanted}"), cut(f" {given}")
        tokens += max(len(wanted_tokens), len(given_tokens))
        agreeing += common_prefix(wanted_tokens, given_tokens)
        equal += wanted_tokens == given_tokens
    return Agreement(
        answers=min(len(expected), len(got)),
        equal_answers=equal,
        tokens=tokens,
        agreeing_tokens=agreeing,
    )


def common_prefix(left: Sequence[str], right: Sequence[str]) -> int:
    """How many tokens are equal from the start."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
