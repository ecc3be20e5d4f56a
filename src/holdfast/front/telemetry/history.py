"""How fast the server has been: a bounded history of the last seven days, by model.

It consists of cells: what one model did in one minute, in five minutes, or in one hour. Fine cells
are kept for a short time and coarse ones for long, so that each range of time is read from a few
hundred cells at most. Durations are counted in buckets whose bounds are the same everywhere; two
distributions are merged by adding their counts, and a percentile of the sum has the same accuracy
as one of a single minute.

The history contains only names of models, and no texts. A cell that is over is kept as bytes.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import msgspec

from holdfast.machine.retention_clock import RetentionClock

# the finest distinguished duration, and the buckets per doubling: a percentile is exact up to
# the width of a bucket, a factor of 1.19
LEAST_VALUE: Final = 1e-5
BUCKETS_PER_DOUBLING: Final = 4
LAST_BUCKET: Final = 160  # up to 1.1e7: for durations in seconds and for tokens per second
MOST_MODELS = 32
MOST_BYTES = 4 << 20  # of all cells that are over
VERSION = 1

PhaseName: TypeAlias = Literal[
    "load", "queue", "lookup", "restore", "prefill", "first_token", "gap"
]
RangeName: TypeAlias = Literal["15m", "1h", "6h", "24h", "7d"]


def bucket_of(value: float) -> int:
    """The bucket of a value: the first one whose upper bound is not below the value."""
    if value <= LEAST_VALUE:
        return 0
    return min(LAST_BUCKET, math.ceil(math.log2(value / LEAST_VALUE) * BUCKETS_PER_DOUBLING))


def bucket_bound(bucket: float) -> float:
    """The upper bound of a bucket, which is the lower bound of the next one. Between two whole
    numbers lie the values within a bucket.
    """
    return LEAST_VALUE * math.exp2(bucket / BUCKETS_PER_DOUBLING)


class Distribution(msgspec.Struct, array_like=True):
    """How often values fell into each bucket, and their sum."""

    counts: dict[int, int] = {}  # by bucket (`bucket_of`)
    total: float = 0.0  # the sum of all values

    def add(self, value: float) -> None:
        """Count one value."""
        bucket = bucket_of(value)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.total += value

    def add_all(self, values: Sequence[float]) -> None:
        """Count many values; twice as fast as one by one."""
        new_counts = Counter(
            [
                math.ceil(math.log2(value / LEAST_VALUE) * BUCKETS_PER_DOUBLING)
                for value in values
                if value > 0
            ]
        )
        for bucket, count in new_counts.items():
            clamped_bucket = min(LAST_BUCKET, max(0, bucket))
            self.counts[clamped_bucket] = self.counts.get(clamped_bucket, 0) + count
        if zeros := len(values) - new_counts.total():
            self.counts[0] = self.counts.get(0, 0) + zeros
        self.total += sum(values)

    def merge(self, other: Distribution) -> None:
        """Add the values of another distribution."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.total += other.total

    def percentile(self, share: float) -> float:
        """The smallest value that at least this share of all values does not exceed, up to the
        width of its bucket. There must be a value.
        """
        buckets = sorted(self.counts)
        rank = max(1, math.ceil(share * sum(self.counts.values())))
        lower_count = 0
        for bucket in buckets:
            count = self.counts[bucket]
            if lower_count + count >= rank:
                return bucket_bound(bucket - 1 + (rank - lower_count - 0.5) / count)
            lower_count += count
        raise AssertionError("a rank is at most the number of values")


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of durations, in seconds, exact up to a factor of 1.19; `mean` is exact."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of speeds, in tokens per second: 95 % of all answers were at least as fast as
    `p5`, 99 % as `p1`. Exact up to a factor of 1.19; `mean` is exact.
    """

    count: int
    mean: float
    p50: float
    p5: float
    p1: float


class PerformanceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What answers took, and how much they processed. A phase without a value is null.

    answers: finished choices; each prompt of an embedding or a ranking counts as one.
    cached_tokens: of `prompt_tokens`, those that needed no prefill.
    accepted_tokens: of `drafted_tokens`, those that became part of an answer.
    load: the wait for the model, of requests that had to wait for it.
    queue: in the worker, before prefill; it includes `lookup` and `restore`.
    lookup: of the prompt in the prefix cache. restore: of cached blocks, from disk if they are
        there.
    prefill: from admission to the first token.
    first_token: from the request to the first text, including all waiting.
    gap: between two pieces of text of one answer.
    speed: of single answers, after their first text.
    """

    answers: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    load: Seconds | None = None
    queue: Seconds | None = None
    lookup: Seconds | None = None
    restore: Seconds | None = None
    prefill: Seconds | None = None
    first_token: Seconds | None = None
    gap: Seconds | None = None
    speed: Speeds | None = None


