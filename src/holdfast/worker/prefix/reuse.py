"""What of a prompt need not be read again, and why it is not more."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.store.block import BlockKey
from holdfast.wire.events import CacheOutcome, Divergence
from holdfast.worker.prefix.piece import Cursor, Piece


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why no more of a prompt can be reused; COMPLETE when all of it can."""

    outcome: CacheOutcome
    unused_tokens: int = 0  # further tokens that are, or were, stored but cannot be used
    # where something else is stored, if it is, be it behind what can be used
    divergence: Divergence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusePlan:
    """What to begin a sequence from. Valid until the index changes; hold its keys to keep it valid."""

    cursor: Cursor  # behind what is reused
    pieces: tuple[Piece, ...] = ()  # adjoining, from token 0 on
    checkpoint: Piece | None = None  # to resume from, at the end of the last piece
    shortfall: Shortfall
    keys: tuple[BlockKey, ...] = ()  # everything that the plan needs, parents before children
    to_read: tuple[BlockKey, ...] = ()  # what of it has to be read from disk first

    @property
    def tokens(self) -> int:
        """Tokens that need not be read."""
        return self.pieces[-1].end if self.pieces else 0
