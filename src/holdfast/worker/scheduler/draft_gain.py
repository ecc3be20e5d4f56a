"""Decides how many drafted tokens a step verifies.

A drafted token adds a row to a step. How much longer the step takes depends on the machine: a few
rows more cost little as long as reading the weights takes most of the time. So the time of a step
is learned as a function of its rows, from steps that verify drafts and from those that do not.
Verifying also has a cost that does not depend on the rows (a third of a step with a small model);
it is learned as a separate factor.

The drafted tokens are chosen so that the product of the speeds of all sequences becomes as large as
possible. A draft that doubles the speed of one of eight sequences is thus not worth a step that is
a tenth longer for all. If no choice increases the product, no token is drafted.

A draft model takes time before the step, a pass per drafted token. So its passes are chosen first,
from the value of its drafts (`passes`), and the drafted tokens that are verified afterwards.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from holdfast.wire.requests import RequestId
from holdfast.worker.engine.plan import NO_DRAFT, Draft

# A first guess of the time of a step over that of a step with one row: this much for several rows,
# and for each.
_FIRST_FIXED, _FIRST_PER_ROW = 0.95, 0.15
# Steps whose numbers of rows are in the same range are taken for equally far from that guess; these
# are the ends of the ranges.
_RANGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_LEVEL_SHARE = 0.25  # of a deviation that is taken to hold for all ranges
# of a verifying step's deviation that is attributed to verifying itself, and the limit of that part
_VERIFYING_SHARE = 0.1
_MOST_VERIFYING_DEVIATION = 0.3
_MEMORY_STEPS = 16
_MOST_DEVIATION = math.log(3.0)  # of a measured step; more is taken for an interruption
_LEAST_GAIN = 0.03  # of the logarithm of a sequence's speed; less may be an error of measurement
# After this many verifying steps in a row, one verifies nothing, so that the time of such steps is
# still known.
_STEPS_PER_PLAIN = 48
# After this many steps with drafts of which none was worth it, one is verified nevertheless, in case
# verifying has become cheaper; each time, the number doubles.
_FIRST_RETRY, _LAST_RETRY = 64, 1024


# Passes of a draft model that do not pay, but show what they would be worth, take this share of the
# time of decoding.
_TRIAL_SHARE = 0.01
_TRIAL_PASSES = 4
_MOST_UNASKED = 15

Offers: TypeAlias = Mapping[RequestId, Draft]
NO_OFFERS: Offers = {}


class RowCosts:
    """Learns the seconds of a step from its rows, as factors on a guess. No clock."""

    def __init__(self) -> None:
        self._level: float | None = None  # the logarithm of the factor for all ranges
        # for each range, the logarithm of a further factor, and how many steps it was learned from
        self._offsets = [0.0] * (len(_RANGES) + 1)
        self._steps = [0] * (len(_RANGES) + 1)
        self._verifying = 0.0  # the logarithm of a further factor for steps that verify drafts

    def learn(self, rows: int, seconds: float, *, is_verifying: bool = False) -> None:
        """Learn from one step. rows: with those of drafted tokens."""
        measured = math.log(seconds) - _log_guess(rows)
        if is_verifying:
            measured -= self._verifying
        if self._level is None:
            self._level = measured
        place = bisect.bisect_left(_RANGES, rows)
        deviation = measured - self._level - self._offsets[place]
        deviation = max(-_MOST_DEVIATION, min(_MOST_DEVIATION, deviation))
        if is_verifying:
            limited = max(-_MOST_VERIFYING_DEVIATION, min(_MOST_VERIFYING_DEVIATION, deviation))
            self._verifying += _VERIFYING_SHARE * limited
            deviation *= 1.0 - _VERIFYING_SHARE
        self._level += _LEVEL_SHARE * deviation
        self._steps[place] = min(self._steps[place] + 1, _MEMORY_STEPS)
        self._offsets[place] += (1.0 - _LEVEL_SHARE) * deviation / self._steps[place]
        self._fill_gap(place, -1)
        self._fill_gap(place, 1)

    def _fill_gap(self, place: int, step: int) -> None:
        """Set the offsets of the ranges without steps next to a place, below it or above it, to
        values between those of the nearest ranges with steps.
        """
        end = place + step
        while 0 <= end < len(self._offsets) and not self._steps[end]:
            end += step
        own = self._offsets[place]
        is_last = not 0 <= end < len(self._offsets)
        slope = 0.0 if is_last else (self._offsets[end] - own) / (end - place)
        for at in range(place + step, end, step):
            self._offsets[at] = own + slope * (at - place)

    def log_seconds(self, rows: int, *, drafted: int = 0) -> float:
        """The logarithm of the seconds of a step with this many rows and, in addition, drafted
        tokens, up to a constant.
        """
        rows += drafted
        verifying = self._verifying if drafted else 0.0
        return _log_guess(rows) + self._offsets[bisect.bisect_left(_RANGES, rows)] + verifying

    def seconds(self, rows: int, *, drafted: int = 0) -> float | None:
        """The seconds of such a step; None if no step was measured yet."""
        if self._level is None:
            return None
        return math.exp(self._level + self.log_seconds(rows, drafted=drafted))


def _log_guess(rows: int) -> float:
    return 0.0 if rows == 1 else math.log(_FIRST_FIXED + _FIRST_PER_ROW * rows)


class DraftGain:
    """Learns what verifying costs, and chooses among drafts. No clock."""

    def __init__(self) -> None:
        self._costs = RowCosts()
        self._verifying_steps = 0  # since the last one without
        self._declined_steps = 0  # since the last verifying one
        self._retry_after = _FIRST_RETRY
        # steps since a draft model was considered last, and how many may pass if it did not pay
        self._unasked_steps = 0
        self._steps_per_question = 0
        self._untried_seconds = 0.0  # of decoding, since the draft model was tried last

    def learn(self, rows: int, seconds: float, *, is_verifying: bool = False) -> None:
        """Learn from a step without chunks. rows: with those of drafted tokens."""
        self._costs.learn(rows, seconds, is_verifying=is_verifying)
        self._untried_seconds += seconds

    def passes(
        self, offers: Offers, modelled: Offers, *, rows: int, most: int, pass_seconds: float
    ) -> int:
        """How many tokens a draft model should draft for each of the sequences in `modelled`, before
        the next step with `rows` decoding sequences.

        offers: drafts that cost nothing. A sequence uses the better one of both. modelled: the
        expected drafts of the draft model. most: as for `choose`. pass_seconds: how long the draft
        model takes for one token of each sequence.
        """
        if self._verifying_steps >= _STEPS_PER_PLAIN or not modelled:
            return 0
        if self._unasked_steps < self._steps_per_question:  # what follows takes 0.02 ms
            self._unasked_steps += 1
            return 0
        self._unasked_steps = 0
        plain = self._costs.seconds(rows)
        if plain is None:
            return 0
        best = 0
        best_net = max(
            0.0, self._net_of_passes(offers, modelled, 0, rows=rows, seconds=0.0, most=most)
        )
        best_net += _LEAST_GAIN * rows
        longest = max(len(draft.chances) for draft in modelled.values())
        for count in range(1, longest + 1):
            seconds = count * pass_seconds
            net = self._net_of_passes(
                offers, modelled, count, rows=rows, seconds=seconds, most=most
            )
            if net > best_net:
                best = count
                best_net = net
        if best:
            self._untried_seconds = 0.0
            self._steps_per_question = 0
            return best
        self._steps_per_question = min(2 * self._steps_per_question + 1, _MOST_UNASKED)
        if _TRIAL_PASSES * (pass_seconds + 0.2 * plain) < _TRIAL_SHARE * self._untried_seconds:
            self._untried_seconds = 0.0
            return _TRIAL_PASSES
        return 0

    def _net_of_passes(
        self,
        offers: Offers,
        modelled: Offers,
        count: int,
        *,
        rows: int,
        seconds: float,
        most: int,
    ) -> float:
        """The logarithm of the gain in speed of all sequences together, if a draft model drafts
        `count` tokens for each sequence for which that is better, which takes `seconds`.
        """
        gain = 0.0
        drafted = 0
        for request_id in {**offers, **modelled}:
            own = offers.get(request_id, NO_DRAFT)
            model = modelled.get(request_id, NO_DRAFT).cut(count)
            better = max(own, model, key=lambda draft: draft.expected_tokens)
            gain += math.log1p(better.expected_tokens)
            drafted += len(better.chances)
        if drafted > most:
            return -math.inf
        plain = self._costs.log_seconds(rows)
        step = self._costs.seconds(rows) or 1.0
        longer = math.exp(self._costs.log_seconds(rows, drafted=drafted) - plain) + seconds / step
        return gain - rows * math.log(longer)

    def pays_to_prefill(
        self,
        chances: Sequence[float],
        *,
        rows: int,
        pass_seconds: float,
        seconds: float,
        generated: int,
    ) -> bool:
        """Whether a draft model should prefill a sequence, which takes `seconds`: if it would have
        gained that time, had it drafted since the answer began, or if it has not been tried for long
        enough.

        chances: of its drafts. rows: how many sequences decode. generated: tokens of the answer;
        the same number is expected to follow.
        """
        plain = self._costs.seconds(rows)
        if plain is None:
            return False
        best = plain
        tokens = 1.0
        for count, chance in enumerate(chances, start=1):
            tokens += chance
            step = self._costs.seconds(rows, drafted=rows * count) or plain
            best = min(best, (step + count * pass_seconds) / tokens)
        if generated * (plain - best) >= seconds:
            return True
        if seconds < _TRIAL_SHARE * self._untried_seconds:
            self._untried_seconds -= seconds / _TRIAL_SHARE
            return True
        return False

    def choose(self, offers: Offers, *, rows: int, most: int) -> dict[RequestId, Draft]:
        """The drafts to verify in a step with `rows` decoding sequences, each cut to its first
        tokens.

        most: the largest number of drafted rows. Sequences that verify nothing are left out.
        """
        gains: list[tuple[float, RequestId]] = []
        for request_id, draft in offers.items():
            tokens = 1.0
            for chance in draft.chances:
                gains.append((math.log1p(chance / tokens), request_id))
                tokens += chance
        if not gains or most < 1:
            self._verifying_steps = 0
            return {}
        # within an offer, gains fall, so that the tokens taken are the first ones
        gains.sort(key=lambda each: each[0], reverse=True)
        del gains[most:]
        count = self._count(gains, rows=rows)
        tokens_of = Counter(request_id for _, request_id in gains[:count])
        return {
            request_id: offers[request_id].cut(taken) for request_id, taken in tokens_of.items()
        }

    def _count(self, gains: Sequence[tuple[float, RequestId]], *, rows: int) -> int:
        """How many drafted rows to verify."""
        best = 0
        best_gain = _LEAST_GAIN * rows
        gain = 0.0
        plain = self._costs.log_seconds(rows)
        for count, (more, _) in enumerate(gains, start=1):
            gain += more
            net = gain - rows * (self._costs.log_seconds(rows, drafted=count) - plain)
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
