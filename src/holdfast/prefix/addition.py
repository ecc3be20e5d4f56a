"""What became of a run or a state that was given to the library, and what the store needs to know to keep it too."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from holdfast.store.keys import BlockKey, BlockKind, unpack_tokens


class Outcome(Enum):
    """What became of what was given to the library."""

    NEW = "new"  # kept; with a disk, it is to be given to the store now
    STORED = "stored"  # all of it was there already
    NO_PARENT = "no parent"  # what stands before it is not stored (any more)
    NO_ROOM = "no room"  # everything in RAM is held or stands before it, and there is no disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """A run or a state at its place. The fields are those of `store.block.Block`; `key` is empty for NO_PARENT."""

    outcome: Outcome
    key: BlockKey
    parent_key: BlockKey
    parent_tokens: int
    kind: BlockKind
    start: int
    packed_tokens: bytes = field(repr=False, default=b"")

    @property
    def is_new(self) -> bool:
        """Whether it is to be given to the store."""
        return self.outcome is Outcome.NEW

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The run's tokens; none for a state."""
        return unpack_tokens(self.packed_tokens)
