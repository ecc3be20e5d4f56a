"""The tiers in which payloads (the stored data of blocks and states) are kept: RAM, within a
budget, and the disk, of which only the keys are known here.

Device thread only; no MLX.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, KeysView
from contextlib import ExitStack
from enum import Enum
from typing import Literal, Protocol, TypeAlias

from holdfast.store.block import BlockKey

MOST_EXPECTED_LOSSES = 65536

DiskState: TypeAlias = Literal["stored", "saving"]


class Residence(Enum):
    """Which tiers have the payload of a key."""

    RAM = "ram"
    DISK = "disk"
    BOTH = "both"


class Payload(Protocol):
    """The stored data of a block or state. Only its size matters here."""

    @property
    def nbytes(self) -> int:
        """Bytes in RAM."""


class EvictionOrder:
    """The order in which keys are evicted: the least recently used one first, but no key that has
    children or is held.

    A use of a child is a use of its parents, and a child is evicted before its parent, so a shared
    prefix outlives its branches. Keys may be added and removed in any order; a child prevents the
    eviction of its parent only while the child is a member. All costs are logarithmic in the number
    of members: leaves are in a heap, and outdated entries are corrected when they reach the top.
    """

    def __init__(self) -> None:
        self._last_used: dict[BlockKey, int] = {}  # of every member
        self._parents: dict[BlockKey, BlockKey | None] = {}
        # number of members that follow a key, which need not be a member
        self._children: dict[BlockKey, int] = {}
        # for any key, so that a hold remains when a key is removed and added again
        self._holds: dict[BlockKey, int] = {}
        # contains, at least once, every member without children or holds
        self._leaves: list[tuple[int, BlockKey]] = []
        self._uses = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._last_used

    def __len__(self) -> int:
        return len(self._last_used)

    @property
    def held(self) -> int:
        """The number of members that may not be evicted because of a hold."""
        return sum(key in self._last_used for key in self._holds)

    def add(self, key: BlockKey, *, parent: BlockKey | None) -> None:
        """Add a key as the most recently used one."""
        assert key not in self._last_used, "a key is added twice"
        self._uses += 1
        self._last_used[key] = self._uses
        self._parents[key] = parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._offer_for_eviction(key)

    def remove(self, key: BlockKey) -> None:
        """Remove a key, for any reason."""
        del self._last_used[key]
        parent = self._parents.pop(key)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                self._offer_for_eviction(parent)
        self._shrink()

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Record one use of several keys. The caller must include all parents of each key."""
        self._uses += 1
        for key in keys:
            if key in self._last_used:
                self._last_used[key] = self._uses

    def hold_keys(self, keys: Iterable[BlockKey]) -> None:
        """Hold keys, which may become members later, until they are released once for each
        hold.
        """
        for key in keys:
            self._holds[key] = self._holds.get(key, 0) + 1

    def release_keys(self, keys: Iterable[BlockKey]) -> None:
        """Undo one hold of each key."""
        for key in keys:
            self._holds[key] -= 1
            if not self._holds[key]:
                del self._holds[key]
                self._offer_for_eviction(key)

    def pinned(self, keys: Iterable[BlockKey]) -> ExitStack:
        """Hold keys until the returned stack is closed; closing it again does nothing."""
        held = tuple(keys)
        self.hold_keys(held)
        hold = ExitStack()
        hold.callback(self.release_keys, held)
        return hold

    def next_to_leave(self) -> BlockKey | None:
        """The key to evict next; None if no key may be evicted. The key stays until it is
        removed.
        """
        while self._leaves:
            last_used, key = self._leaves[0]
            used = self._last_used.get(key)
            if used is None or not self._is_evictable(key):
                heapq.heappop(self._leaves)  # added again when the last child or hold is gone
            elif used != last_used:
                heapq.heapreplace(self._leaves, (used, key))
            else:
                return key
        return None

    def _offer_for_eviction(self, key: BlockKey) -> None:
        """Add a key to the heap if it may be evicted now."""
        used = self._last_used.get(key)
        if used is None or not self._is_evictable(key):
            return
        heapq.heappush(self._leaves, (used, key))
        self._shrink()

    def _shrink(self) -> None:
        """Rebuild the heap when most of its entries are duplicates, which repeated holds and
        removals leave.
        """
        if len(self._leaves) > 64 + 2 * len(self._last_used):
            self._leaves = [
                (used, key) for key, used in self._last_used.items() if self._is_evictable(key)
            ]
            heapq.heapify(self._leaves)

    def _is_evictable(self, key: BlockKey) -> bool:
        return key not in self._children and key not in self._holds

    def check_invariants(self) -> None:
        """Assert that children are counted correctly, and that every key that may be evicted is in
        the heap.
        """
        children: dict[BlockKey, int] = {}
        for parent in self._parents.values():
            if parent is not None:
                children[parent] = children.get(parent, 0) + 1
        assert self._parents.keys() == self._last_used.keys(), "members differ"
        assert children == self._children, "children are miscounted"
        assert all(count > 0 for count in self._holds.values()), "a hold of nothing"
        evictable = {key for key in self._last_used if self._is_evictable(key)}
        assert evictable <= {key for _, key in self._leaves}, "a key that may leave never comes up"
        assert len(self._leaves) <= 65 + 2 * len(self._last_used), "the order is full of copies"


