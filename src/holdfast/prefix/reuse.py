"""What of a prompt need not be read again, and why it is not more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from holdfast.prefix.evicted import Evicted
from holdfast.prefix.ram import Residence
from holdfast.prefix.tree import Diverged
from holdfast.store.block import BlockKey


@dataclass(frozen=True, slots=True)
class NothingStored:
    """Nothing is stored yet for this model and tenant."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What is stored ends at `position`, the prompt goes on: the usual case of a conversation's next turn."""

    position: int


@dataclass(frozen=True, slots=True)
class NoBoundary:
    """`matched` tokens are stored, but the model can only be resumed where a state was taken, which is at `boundary` last."""

    matched: int
    boundary: int


Shortfall: TypeAlias = NothingStored | NewTokens | Diverged | NoBoundary | Evicted


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """The block's tokens `offset` to `offset + tokens` are the prompt's tokens from `start` on."""

    key: BlockKey
    start: int
    tokens: int
    offset: int
    residence: Residence


@dataclass(frozen=True, slots=True)
class PlannedState:
    """The state to resume from. Its position is the end of the plan's last piece."""

    key: BlockKey
    position: int
    residence: Residence


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusePlan:
    """What to begin a sequence from. Valid until the library changes; hold its keys to keep it valid."""

    tokens: int
    pieces: tuple[PlannedPiece, ...]  # adjoining, from token 0 on
    state: PlannedState | None
    shortfall: Shortfall | None  # why it is not more; None when it is all that was asked for
    diverged: Diverged | None = None  # behind tokens that are stored but cannot be resumed from, if the prompt diverges there

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """Everything that the plan needs."""
        blocks = tuple(piece.key for piece in self.pieces)
        return blocks if self.state is None else (*blocks, self.state.key)

    @property
    def to_read(self) -> tuple[BlockKey, ...]:
        """What has to be read from disk first."""
        keys = [piece.key for piece in self.pieces if piece.residence is Residence.DISK]
        if self.state is not None and self.state.residence is Residence.DISK:
            keys.append(self.state.key)
        return tuple(keys)

    @property
    def ram_tokens(self) -> int:
        """Tokens whose block is in RAM."""
        return sum(piece.tokens for piece in self.pieces if piece.residence is not Residence.DISK)

    @property
    def disk_tokens(self) -> int:
        """Tokens whose block has to be read from disk."""
        return self.tokens - self.ram_tokens
