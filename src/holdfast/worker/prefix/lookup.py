"""What one request can start from: blocks, a state, and a claim on a live chain. No MLX.

A live chain is a sequence whose KV is in the layers' own buffers: it runs, or it has ended and is
parked. What a live chain holds needs no copy in RAM.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.store.block import BlockKey, StoredBlock
from holdfast.wire.events import CacheReport
from holdfast.wire.requests import RequestId
from holdfast.worker.prefix.chain import ChainBlock, ChainState, Cursor
from holdfast.worker.prefix.planning import ReusePlan
from holdfast.worker.prefix.tiers import Payload

if TYPE_CHECKING:
    from holdfast.worker.kv.live import BaseUse, LiveState


@dataclass(slots=True, eq=False, kw_only=True)
class LiveClaim:
    """A sequence is to start from the first tokens of a live chain.

    needs_end: with all layers as they are at its end, or rewound from there; exclusive.
    use: as planned when it is found, then as it was when the engine got it.
    """

    chain: LiveChain
    tokens: int
    needs_end: bool = False
    use: BaseUse = "copied"

    @property
    def is_lost(self) -> bool:
        """Whether the chain is no longer live or not to be trusted: look it up again."""
        return self.chain.state is None or self.chain.is_stale

    @property
    def held_tokens(self) -> int:
        """Tokens that need no memory reservation."""
        return 0 if self.use == "copied" else self.tokens


@dataclass(slots=True, eq=False, kw_only=True)
class LiveChain:
    """A sequence whose state is live: it runs, or it is parked.

    keys: the blocks of which it holds every token. held_tokens: of what it started from, the tokens
    that no running sequence has reserved memory for.
    """

    request_id: RequestId  # that runs on it, or did last
    tenant: str
    session_id: str = ""  # of its last request, if any
    chain: bytes | bytearray  # packed
    prompt_tokens: int = 0  # of its last request
    cursor: Cursor
    state: LiveState | None = None  # None until it is open
    keys: set[BlockKey] = field(default_factory=set)
    held_tokens: int = 0
    is_parked: bool = False
    is_stale: bool = False  # something in it was forgotten: nothing may start from it
    used: int = 0
    claims: list[LiveClaim] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """How many of its tokens another sequence may start from: of a running one, stored ones."""
        if self.state is None or self.is_stale:
            return 0
        return self.state.tokens if self.is_parked else min(self.state.tokens, self.cursor.position)


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Bytes of live states that no running sequence has reserved; shared buffers count once."""

    total_bytes: int = 0
    parked_bytes: int = 0  # that go with the parked states
    parked: int = 0  # states


@dataclass(slots=True, eq=False)
class Lookup:
    """What a sequence that knows `chain`, packed tokens, can start from; held until released."""

    chain: bytes
    tenant: str
    plan: ReusePlan
    hold: ExitStack  # keeps the plan's blocks from being evicted
    asked_at: float
    awaited: dict[BlockKey, Future[StoredBlock]] = field(default_factory=dict)
    fetched: dict[BlockKey, Payload] = field(default_factory=dict)
    fetched_at: float | None = None  # None until everything is there
    in_blocks_only: bool = False  # never from a live chain
    may_move: bool = True  # whether it may take over a parked state
    base: LiveClaim | None = None

    @property
    def base_tokens(self) -> int:
        """Tokens from a live chain."""
        return 0 if self.base is None else self.base.tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens that need no prefill; fewer than the request has."""
        return max(self.plan.tokens, self.base_tokens)

    @property
    def held_tokens(self) -> int:
        """Tokens that need no memory reservation, because live states have it."""
        return 0 if self.base is None else self.base.held_tokens

    @property
    def has_lost_its_base(self) -> bool:
        """Whether it must be looked up again."""
        return self.base is not None and self.base.is_lost

    @property
    def missing_blocks(self) -> list[ChainBlock]:
        """The blocks of the plan that the base does not have."""
        return [block for block in self.plan.blocks if block.end > self.base_tokens]

    @property
    def missing_state(self) -> ChainState | None:
        """The state to resume from, unless the base has all layers as needed."""
        return None if self.base is not None and self.base.needs_end else self.plan.state

    @property
    def missing_keys(self) -> list[BlockKey]:
        """The keys of both, parents before children."""
        keys = [block.key for block in self.missing_blocks]
        state = self.missing_state
        return keys if state is None else [*keys, state.key]

    def drop_base(self) -> None:
        """Give up the claim on a live chain."""
        if self.base is not None:
            self.base.chain.claims.remove(self.base)
            self.base = None

    @property
    def fetch_seconds(self) -> float:
        """How long it took until everything was there."""
        return 0.0 if self.fetched_at is None else self.fetched_at - self.asked_at

    def report(
        self, *, lookup_seconds: float, waited_seconds: float, restore_seconds: float
    ) -> CacheReport:
        """What was found, why not more, and how long it took."""
        shortfall = self.plan.shortfall
        to_read = set(self.plan.to_read)
        disk_tokens = 0
        begin = self.base_tokens
        for block in self.missing_blocks:
            if block.key in to_read:
                disk_tokens += block.end - begin
            begin = block.end
        use = None if self.base is None else self.base.use
        return CacheReport(
            outcome=shortfall.outcome,
            ram_tokens=self.cached_tokens - disk_tokens,
            moved_tokens=self.base_tokens if use == "moved" else 0,
            shared_tokens=self.base_tokens if use == "shared" else 0,
            disk_tokens=disk_tokens,
            unused_tokens=max(0, shortfall.unused_tokens - (self.cached_tokens - self.plan.tokens)),
            divergence=shortfall.divergence,
            waited_for_another=waited_seconds > 0,
            waited_seconds=waited_seconds,
            lookup_seconds=lookup_seconds,
            restore_seconds=restore_seconds,
        )

    def release(self) -> None:
        """Let go of everything; what was fetched stays where the index put it."""
        self.hold.close()
        self.fetched.clear()
        self.drop_base()
