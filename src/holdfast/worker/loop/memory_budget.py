"""The memory budget of a worker. It changes while the worker serves, when other models are loaded
or unloaded and when memory runs short. macOS reports the memory pressure of the system; the front
derives that of all workers from their memory (`front/fleet/memory_watch.py`).

Device thread only. No running sequence is ended: if live KV exceeds a smaller budget, it stays
until its sequences end; parked states and blocks in RAM are freed first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.machine.device_memory import Pressure
from holdfast.machine.memory_plan import MemoryPlan
from holdfast.wire.events import BudgetChanged
from holdfast.worker.scheduler.scheduler import Scheduler

if TYPE_CHECKING:  # this module imports MLX, which is not needed here at run time
    from holdfast.worker.prefix.cache import PrefixCache

READ_SECONDS = 1.0  # between two readings of the memory pressure
CLEAR_SECONDS = 5.0  # between two releases of free buffers, while there is memory pressure

logger = logging.getLogger("holdfast.worker")


class MemoryBudget:
    """Applies a memory plan and the system's memory pressure to the scheduler and the cache."""

    def __init__(
        self,
        plan: MemoryPlan,
        *,
        plan_for: Callable[[int], MemoryPlan],
        contexts_of: Callable[[int], dict[str, int]] = lambda kv_bytes: {},
        scheduler: Scheduler,
        cache: PrefixCache | None,
        most_parked_bytes: int | None = None,
        clear_buffers: Callable[[], None] = lambda: None,
        read_pressure: Callable[[], Pressure] | None = None,
    ) -> None:
        """plan_for: returns the memory plan for a given number of bytes for KV and blocks.
        contexts_of: returns the context that fits a KV budget, for each form of keys and values.

        most_parked_bytes: the limit for parked states without memory pressure; None: as many as
        fit. clear_buffers: frees the memory that MLX keeps for later allocations. read_pressure:
        None if the system does not report its memory pressure.
        """
        self._plan = plan
        self._plan_for = plan_for
        self._contexts_of = contexts_of
        self._scheduler = scheduler
        self._cache = cache
        self._most_parked_bytes = most_parked_bytes
        self._clear_buffers = clear_buffers
        self._read_pressure = read_pressure
        self._read_at = 0.0  # when the system's memory pressure was last read
        self._cleared_at = 0.0  # when free buffers were last released
        self._system_pressure = Pressure.NORMAL
        self._worker_pressure = Pressure.NORMAL

    @property
    def pressure(self) -> Pressure:
        """The level of memory pressure to which the worker reacts: that of the system or that of
        all workers, whichever is higher.
        """
        return max(self._system_pressure, self._worker_pressure)

    @property
    def is_critical(self) -> bool:
        """Whether memory is so short that running sequences must be quantized."""
        return self.pressure is Pressure.CRITICAL

    @property
    def is_short(self) -> bool:
        """Whether there is memory pressure, so that new sequences should be quantized."""
        return self.pressure is not Pressure.NORMAL

    def set_share(self, state_bytes: int) -> BudgetChanged:
        """Limit KV and blocks in RAM to this many bytes in total from now on."""
        self._plan = self._plan_for(state_bytes)
        logger.info(
            "KV may take %.2f GiB from now on, because other models were loaded or unloaded",
            self._plan.kv_bytes / (1 << 30),
        )
        self._apply()
        return BudgetChanged(
            kv_budget_bytes=self._plan.kv_bytes,
            context_tokens_by_bits=self._contexts_of(self._plan.kv_bytes),
        )

    def maintain(self, *, now: float) -> None:
        """Read the system's memory pressure, at most once a second, and release free buffers
        every `CLEAR_SECONDS` while there is pressure. Call this often.

        now: seconds of any monotonic clock.
        """
        if self.pressure is Pressure.NORMAL:
            self._cleared_at = now  # when a level begins, `_apply` releases the buffers immediately
        if self._read_pressure is not None and now - self._read_at >= READ_SECONDS:
            self._read_at = now
            self.set_system_pressure(self._read_pressure())
        if self.is_short and now - self._cleared_at >= CLEAR_SECONDS:
            self._cleared_at = now
            self._clear_buffers()

    def set_system_pressure(self, pressure: Pressure) -> None:
        """Apply a new level of the system's memory pressure: release memory, or use it again."""
        if pressure is self._system_pressure:
            return
        previous = self._system_pressure
        self._system_pressure = pressure
        logger.log(
            logging.WARNING if pressure > previous else logging.INFO,
            "memory pressure of the system: now %s, before %s",
            pressure.name.lower(),
            previous.name.lower(),
        )
        self._apply()

    def set_worker_pressure(self, pressure: Pressure) -> None:
        """Apply a new level of the memory pressure of all workers; the front has logged it."""
        if pressure is not self._worker_pressure:
            self._worker_pressure = pressure
            self._apply()

    def note_quantized(self, *, now: float) -> None:
        """Record that a running sequence was quantized. The memory that this has freed is released
        a second later, so that several sequences cost one release.
        """
        self._cleared_at = min(self._cleared_at, now - CLEAR_SECONDS + READ_SECONDS)

    def _apply(self) -> None:
        """Set the limits of the scheduler and the cache by the plan and the memory pressure, and free
        what exceeds them. Parked states (the KV of ended sequences) and blocks in RAM are freed first.
        """
        self._scheduler.set_budget(self._plan.kv_bytes)
        self._scheduler.admits_one_at_a_time = self.is_critical
        if self._cache is not None and self.is_short:
            self._cache.limit_ram(0, most_parked_bytes=0)
        elif self._cache is not None:
            self._cache.limit_ram(
                self._plan.ram_tier_bytes, most_parked_bytes=self._most_parked_bytes
            )
            self._cache.live.reclaim(self._scheduler.excess_bytes)
        if self.is_short:
            self._clear_buffers()  # after the cache has released its arrays
