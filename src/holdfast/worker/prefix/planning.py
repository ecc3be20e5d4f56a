"""What of a prompt can be reused, given what is stored; and why it is not more.

Decides nothing about who stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from holdfast.store.block import BlockKey
from holdfast.wire.events import CacheOutcome
from holdfast.wire.token_ids import TOKEN_BYTES
from holdfast.worker.prefix.evicted import EvictionHistory
from holdfast.worker.prefix.piece import Piece
from holdfast.worker.prefix.reuse import ReusePlan, Shortfall
from holdfast.worker.prefix.tree import PrefixMatch, PrefixTree


class Planner:
    """Asks the tree what is there, and the history what was there once."""

    def __init__(
        self, tree: PrefixTree, evicted: EvictionHistory, *, at_hand: Callable[[BlockKey], bool]
    ) -> None:
        self._tree, self._evicted, self._at_hand = tree, evicted, at_hand

    def plan(
        self, packed: bytes, *, root: BlockKey, resumable_anywhere: bool, limit: int
    ) -> ReusePlan:
        """The longest beginning of packed tokens from which a sequence can go on; at most `limit`
        tokens.
        """
        limit = max(0, min(limit, len(packed) // TOKEN_BYTES))
        match = self._tree.match(packed, root=root)
        stored = min(match.tokens, limit)
        checkpoint: Piece | None = None
        tokens = stored
        if not resumable_anywhere:
            checkpoint = next(
                (each for each in reversed(match.checkpoints) if each.start <= stored), None
            )
            tokens = checkpoint.start if checkpoint else 0
        pieces = list(match.pieces)
        while pieces and pieces[-1].start >= tokens:
            pieces.pop()
        if pieces and pieces[-1].end > tokens:
            last = pieces[-1]
            pieces[-1] = Piece(last.key, last.kind, last.start, tokens - last.start, last.offset)
        keys = [piece.key for piece in pieces]
        if checkpoint is not None:
            keys.append(checkpoint.key)
        to_read = {key: None for key in keys if not self._at_hand(key)}
        return ReusePlan(
            cursor=match.end.back_at(tokens),
            pieces=tuple(pieces),
            checkpoint=checkpoint,
            shortfall=self._shortfall(match, packed, tokens=tokens, stored=stored, limit=limit),
            keys=tuple(keys),
            to_read=tuple(to_read),
        )

    def _shortfall(
        self, match: PrefixMatch, packed: bytes, *, tokens: int, stored: int, limit: int
    ) -> Shortfall:
        """Why only `tokens` tokens can be reused, of `stored` that are stored and `limit` that are
        wanted.
        """
        if tokens < stored:
            lost = self._evicted.last_checkpoint(match.pieces, begin=tokens, end=stored)
            return replace(
                lost or Shortfall(CacheOutcome.NO_BOUNDARY, stored - tokens),
                divergence=match.divergence,
            )
        if tokens == limit:
            return Shortfall(CacheOutcome.COMPLETE)
        lost = self._evicted.behind(match.end, packed[stored * TOKEN_BYTES : limit * TOKEN_BYTES])
        if lost is not None:
            return lost
        if match.divergence is not None:
            return Shortfall(CacheOutcome.DIVERGED, divergence=match.divergence)
        return Shortfall(
            CacheOutcome.NEW_TOKENS
            if self._tree.has_root(match.end.root)
            else CacheOutcome.NOTHING_STORED
        )
