"""What was stored once and is gone: kept for a while, so that a miss can say so. Bounded; a hint, never a decision."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from holdfast.prefix.packed import common_tokens
from holdfast.prefix.tree import Piece, Place, Standing
from holdfast.store.block import TOKEN_BYTES, BlockKey

REMEMBERED = 2048  # of blocks and of states each: 2 MiB of tokens at most


class EvictionCause(Enum):
    """Why something that was stored is gone."""

    EVICTED = "evicted"  # it had to make room
    UNREADABLE = "unreadable"  # its file is damaged, missing or does not fit the model
    UNTRUSTED = "untrusted"  # what began from it did not come out as numbers
    FORGOTTEN = "forgotten"  # somebody asked for it


@dataclass(frozen=True, slots=True)
class Evicted:
    """`tokens` more tokens behind `position` were stored once."""

    position: int
    tokens: int
    cause: EvictionCause


@dataclass(frozen=True, slots=True)
class _EvictedBlock:
    key: BlockKey
    end: int  # tokens of the block, those of other nodes included
    packed: bytes
    cause: EvictionCause


class EvictionHistory:
    """The blocks and states that were lost last, by where they stood."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._blocks: OrderedDict[tuple[BlockKey, int, bytes], _EvictedBlock] = OrderedDict()
        self._states: OrderedDict[tuple[BlockKey, int], EvictionCause] = OrderedDict()

    def block_lost(self, key: BlockKey, standing: Standing, *, cause: EvictionCause) -> None:
        """A block is gone."""
        place, packed = standing.place, standing.packed
        where = (place.parent_key, place.parent_tokens, packed[:TOKEN_BYTES])
        self._blocks[where] = _EvictedBlock(key, standing.block_tokens, packed, cause)
        self._blocks.move_to_end(where)
        if len(self._blocks) > self._limit:
            self._blocks.popitem(last=False)

    def state_lost(self, place: Place, *, cause: EvictionCause) -> None:
        """A state that stood at `place` is gone."""
        where = (place.parent_key, place.parent_tokens)
        self._states[where] = cause
        self._states.move_to_end(where)
        if len(self._states) > self._limit:
            self._states.popitem(last=False)

    def behind(self, place: Place, packed: bytes) -> Evicted | None:
        """What was stored of the tokens `packed` behind a place where nothing of them is stored now."""
        at, cause = 0, None
        parent_key, parent_tokens = place.parent_key, place.parent_tokens
        while at < len(packed):
            block = self._blocks.get((parent_key, parent_tokens, packed[at : at + TOKEN_BYTES]))
            if block is None:
                break
            cause = cause or block.cause
            used = common_tokens(block.packed, packed[at : at + len(block.packed)]) * TOKEN_BYTES
            at += used
            parent_key, parent_tokens = block.key, block.end - (len(block.packed) - used) // TOKEN_BYTES
        return None if cause is None else Evicted(place.position, at // TOKEN_BYTES, cause)

    def last_state(self, pieces: Iterable[Piece], *, begin: int, end: int) -> Evicted | None:
        """The last state that was lost along `pieces`, behind more than `begin` and at most `end` tokens of the chain."""
        starts = {piece.key: (piece.start - piece.offset, piece.start + piece.tokens) for piece in pieces}
        last = Evicted(begin, 0, EvictionCause.EVICTED)
        for (block, tokens), cause in self._states.items():
            start, piece_end = starts.get(block, (0, 0))
            position = start + tokens
            if begin + last.tokens < position <= min(end, piece_end):
                last = Evicted(begin, position - begin, cause)
        return last if last.tokens else None
