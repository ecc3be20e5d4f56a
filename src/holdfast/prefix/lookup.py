"""What one request can begin from: the answer of a cache, held until the engine has it."""

from __future__ import annotations

from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field

from holdfast.messages.events import CacheReport
from holdfast.prefix.hold import Hold
from holdfast.prefix.ram import Payload
from holdfast.prefix.report import report_of
from holdfast.prefix.reuse import ReusePlan
from holdfast.store.block import BlockKey, StoredBlock


@dataclass(slots=True, eq=False)
class Lookup:
    """What a sequence that knows `tokens` can begin from. Holds it in memory until it is released."""

    tokens: array[int]
    tenant: str
    plan: ReusePlan
    hold: Hold
    asked_at: float
    awaited: dict[BlockKey, Future[StoredBlock]] = field(default_factory=dict)
    fetched: dict[BlockKey, Payload] = field(default_factory=dict)
    fetched_at: float | None = None  # None: not all of it is there yet

    @property
    def cached_tokens(self) -> int:
        """Tokens that need not be read, fewer than the request knows."""
        return self.plan.tokens

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """The blocks and the checkpoint that they are in, parents before children."""
        return self.plan.keys

    @property
    def fetch_seconds(self) -> float:
        """How long it took until all of it was there."""
        return 0.0 if self.fetched_at is None else self.fetched_at - self.asked_at

    def report(self, *, lookup_seconds: float, waited_seconds: float, restore_seconds: float) -> CacheReport:
        """What was found, why not more, and what it took."""
        return report_of(self.plan, lookup_seconds=lookup_seconds, waited_seconds=waited_seconds, restore_seconds=restore_seconds)

    def release(self) -> None:
        """Let the memory go; what was fetched stays where the index put it."""
        self.hold.release()
        self.fetched.clear()
