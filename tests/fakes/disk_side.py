"""A disk that stores entries immediately and reports them on request, like the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.store.block import Block, BlockKey, Entry, StoreChanges


class FakeDisk:
    def __init__(self) -> None:
        self.kept: dict[BlockKey, Entry] = {}
        self.touched: list[tuple[BlockKey, ...]] = []
        self.queued: dict[BlockKey, Entry] = {}
        # entries removed on request, to be reported later, like in a store
        self.echoes: list[BlockKey] = []

    def put(self, block: Block) -> None:
        self.queued[block.key] = Entry(block=block, model="", file_bytes=1, last_used=0.0)

    def write(self, keys: Iterable[BlockKey] | None = None) -> StoreChanges:
        """Write some or all queued blocks."""
        keys = tuple(self.queued) if keys is None else tuple(keys)
        self.kept.update({key: self.queued.pop(key) for key in keys})
        return StoreChanges(stored=keys)

    def drop(self, keys: Iterable[BlockKey]) -> StoreChanges:
        """Lose keys, including queued ones."""
        keys = tuple(keys)
        for key in keys:
            self.queued.pop(key, None)
            self.kept.pop(key, None)
        return StoreChanges(lost=keys)

    def condemn(self, key: BlockKey) -> None:
        """Report a key as damaged."""
        del self.kept[key]
        self.echoes.append(key)

    def take_echoes(self) -> StoreChanges:
        """Report the losses."""
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
