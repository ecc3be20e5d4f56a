"""What steps cost on this machine, learned from the steps themselves: decoding rows, prompt tokens
and their scores apart.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

# observations of full weight that an estimate remembers: the gain never falls below 1/4
_MEMORY = 4.0
# one observation moves an estimate no further than towards this many times itself
_LOWEST, _HIGHEST = 1 / 8, 3.0
_FLOOR = 1 / 10  # of the mean: extrapolation never goes below it

_FIRST_DECODE_SECONDS = 0.02
_FIRST_PROMPT_TOKEN_SECONDS = 0.001
_FIRST_SCORE_SECONDS = 0.001
_ROWS_SPREAD = 1.0
_POSITIONS_SPREAD = 256.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBounds:
    """What a chunk of a prompt may take, however much room its step has.

    By default nothing is bounded.

    seconds: of a step in which no sequence decodes. The GPU watchdog of macOS ends a command that
        runs too long, and a new
    request waits for the step under way.
    score_bytes_per_pair: what attention stores for each pair of a query and a key; 0 where a fused
        kernel stores no scores.
    score_bytes: the memory that there is for these.
    """

    seconds: float = math.inf
    score_bytes_per_pair: int = 0
    score_bytes: int = 0


UNBOUNDED = ChunkBounds()


class Trend:
    """A cost that rises in a straight line with x, followed by exponentially weighted means.

    `spread` is the scatter of x from which a slope is believed. Before the first observation the
    cost is `first_guess`.
    """

    __slots__ = ("_covariance", "_mean", "_mean_x", "_spread_squared", "_variance", "_weight")

    def __init__(self, *, first_guess: float, spread: float) -> None:
        self._mean, self._mean_x = first_guess, 0.0
        self._variance = self._covariance = 0.0
        self._weight = 0.0
        self._spread_squared = spread * spread

    @property
    def is_learned(self) -> bool:
        """Whether anything was observed."""
        return self._weight > 0.0

    @property
    def mean(self) -> float:
        """The cost at the x seen lately."""
        return self._mean

    @property
    def slope(self) -> float:
        """How much the cost rises with x; never negative."""
        return max(0.0, self._covariance / (self._variance + self._spread_squared))

    def at(self, x: float) -> float:
        """The cost at x."""
        return max(self._mean + self.slope * (x - self._mean_x), self._mean * _FLOOR)

    def at_most(self, x: float) -> float:
        """A bound at x for a cost that grows with x at most in proportion, wherever it was
        measured.
        """
        return max(self._mean * max(1.0, x / max(self._mean_x, 1.0)), self.at(x))

    def learn(self, x: float, cost: float, *, weight: float = 1.0) -> None:
        """Take in one observation; `weight`: between 0 and 1, how much it says.

        An outlier moves the estimate only so far.
        """
        if self._weight >= 1.0:
            expected = self.at(x)
            cost = min(max(cost, expected * _LOWEST), expected * _HIGHEST)
        self._weight = min(self._weight + weight, _MEMORY)
        gain = weight / self._weight
        away_x, away = x - self._mean_x, cost - self._mean
        if gain < 1.0:
            self._variance = (1.0 - gain) * (self._variance + gain * away_x * away_x)
            self._covariance = (1.0 - gain) * (self._covariance + gain * away_x * away)
        self._mean_x += gain * away_x
        self._mean += gain * away


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step contained, as far as its cost goes."""

    decode_rows: int
    chunks: int = 0
    chunk_tokens: int = 0
    position_sum: float = 0.0  # over the chunks' tokens, of their positions
    scored_tokens: int = 0  # of the chunks' tokens, those whose log-probabilities are wanted


