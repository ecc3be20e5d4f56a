"""Which tokens a sequence may draw next: grammars matched by llguidance, thoughts that have a
budget. Plain Python, no MLX.

A matcher follows the tokens of one answer on the host and tells, as one bit per token of the
vocabulary, what may come next. After a preemption, a failure or a restart it is built anew by
taking the tokens that were generated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.errors import InvalidRequest
from holdfast.wire.commands import SequenceRequest, ThinkingBudget
from holdfast.wire.events import ConstraintFigures
from holdfast.worker.engine.grammars import GrammarMatcher, Grammars, Words


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


class Constraints:
    """The constraints of one model's sequences. Device thread only."""

    def __init__(self, grammars: Grammars | None, *, vocab_size: int) -> None:
        """grammars: None: requests with one are refused. vocab_size: columns of the logits."""
        self.figures = ConstraintFigures()
        self.words_per_row = -(-vocab_size // 32)
        self._grammars = grammars

    def of(
        self, request: SequenceRequest, *, generated: Sequence[int] = ()
    ) -> SequenceConstraint | None:
        """What limits the draws of a sequence that has `generated` already; None when nothing does.

        Raises InvalidRequest when its grammar is none or does not allow what was generated.
        """
        if not request.grammar and request.thinking_budget is None:
            return None
        constraint = SequenceConstraint(
            matcher=self._matcher(request) if request.grammar else None,
            meter=None
            if request.thinking_budget is None
            else ThoughtMeter(request.thinking_budget),
            figures=self.figures,
        )
        for token_id in generated:
            constraint.take(token_id)
        if constraint.failure:
            raise InvalidRequest(constraint.failure, field="grammar")
        self.figures.sequences += not generated
        return constraint

    def with_budget(
        self,
        constraint: SequenceConstraint | None,
        budget: ThinkingBudget,
        *,
        generated: Sequence[int],
    ) -> SequenceConstraint:
        """The constraint of a sequence that gets another thinking budget after it has `generated`
        these tokens.
        """
        if constraint is None:
            self.figures.sequences += 1
            constraint = SequenceConstraint(matcher=None, meter=None, figures=self.figures)
        constraint.meter = ThoughtMeter(budget)
        for token_id in generated:
            constraint.meter.take(token_id)
        return constraint

    def _matcher(self, request: SequenceRequest) -> GrammarMatcher:
        if self._grammars is None:
            raise InvalidRequest("this model takes no grammar", field="grammar")
        return self._grammars.matcher(request.grammar, stop_token_ids=request.stop_token_ids)


@dataclass(slots=True, eq=False)
class SequenceConstraint:
    """What one sequence may draw next, as a function of the tokens that it has drawn."""

    matcher: GrammarMatcher | None
    meter: ThoughtMeter | None
    figures: ConstraintFigures
    failure: str = field(default="", init=False)  # why nothing can be drawn any more

    def take(self, token_id: int) -> None:
        """The sequence has drawn a token."""
        if self.meter is not None:
            self.meter.take(token_id)
        if self.matcher is not None and not self.failure and not self.matcher.take(token_id):
            self._fail(f"the grammar does not go on behind token {token_id}: {self.matcher.error}")

    def forced_token(self) -> int | None:
        """The one token that has to come, whatever the model says; None where it may choose."""
        due = () if self.meter is None else self.meter.due
        if not due or (self.matcher is not None and not self.matcher.allows(due)):
            # a grammar has the last word; inside a character, say, the thought goes on for a token
            return None
        return due[0]

    def fill(self, words: Words) -> bool:
        """Write into `words`, one row, what may come next; False, and nothing of use in there, when
        anything may.

        When nothing may, there is a `failure`.
        """
        if self.matcher is None or self.failure:
            return False
        began_at = time.perf_counter()
        is_open = self.matcher.fill(words)
        self.figures.masks += 1
        self.figures.mask_seconds += time.perf_counter() - began_at
        if not is_open:
            self._fail(
                "the grammar cannot be followed any further: "
                f"{self.matcher.error or 'it allows no token here'}"
            )
        return is_open

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.figures.failures += 1
