"""Counters of a worker since its start."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import psutil

from holdfast.wire.events import (
    CacheFigures,
    CacheOutcome,
    CacheReport,
    ConstraintFigures,
    FinishReason,
    Histogram,
    WorkerStatistics,
)
from holdfast.worker.scheduler.scheduler import SchedulerStatistics

SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class SecondsCounter:
    """How long something took, each time it happened."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS_BOUNDS) + 1)
        self._total = 0.0

    def count(self, seconds: float) -> None:
        """It happened once more."""
        self._total += seconds
        self._counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1

    def histogram(self) -> Histogram:
        """All of them so far."""
        return Histogram(bounds=SECONDS_BOUNDS, counts=tuple(self._counts), total=self._total)


@dataclass(slots=True, kw_only=True)
class Counters:
    """Plain numbers, written by the device thread alone."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    rejected: int = 0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
    step_seconds: SecondsCounter = field(default_factory=SecondsCounter)
    lookups: Counter[CacheOutcome] = field(default_factory=Counter)
    ram_tokens: int = 0  # that were not read again, by where they were
    moved_tokens: int = 0  # of these, by how they were had
    shared_tokens: int = 0
    disk_tokens: int = 0
    read_ahead_tokens: int = 0  # not in prompt_tokens
    used_ahead_tokens: int = 0
    lookup_seconds: SecondsCounter = field(default_factory=SecondsCounter)
    # of requests for which something was there
    restore_seconds: SecondsCounter = field(default_factory=SecondsCounter)
    constraints: ConstraintFigures = field(default_factory=ConstraintFigures)  # the engine's own
    device_bytes: Callable[[], int] = int  # memory of a GPU that the worker has

    def count_step(self, seconds: float) -> None:
        """One step has been collected."""
        self.steps += 1
        self.step_seconds.count(seconds)

    def count_report(self, report: CacheReport) -> None:
        """One request has begun, and this is what the cache had of it."""
        self.lookups[report.outcome] += 1
        self.ram_tokens += report.ram_tokens
        self.moved_tokens += report.moved_tokens
        self.shared_tokens += report.shared_tokens
        self.disk_tokens += report.disk_tokens
        self.used_ahead_tokens += report.read_ahead_tokens
        self.lookup_seconds.count(report.lookup_seconds)
        if report.cached_tokens:
            self.restore_seconds.count(report.restore_seconds)

    def statistics(
        self, load: SchedulerStatistics, cache: CacheFigures | None, *, in_answer: bool
    ) -> WorkerStatistics:
        """All of them with what the scheduler and the cache say of now; `cache` is None when
        nothing is kept.
        """
        return WorkerStatistics(
            in_answer=in_answer,
            running=load.running,
            queued=load.queued,
            max_running=load.max_running,
            step_tokens=load.step_tokens,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            cached_tokens=self.ram_tokens + self.disk_tokens,
            preemptions=load.preemptions,
            finished=sum(self.finished.values()),
            failed=self.finished[FinishReason.FAILED] + self.finished[FinishReason.REFUSED],
            cancelled=self.finished[FinishReason.CANCELLED],
            rejected=self.rejected,
            kv_reserved_bytes=load.reserved_bytes,
            kv_budget_bytes=load.budget_bytes,
            resident_bytes=resident_bytes(),
            device_bytes=self.device_bytes(),
            step_seconds=self.step_seconds.histogram(),
            memory=None if cache is None else self._with_lookups(cache),
            constraints=msgspec.structs.replace(self.constraints),
        )

    def _with_lookups(self, cache: CacheFigures) -> CacheFigures:
        return msgspec.structs.replace(
            cache,
            ram_tokens=self.ram_tokens,
            moved_tokens=self.moved_tokens,
            shared_tokens=self.shared_tokens,
            disk_tokens=self.disk_tokens,
            read_ahead_tokens=self.read_ahead_tokens,
            used_ahead_tokens=self.used_ahead_tokens,
            lookups={outcome.value: count for outcome, count in self.lookups.items()},
            lookup_seconds=self.lookup_seconds.histogram(),
            restore_seconds=self.restore_seconds.histogram(),
        )


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return int(_this_process().memory_info().rss)


@functools.cache
def _this_process() -> psutil.Process:
    return psutil.Process()