class Cell(msgspec.Struct, array_like=True):
    """What one model did in one span of time. The fields are those of `PerformanceFigures`."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    phases: dict[PhaseName, Distribution] = {}  # seconds of each phase
    speed: Distribution = msgspec.field(default_factory=Distribution)  # tokens per second

    def add_duration(self, phase: PhaseName, seconds: float) -> None:
        """Count one duration."""
        self._distribution_of(phase).add(seconds)

    def merge(self, other: Cell) -> None:
        """Add everything of another cell."""
        for name in _COUNT_FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for phase, distribution in other.phases.items():
            self._distribution_of(phase).merge(distribution)
        self.speed.merge(other.speed)

    def figures(self) -> PerformanceFigures:
        """The counts, and the percentiles of all phases."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _COUNT_FIELDS}
        values |= {name: _seconds_percentiles(each) for name, each in self.phases.items()}
        return PerformanceFigures(**values, speed=_speed_percentiles(self.speed))

    def _distribution_of(self, phase: PhaseName) -> Distribution:
        """The durations of a phase, which may be empty."""
        distribution = self.phases.get(phase)
        if distribution is None:
            distribution = self.phases[phase] = Distribution()
        return distribution


_COUNT_FIELDS = tuple(name for name in Cell.__struct_fields__ if name not in ("phases", "speed"))


def _seconds_percentiles(values: Distribution) -> Seconds:
    return Seconds(**_percentiles(values, p50=0.5, p95=0.95, p99=0.99))


def _speed_percentiles(values: Distribution) -> Speeds | None:
    return Speeds(**_percentiles(values, p50=0.5, p5=0.05, p1=0.01)) if values.counts else None


def _percentiles(values: Distribution, **shares: float) -> dict[str, Any]:
    """The count, the mean, and the percentile of each share, by its name. There must be a value."""
    count = sum(values.counts.values())
    figures = {name: _with_four_digits(values.percentile(share)) for name, share in shares.items()}
    return {"count": count, "mean": _with_four_digits(values.total / count), **figures}


