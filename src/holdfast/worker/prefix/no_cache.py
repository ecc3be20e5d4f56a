"""A cache that keeps nothing, for models whose state cannot be kept."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from holdfast.store.block import BlockKey
from holdfast.wire.events import CacheOutcome
from holdfast.worker.prefix.chain import Cursor
from holdfast.worker.prefix.lookup import HeldMemory, LiveChain, Lookup, ReusePlan, Shortfall

if TYPE_CHECKING:
    from holdfast.worker.kv.live import LiveState


class NothingLive:
    """Keeps no state longer than its sequence."""

    held = HeldMemory()

    def begin(self, lookup: Lookup | None, live: LiveChain, state: LiveState) -> LiveChain:
        """The chain is live for as long as the sequence runs."""
        return live

    def park(self, live: LiveChain, chain: bytes) -> None:
        """Keeps nothing."""

    def leave(self, live: LiveChain) -> None:
        """Keeps nothing."""

    def reclaim(self, nbytes: int) -> None:
        """Nothing is parked."""

    def newly_frozen(self) -> tuple[LiveChain, ...]:
        """What is frozen counts as the sequence's own."""
        return ()


class NoCache:
    """Finds nothing and keeps nothing."""

    keeps_anything = False

    def __init__(self) -> None:
        self.live = NothingLive()

    def boundaries(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> tuple[int, ...]:
        """Spans may end anywhere."""
        return ()

    def policy(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> None:
        """Nothing is copied out."""

    def lookup(
        self, chain: bytes, *, tenant: str = "", in_blocks_only: bool = False, may_move: bool = True
    ) -> Lookup:
        """Finds nothing."""
        plan = ReusePlan(cursor=Cursor(b""), shortfall=Shortfall(CacheOutcome.OFF))
        return Lookup(
            chain=chain, tenant=tenant, plan=plan, hold=ExitStack(), asked_at=time.perf_counter()
        )

    def advance(self, lookup: Lookup) -> bool:
        """Nothing is awaited."""
        return True

    def prefix(self, lookup: Lookup) -> None:
        """There is nothing to start from."""

    def cursor(self, *, tenant: str = "") -> Cursor:
        """At the start of a chain that is never stored."""
        return Cursor(b"")

    def insert(
        self,
        cursor: Cursor,
        chain: bytes | bytearray,
        kept: object,
        *,
        live: LiveChain | None = None,
    ) -> tuple[BlockKey, ...]:
        """Keeps nothing."""
        return ()

    def forget(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """There is nothing to forget."""
        return ()

    def gone(self, keys: Iterable[BlockKey]) -> tuple[BlockKey, ...]:
        """Nothing was there."""
        return ()

    def forget_unsound(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """There is nothing to forget."""
        return ()

    def limit_ram(self, nbytes: int, *, most_parked_bytes: int | None) -> None:
        """Nothing is in RAM."""

    def tend(self) -> None:
        """There is nothing to do."""

    def figures(self) -> None:
        """There is nothing to count."""

    def offer_rest(self) -> None:
        """Keeps nothing."""

    def close(self) -> None:
        """Nothing is open."""
