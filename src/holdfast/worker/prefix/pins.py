"""What sessions have pinned: it stays in RAM for as long as the disk does not have it.

Device thread only.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.store.block import BlockKey
from holdfast.worker.prefix.disk import DiskIndex
from holdfast.worker.prefix.ram import RamTier


class Pins:
    """Pinned keys, and which of them are held in RAM on that account.

    Who pins what, and how often, is the sessions' table.
    """

    def __init__(self, ram: RamTier, book: DiskIndex) -> None:
        self._ram, self._book = ram, book
        self._pins: set[BlockKey] = set()
        self._held: dict[BlockKey, int] = {}  # with their bytes
        self._held_bytes = 0
        self.most_held_bytes = ram.budget_bytes

    def pin(self, keys: Iterable[BlockKey]) -> None:
        """Keep keys, until they are unpinned."""
        for key in keys:
            self._pins.add(key)
            self.sync(key)

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Take pins back."""
        for key in keys:
            self._pins.remove(key)
            self.sync(key)

    def sync(self, key: BlockKey) -> None:
        """The disk has got a key, or has lost it, or its pins have changed.

        While the disk fails, RAM holds only so much.
        """
        wanted = key in self._pins and not self._book.is_stored(key)
        if wanted and key not in self._held:
            payload = self._ram.get(key)
            if payload is not None and self._held_bytes + payload.nbytes <= self.most_held_bytes:
                self._held[key] = payload.nbytes
                self._held_bytes += payload.nbytes
                self._ram.hold((key,))
        elif not wanted and key in self._held:
            self._held_bytes -= self._held.pop(key)
            self._ram.release((key,))

    def check_invariants(self) -> None:
        """Assert that what is held is pinned and not on disk, and within the bound."""
        assert self._held.keys() <= {key for key in self._pins if not self._book.is_stored(key)}, (
            "held and pinned differ"
        )
        assert self._held_bytes == sum(self._held.values()) <= self.most_held_bytes, (
            "pins hold more than they may"
        )
