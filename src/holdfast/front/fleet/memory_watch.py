"""Watches the memory of all workers together, and derives a level of memory pressure from it.

There are two watermarks, for the part of the memory that weights and steps leave free. Above the
first one, workers release idle state from RAM and start new sequences with 8-bit KV; above the
second one, they also convert running sequences to 8 bits, and run new requests one at a time.
`MemoryBudget` in each worker does this. The levels are derived here because only the front knows
all workers. It measures their processes from outside, so that a worker that hangs still counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.front.telemetry.metrics import PressureFigures
from holdfast.machine.device_memory import DeviceMemory, Pressure, memory_report, process_footprint

# Shares of the memory that weights and steps leave free. KV and cached blocks of one worker are
# planned to take at most 80 % of this (`plan_memory`), so the planned use is below the first one.
FIRST_WATERMARK = 0.85
SECOND_WATERMARK = 0.95
# A level ends when the footprint has been this much below its watermark for a while. Otherwise, the
# memory that a countermeasure frees would end the countermeasure immediately.
MARGIN = 0.05
RECOVERY_SECONDS = {Pressure.WARNING: 10.0, Pressure.CRITICAL: 2.0}
WATCH_SECONDS = 1.0  # between two measurements

_LEVEL_BELOW = {Pressure.CRITICAL: Pressure.WARNING, Pressure.WARNING: Pressure.NORMAL}
_SHARES = {Pressure.WARNING: FIRST_WATERMARK, Pressure.CRITICAL: SECOND_WATERMARK}
_NAMES: Mapping[Pressure, Literal["normal", "warning", "critical"]] = {
    Pressure.NORMAL: "normal",
    Pressure.WARNING: "warning",
    Pressure.CRITICAL: "critical",
}
_WATERMARK_NAMES = {Pressure.WARNING: "first", Pressure.CRITICAL: "second"}
_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryMeter:
    """Measures how much memory processes take and how much the machine has. Tests pass functions
    that return made-up figures.
    """

    footprint: Callable[[int], int] = process_footprint
    machine: Callable[[], DeviceMemory] = memory_report

    def read(self, pids: Collection[int]) -> tuple[dict[int, int], DeviceMemory]:
        """The footprint of each process, and the memory of the machine. Any thread."""
        return {pid: self.footprint(pid) for pid in pids}, self.machine()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """How much memory all workers take together, and how much they may take.

    workers: the footprint of each worker, by model. fixed_bytes: weights and step memory of all
    workers, which cannot be freed. limit_bytes: the memory that all workers may take.
    """

    workers: Mapping[str, int] = field(default_factory=dict)
    fixed_bytes: int = 0
    limit_bytes: int = 0

    @property
    def footprint_bytes(self) -> int:
        """The footprints of all workers together."""
        return sum(self.workers.values())

    def watermark_bytes(self, pressure: Pressure, *, margin: float = 0.0) -> int:
        """The footprint above which this level of pressure begins. margin: lowers the watermark by
        this share of the memory that is not fixed.
        """
        free_bytes = max(0, self.limit_bytes - self.fixed_bytes)
        return self.fixed_bytes + int(free_bytes * (_SHARES[pressure] - margin))

    def pressure(self, *, margin: float = 0.0) -> Pressure:
        """The highest level whose watermark the footprint exceeds."""
        return max(
            (
                each
                for each in _SHARES
                if self.footprint_bytes > self.watermark_bytes(each, margin=margin)
            ),
            default=Pressure.NORMAL,
        )

    def describe(self, pressure: Pressure) -> str:
        """The footprint, and the watermark of this level, with the arithmetic behind both."""
        unit, name = (_GIB, "GiB") if self.limit_bytes >= _GIB else (_MIB, "MiB")

        def in_unit(nbytes: int) -> str:
            return f"{nbytes / unit:.1f}"

        workers = " + ".join(
            f"worker {model} {in_unit(size)}" for model, size in self.workers.items()
        )
        free = in_unit(max(0, self.limit_bytes - self.fixed_bytes))
        return (
            f"footprint {in_unit(self.footprint_bytes)} {name} = {workers or 'no worker'}; "
            f"{_WATERMARK_NAMES[pressure]} watermark {in_unit(self.watermark_bytes(pressure))} = "
            f"{in_unit(self.fixed_bytes)} for weights and steps + {_SHARES[pressure]:.0%} of the "
            f"other {free} of {in_unit(self.limit_bytes)}"
        )


class MemoryWatch:
    """The current level of memory pressure: rises immediately, and falls step by step, after a
    while. The caller passes the time.
    """

    def __init__(self) -> None:
        self.pressure = Pressure.NORMAL
        self.use = MemoryUse()  # the last measurement
        self.reason = ""  # the arithmetic behind the last change
        self._changes: Counter[str] = Counter()  # how often each level began, by its name
        # since when the footprint would allow a lower level; None: it does not
        self._lower_since: float | None = None

    def update(self, use: MemoryUse, *, now: float) -> bool:
        """Update the level from a new measurement. Returns whether the level has changed.

        now: seconds of any monotonic clock.
        """
        self.use = use
        last_pressure = self.pressure
        lowered_pressure = use.pressure(margin=MARGIN)
        if lowered_pressure >= last_pressure:
            self._lower_since = None
            self.pressure = max(use.pressure(), last_pressure)
        elif self._lower_since is None:
            self._lower_since = now
        elif now - self._lower_since >= RECOVERY_SECONDS[last_pressure]:
            self._lower_since = now
            self.pressure = _LEVEL_BELOW[last_pressure]
        if self.pressure is last_pressure:
            return False
        self._changes[level_name(self.pressure)] += 1
        self.reason = use.describe(max(self.pressure, last_pressure))
        return True

    def figures(self) -> PressureFigures:
        """The level and the last measurement, for metrics and /health."""
        return PressureFigures(
            level=level_name(self.pressure),
            footprint_bytes=self.use.footprint_bytes,
            limit_bytes=self.use.limit_bytes,
            first_watermark_bytes=self.use.watermark_bytes(Pressure.WARNING),
            second_watermark_bytes=self.use.watermark_bytes(Pressure.CRITICAL),
            changes=dict(self._changes),
        )


def level_name(pressure: Pressure) -> Literal["normal", "warning", "critical"]:
    """The name of a level in logs, metrics and answers."""
    return _NAMES[pressure]
