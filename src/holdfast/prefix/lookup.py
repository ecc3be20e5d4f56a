"""What one request can begin from: the answer of a cache, held until the engine has it."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

from holdfast.messages.events import CacheReport
from holdfast.prefix.ram import Payload
from holdfast.prefix.reuse import ReusePlan
from holdfast.store.block import BlockKey, StoredBlock


@dataclass(slots=True, eq=False)
class Lookup:
    """What a sequence that knows `chain`, packed tokens, can begin from. Holds it in memory until it is released."""

    chain: bytes
    tenant: str
    plan: ReusePlan
    hold: ExitStack  # closed when it is released
    asked_at: float
    awaited: dict[BlockKey, Future[StoredBlock]] = field(default_factory=dict)
    fetched: dict[BlockKey, Payload] = field(default_factory=dict)
    fetched_at: float | None = None  # None: not all of it is there yet

    @property
    def cached_tokens(self) -> int:
        """Tokens that need not be read, fewer than the request knows."""
        return self.plan.tokens

    @property
    def fetch_seconds(self) -> float:
        """How long it took until all of it was there."""
        return 0.0 if self.fetched_at is None else self.fetched_at - self.asked_at

    def report(self, *, lookup_seconds: float, waited_seconds: float, restore_seconds: float) -> CacheReport:
        """What was found, why not more, and what it took."""
        return CacheReport(
            outcome=self.plan.shortfall.outcome,
            ram_tokens=self.plan.ram_tokens,
            disk_tokens=self.plan.disk_tokens,
            unused_tokens=self.plan.shortfall.unused_tokens,
            divergence=self.plan.shortfall.divergence,
            waited_for_another=waited_seconds > 0,
            waited_seconds=waited_seconds,
            lookup_seconds=lookup_seconds,
            restore_seconds=restore_seconds,
        )

    def release(self) -> None:
        """Let the memory go; what was fetched stays where the index put it."""
        self.hold.close()
        self.fetched.clear()
