"""Counters of a worker since its start."""

from __future__ import annotations

import functools
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping
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
    ImageFigures,
    StepRecord,
    WaitReason,
    WorkerStatistics,
)
from holdfast.wire.requests import RequestId
from holdfast.worker.scheduler.scheduler import SchedulerStatistics

MOST_RECENT_STEPS = 120
SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class SecondsCounter:
    """Counts the durations of one kind of event in the buckets of a histogram."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS_BOUNDS) + 1)
        self._total = 0.0

    def count(self, seconds: float) -> None:
        self._total += seconds
        self._counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1

    def histogram(self) -> Histogram:
        return Histogram(bounds=SECONDS_BOUNDS, counts=tuple(self._counts), total=self._total)


@dataclass(slots=True, kw_only=True)
class Counters:
    """The counters of one worker since its start. Written by the device thread only."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # part of drafted_tokens
    model_drafted_tokens: int = 0  # part of drafted_tokens: by the draft model
    model_accepted_tokens: int = 0  # part of accepted_tokens: the same
    draft_model: str = ""  # the model that drafts; empty: none, or it has failed
    rejected: int = 0  # requests
    quantized: int = 0  # sequences whose KV was quantized while they ran
    finished: Counter[FinishReason] = field(default_factory=Counter)
    step_seconds: SecondsCounter = field(default_factory=SecondsCounter)
    recent_steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MOST_RECENT_STEPS))
    lookups: Counter[CacheOutcome] = field(default_factory=Counter)
    ram_tokens: int = 0  # reused from RAM
    moved_tokens: int = 0  # part of ram_tokens: in a state that was moved to the request
    shared_tokens: int = 0  # part of ram_tokens: in buffers that several sequences share
    disk_tokens: int = 0  # reused from disk
    # prefilled as idle work (for an expected request, while there is none); not in prompt_tokens
    read_ahead_tokens: int = 0
    used_ahead_tokens: int = 0  # part of read_ahead_tokens: reused by a later request
    lookup_seconds: SecondsCounter = field(default_factory=SecondsCounter)
    restore_seconds: SecondsCounter = field(default_factory=SecondsCounter)  # for cache hits
    # the engine updates this object
    constraints: ConstraintFigures = field(default_factory=ConstraintFigures)
    images: ImageFigures = field(default_factory=ImageFigures)  # the engine updates it, too
    device_bytes: Callable[[], int] = int  # GPU memory of this worker

    def count_step(
        self, seconds: float, *, sequences: int, prompt_tokens: int, generated_tokens: int
    ) -> None:
        """Count a collected step. Its tokens are already counted."""
        self.steps += 1
        self.step_seconds.count(seconds)
        self.recent_steps.append(
            StepRecord(
                at=round(time.time(), 4),
                seconds=round(seconds, 6),
                sequences=sequences,
                prompt_tokens=prompt_tokens,
                generated_tokens=generated_tokens,
            )
        )

    def count_report(self, report: CacheReport) -> None:
        """Count what a request that has started reused from the cache."""
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
        self,
        load: SchedulerStatistics,
        cache: CacheFigures | None,
        *,
        waits: Mapping[RequestId, WaitReason],
        in_answer: bool,
    ) -> WorkerStatistics:
        """All counters, with the current gauges of the scheduler and the cache (None: no cache)."""
        return WorkerStatistics(
            in_answer=in_answer,
            running=load.running,
            queued=load.queued,
            max_running=load.max_running,
            step_tokens=load.step_tokens,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            model_drafted_tokens=self.model_drafted_tokens,
            model_accepted_tokens=self.model_accepted_tokens,
            draft_model=self.draft_model,
            cached_tokens=self.ram_tokens + self.disk_tokens,
            preemptions=load.preemptions,
            finished=self.finished.total(),
            failed=self.finished[FinishReason.FAILED] + self.finished[FinishReason.REFUSED],
            cancelled=self.finished[FinishReason.CANCELLED],
            rejected=self.rejected,
            quantized=self.quantized,
            kv_reserved_bytes=load.reserved_bytes,
            kv_budget_bytes=load.budget_bytes,
            resident_bytes=int(_this_process().memory_info().rss),
            device_bytes=self.device_bytes(),
            step_seconds=self.step_seconds.histogram(),
            cache=None if cache is None else self._with_lookups(cache),
            constraints=msgspec.structs.replace(self.constraints),
            images=msgspec.structs.replace(self.images),
            waits=dict(waits),
            recent_steps=tuple(self.recent_steps) if in_answer else (),
        )

    def _with_lookups(self, cache: CacheFigures) -> CacheFigures:
        """The cache's figures, completed by the counters of the requests' lookups."""
        return msgspec.structs.replace(
            cache,
            ram_tokens=self.ram_tokens,
            moved_tokens=self.moved_tokens,
            shared_tokens=self.shared_tokens,
            disk_tokens=self.disk_tokens,
            read_ahead_tokens=self.read_ahead_tokens,
            used_ahead_tokens=self.used_ahead_tokens,
            lookups=dict(self.lookups),
            lookup_seconds=self.lookup_seconds.histogram(),
            restore_seconds=self.restore_seconds.histogram(),
        )


@functools.cache
def _this_process() -> psutil.Process:
    return psutil.Process()
