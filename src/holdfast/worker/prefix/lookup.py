"""What one request can begin from: the answer of a cache, held until the engine has it."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

from holdfast.store.block import BlockKey, StoredBlock
from holdfast.wire.events import CacheReport
from holdfast.worker.prefix.live import LiveClaim
from holdfast.worker.prefix.piece import Piece
from holdfast.worker.prefix.ram import Payload
from holdfast.worker.prefix.reuse import ReusePlan


@dataclass(slots=True, eq=False)
class Lookup:
    """What a sequence that knows `chain`, packed tokens, can begin from.

    Holds it in memory until it is released.
    """

    chain: bytes
    tenant: str
    plan: ReusePlan
    hold: ExitStack  # closed when it is released
    asked_at: float
    awaited: dict[BlockKey, Future[StoredBlock]] = field(default_factory=dict)
    fetched: dict[BlockKey, Payload] = field(default_factory=dict)
    fetched_at: float | None = None  # None: not all of it is there yet
    in_blocks_only: bool = False  # not from live states
    may_move: bool = True  # whether a parked state may be handed over
    base: LiveClaim | None = None  # on a live chain to begin from

    @property
    def base_tokens(self) -> int:
        """Tokens that a live chain has."""
        return 0 if self.base is None else self.base.tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens that need not be read, fewer than the request knows."""
        return max(self.plan.tokens, self.base_tokens)

    @property
    def held_tokens(self) -> int:
        """Tokens for which no memory has to be reserved: live states have it."""
        return 0 if self.base is None else self.base.held_tokens

    @property
    def has_lost_its_base(self) -> bool:
        """Whether it has to be looked up again."""
        return self.base is not None and self.base.is_lost

    @property
    def missing_pieces(self) -> tuple[Piece, ...]:
        """What of the plan is not in the base."""
        return tuple([piece for piece in self.plan.pieces if piece.end > self.base_tokens])

    @property
    def checkpoint(self) -> Piece | None:
        """To resume from, unless the base has all layers as they are wanted."""
        return None if self.base is not None and self.base.needs_end else self.plan.checkpoint

    def let_go_of_base(self) -> None:
        """Do without a live chain."""
        if self.base is not None:
            self.base.chain.claims.remove(self.base)
            self.base = None

    @property
    def fetch_seconds(self) -> float:
        """How long it took until all of it was there."""
        return 0.0 if self.fetched_at is None else self.fetched_at - self.asked_at

    def report(
        self, *, lookup_seconds: float, waited_seconds: float, restore_seconds: float
    ) -> CacheReport:
        """What was found, why not more, and what it took."""
        shortfall, read = self.plan.shortfall, set(self.plan.to_read)
        disk_tokens = sum(
            piece.end - max(piece.start, self.base_tokens)
            for piece in self.missing_pieces
            if piece.key in read
        )
        return CacheReport(
            outcome=shortfall.outcome,
            ram_tokens=self.cached_tokens - disk_tokens,
            moved_tokens=self.base.tokens
            if self.base is not None and self.base.use == "moved"
            else 0,
            shared_tokens=self.base.tokens
            if self.base is not None and self.base.use == "shared"
            else 0,
            disk_tokens=disk_tokens,
            unused_tokens=max(0, shortfall.unused_tokens - (self.cached_tokens - self.plan.tokens)),
            divergence=shortfall.divergence,
            waited_for_another=waited_seconds > 0,
            waited_seconds=waited_seconds,
            lookup_seconds=lookup_seconds,
            restore_seconds=restore_seconds,
        )

    def release(self) -> None:
        """Let the memory go; what was fetched stays where the index put it."""
        self.hold.close()
        self.fetched.clear()
        self.let_go_of_base()
