"""Where payloads live, and the RAM tier: payloads by key within a budget of bytes.

Device thread only; knows no MLX.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from enum import Enum
from typing import Protocol

from holdfast.store.block import BlockKey
from holdfast.worker.prefix.eviction import EvictionOrder


class Residence(Enum):
    """Where the payload of a block or state is."""

    RAM = "ram"
    DISK = "disk"
    BOTH = "both"


class Payload(Protocol):
    """What is kept of a block or state; the tier only weighs it."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in RAM."""


class RamTier:
    """Payloads by key, each once. What does not fit has to wait until `evict` has made room."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._payloads: dict[BlockKey, Payload] = {}
        self._order = EvictionOrder()
        self.resident_bytes = 0
        self.evicted = 0  # payloads that had to make room, since the start

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._payloads

    def __len__(self) -> int:
        return len(self._payloads)

    def keys(self) -> set[BlockKey]:
        """Whose payloads are here."""
        return set(self._payloads)

    @property
    def held(self) -> int:
        """Payloads that may not leave because somebody holds them."""
        return self._order.held

    @property
    def budget_bytes(self) -> int:
        """Most bytes that may be resident."""
        return self._budget_bytes

    def set_budget(self, nbytes: int) -> None:
        """How much may be resident from now on; what is beyond it stays until it is evicted."""
        self._budget_bytes = nbytes

    def fits(self, nbytes: int) -> bool:
        """Whether this many more bytes fit now."""
        return self.resident_bytes + nbytes <= self._budget_bytes

    def get(self, key: BlockKey) -> Payload | None:
        """The payload, without counting as a use: only a prefix that was accepted was used."""
        return self._payloads.get(key)

    def add(self, key: BlockKey, payload: Payload, *, parent: BlockKey | None) -> None:
        """Take in a payload that fits; it is the most recently used one now."""
        assert self.fits(payload.nbytes), "a payload beyond the budget"
        self._order.add(key, parent=parent)
        self._payloads[key] = payload
        self.resident_bytes += payload.nbytes

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """An accepted use of a prefix: all of its keys, parents too."""
        self._order.touch(keys)

    def next_to_leave(self) -> BlockKey | None:
        """Whose payload has to leave first; None when none may."""
        return self._order.next_to_leave()

    def evict(self, key: BlockKey) -> None:
        """Let go of a payload to make room."""
        self.evicted += 1
        self.drop(key)

    def drop(self, key: BlockKey) -> None:
        """Let go of a payload, held or not. Raises KeyError when it is not there."""
        self.resident_bytes -= self._payloads.pop(key).nbytes
        self._order.remove(key)

    def hold(self, keys: Iterable[BlockKey]) -> None:
        """Keep keys from being evicted, now and when they come in later, until they are released as
        often.
        """
        self._order.hold(keys)

    def release(self, keys: Iterable[BlockKey]) -> None:
        """Take holds back."""
        self._order.release(keys)

    def pinned(self, keys: Iterable[BlockKey]) -> ExitStack:
        """Hold keys for as long as a context lasts, or until what is returned is closed."""
        return self._order.held_until_closed(keys)

    def check_invariants(self) -> None:
        """Assert that bytes and keys are counted right and the budget is kept."""
        assert self.resident_bytes == sum(payload.nbytes for payload in self._payloads.values()), (
            "bytes are miscounted"
        )
        assert self.resident_bytes <= self._budget_bytes, "the budget is exceeded"
        assert len(self._order) == len(self._payloads), "the order has other members than the tier"
        assert all(key in self._order for key in self._payloads), "a payload that cannot be evicted"
        self._order.check_invariants()
