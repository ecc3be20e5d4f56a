"""What of a prompt can be reused, given what is stored; and why it is not more. Decides nothing about who stays."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.prefix.evicted import EvictionHistory
from holdfast.prefix.ram import Residence
from holdfast.prefix.reuse import NewTokens, NoBoundary, NothingStored, PlannedPiece, PlannedState, ReusePlan, Shortfall
from holdfast.prefix.tree import PrefixTree
from holdfast.store.block import TOKEN_BYTES, BlockKey


class Planner:
    """Asks the tree what is there, and the losses what was there once."""

    def __init__(self, tree: PrefixTree, losses: EvictionHistory, residence: Callable[[BlockKey], Residence]) -> None:
        self._tree = tree
        self._losses = losses
        self._residence = residence

    def plan(self, packed: bytes, *, root: BlockKey, resumable_anywhere: bool, limit: int) -> ReusePlan:
        """The longest beginning of packed tokens from which a sequence can go on; at most `limit` tokens."""
        limit = max(0, min(limit, len(packed) // TOKEN_BYTES))
        match = self._tree.match_packed(packed, root=root)
        stored = min(match.tokens, limit)
        state = next((state for state in reversed(match.states) if state.position <= stored), None)
        tokens = stored if resumable_anywhere else state.position if state else 0
        shortfall: Shortfall | None = None
        if tokens < stored:
            shortfall = self._losses.last_state(match.pieces, begin=tokens, end=stored) or NoBoundary(stored, tokens)
        elif tokens < limit:
            shortfall = self._losses.behind(match.end, packed[stored * TOKEN_BYTES : limit * TOKEN_BYTES])
            if shortfall is None:
                shortfall = match.diverged or (NewTokens(stored) if self._tree.has_root(root) else NothingStored())
        pieces = tuple(
            PlannedPiece(
                piece.key, piece.start, min(piece.tokens, tokens - piece.start), piece.offset, self._residence(piece.key)
            )
            for piece in match.pieces
            if piece.start < tokens
        )
        planned_state = None
        if state is not None and not resumable_anywhere:
            planned_state = PlannedState(state.key, state.position, self._residence(state.key))
        diverged = match.diverged if tokens < stored else None
        return ReusePlan(tokens=tokens, pieces=pieces, state=planned_state, shortfall=shortfall, diverged=diverged)
