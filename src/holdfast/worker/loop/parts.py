"""What the loop works with: engine, cache and sessions need MLX, the loop does not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from holdfast.errors import SessionFailure
from holdfast.machine.device_memory import MemoryPlan, Pressure
from holdfast.store.block import BlockKey
from holdfast.wire.commands import PinnedPrefix, SequenceRequest, ThinkingBudget
from holdfast.wire.requests import RequestId
from holdfast.wire.sessions import SessionAnswer, SessionCommand
from holdfast.worker.engine.plan import KeepPolicy, SpanResult, StepPlan
from holdfast.worker.scheduler.scheduler import Scheduler

if TYPE_CHECKING:  # at run time these import MLX
    from holdfast.worker.engine.sequence import Kept, Prefix
    from holdfast.worker.kv.live import LiveState
    from holdfast.worker.prefix.cache import PrefixCache
    from holdfast.worker.prefix.no_cache import NoCache
    from holdfast.worker.sessions.service import SessionService

logger = logging.getLogger("holdfast.worker")

Cache: TypeAlias = "PrefixCache | NoCache"
WorkerSessions: TypeAlias = "SessionService | NoSessions"
READ_SECONDS = 1.0  # between two looks at the memory pressure
Step = TypeVar("Step")  # a step under way; only the engine looks into it


class StepEngine(Protocol[Step]):
    """Holds the state of open sequences and executes plans over them. Device thread only.

    Any method may raise; the loop then reopens the sequences concerned and runs each alone.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is to be dispatched before the previous one is collected."""

    def open(
        self,
        request: SequenceRequest,
        *,
        generated: tuple[int, ...] = (),
        capacity_tokens: int,
        prefix: Prefix | None = None,
        keep: KeepPolicy | None = None,
    ) -> LiveState:
        """Make room for a sequence and return its state.

        generated: tokens drawn before a preemption. prefix: what to start from, without prefill.
        keep: what to copy out while it runs.
        """

    def grow(self, request_id: RequestId, capacity_tokens: int) -> None:
        """Make more room for an open sequence."""

    def limit_thoughts(
        self, request_id: RequestId, budget: ThinkingBudget, *, generated: Sequence[int]
    ) -> None:
        """Change the thinking budget of an open sequence without a span under way.

        generated: every token drawn so far.
        """

    def close(self, request_id: RequestId) -> None:
        """Forget an open sequence; a span under way still runs."""

    def keep_rest(self, request_id: RequestId) -> Kept | None:
        """Copy out what was not kept of an open sequence yet, without waiting; None if nothing."""

    def check_device(self) -> None:
        """Compute something with a known result; raises if the device computes nothing any more."""

    def abandon_pending(self) -> None:
        """Forget dispatched steps that are not collected, because one of them failed."""

    def dispatch(self, plan: StepPlan) -> Step:
        """Start a step without waiting for the device."""

    def collect(self, pending: Step) -> tuple[SpanResult, ...]:
        """Wait for a dispatched step; returns a result per span."""

    def take_kept(self, pending: Step) -> Sequence[Kept]:
        """The snapshots that a collected step has made."""


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


class NoSessions:
    """The sessions of a worker that keeps nothing: refuses every command."""

    is_busy = False

    def carry_out(self, command: SessionCommand) -> SessionAnswer:
        """Refuse."""
        message = "this model has no prefix cache, so there are no sessions"
        return SessionAnswer(call_id=command.call_id, failure=SessionFailure.OFF, message=message)

    def used(self, session_id: str, *, tenant: str, chain: bytes | bytearray) -> None:
        """Nothing was kept."""

    def keep_prefixes(
        self,
        wanted: Sequence[PinnedPrefix],
        *,
        tenant: str,
        chain: bytes | bytearray,
        began_from: Sequence[BlockKey],
    ) -> None:
        """Nothing was kept."""

    def tend(self) -> list[SessionAnswer]:
        """Nothing is due."""
        return []

    def close(self) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """There are no threads."""
