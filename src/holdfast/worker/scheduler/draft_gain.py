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

# A first guess of the time of a step with several rows, relative to that of a step with one row:
# _FIRST_FIXED + _FIRST_PER_ROW * rows.
_FIRST_FIXED = 0.95
_FIRST_PER_ROW = 0.15
# The guess is corrected by one factor for all steps, and by a further factor for each range of
# rows. These are the last numbers of rows of the ranges; the last range has no end.
_RANGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_SHARED_PART = 0.25  # the part of a measured deviation that goes to the factor for all steps
# the part of a verifying step's deviation that goes to the factor for verifying, and its limit
_VERIFYING_SHARE = 0.1
_MOST_VERIFYING_DEVIATION = 0.3
_MEMORY_STEPS = 16  # the factor of a range averages over about this many steps
_MOST_DEVIATION = math.log(3.0)  # of a measured step; more is taken for an interruption
# by how much the logarithm of a sequence's speed must rise; less may be an error of measurement
_LEAST_GAIN = 0.03
# After this many verifying steps in a row, one step verifies nothing, so that the time of such steps
# stays known.
_MOST_VERIFYING_STEPS = 48
# After this many steps with drafts of which none was worth it, one is verified nevertheless, in case
# verifying has become cheaper; each time, the number doubles.
_FIRST_RETRY, _LAST_RETRY = 64, 1024


# A draft model that does not pay is still tried now and then, with a few passes, to learn whether its
# drafts have become better. These trials take this share of the decoding time.
_TRIAL_SHARE = 0.01
_TRIAL_PASSES = 4
_MOST_SKIPPED_STEPS = 15

Offers: TypeAlias = Mapping[RequestId, Draft]
NO_OFFERS: Offers = {}


class RowCosts:
    """Learns the seconds of a step as a function of its rows: a guess, times factors that are kept as
    logarithms. Takes measured seconds; reads no clock.
    """

    def __init__(self) -> None:
        self._shared_log: float | None = None  # of the factor for all steps; None: nothing measured
        # for each range, the logarithm of its factor, and how many steps it was learned from
        self._range_logs = [0.0] * (len(_RANGES) + 1)
        self._steps = [0] * (len(_RANGES) + 1)
        self._verifying_log = 0.0  # of the factor for steps that verify drafts

    def learn(self, rows: int, seconds: float, *, is_verifying: bool = False) -> None:
        """Learn from one step. rows: with those of drafted tokens."""
        log_factor = math.log(seconds) - _log_guess(rows)
        if is_verifying:
            log_factor -= self._verifying_log
        if self._shared_log is None:
            self._shared_log = log_factor
        index = bisect.bisect_left(_RANGES, rows)
        deviation = log_factor - self._shared_log - self._range_logs[index]
        deviation = max(-_MOST_DEVIATION, min(_MOST_DEVIATION, deviation))
        if is_verifying:
            limited = max(-_MOST_VERIFYING_DEVIATION, min(_MOST_VERIFYING_DEVIATION, deviation))
            self._verifying_log += _VERIFYING_SHARE * limited
            deviation *= 1.0 - _VERIFYING_SHARE
        self._shared_log += _SHARED_PART * deviation
        self._steps[index] = min(self._steps[index] + 1, _MEMORY_STEPS)
        self._range_logs[index] += (1.0 - _SHARED_PART) * deviation / self._steps[index]
        self._fill_gap(index, -1)
        self._fill_gap(index, 1)

    def _fill_gap(self, index: int, step: int) -> None:
        """Interpolate the factors of the ranges without measured steps, from range `index` to the
        nearest measured range below (step = -1) or above (step = 1).
        """
        end = index + step
        while 0 <= end < len(self._range_logs) and not self._steps[end]:
            end += step
        start_log = self._range_logs[index]
        has_end = 0 <= end < len(self._range_logs)  # otherwise no range there is measured
        slope = (self._range_logs[end] - start_log) / (end - index) if has_end else 0.0
        for gap in range(index + step, end, step):
            self._range_logs[gap] = start_log + slope * (gap - index)

    def log_seconds(self, rows: int, *, drafted: int = 0) -> float:
        """The logarithm of a step's seconds, up to a constant. drafted: rows in addition."""
        rows += drafted
        verifying_log = self._verifying_log if drafted else 0.0
        range_log = self._range_logs[bisect.bisect_left(_RANGES, rows)]
        return _log_guess(rows) + range_log + verifying_log

    def seconds(self, rows: int, *, drafted: int = 0) -> float | None:
        """The seconds of such a step; None if no step was measured yet."""
        if self._shared_log is None:
            return None
        return math.exp(self._shared_log + self.log_seconds(rows, drafted=drafted))