class RamTier(EvictionOrder):
    """Payloads by key, within a budget of bytes. The caller of `put` must make room with `evict`
    before.
    """

    def __init__(self, budget_bytes: int) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        # above the budget as long as payloads exceed it that were held when it was lowered
        self.tolerated_bytes = budget_bytes
        self._payloads: dict[BlockKey, Payload] = {}
        self.resident_bytes = 0
        self.evicted = 0  # since the start

    def keys(self) -> set[BlockKey]:
        """The keys with a payload here."""
        return set(self._payloads)

    def fits(self, nbytes: int) -> bool:
        """Whether this many more bytes fit now."""
        return self.resident_bytes + nbytes <= self.budget_bytes

    def get(self, key: BlockKey) -> Payload | None:
        """The payload of a key; None if RAM does not have it. Does not count as a use: `touch`
        records uses.
        """
        return self._payloads.get(key)

    def put(self, key: BlockKey, payload: Payload, *, parent: BlockKey | None) -> None:
        """Add a payload that fits, as the most recently used one."""
        assert self.fits(payload.nbytes), "a payload beyond the budget"
        self.add(key, parent=parent)
        self._payloads[key] = payload
        self.resident_bytes += payload.nbytes

    def evict(self, key: BlockKey) -> None:
        """Drop a payload to make room."""
        self.evicted += 1
        self.drop(key)

    def drop(self, key: BlockKey) -> None:
        """Drop a payload, even if it is held. Raises KeyError if RAM does not have it."""
        self.resident_bytes -= self._payloads.pop(key).nbytes
        self.remove(key)

    def check_invariants(self) -> None:
        """Assert that bytes and keys are counted correctly, and that the budget is not exceeded any
        further.
        """
        super().check_invariants()
        assert self.resident_bytes == sum(payload.nbytes for payload in self._payloads.values()), (
            "bytes are miscounted"
        )
        assert self.resident_bytes <= self.tolerated_bytes, "the budget is exceeded"
        assert self._payloads.keys() == self._last_used.keys(), "members without payload"


