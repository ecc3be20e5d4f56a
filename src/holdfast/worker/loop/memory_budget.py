"""What a worker may use changes while it serves: other models come and go, and the system runs
short of memory.

Device thread only. Nothing that runs is ended: live KV beyond a smaller budget stays until its
sequences end, and parked states and blocks in RAM make room first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.machine.device_memory import MemoryPlan, Pressure
from holdfast.worker.loop.parts import Cache
from holdfast.worker.scheduler.scheduler import Scheduler

READ_SECONDS = 1.0  # between two looks at the memory pressure

logger = logging.getLogger("holdfast.worker")


class MemoryBudget:
    """Applies a plan and the system's memory pressure to the scheduler and the cache."""

    def __init__(
        self,
        plan: MemoryPlan,
        *,
        scheduler: Scheduler,
        cache: Cache,
        most_parked_bytes: int | None = None,
        clear_buffers: Callable[[], None] = lambda: None,
        plan_for: Callable[[int], MemoryPlan] | None = None,
        read_pressure: Callable[[], Pressure] | None = None,
    ) -> None:
        """most_parked_bytes: as the cache was opened with. clear_buffers: frees what MLX keeps for
        later allocations.

        plan_for: the plan for another number of bytes for KV and blocks; None: the plan never
            changes.
        read_pressure: tells the system's memory pressure; None: the system does not tell it.
        """
        self._plan, self._plan_for = plan, plan_for
        self._scheduler, self._cache = scheduler, cache
        self._most_parked_bytes = most_parked_bytes
        self._clear_buffers = clear_buffers
        self._read_pressure = read_pressure
        self._read_at = 0.0
        self._pressure = Pressure.NORMAL

    @property
    def pressure(self) -> Pressure:
        """The pressure that counts at the moment."""
        return self._pressure

    def share(self, state_bytes: int) -> None:
        """From now on KV and blocks in RAM may take so many bytes together."""
        if self._plan_for is None:
            return
        self._plan = self._plan_for(state_bytes)
        logger.info(
            "KV may take %.1f GiB from now on: other models came or went",
            self._plan.kv_bytes / (1 << 30),
        )
        self._apply()

    def tend(self, *, now: float) -> None:
        """Look at the system's memory pressure now and then; call often. now: seconds of any steady
        clock.
        """
        if self._read_pressure is not None and now - self._read_at >= READ_SECONDS:
            self._read_at = now
            self.follow(self._read_pressure())

    def follow(self, pressure: Pressure) -> None:
        """Give up at once what the system wants back, and take it again when it has recovered."""
        if pressure is self._pressure:
            return
        before, self._pressure = self._pressure, pressure
        level = logging.WARNING if pressure > before else logging.INFO
        logger.log(
            level,
            "memory pressure of the system: %s, was %s",
            pressure.name.lower(),
            before.name.lower(),
        )
        self._apply()

    def _apply(self) -> None:
        is_short = self._pressure is not Pressure.NORMAL
        self._scheduler.set_budget(self._plan.kv_bytes)
        self._scheduler.admits_one_at_a_time = self._pressure is Pressure.CRITICAL
        if is_short:
            self._cache.limit_ram(0, most_parked_bytes=0)
            self._clear_buffers()
        else:
            self._cache.limit_ram(
                self._plan.ram_tier_bytes, most_parked_bytes=self._most_parked_bytes
            )
            self._cache.live.reclaim(self._scheduler.excess_bytes)
