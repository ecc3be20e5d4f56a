"""What is known on the device thread of the disk: which keys it has, which it is about to have,
which it failed to take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from holdfast.store.block import Block, BlockKey, Entry

MOST_ECHOES = 65536


class DiskSide(Protocol):
    """What the index needs of the store; the payloads go past it."""

    def entries(self) -> Iterable[Entry]:
        """Everything that is stored for this model."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """These were used."""

    def remove(self, keys: Sequence[BlockKey]) -> None:
        """These are of no use any more."""


class DiskIndex:
    """Each key is stored, being saved, unsaved (the disk failed to take it) or unknown here.

    The disk's news are late. What was removed here may be back, and on its way to the disk again,
    before the disk tells that the removed one is gone. So that many losses are expected of a
    removed key and believed of nobody: a key that is thought to be on disk and is not costs a
    failed read, one that is thought to be lost and is not costs all that stands behind it.
    """

    def __init__(self) -> None:
        self._stored: set[BlockKey] = set()
        self._saving: dict[BlockKey, Block] = {}
        self._unsaved: dict[BlockKey, Block] = {}
        # losses that the disk will tell of and that are known here
        self._echoes: OrderedDict[BlockKey, int] = OrderedDict()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._stored or key in self._saving

    @property
    def stored(self) -> int:
        """Keys that the disk has."""
        return len(self._stored)

    @property
    def saving(self) -> int:
        """Keys on their way to the disk."""
        return len(self._saving)

    @property
    def unsaved(self) -> tuple[Block, ...]:
        """What the disk failed to take, or lost."""
        return tuple(self._unsaved.values())

    def is_stored(self, key: BlockKey) -> bool:
        """Whether the disk has a key for sure."""
        return key in self._stored

    def is_saving(self, key: BlockKey) -> bool:
        """Whether the store has been given a key and has not told its fate yet."""
        return key in self._saving

    def begin(self, block: Block) -> None:
        """The store is given something."""
        self._unsaved.pop(block.key, None)
        self._saving[block.key] = block

    def found(self, key: BlockKey) -> None:
        """A key turns out to be on the disk."""
        if key not in self._saving:
            self._unsaved.pop(key, None)
            self._stored.add(key)

    def saved(self, key: BlockKey) -> bool:
        """What was given is durable; False when it was not given or is forgotten."""
        if self._saving.pop(key, None) is None:
            return False
        self._stored.add(key)
        return True

    def lost(self, key: BlockKey) -> bool:
        """The disk does not have a key (any more); False when that is no news, or was said of one
        that was removed.
        """
        if self._is_echo(key):
            if self._saving.pop(key, None) is not None:
                self._stored.add(key)
            return False
        block = self._saving.pop(key, None)
        if block is not None:
            self._unsaved[key] = block
            return True
        if key in self._stored:
            self._stored.remove(key)
            return True
        return False

    def forget(self, key: BlockKey) -> bool:
        """Nothing is known of a key any more; whether the disk has it or will have it, so that it
        is to be removed there.
        """
        was_there = key in self
        if was_there:
            self.expect_loss(key)
        self._stored.discard(key)
        self._saving.pop(key, None)
        self._unsaved.pop(key, None)
        return was_there

    def expect_loss(self, key: BlockKey) -> None:
        """The disk will tell once more that it has lost a key, which is known."""
        self._echoes[key] = self._echoes.pop(key, 0) + 1
        if len(self._echoes) > MOST_ECHOES:
            self._echoes.popitem(last=False)

    def _is_echo(self, key: BlockKey) -> bool:
        expected = self._echoes.pop(key, 0)
        if expected > 1:
            self._echoes[key] = expected - 1
        return expected > 0

    def keys(self) -> set[BlockKey]:
        """Everything that the disk has or will have."""
        return self._stored | self._saving.keys()

    def check_invariants(self) -> None:
        """Assert that every key is in one state."""
        assert not self._stored & self._saving.keys(), "stored and being saved"
        assert not self._stored & self._unsaved.keys(), "stored and unsaved"
        assert not self._saving.keys() & self._unsaved.keys(), "being saved and unsaved"
