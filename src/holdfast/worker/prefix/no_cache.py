"""A cache that keeps nothing: for models whose state cannot be kept."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from holdfast.store.block import BlockKey
from holdfast.wire.events import CacheOutcome
from holdfast.worker.prefix.live import HeldMemory, LiveChain
from holdfast.worker.prefix.lookup import Lookup
from holdfast.worker.prefix.piece import Cursor
from holdfast.worker.prefix.reuse import ReusePlan, Shortfall

if TYPE_CHECKING:
    from holdfast.worker.kv.live import LiveState


class NothingLive:
    """Keeps no state longer than its sequence."""

    def begin(self, lookup: Lookup | None, live: LiveChain, state: LiveState) -> LiveChain:
        """It is live for as long as it runs."""
        return live

    def park(self, live: LiveChain, chain: bytes) -> None:
        """Nothing is kept."""

    def leave(self, live: LiveChain) -> None:
        """Nothing is kept."""

    def reclaim(self, nbytes: int) -> None:
        """Nothing is parked."""

    def newly_frozen(self) -> tuple[LiveChain, ...]:
        """What is frozen counts as its sequence's own."""
        return ()

    @property
    def held(self) -> HeldMemory:
        """Nothing is parked."""
        return HeldMemory()


class NoCache:
    """Has nothing of any prompt, and wants nothing of any sequence."""

    def __init__(self) -> None:
        self.live = NothingLive()

    @property
    def keeps_anything(self) -> bool:
        """No."""
        return False

    def boundaries(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> tuple[int, ...]:
        """Spans may end where they like."""
        return ()

    def policy(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> None:
        """Nothing is to be copied out."""

    def lookup(
        self, chain: bytes, *, tenant: str = "", in_blocks_only: bool = False, may_move: bool = True
    ) -> Lookup:
        """Nothing is found."""
        plan = ReusePlan(cursor=Cursor(b""), shortfall=Shortfall(CacheOutcome.OFF))
        return Lookup(
            chain=chain, tenant=tenant, plan=plan, hold=ExitStack(), asked_at=time.perf_counter()
        )

    def advance(self, lookup: Lookup) -> bool:
        """Nothing has to be fetched."""
        return True

    def prefix(self, lookup: Lookup) -> None:
        """There is nothing to begin from."""

    def cursor(self, *, tenant: str = "") -> Cursor:
        """Before the first token of a chain that will never be stored."""
        return Cursor(b"")

    def insert(
        self,
        cursor: Cursor,
        chain: bytes | bytearray,
        kept: object,
        *,
        live: LiveChain | None = None,
    ) -> tuple[BlockKey, ...]:
        """Nothing is kept."""
        return ()

    def forget(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Nothing is there to be forgotten."""
        return ()

    def gone(self, keys: Iterable[BlockKey]) -> tuple[BlockKey, ...]:
        """Nobody was to begin from anything."""
        return ()

    def forget_unsound(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Nothing is there to be forgotten."""
        return ()

    def limit_ram(self, nbytes: int, *, most_parked_bytes: int | None) -> None:
        """Nothing is in RAM."""

    def tend(self) -> None:
        """Nothing has to be done."""

    def figures(self) -> None:
        """There is nothing to count."""

    def offer_rest(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""
