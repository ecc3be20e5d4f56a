"""What sessions have pinned: it stays in RAM for as long as the disk does not have it. Device thread only."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.cache.disk_side import DiskBook
from holdfast.cache.tiers import RamTier
from holdfast.store.keys import BlockKey


class Pins:
    """Pinned keys, counted, and which of them are held in RAM on that account. The disk's own pins are the store's business."""

    def __init__(self, ram: RamTier, book: DiskBook) -> None:
        self._ram, self._book = ram, book
        self._pins: dict[BlockKey, int] = {}
        self._held: set[BlockKey] = set()

    def pin(self, keys: Iterable[BlockKey]) -> None:
        """Keep keys, until they are unpinned as often."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1
            self.settle(key)

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Take pins back."""
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
            self.settle(key)

    def settle(self, key: BlockKey) -> None:
        """The disk has got a key, or has lost it, or its pins have changed."""
        wanted = key in self._pins and not self._book.is_stored(key)
        if wanted and key not in self._held:
            self._held.add(key)
            self._ram.hold((key,))
        elif not wanted and key in self._held:
            self._held.remove(key)
            self._ram.release((key,))

    def check_invariants(self) -> None:
        """Assert that what is held is what is pinned and not on disk."""
        assert self._held == {key for key in self._pins if not self._book.is_stored(key)}, "held and pinned differ"
