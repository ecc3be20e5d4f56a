"""What was stored once and is gone: kept for a while, so that a miss can say why.

Bounded; a hint, never a decision.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from holdfast.store.block import BlockKey
from holdfast.wire.events import CacheOutcome
from holdfast.wire.token_ids import TOKEN_BYTES, common_tokens
from holdfast.worker.prefix.piece import Cursor, Piece
from holdfast.worker.prefix.reuse import Shortfall
from holdfast.worker.prefix.tree import Standing

REMEMBERED = 2048  # of blocks and of checkpoints each: 2 MiB of tokens at most


class EvictionHistory:
    """The blocks and checkpoints that were lost last, by where they stood."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._blocks: OrderedDict[tuple[BlockKey, int, bytes], tuple[Standing, CacheOutcome]] = (
            OrderedDict()
        )
        self._checkpoints: OrderedDict[tuple[BlockKey, int], CacheOutcome] = OrderedDict()

    def record_block(self, standing: Standing, *, cause: CacheOutcome) -> None:
        """A block is gone."""
        packed = standing.packed
        where = (standing.parent_key, standing.parent_tokens, packed[:TOKEN_BYTES])
        self._blocks[where] = standing, cause
        self._blocks.move_to_end(where)
        if len(self._blocks) > self._limit:
            self._blocks.popitem(last=False)

    def record_checkpoint(self, standing: Standing, *, cause: CacheOutcome) -> None:
        """A checkpoint is gone."""
        where = (standing.parent_key, standing.parent_tokens)
        self._checkpoints[where] = cause
        self._checkpoints.move_to_end(where)
        if len(self._checkpoints) > self._limit:
            self._checkpoints.popitem(last=False)

    def behind(self, place: Cursor, packed: bytes) -> Shortfall | None:
        """What was stored of the tokens `packed` behind a place where nothing of them is stored
        now.
        """
        at, cause = 0, None
        parent_key, parent_tokens = place.parent_key, place.parent_tokens
        while at < len(packed):
            evicted = self._blocks.get((parent_key, parent_tokens, packed[at : at + TOKEN_BYTES]))
            if evicted is None:
                break
            block, why = evicted
            cause = cause or why
            used = common_tokens(block.packed, packed[at : at + len(block.packed)]) * TOKEN_BYTES
            at += used
            parent_key, parent_tokens = (
                block.key,
                block.block_tokens - (len(block.packed) - used) // TOKEN_BYTES,
            )
        return None if cause is None else Shortfall(cause, at // TOKEN_BYTES)

    def last_checkpoint(self, pieces: Iterable[Piece], *, begin: int, end: int) -> Shortfall | None:
        """The last checkpoint that was lost along `pieces`, behind more than `begin` and at most
        `end` tokens of the chain.
        """
        starts = {piece.key: (piece.start - piece.offset, piece.end) for piece in pieces}
        last: Shortfall | None = None
        least = begin
        for (block, tokens), cause in self._checkpoints.items():
            start, piece_end = starts.get(block, (0, 0))
            position = start + tokens
            if least < position <= min(end, piece_end):
                last, least = Shortfall(cause, position - begin), position
        return last