def _with_four_digits(value: float) -> float:
    """Four digits, so that answers and files stay short."""
    return float(f"{value:.4g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """A range of time up to now.

    cell_seconds: the length of the cells that it is read from. point_seconds: the length of its
    points, a multiple of that.
    """

    seconds: int
    cell_seconds: int
    point_seconds: int


RANGES: Mapping[RangeName, TimeRange] = {
    "15m": TimeRange(seconds=900, cell_seconds=60, point_seconds=60),
    "1h": TimeRange(seconds=3600, cell_seconds=60, point_seconds=60),
    "6h": TimeRange(seconds=21_600, cell_seconds=300, point_seconds=300),
    "24h": TimeRange(seconds=86_400, cell_seconds=300, point_seconds=900),
    "7d": TimeRange(seconds=604_800, cell_seconds=3600, point_seconds=3600),
}
# length of cells in seconds → for how many seconds they are kept
RETENTION_SECONDS = {
    length: max(each.seconds for each in RANGES.values() if each.cell_seconds == length) + length
    for length in sorted({each.cell_seconds for each in RANGES.values()})
}


class PerformancePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One span of a time range, which begins at `at` (in seconds since 1970).

    `seconds` is its length; that of the last point ends now.
    """

    at: float
    seconds: float
    figures: PerformanceFigures


class ModelPerformance(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one model in a time range."""

    model: str
    figures: PerformanceFigures


class Performance(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the server was in a time range.

    `total` and `points` are about `model`, or about all models if it is null. Points without an
    answer are left out. `models` has every model that answered in the range.
    """

    range: RangeName
    model: str | None
    since: float
    until: float
    total: PerformanceFigures
    models: list[ModelPerformance]
    points: list[PerformancePoint]


class FinishedCell(msgspec.Struct, array_like=True, frozen=True):
    """A cell that is over. cell: a Cell as MessagePack."""

    start: int  # seconds since 1970
    cell: bytes


class _Contents(msgspec.Struct, kw_only=True):
    """The saved form of a history: the cells by model and by their length."""

    version: int
    # by model, then by the cells' length in seconds
    models: dict[str, dict[int, list[FinishedCell]]]


@dataclass(slots=True)
class _CurrentCell:
    """The current cell of one model and one length."""

    start: int  # seconds since 1970
    cell: Cell = field(default_factory=Cell)


class _CellSeries:
    """The cells of one model that have the same length, the oldest first."""

    def __init__(self, length: int, finished: Iterable[FinishedCell] = ()) -> None:
        self.length = length
        self.finished: deque[FinishedCell] = deque(
            finished, maxlen=RETENTION_SECONDS[length] // length + 1
        )
        self._current: _CurrentCell | None = None

    def cell_at(self, now: float) -> Cell:
        """The cell of this time, which becomes the current one; the one before it is packed."""
        start = int(now // self.length) * self.length
        if self._current is None or self._current.start != start:
            self.finished.extend(self._packed_current())
            self._current = _CurrentCell(start)
        return self._current.cell

    def expire(self, now: float) -> None:
        """Forget the cells that ended too long ago. now: as RetentionClock counts."""
        while self.finished and self.finished[0].start + RETENTION_SECONDS[self.length] <= now:
            self.finished.popleft()
        if (
            self._current is not None
            and self._current.start + RETENTION_SECONDS[self.length] <= now
        ):
            self._current = None

    @property
    def is_empty(self) -> bool:
        return not self.finished and self._current is None

    def packed(self) -> list[FinishedCell]:
        """All cells as bytes, also the current one."""
        return [*self.finished, *self._packed_current()]

    def cells_within(self, since: int, until: float) -> Iterator[tuple[int, Cell]]:
        """Yield the cells that begin in this time, each after the second at which it begins."""
        for each in self.finished:
            if since <= each.start <= until:
                yield each.start, msgspec.msgpack.decode(each.cell, type=Cell)
        if self._current is not None and since <= self._current.start <= until:
            yield self._current.start, self._current.cell

    @property
    def finished_bytes(self) -> int:
        return sum(len(each.cell) for each in self.finished)

    def _packed_current(self) -> Iterator[FinishedCell]:
        """Yield the current cell as bytes, if there is one."""
        if self._current is not None:
            yield FinishedCell(self._current.start, msgspec.msgpack.encode(self._current.cell))


class PerformanceHistory:
    """The history of all models. Event loop's thread only.

    Its size is bounded by the lengths and times of `RETENTION_SECONDS`, by MOST_MODELS
    (the model that has been idle for longest is forgotten) and by MOST_BYTES (the oldest cells are).
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: the time in seconds since 1970."""
        self._clock = clock
        self._retention = RetentionClock(wall=clock, steady=steady)
        # by model, the latest used one last, and by the length of the cells in seconds
        self._models: dict[str, dict[int, _CellSeries]] = {}
        self._limits_enforced_at = 0.0
        # called after each change
        self.on_change: Callable[[], None] = lambda: None

    def add(self, model: str, cell: Cell) -> None:
        """Add what a model has just done."""
        now = self._clock()
        series_by_length = self._models.pop(model, None) or {
            length: _CellSeries(length) for length in RETENTION_SECONDS
        }
        self._models[model] = series_by_length
        if len(self._models) > MOST_MODELS:
            del self._models[next(iter(self._models))]
        for series in series_by_length.values():
            series.cell_at(now).merge(cell)
        if not self._limits_enforced_at <= now < self._limits_enforced_at + min(RETENTION_SECONDS):
            self._limits_enforced_at = now
            self._enforce_limits()
        self.on_change()

    @property
    def models(self) -> frozenset[str]:
        """The models that it knows."""
        return frozenset(self._models)

    def report(self, range_name: RangeName, *, model: str | None = None) -> Performance:
        """The figures of a range of time, of one model or of all."""
        time_range = RANGES[range_name]
        now = self._clock()
        point_seconds = time_range.point_seconds
        since = (int(now // point_seconds) + 1) * point_seconds - time_range.seconds
        points: dict[int, Cell] = {}
        total = Cell()
        models: list[ModelPerformance] = []
        for name, series_by_length in self._models.items():
            model_total = Cell()
            for start, cell in series_by_length[time_range.cell_seconds].cells_within(since, now):
                model_total.merge(cell)
                if model in (None, name):
                    points.setdefault(start // point_seconds * point_seconds, Cell()).merge(cell)
            if model_total.answers or model_total.phases:
                models.append(ModelPerformance(model=name, figures=model_total.figures()))
            if model in (None, name):
                total.merge(model_total)
        return Performance(
            range=range_name,
            model=model,
            since=float(since),
            until=now,
            total=total.figures(),
            models=sorted(models, key=lambda each: each.model),
            points=[
                PerformancePoint(
                    at=float(at),
                    seconds=round(min(point_seconds, now - at), 1),
                    figures=cell.figures(),
                )
                for at, cell in sorted(points.items())
            ],
        )

    def serialize(self) -> bytes:
        """Everything, to be saved."""
        self._enforce_limits()
        models = {
            name: {length: series.packed() for length, series in series_by_length.items()}
            for name, series_by_length in self._models.items()
        }
        return msgspec.msgpack.encode(_Contents(version=VERSION, models=models))

    def restore(self, packed: bytes) -> None:
        """Replace the history by a saved one, which `serialize` returned.

        Raises msgspec.DecodeError if it cannot be read.
        """
        contents = msgspec.msgpack.decode(packed, type=_Contents)
        if contents.version != VERSION:
            raise msgspec.ValidationError(f"version {contents.version} is not {VERSION}")
        self._models = {
            name: {
                length: _CellSeries(length, finished.get(length, ()))
                for length in RETENTION_SECONDS
            }
            for name, finished in contents.models.items()
        }
        all_series = [series for each in self._models.values() for series in each.values()]
        self._retention.start_from_stamps(
            cell.start + series.length for series in all_series for cell in series.finished
        )
        self._enforce_limits()

    def _enforce_limits(self) -> None:
        """Forget what is too old or too much, and models without cells."""
        now = self._retention()
        for name, series_by_length in list(self._models.items()):
            for series in series_by_length.values():
                series.expire(now)
            if all(series.is_empty for series in series_by_length.values()):
                del self._models[name]
        while len(self._models) > MOST_MODELS:
            del self._models[next(iter(self._models))]
        all_series = [
            series
            for series_by_length in self._models.values()
            for series in series_by_length.values()
        ]
        excess_bytes = sum(series.finished_bytes for series in all_series) - MOST_BYTES
        while excess_bytes > 0:
            oldest = min((series for series in all_series if series.finished), key=_oldest_start)
            excess_bytes -= len(oldest.finished.popleft().cell)


def _oldest_start(series: _CellSeries) -> int:
    return series.finished[0].start
