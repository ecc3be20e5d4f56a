"""Learns the cost of decoding rows, prompt tokens and scores from the steps on this machine."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

# an estimate averages over this many observations of full weight, so a new one counts at least 1/4
_MEMORY = 4.0
# an observation is clipped to between these multiples of the estimate
_LOWEST, _HIGHEST = 1 / 8, 3.0
_FLOOR = 1 / 10  # an extrapolation returns at least this share of the mean

_FIRST_DECODE_SECONDS = 0.02
_FIRST_PROMPT_TOKEN_SECONDS = 0.001
_FIRST_SCORE_SECONDS = 0.001
_ROWS_SPREAD = 1.0
_POSITIONS_SPREAD = 256.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBounds:
    """Limits for the size of prompt chunks that the device sets. By default nothing is limited.

    seconds: the longest time that a step without decoding rows may take. The GPU watchdog of macOS
    ends a command that runs too long, and a new request waits for the dispatched step.
    score_bytes_per_pair: bytes that attention stores for each pair of a query and a key; 0 if a
    fused kernel stores no scores. score_bytes: the memory for these scores.
    """

    seconds: float = math.inf
    score_bytes_per_pair: int = 0
    score_bytes: int = 0


UNBOUNDED = ChunkBounds()


class Trend:
    """A cost that is linear in x, estimated with exponentially weighted means.

    spread: how much x must vary before the estimated slope is trusted. first_guess: the cost before
    the first observation.
    """

    __slots__ = ("_covariance", "_mean", "_mean_x", "_spread_squared", "_variance", "_weight")

    def __init__(self, *, first_guess: float, spread: float) -> None:
        self._mean = first_guess
        self._mean_x = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self._weight = 0.0
        self._spread_squared = spread * spread

    @property
    def is_learned(self) -> bool:
        return self._weight > 0.0

    @property
    def mean(self) -> float:
        """The cost at the mean of recent values of x."""
        return self._mean

    @property
    def slope(self) -> float:
        """How much the cost rises with x; never negative."""
        return max(0.0, self._covariance / (self._variance + self._spread_squared))

    def at(self, x: float) -> float:
        return max(self._mean + self.slope * (x - self._mean_x), self._mean * _FLOOR)

    def at_most(self, x: float) -> float:
        """An upper bound of the cost at x, if the cost grows at most in proportion to x."""
        return max(self._mean * max(1.0, x / max(self._mean_x, 1.0)), self.at(x))

    def learn(self, x: float, cost: float, *, weight: float = 1.0) -> None:
        """Learn from one observation. weight: from 0 to 1. The effect of outliers is bounded."""
        if self._weight >= 1.0:
            expected = self.at(x)
            cost = min(max(cost, expected * _LOWEST), expected * _HIGHEST)
        self._weight = min(self._weight + weight, _MEMORY)
        gain = weight / self._weight
        x_deviation = x - self._mean_x
        cost_deviation = cost - self._mean
        if gain < 1.0:
            self._variance = (1.0 - gain) * (self._variance + gain * x_deviation * x_deviation)
            self._covariance = (1.0 - gain) * (
                self._covariance + gain * x_deviation * cost_deviation
            )
        self._mean_x += gain * x_deviation
        self._mean += gain * cost_deviation


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The contents of a step that determine its cost."""

    decode_rows: int
    chunks: int = 0
    chunk_tokens: int = 0
    position_sum: float = 0.0  # sum of the positions of all chunk tokens
    scored_tokens: int = 0  # chunk tokens whose log-probabilities are requested
    drafted_rows: int = 0  # rows that verify drafted tokens, in addition to `decode_rows`

    @property
    def rows(self) -> int:
        return self.decode_rows + self.drafted_rows


