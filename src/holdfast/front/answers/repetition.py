"""Recognizes a thought that goes round in circles, by its tokens alone. Pure.

It is meant to be right rather than early: a thought counts as endless only when its last 2048
tokens (by default) are one piece of at most an eighth of them, again and again, without a single
token that differs. Useful thoughts do not do that, not even with tables in them: a grid of 30 rows
of 30 zeros has 1,800 tokens.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

LEAST_ROUNDS = 8
_LOOK_EVERY = 64  # tokens: a look costs about 0.1 ms


class RepetitionGuard:
    """Follows the thoughts of one answer."""

    def __init__(self, tokens: int) -> None:
        """tokens: how many have to repeat; 0: nothing counts as repetition."""
        self._tokens = tokens
        self._last: deque[int] = deque(maxlen=tokens)
        self._until_look = tokens

    def take(self, token_ids: Iterable[int]) -> bool:
        """The thought has these tokens more.

        Returns whether it goes round in circles; it is looked at now and then.
        """
        if not self._tokens:
            return False
        repeats = False
        for token_id in token_ids:
            self._last.append(token_id)
            self._until_look -= 1
            if not self._until_look:
                self._until_look = _LOOK_EVERY
                repeats = repeats or is_periodic(
                    self._last, longest_period=self._tokens // LEAST_ROUNDS
                )
        return repeats


def is_periodic(token_ids: Iterable[int], *, longest_period: int) -> bool:
    """Whether the tokens are one piece of at most so many tokens, again and again; the last time it
    may be cut short.
    """
    ids = array("q", token_ids)
    packed = ids.tobytes()
    size = ids.itemsize
    periods = (
        period
        for period in range(1, min(longest_period, len(ids) - 1) + 1)
        if ids[-1] == ids[-1 - period]
    )
    return any(packed[period * size :] == packed[: -period * size] for period in periods)
