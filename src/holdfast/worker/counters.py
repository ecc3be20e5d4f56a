"""Counters of a worker since its start."""

from __future__ import annotations

import functools
from bisect import bisect_left
from dataclasses import dataclass, field

import psutil

from holdfast.messages import FinishReason, Histogram

STEP_SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(slots=True, kw_only=True)
class Counters:
    """Plain numbers, written by the device thread alone."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    rejected: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_SECONDS_BOUNDS) + 1))
    step_seconds: float = 0.0

    def count_step(self, seconds: float) -> None:
        """One step has been collected."""
        self.steps += 1
        self.step_seconds += seconds
        self.step_counts[bisect_left(STEP_SECONDS_BOUNDS, seconds)] += 1

    def step_histogram(self) -> Histogram:
        """How long steps took."""
        return Histogram(bounds=STEP_SECONDS_BOUNDS, counts=tuple(self.step_counts), total=self.step_seconds)


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return int(_this_process().memory_info().rss)


@functools.cache
def _this_process() -> psutil.Process:
    return psutil.Process()
