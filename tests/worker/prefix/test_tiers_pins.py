"""Pinned blocks stay in RAM until they are on disk, within a limit."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest

from holdfast.worker.prefix.tiers import DiskIndex, Pins, RamTier
from tests.fakes.chains import named
from tests.fakes.payloads import Weight

A, B, C = named("a"), named("b"), named("c")


class Pinned:
    def __init__(self, *, budget_bytes: int = 10) -> None:
        self.ram, self.disk = RamTier(budget_bytes), DiskIndex()
        self.pins = Pins(self.ram, self.disk)
        for key in (A, B, C):
            self.ram.put(key, Weight(3), parent=None)

    def leaving(self) -> list[bytes]:
        """The keys in eviction order."""
        left = []
        while (key := self.ram.next_to_leave()) is not None:
            self.ram.evict(key)
            left.append(key)
        return left

    def store(self, key: bytes) -> None:
        self.disk.begin_saving(key)
        assert self.disk.saved(key)
        self.pins.sync(key)


def test_pinned_blocks_stay_until_they_are_unpinned() -> None:
    subject = Pinned()
    subject.pins.pin([A, B])
    subject.pins.unpin([B])
    subject.pins.check_invariants()
    assert subject.leaving() == [B, C]
    subject.pins.unpin([A])
    assert subject.leaving() == [A]


def test_a_pinned_block_on_disk_may_leave_ram() -> None:
    subject = Pinned()
    subject.pins.pin([A, B])
    subject.store(A)
    subject.store(B)
    assert subject.disk.lost(B)
    subject.pins.sync(B)
    subject.pins.check_invariants()
    assert subject.leaving() == [A, C]


def test_pins_are_limited_to_their_share_of_ram() -> None:
    subject = Pinned()
    subject.pins.most_held_bytes = 5
    subject.pins.pin([A, B])
    subject.pins.check_invariants()
    assert subject.leaving() == [B, C]


def test_pinned_keys_outside_ram_are_held_on_entry() -> None:
    subject = Pinned()
    other = named("d")
    subject.pins.pin([other])
    subject.ram.drop(A)
    subject.ram.put(other, Weight(3), parent=None)
    subject.pins.sync(other)
    assert subject.leaving() == [B, C]


class Unwalked(dict[bytes, Any]):
    """A dict that is only asked for single keys."""

    def _refuse(self) -> NoReturn:
        raise AssertionError("all entries are visited")

    __iter__ = keys = values = items = _refuse


def test_the_unsaved_keys_are_found_without_visiting_all_keys_on_disk() -> None:
    disk = DiskIndex()
    for key in (A, B, C):
        disk.begin_saving(key)
    disk._states = Unwalked(disk._states)
    assert disk.lost(C)
    disk.forget_copy(A)
    disk.found(B)
    assert list(disk.unsaved) == [C, A]
    disk.begin_saving(C)
    disk.forget(A)
    assert list(disk.unsaved) == []
    assert C in disk
    assert A not in disk
    with pytest.raises(AssertionError, match="visited"):
        disk.keys()
