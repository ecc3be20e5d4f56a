"""What became of a block or a checkpoint that was given to the index."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from holdfast.store.block import Block


class Outcome(Enum):
    """What became of what was given to the index."""

    NEW = "new"  # kept; with a disk, it is to be given to the store now
    STORED = "stored"  # all of it was there already
    NO_PARENT = "no parent"  # what stands before it is not stored (any more)
    NO_ROOM = "no room"  # everything in RAM is held or stands before it, and there is no disk


@dataclass(frozen=True, slots=True)
class Addition:
    """A block or a checkpoint at its place; it has none for NO_PARENT."""

    outcome: Outcome
    block: Block | None = None

    @property
    def new_block(self) -> Block | None:
        """What is to be given to the store, if anything is."""
        return self.block if self.outcome is Outcome.NEW else None
