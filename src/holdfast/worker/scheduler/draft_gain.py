"""Decides how many drafted tokens a step verifies.

Verifying takes time: with drafted rows, a step takes `1 + a + b * rows` times as long as without,
where `rows` are the drafted rows per sequence. The two factors are learned from the steps, as a
regression in which old steps count less and a first guess always counts a little, so that the shape
is known even if all steps verify equally many rows.

The drafted tokens are chosen so that the product of the speeds of all sequences becomes as large as
possible. A draft that doubles the speed of one of eight sequences is thus not worth a step that is
a tenth longer for all of them. If no choice increases the product, nothing is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from holdfast.wire.requests import RequestId

_FIRST_FIXED, _FIRST_PER_ROW = 0.1, 0.15  # a and b until they are measured
_GUESS_WEIGHT = 0.5  # steps that the first guess counts for
_LEAST_PER_ROW = 0.01
_MEMORY_STEPS = 16.0
_LEAST_GAIN = 0.03  # of the logarithm of a sequence's speed; less may be an error of measurement
_HIGHEST = 3.0  # a measured step is clipped to this multiple of the estimate
# After this many verifying steps in a row, one verifies nothing, so that the time of such steps is
# still known.
_STEPS_PER_PLAIN = 48
# After this many steps in which no draft was worth it, one is verified nevertheless, in case
# verifying has become cheaper; each time, the number doubles.
_FIRST_RETRY, _LAST_RETRY = 64, 1024


# Drafts of sequences: for each drafted token, the chance that it and all tokens before it are right.
Offers: TypeAlias = Mapping[RequestId, Sequence[float]]
NO_OFFERS: Offers = {}


class DraftGain:
    """Learns what verifying costs, and chooses among drafts. No clock."""

    def __init__(self) -> None:
        # weighted sums over steps: of 1, x, x², y, x y, where x is drafted rows per sequence, and y
        # the factor by which the step was longer
        self._sums = [0.0] * 5
        self._line = (_FIRST_FIXED, _FIRST_PER_ROW)
        self._verifying_steps = 0  # since the last one without
        self._declined_steps = 0  # since the last verifying one
        self._retry_after = _FIRST_RETRY

    def factor(self, rows_per_sequence: float) -> float:
        """How many times as long a step takes if it verifies this many drafted rows per sequence."""
        if not rows_per_sequence:
            return 1.0
        fixed, per_row = self._line
        return 1.0 + fixed + per_row * rows_per_sequence

    def _fitted(self) -> tuple[float, float]:
        """The factors a and b."""
        count, x, xx, y, xy = self._sums
        # the first guess as two observations: without drafted rows, and with eight
        for at, weight in ((0.0, _GUESS_WEIGHT), (8.0, _GUESS_WEIGHT)):
            guess = _FIRST_FIXED + _FIRST_PER_ROW * at
            count += weight
            x += weight * at
            xx += weight * at * at
            y += weight * guess
            xy += weight * at * guess
        per_row = max(_LEAST_PER_ROW, (count * xy - x * y) / (count * xx - x * x))
        fixed = (y - per_row * x) / count
        if fixed < 0.0:  # a line through the origin instead
            return 0.0, max(_LEAST_PER_ROW, xy / xx)
        return fixed, per_row

    def learn(self, *, rows: int, drafted: int, seconds: float, plain_seconds: float) -> None:
        """Learn from a step without chunks. plain_seconds: what it would have taken without drafted
        rows.
        """
        x = drafted / rows
        expected = self.factor(x)
        y = min(seconds / plain_seconds, expected * _HIGHEST) - 1.0
        self._sums = [
            each * (1.0 - 1.0 / _MEMORY_STEPS) + new
            for each, new in zip(self._sums, (1.0, x, x * x, y, x * y), strict=True)
        ]
        self._line = self._fitted()

    def choose(self, offers: Offers, *, rows: int, most: int) -> dict[RequestId, int]:
        """How many tokens of each draft to verify in a step with `rows` decoding sequences.

        most: the largest number of drafted rows. Sequences that verify nothing are left out.
        """
        gains: list[tuple[float, RequestId]] = []
        for request_id, chances in offers.items():
            tokens = 1.0
            for chance in chances:
                gains.append((math.log1p(chance / tokens), request_id))
                tokens += chance
        if not gains or most < 1:
            return {}
        # within an offer, gains fall, so that the tokens taken are the first ones
        gains.sort(key=lambda each: each[0], reverse=True)
        del gains[most:]
        count = self._count(gains, rows=rows)
        chosen: dict[RequestId, int] = {}
        for _, request_id in gains[:count]:
            chosen[request_id] = chosen.get(request_id, 0) + 1
        return chosen

    def _count(self, gains: Sequence[tuple[float, RequestId]], *, rows: int) -> int:
        """How many drafted rows to verify."""
        best = 0
        best_gain = _LEAST_GAIN * rows
        gain = 0.0
        fixed, per_row = self._line
        for count, (more, _) in enumerate(gains, start=1):
            gain += more
            net = gain - rows * math.log(1.0 + fixed + per_row * count / rows)
            if net > best_gain:
                best = count
                best_gain = net
        if best:
            self._verifying_steps += 1
            self._declined_steps = 0
            self._retry_after = _FIRST_RETRY
            if self._verifying_steps > _STEPS_PER_PLAIN:
                self._verifying_steps = 0
                return 0
            return best
        self._verifying_steps = 0
        self._declined_steps += 1
        if self._declined_steps > self._retry_after:
            self._declined_steps = 0
            self._retry_after = min(2 * self._retry_after, _LAST_RETRY)
            return min(len(gains), 4)
        return 0