class DiskIndex:
    """What the device thread knows about the blocks on disk.

    Each key is stored, being saved, unsaved (the disk did not take it) or unknown. Reports from the
    disk arrive late: a removed key may already be on its way to the disk again when the loss of the
    removed copy is reported. So for each removal, one later report of a loss is ignored. To ignore
    a true report costs one failed read; to believe a false one would drop all descendants.
    """

    def __init__(self) -> None:
        self._states: dict[BlockKey, DiskState] = {}
        self._unsaved: dict[BlockKey, None] = {}  # apart from `_states`, in order
        self._expected_losses: OrderedDict[BlockKey, int] = OrderedDict()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._states

    @property
    def unsaved(self) -> KeysView[BlockKey]:
        """Keys that the disk did not take, or lost; in this order."""
        return self._unsaved.keys()

    def is_stored(self, key: BlockKey) -> bool:
        """Whether the disk certainly has a key."""
        return self._states.get(key) == "stored"

    def is_saving(self, key: BlockKey) -> bool:
        """Whether the store has been given a key and has not reported the outcome yet."""
        return self._states.get(key) == "saving"

    def _set_state(self, key: BlockKey, state: DiskState) -> None:
        self._unsaved.pop(key, None)
        self._states[key] = state

    def begin_saving(self, key: BlockKey) -> None:
        """Record that a block was given to the store."""
        self._set_state(key, "saving")

    def found(self, key: BlockKey) -> None:
        """Record that a key was found on the disk."""
        if not self.is_saving(key):
            self._set_state(key, "stored")

    def saved(self, key: BlockKey) -> bool:
        """Record that a block is durable. Returns False if it was not being saved or is
        forgotten.
        """
        is_news = self.is_saving(key)
        if is_news:
            self._set_state(key, "stored")
        return is_news

    def lost(self, key: BlockKey) -> bool:
        """Record that the disk does not have a key. Returns False if this is not news: the loss was
        expected, or the key was not on disk.
        """
        if self._use_expected_loss(key):
            self.saved(key)
            return False
        state = self._states.pop(key, None)
        if state == "saving":
            self._unsaved[key] = None
        return state is not None

    def forget(self, key: BlockKey) -> bool:
        """Drop all knowledge of a key. Returns whether the key must be removed from the disk."""
        was_on_disk = key in self
        if was_on_disk:
            self.expect_loss(key)
        self._states.pop(key, None)
        self._unsaved.pop(key, None)
        return was_on_disk

    def forget_copy(self, key: BlockKey) -> None:
        """Forget the file of a block that is in memory, because the file is unusable."""
        self.forget(key)
        self._unsaved[key] = None

    def expect_loss(self, key: BlockKey) -> None:
        """Ignore one more report of the loss of this key."""
        self._expected_losses[key] = self._expected_losses.pop(key, 0) + 1
        if len(self._expected_losses) > MOST_EXPECTED_LOSSES:
            self._expected_losses.popitem(last=False)

    def _use_expected_loss(self, key: BlockKey) -> bool:
        """Use up one expected loss of this key; returns False if none was expected."""
        expected = self._expected_losses.pop(key, 0)
        if expected > 1:
            self._expected_losses[key] = expected - 1
        return expected > 0

    def keys(self) -> set[BlockKey]:
        """All keys that the disk has or will have."""
        return set(self._states)


class Pins:
    """Keys pinned by sessions: they stay in RAM for as long as the disk does not have them.

    `sessions/` counts which session pins which key.
    """

    def __init__(self, ram: RamTier, disk: DiskIndex) -> None:
        self._ram = ram
        self._disk = disk
        self._pins: set[BlockKey] = set()
        self._held_sizes: dict[BlockKey, int] = {}  # held keys and their bytes in RAM
        self._held_bytes = 0
        self.most_held_bytes = ram.budget_bytes

    def pin(self, keys: Iterable[BlockKey]) -> None:
        """Pin keys, each at most once: they stay in RAM until the disk has them. The caller must
        also pin them in the store.
        """
        for key in keys:
            self._pins.add(key)
            self.sync(key)

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Undo `pin`."""
        for key in keys:
            self._pins.remove(key)
            self.sync(key)

    def sync(self, key: BlockKey) -> None:
        """Hold or release a key after it was stored, lost, pinned or unpinned.

        While the disk cannot be written, pins hold at most `most_held_bytes` in RAM.
        """
        must_hold = key in self._pins and not self._disk.is_stored(key)
        if must_hold and key not in self._held_sizes:
            payload = self._ram.get(key)
            if payload is not None and self._held_bytes + payload.nbytes <= self.most_held_bytes:
                self._held_sizes[key] = payload.nbytes
                self._held_bytes += payload.nbytes
                self._ram.hold_keys((key,))
        elif not must_hold and key in self._held_sizes:
            self._held_bytes -= self._held_sizes.pop(key)
            self._ram.release_keys((key,))

    def check_invariants(self) -> None:
        """Assert that held keys are pinned, not on disk, and within `most_held_bytes`."""
        assert self._held_sizes.keys() <= {
            key for key in self._pins if not self._disk.is_stored(key)
        }, "held without being pinned, or though the disk has it"
        assert self._held_bytes == sum(self._held_sizes.values()) <= self.most_held_bytes, (
            "pins hold more than they may"
        )