def _log_guess(rows: int) -> float:
    """The logarithm of the guessed time of a step with several rows, relative to one with one row."""
    return 0.0 if rows == 1 else math.log(_FIRST_FIXED + _FIRST_PER_ROW * rows)


class DraftGain:
    """Learns what verifying costs, and chooses which drafts to verify. Reads no clock."""

    def __init__(self) -> None:
        self._costs = RowCosts()
        self._verifying_steps = 0  # since the last step that verified nothing
        self._declined_steps = 0  # steps with drafts since the last step that verified any
        self._retry_after_steps = _FIRST_RETRY
        # steps since a draft model was considered last, and for how many it is not considered
        self._skipped_steps = 0
        self._steps_to_skip = 0
        self._seconds_for_trials = 0.0  # decoding time of which no trial has used its share yet

    def learn(self, rows: int, seconds: float, *, is_verifying: bool = False) -> None:
        """Learn from a step without chunks. rows: with those of drafted tokens."""
        self._costs.learn(rows, seconds, is_verifying=is_verifying)
        self._seconds_for_trials += seconds

    def passes(
        self, offers: Offers, model_drafts: Offers, *, rows: int, most: int, pass_seconds: float
    ) -> int:
        """How many passes a draft model should run before the next step with `rows` decoding
        sequences. Each pass drafts one token for each of the sequences in `model_drafts`.

        offers: drafts that cost nothing. A sequence uses the better one of both. model_drafts: the
        expected drafts of the draft model. most: the largest number of drafted rows. pass_seconds: how long the draft
        model takes for one token of each sequence.
        """
        if self._verifying_steps >= _MOST_VERIFYING_STEPS or not model_drafts:
            return 0
        if self._skipped_steps < self._steps_to_skip:  # the calculation below takes 0.02 ms
            self._skipped_steps += 1
            return 0
        self._skipped_steps = 0
        plain_seconds = self._costs.seconds(rows)  # of a step that verifies nothing
        if plain_seconds is None:
            return 0
        best_passes = 0
        best_speedup = max(
            0.0, self._log_speedup(offers, model_drafts, 0, rows=rows, seconds=0.0, most=most)
        )
        best_speedup += _LEAST_GAIN * rows
        longest = max(len(draft.chances) for draft in model_drafts.values())
        for count in range(1, longest + 1):
            seconds = count * pass_seconds
            speedup = self._log_speedup(
                offers, model_drafts, count, rows=rows, seconds=seconds, most=most
            )
            if speedup > best_speedup:
                best_passes = count
                best_speedup = speedup
        if best_passes:
            self._seconds_for_trials = 0.0
            self._steps_to_skip = 0
            return best_passes
        self._steps_to_skip = min(2 * self._steps_to_skip + 1, _MOST_SKIPPED_STEPS)
        if (
            _TRIAL_PASSES * (pass_seconds + 0.2 * plain_seconds)
            < _TRIAL_SHARE * self._seconds_for_trials
        ):
            self._seconds_for_trials = 0.0
            return _TRIAL_PASSES
        return 0

    def _log_speedup(
        self,
        offers: Offers,
        model_drafts: Offers,
        count: int,
        *,
        rows: int,
        seconds: float,
        most: int,
    ) -> float:
        """By how much the sum of the logarithms of all sequences' speeds rises if a draft model makes
        `count` passes, which take `seconds`, and each sequence verifies the better of its drafts.
        -inf if these have more than `most` tokens.
        """
        gain = 0.0
        drafted = 0
        for request_id in {**offers, **model_drafts}:
            free_draft = offers.get(request_id, NO_DRAFT)
            model_draft = model_drafts.get(request_id, NO_DRAFT).cut(count)
            better = max(free_draft, model_draft, key=lambda draft: draft.expected_tokens)
            gain += math.log1p(better.expected_tokens)
            drafted += len(better.chances)
        if drafted > most:
            return -math.inf
        plain_log = self._costs.log_seconds(rows)
        plain_seconds = self._costs.seconds(rows) or 1.0
        # the time of the verifying step and of the passes, relative to a step without drafts
        relative_time = (
            math.exp(self._costs.log_seconds(rows, drafted=drafted) - plain_log)
            + seconds / plain_seconds
        )
        return gain - rows * math.log(relative_time)

    def approve_prefill(
        self,
        chances: Sequence[float],
        *,
        rows: int,
        pass_seconds: float,
        seconds: float,
        generated: int,
    ) -> bool:
        """Decide whether a draft model prefills a sequence, which takes `seconds`. It does if drafts
        for as many tokens as the answer has so far, which are expected to follow, save that time; or
        if it is time for a trial.

        chances: for each token of its drafts, the chance that it and those before it are right.
        rows: how many sequences decode; all are assumed to draft like this one. pass_seconds: of one
        pass. generated: tokens of the answer.
        """
        plain_seconds = self._costs.seconds(rows)
        if plain_seconds is None:
            return False
        best_seconds = plain_seconds  # for a token of each sequence
        tokens = 1.0  # expected from a step that verifies `count` drafted tokens of each sequence
        for count, chance in enumerate(chances, start=1):
            tokens += chance
            step_seconds = self._costs.seconds(rows, drafted=rows * count) or plain_seconds
            best_seconds = min(best_seconds, (step_seconds + count * pass_seconds) / tokens)
        if generated * (plain_seconds - best_seconds) >= seconds:
            return True
        if seconds < _TRIAL_SHARE * self._seconds_for_trials:
            self._seconds_for_trials -= seconds / _TRIAL_SHARE
            return True
        return False

    def choose(self, offers: Offers, *, rows: int, most: int) -> dict[RequestId, Draft]:
        """The drafts to verify in a step with `rows` decoding sequences, each cut to its first
        tokens.

        most: the largest number of drafted rows. Sequences that verify nothing are left out.
        """
        # for each drafted token, by how much it raises the logarithm of its sequence's speed
        gains: list[tuple[float, RequestId]] = []
        for request_id, draft in offers.items():
            tokens = 1.0
            for chance in draft.chances:
                gains.append((math.log1p(chance / tokens), request_id))
                tokens += chance
        if not gains or most < 1:
            self._verifying_steps = 0
            return {}
        # within a draft, gains fall, so the chosen tokens of a draft are its first ones
        gains.sort(key=lambda each: each[0], reverse=True)
        del gains[most:]
        count = self._rows_to_verify(gains, rows=rows)
        tokens_of = Counter(request_id for _, request_id in gains[:count])
        return {
            request_id: offers[request_id].cut(taken) for request_id, taken in tokens_of.items()
        }

    def _rows_to_verify(self, gains: Sequence[tuple[float, RequestId]], *, rows: int) -> int:
        """How many drafted rows to verify; counts the step as one that verifies drafts or declines
        them. gains: for each drafted token, by how much it raises the logarithm of its sequence's
        speed, the largest first; with the request id.
        """
        best_count = 0
        best_gain = _LEAST_GAIN * rows
        gain = 0.0
        plain_log = self._costs.log_seconds(rows)
        for count, (token_gain, _) in enumerate(gains, start=1):
            gain += token_gain
            net_gain = gain - rows * (self._costs.log_seconds(rows, drafted=count) - plain_log)
            if net_gain > best_gain:
                best_count = count
                best_gain = net_gain
        if best_count:
            self._verifying_steps += 1
            self._declined_steps = 0
            self._retry_after_steps = _FIRST_RETRY
            if self._verifying_steps > _MOST_VERIFYING_STEPS:
                self._verifying_steps = 0
                return 0
            return best_count
        self._verifying_steps = 0
        self._declined_steps += 1
        if self._declined_steps > self._retry_after_steps:
            self._declined_steps = 0
            self._retry_after_steps = min(2 * self._retry_after_steps, _LAST_RETRY)
            return min(len(gains), 4)
        return 0
