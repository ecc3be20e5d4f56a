"""A disk that stores entries immediately and reports them on request, like the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from holdfast.store.block import Block, BlockKey, Entry, StoreChanges
from holdfast.worker.prefix.index import PrefixIndex

PICKS = st.integers(0, 10**6)


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


class DiskRules(RuleBasedStateMachine):
    """What a disk under an index may do at any time."""

    index: PrefixIndex
    disk: FakeDisk | None

    def lost_on_purpose(self, keys: tuple[BlockKey, ...]) -> None:
        """The index has forgotten these keys, because the disk lost them."""

    @precondition(lambda self: self.disk is not None and self.disk.queued)
    @rule(pick=PICKS, is_written=st.booleans())
    def the_disk_answers(self, pick: int, is_written: bool) -> None:
        assert self.disk is not None
        keys = list(self.disk.queued)
        if is_written:
            self.index.disk_changed(stored=self.disk.write(keys[: 1 + pick % len(keys)]).stored)
        else:
            self.the_disk_echoes()
            lost = self.disk.drop([keys[pick % len(keys)]]).lost
            self.lost_on_purpose(self.index.disk_changed(lost=lost))

    @precondition(lambda self: self.disk is not None and self.disk.kept)
    @rule(pick=PICKS, is_unreadable=st.booleans())
    def the_disk_loses(self, pick: int, is_unreadable: bool) -> None:
        assert self.disk is not None
        key = list(self.disk.kept)[pick % len(self.disk.kept)]
        self.the_disk_echoes()
        if is_unreadable:
            self.disk.condemn(key)
            gone = self.index.unreadable([key])
        else:
            gone = self.index.disk_changed(lost=self.disk.drop([key]).lost)
        assert key not in self.disk.kept
        self.lost_on_purpose(gone)

    @precondition(lambda self: self.disk is not None)
    @rule()
    def the_disk_echoes(self) -> None:
        assert self.disk is not None
        assert self.index.disk_changed(lost=self.disk.take_echoes().lost) == ()
