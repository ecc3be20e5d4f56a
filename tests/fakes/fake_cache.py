"""A cache without arrays, for the engine without a device."""

from __future__ import annotations

import time
from collections.abc import Sequence

from holdfast.wire.events import CacheFigures, CacheOutcome
from holdfast.worker.prefix.chain import ChainBlock, Cursor, Root, pack_tokens
from holdfast.worker.prefix.lookup import (
    CachedStart,
    HeldMemory,
    LiveChain,
    Lookup,
    ReusePlan,
    Shortfall,
)
from holdfast.worker.prefix.tiers import EvictionOrder
from tests.fakes.fake_engine import BLOCK, Run


class NothingLive:
    """Live states end with their sequence."""

    held = HeldMemory()

    def base(self, lookup: Lookup) -> None:
        """No state is live."""

    def begin(self, lookup: Lookup | None, live: LiveChain, state: object) -> LiveChain:
        return live

    def park(self, live: LiveChain, chain: bytes) -> None:
        """Keeps nothing."""

    def leave(self, live: LiveChain) -> None:
        """Keeps nothing."""

    def reclaim(self, nbytes: int) -> None:
        """No states are parked."""

    def newly_frozen(self) -> tuple[LiveChain, ...]:
        return ()


class FakeCache:
    """Stores whole chains block by block; the key of a block is the chain up to its end.

    raises: names of methods that raise while they are in it. on_disk: whether found blocks must be
    fetched, which `arrive` does.
    """

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()
        self.forgotten: set[bytes] = set()
        self.raises: set[str] = set()
        self.on_disk = False
        self.order = EvictionOrder()
        self.lookups: list[Lookup] = []
        self.inserted: list[tuple[str, int]] = []  # request and its stored position
        self.tended = 0
        self.is_closed = False
        self.live = NothingLive()
        self.index = self

    def _called(self, name: str) -> None:
        if name in self.raises:
            raise RuntimeError(f"{name} fails")

    def root(self, *, tenant: str = "", form: str = "native") -> Root:
        return Root(f"{form} {tenant}".encode())

    def boundaries(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> tuple[int, ...]:
        return ()

    def lookup(
        self,
        chain: bytes,
        *,
        root: Root,
        in_blocks_only: bool = False,
        may_move: bool = True,
    ) -> Lookup:
        self._called("lookup")
        end = 0
        while chain[: end + 4 * BLOCK] in self.blocks and end + 4 * BLOCK < len(chain):
            end += 4 * BLOCK
        keys = tuple(chain[:at] for at in range(4 * BLOCK, end + 1, 4 * BLOCK))
        blocks = tuple(
            ChainBlock(key, BLOCK, (index + 1) * BLOCK) for index, key in enumerate(keys)
        )
        plan = ReusePlan(
            cursor=Cursor(root),
            blocks=blocks,
            shortfall=Shortfall(CacheOutcome.NEW_TOKENS),
        )
        lookup = Lookup(chain, root, plan, self.order.pinned(keys), asked_at=time.perf_counter())
        if self.on_disk and keys:
            lookup.awaited = dict.fromkeys(keys)  # type: ignore[arg-type]
        self.lookups.append(lookup)
        return lookup

    def arrive(self) -> None:
        """All requested blocks have arrived from the disk."""
        for lookup in self.lookups:
            lookup.awaited.clear()

    def advance(self, lookup: Lookup) -> bool:
        self._called("advance")
        return not lookup.awaited

    def snapshots(self, lookup: Lookup) -> tuple[int, ...]:
        self._called("snapshots")
        return tuple(memoryview(lookup.plan.keys[-1]).cast("I"))

    def store_snapshots(
        self,
        cursor: Cursor,
        chain: bytes | bytearray,
        kept: Sequence[Run],
        *,
        live: LiveChain | None = None,
    ) -> tuple[bytes, ...]:
        self._called("store_snapshots")
        new = []
        for run in kept:
            key = bytes(chain[: 4 * run.end])
            if run.tokens == BLOCK and key not in self.blocks:
                self.blocks.add(key)
                new.append(key)
            self.inserted.append((run.request_id, run.end))
        return tuple(new)

    def forget(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        self._called("forget")
        gone = tuple(block for block in self.blocks if any(block.startswith(key) for key in keys))
        self.blocks -= set(gone)
        self.forgotten |= set(gone)
        return gone

    def take_forgotten(self) -> set[bytes]:
        self._called("take_forgotten")
        forgotten, self.forgotten = self.forgotten, set()
        return forgotten

    def distrust(self, start: CachedStart, computed: Sequence[bytes]) -> None:
        self._called("distrust")
        self.forget(computed)

    def blame(self, start: CachedStart) -> None:
        self._called("blame")
        self.forget(start.blocks)

    def maintain(self) -> None:
        self._called("maintain")
        self.tended += 1

    def figures(self) -> CacheFigures:
        return CacheFigures(kept_tokens=BLOCK * len(self.blocks))

    def close(self, *, saves_all: bool = False) -> None:
        self.is_closed = True
        self._called("close")


def stored_chain(*tokens: int) -> set[bytes]:
    """The blocks of a chain, as the cache keeps them."""
    packed = pack_tokens(tokens)
    return {packed[:end] for end in range(4 * BLOCK, len(packed) + 1, 4 * BLOCK)}