class CostModel:
    """Learns the seconds of a decode step by its rows, and of a prompt token by its position
    (attention grows with it).

    `mixes_chunks`: prompt chunks ride in the same forward as the decoding rows. Otherwise each
    chunk reads the weights once more, which is taken to cost as much as a decode step of one row.
    What it takes to score a prompt token (logits over the whole vocabulary) is learned apart: with
    a small model and a large vocabulary it is most of what a token costs.
    """

    def __init__(
        self, *, mixes_chunks: bool, min_chunk_tokens: int, bounds: ChunkBounds = UNBOUNDED
    ) -> None:
        self._mixes_chunks = mixes_chunks
        self._min_chunk_tokens = min_chunk_tokens
        self._bounds = bounds
        self._most_chunk_tokens = sys.maxsize
        self._full_weight_tokens = 2 * min_chunk_tokens
        self._last_chunks_seconds = 0.0
        self._decode = Trend(first_guess=_FIRST_DECODE_SECONDS, spread=_ROWS_SPREAD)
        self._prompt = Trend(first_guess=_FIRST_PROMPT_TOKEN_SECONDS, spread=_POSITIONS_SPREAD)
        self._scores = Trend(first_guess=_FIRST_SCORE_SECONDS, spread=1.0)

    @property
    def score_seconds(self) -> float:
        """What the log-probability of a prompt token costs beside reading it."""
        return self._scores.mean

    @property
    def knows_decoding(self) -> bool:
        """Whether a step without chunks was ever seen."""
        return self._decode.is_learned

    @property
    def seconds_without_decoding(self) -> float:
        """How long a step may take in which no sequence decodes."""
        return self._bounds.seconds

    def limit_chunks(self, tokens: int) -> None:
        """Never read more of a prompt at once from now on: the device has failed on a larger chunk,
        and not on this one.
        """
        self._most_chunk_tokens = min(self._most_chunk_tokens, max(tokens, self._min_chunk_tokens))

    def most_chunk_tokens(self, position: int) -> int:
        """The longest chunk that may begin at a position: as large as memory for attention scores
        and past failures allow.
        """
        most = self._most_chunk_tokens
        if self._bounds.score_bytes_per_pair:
            # The largest n with n * (position + n) pairs; the stable form of the root.
            pairs = self._bounds.score_bytes / self._bounds.score_bytes_per_pair
            fitting = (
                int(2 * pairs / (position + math.sqrt(position * position + 4 * pairs)))
                if pairs
                else 0
            )
            most = min(
                most, max(fitting - fitting % self._min_chunk_tokens, self._min_chunk_tokens)
            )
        return most

    def decode_seconds(self, rows: int) -> float:
        """A step that only decodes so many rows."""
        return self._decode.at(rows)

    def decode_row_seconds(self, rows: int) -> float:
        """What one of so many decoding rows takes of a step; 0 before such a step was measured."""
        return self._decode.at(rows) / rows if rows and self._decode.is_learned else 0.0

    def prompt_token_seconds_at(self, position: int) -> float:
        """A prompt token at that position."""
        return self._prompt.at(position)

    def seconds_per_chunk(self) -> float:
        """What a chunk costs beside decoding rows before its first token is counted."""
        return 0.0 if self._mixes_chunks or not self._decode.is_learned else self._decode.at(1)

    def more_chunk_seconds(
        self, position: int, tokens: int, *, score_seconds: float = 0.0
    ) -> float:
        """What further tokens add to a chunk that is in the step already. score_seconds: what each
        costs beside being read.
        """
        return tokens * (self._prompt.at(position + tokens / 2) + score_seconds)

    def tokens_within(self, seconds: float, position: int, *, score_seconds: float = 0.0) -> int:
        """The most tokens from `position` on that take no longer; the inverse of
        `more_chunk_seconds`, or a little less.
        """
        if seconds <= 0.0:
            return 0
        first, slope = self._prompt.at(position) + score_seconds, self._prompt.slope
        # The stable form of the positive root of slope/2·n² + first·n = seconds; right for slope =
        # 0 too.
        return int(2 * seconds / (first + math.sqrt(first * first + 2 * slope * seconds)))

    def at_most(self, load: StepLoad) -> float | None:
        """What a step of this load takes at most, None before its like was seen; an outlier may
        still take several times that.

        Rows and positions beyond those measured count in proportion: no row costs more than the
        first, and attention over twice as many tokens no more than twice as much.
        """
        if (load.decode_rows and not self._decode.is_learned) or (
            load.chunks and not self._prompt.is_learned
        ):
            return None
        if load.scored_tokens and not self._scores.is_learned:
            return None
        seconds = 0.0
        if load.decode_rows or (self._mixes_chunks and self._decode.is_learned):
            # what any step takes that reads the weights
            seconds = self._decode.at_most(max(load.decode_rows, 1))
        if not self._decode.is_learned:
            seconds = self._last_chunks_seconds  # one token may take as long as all of them
        if load.chunk_tokens:
            seconds += load.chunk_tokens * self._prompt.at_most(
                load.position_sum / load.chunk_tokens
            )
        return (
            seconds
            + load.scored_tokens * self._scores.mean
            + load.chunks * self.seconds_per_chunk()
        )

    def learn(self, load: StepLoad, seconds: float) -> None:
        """Take in what a step took."""
        if not load.chunks:
            if load.decode_rows:
                self._decode.learn(load.decode_rows, seconds)
            return
        self._last_chunks_seconds = seconds
        fixed = self._seconds_without_prompt_tokens(load)
        # A decode estimate that is too high for the moment must not make prompt tokens look free.
        added = max(seconds - fixed, seconds / 4)
        if load.scored_tokens and self._prompt.is_learned:
            read = load.chunk_tokens * self._prompt.at(load.position_sum / load.chunk_tokens)
            # As above: what reading is thought to take must not make scores look free, from where
            # no factor leads back.
            self._scores.learn(0.0, max(added - read, added / 16) / load.scored_tokens)
            return
        # What a step takes beside its tokens blurs the cost of each in inverse proportion to their
        # number.
        weight = min(1.0, (load.chunk_tokens / self._full_weight_tokens) ** 2)
        self._prompt.learn(
            load.position_sum / load.chunk_tokens, added / load.chunk_tokens, weight=weight
        )

    def _seconds_without_prompt_tokens(self, load: StepLoad) -> float:
        if not self._decode.is_learned:
            return 0.0
        if self._mixes_chunks:
            return self._decode.at(max(load.decode_rows, 1))
        decoding = self._decode.at(load.decode_rows) if load.decode_rows else 0.0
        return decoding + load.chunks * self._decode.at(1)
