"""Counts the tokens of a thought, and says which token has to come when there were enough. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.wire.commands import ThinkingBudget


class ThoughtMeter:
    """Follows one answer token by token.

    All its thoughts together have one budget; behind it a thought ends as it begins.
    """

    def __init__(self, budget: ThinkingBudget) -> None:
        self._start, self._end = budget.start_token_ids, budget.end_token_ids
        self._left = budget.tokens
        self._thinks = not budget.start_token_ids
        # the last tokens since the thought began or ended, as many as a marker has
        self._since: list[int] = []

    def take(self, token_id: int) -> None:
        """The answer has one more token."""
        marker = self._end if self._thinks else self._start
        self._left -= self._thinks
        self._since = [*self._since, token_id][-len(marker) :] if marker else []
        if marker and tuple(self._since) == marker:
            self._thinks, self._since = not self._thinks, []

    @property
    def due(self) -> tuple[int, ...]:
        """The tokens that have to come now: the rest of the marker that ends the thought.

        Empty while anything may come.
        """
        if not self._thinks or self._left > 0:
            return ()
        return self._end[_begun(self._end, self._since) :]


def _begun(marker: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens of the marker these tokens end with."""
    most = min(len(tokens), len(marker) - 1)
    return next((n for n in range(most, 0, -1) if tuple(tokens[-n:]) == tuple(marker[:n])), 0)