class CostModel:
    """Learns the seconds of a decode step as a function of its rows, and those of a prompt token as
    a function of its position, since attention costs grow with the position.

    mixes_chunks: whether prompt chunks are in the same forward pass as the decoding rows. If not,
    each chunk reads the weights once more, which is assumed to cost as much as a decode step of one
    row.
    The cost of scoring a prompt token (logits over the whole vocabulary) is learned separately:
    with a small model and a large vocabulary, it is most of the cost of a token.
    """

    def __init__(
        self, *, mixes_chunks: bool, min_chunk_tokens: int, bounds: ChunkBounds = UNBOUNDED
    ) -> None:
        self._mixes_chunks = mixes_chunks
        self._min_chunk_tokens = min_chunk_tokens
        self._bounds = bounds
        self._most_chunk_tokens = sys.maxsize
        self._full_weight_tokens = 2 * min_chunk_tokens
        self._last_chunks_seconds = 0.0  # duration of the last step with chunks
        # seconds of a step by its rows, of a prompt token by its position, and of a score
        self._decode_trend = Trend(first_guess=_FIRST_DECODE_SECONDS, spread=_ROWS_SPREAD)
        self._prompt_trend = Trend(
            first_guess=_FIRST_PROMPT_TOKEN_SECONDS, spread=_POSITIONS_SPREAD
        )
        self._score_trend = Trend(first_guess=_FIRST_SCORE_SECONDS, spread=1.0)

    @property
    def score_seconds(self) -> float:
        """The seconds that the log-probability of a prompt token takes, apart from its prefill."""
        return self._score_trend.mean

    @property
    def knows_decoding(self) -> bool:
        """Whether a step without chunks was ever measured."""
        return self._decode_trend.is_learned

    @property
    def seconds_without_decoding(self) -> float:
        """The longest time that a step may take if no sequence decodes in it."""
        return self._bounds.seconds

    def limit_chunks(self, tokens: int) -> None:
        """Limit the size of chunks, because the device failed on a larger chunk than this."""
        self._most_chunk_tokens = min(self._most_chunk_tokens, max(tokens, self._min_chunk_tokens))

    def most_chunk_tokens(self, position: int) -> int:
        """The largest number of tokens in a chunk at a position, limited by the memory for
        attention scores, and by the sizes with which the device has failed.
        """
        most_tokens = self._most_chunk_tokens
        if self._bounds.score_bytes_per_pair:
            # the largest n whose n * (position + n) pairs fit, by the stable form of the root
            pairs = self._bounds.score_bytes / self._bounds.score_bytes_per_pair
            fitting_tokens = (
                int(2 * pairs / (position + math.sqrt(position * position + 4 * pairs)))
                if pairs
                else 0
            )
            most_tokens = min(
                most_tokens,
                max(
                    fitting_tokens - fitting_tokens % self._min_chunk_tokens, self._min_chunk_tokens
                ),
            )
        return most_tokens

    def decode_seconds(self, rows: int) -> float:
        return self._decode_trend.at(rows)

    def decode_row_seconds(self, rows: int) -> float:
        """Seconds of a step per decoding row; 0 until such a step is measured."""
        return self._decode_trend.at(rows) / rows if rows and self._decode_trend.is_learned else 0.0

    def prompt_token_seconds_at(self, position: int) -> float:
        return self._prompt_trend.at(position)

    def seconds_per_chunk(self) -> float:
        """The fixed cost of a chunk in a step with decoding rows, in addition to its tokens."""
        return (
            0.0
            if self._mixes_chunks or not self._decode_trend.is_learned
            else self._decode_trend.at(1)
        )

    def more_chunk_seconds(
        self, position: int, tokens: int, *, score_seconds: float = 0.0
    ) -> float:
        """Seconds that further tokens add to a chunk that is already part of the step.

        score_seconds: extra seconds for each token.
        """
        return tokens * (self._prompt_trend.at(position + tokens / 2) + score_seconds)

    def tokens_within(self, seconds: float, position: int, *, score_seconds: float = 0.0) -> int:
        """The largest number of tokens, starting at `position`, that fit in this time: the inverse
        of `more_chunk_seconds`, or a little less.
        """
        if seconds <= 0.0:
            return 0
        first_seconds = self._prompt_trend.at(position) + score_seconds  # of the first token
        slope = self._prompt_trend.slope
        # the stable form of the positive root of slope/2·n² + first_seconds·n = seconds, also for slope = 0
        root = math.sqrt(first_seconds * first_seconds + 2 * slope * seconds)
        return int(2 * seconds / (first_seconds + root))

    def at_most(self, load: StepLoad) -> float | None:
        """An upper bound for the duration of a step with this load; None until a similar step is
        measured. An outlier may still take several times as long.

        Beyond the measured range, the cost grows in proportion to rows and positions: no row costs
        more than the first, and attention over twice the tokens costs at most twice as much.
        """
        if (load.decode_rows and not self._decode_trend.is_learned) or (
            load.chunks and not self._prompt_trend.is_learned
        ):
            return None
        if load.scored_tokens and not self._score_trend.is_learned:
            return None
        seconds = 0.0
        if load.decode_rows or (self._mixes_chunks and self._decode_trend.is_learned):
            # any step reads the weights
            seconds = self._decode_trend.at_most(max(load.rows, 1))
        if not self._decode_trend.is_learned:
            seconds = self._last_chunks_seconds  # one token may take as long as all of these
        if load.chunk_tokens:
            seconds += load.chunk_tokens * self._prompt_trend.at_most(
                load.position_sum / load.chunk_tokens
            )
        return (
            seconds
            + load.scored_tokens * self._score_trend.mean
            + load.chunks * self.seconds_per_chunk()
        )

    def learn(self, load: StepLoad, seconds: float) -> None:
        """Learn from the duration of a step. `DraftGain` learns from those that verify drafts."""
        if not load.chunks:
            if load.decode_rows and not load.drafted_rows:
                self._decode_trend.learn(load.decode_rows, seconds)
            return
        self._last_chunks_seconds = seconds
        fixed_seconds = self._seconds_without_prompt_tokens(load)
        # a decode estimate that is too high must not make prompt tokens look free
        token_seconds = max(seconds - fixed_seconds, seconds / 4)
        if load.scored_tokens and self._prompt_trend.is_learned:
            prefill_seconds = load.chunk_tokens * self._prompt_trend.at(
                load.position_sum / load.chunk_tokens
            )
            # likewise, the prefill estimate must not make scores look free: 0 would stay 0
            self._score_trend.learn(
                0.0, max(token_seconds - prefill_seconds, token_seconds / 16) / load.scored_tokens
            )
            return
        # the fewer tokens a step has, the more its fixed cost blurs the cost per token
        weight = min(1.0, (load.chunk_tokens / self._full_weight_tokens) ** 2)
        self._prompt_trend.learn(
            load.position_sum / load.chunk_tokens, token_seconds / load.chunk_tokens, weight=weight
        )

    def _seconds_without_prompt_tokens(self, load: StepLoad) -> float:
        """The estimated part of a step's duration that does not depend on its prompt tokens: its
        decoding rows, and a further reading of the weights for each chunk that has its own pass.
        """
        if not self._decode_trend.is_learned:
            return 0.0
        if self._mixes_chunks:
            return self._decode_trend.at(max(load.rows, 1))
        decoding = self._decode_trend.at(load.rows) if load.rows else 0.0
        return decoding + load.chunks * self._decode_trend.at(1)
