"""Recognizes an endless thought by its tokens alone. Pure.

It is cautious rather than quick: a thought is endless only if its last 2048 tokens (by default)
repeat one period of at most an eighth of them, without a single different token. Useful thoughts do
not do that, not even with tables in them: a grid of 30 rows of 30 zeros has 1,800 tokens.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

LEAST_ROUNDS = 8
_CHECK_EVERY = 64  # tokens: a check costs about 0.1 ms


class RepetitionGuard:
    """Follows the thoughts of one answer."""

    def __init__(self, tokens: int) -> None:
        """tokens: how many have to repeat; 0: the guard is off."""
        self._tokens = tokens
        self._last: deque[int] = deque(maxlen=tokens)
        self._until_check = tokens

    def take(self, token_ids: Iterable[int]) -> bool:
        """Add tokens of the thought. Returns whether it is endless, as far as that was checked."""
        if not self._tokens:
            return False
        repeats = False
        for token_id in token_ids:
            self._last.append(token_id)
            self._until_check -= 1
            if not self._until_check:
                self._until_check = _CHECK_EVERY
                longest_period = self._tokens // LEAST_ROUNDS
                repeats = repeats or is_periodic(self._last, longest_period=longest_period)
        return repeats


def is_periodic(token_ids: Iterable[int], *, longest_period: int) -> bool:
    """Whether the tokens repeat a period of at most that length; the last one may be incomplete."""
    ids = array("q", token_ids)
    packed = ids.tobytes()
    size = ids.itemsize
    for period in range(1, min(longest_period, len(ids) - 1) + 1):
        if ids[-1] == ids[-1 - period] and packed[period * size :] == packed[: -period * size]:
            return True
    return False
