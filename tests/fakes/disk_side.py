"""A disk that keeps entries at once, and tells of it when it is asked, as the store does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.store.block import Block, BlockKey, Entry, StoreChanges


class FakeDisk:
    def __init__(self) -> None:
        self.kept: dict[BlockKey, Entry] = {}
        self.touched: list[tuple[BlockKey, ...]] = []
        self.queued: dict[BlockKey, Entry] = {}
        # what it has lost by order and will tell of later, as a store does
        self.echoes: list[BlockKey] = []

    def put(self, block: Block) -> None:
        self.queued[block.key] = Entry(block=block, model="", file_bytes=1, last_used=0.0)

    def write(self, keys: Iterable[BlockKey] | None = None) -> StoreChanges:
        """Write what is queued, or some of it."""
        keys = tuple(self.queued) if keys is None else tuple(keys)
        self.kept.update({key: self.queued.pop(key) for key in keys})
        return StoreChanges(stored=keys)

    def drop(self, keys: Iterable[BlockKey]) -> StoreChanges:
        """Lose keys, queued ones too."""
        keys = tuple(keys)
        for key in keys:
            self.queued.pop(key, None)
            self.kept.pop(key, None)
        return StoreChanges(lost=keys)

    def condemn(self, key: BlockKey) -> None:
        """Find a key damaged."""
        del self.kept[key]
        self.echoes.append(key)

    def take_echoes(self) -> StoreChanges:
        """Tell of the losses."""
        echoes, self.echoes = self.echoes, []
        return StoreChanges(lost=tuple(echoes))

    def entries(self) -> Sequence[Entry]:
        return tuple(self.kept.values())

    def touch(self, keys: Iterable[BlockKey]) -> None:
        self.touched.append(tuple(keys))

    def remove(self, keys: Iterable[BlockKey]) -> None:
        keys = tuple(keys)
        self.echoes += keys
        for key in keys:
            self.queued.pop(key, None)
            self.kept.pop(key, None)
