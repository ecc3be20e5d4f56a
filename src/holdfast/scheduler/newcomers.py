"""Whose prompt is read before those of all others: a short one, of a flow that had none to be read in the step before.

So who asks now and then does not share each step with those who always have prompts to be read. What a flow was favoured by it
owes, and is not favoured again before time has passed in which it might have had its equal share. Known as sparse flows from
FQ-CoDel (RFC 8290).
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.scheduler.cost_model import CostModel
from holdfast.scheduler.sequence import ScheduledSequence

FAVOURED_SECONDS = 0.5  # of reading, that a flow may owe


class Newcomers:
    """Remembers which flows have had their turn, and what those that were favoured owe."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._settled: frozenset[str] = frozenset()
        self._owed: dict[str, float] = {}  # seconds

    def favoured(self, groups: Sequence[list[ScheduledSequence]]) -> ScheduledSequence | None:
        """The prompt that is read alone now; None: all flows share the step. groups: the prompts of each, oldest first."""
        new = [group[0] for group in groups if group[0].service.flow not in self._settled] if len(groups) > 1 else []
        first = min(new, key=self._debt_with, default=None)
        return first if first is not None and self._debt_with(first) < FAVOURED_SECONDS else None

    def note(self, groups: Sequence[list[ScheduledSequence]], favoured: ScheduledSequence | None, *, tokens: int) -> None:
        """Prompts were dealt out: so many tokens of the one that is favoured."""
        flows = frozenset(group[0].service.flow for group in groups)
        if favoured is None:
            self._settled = flows
            return
        self._settled &= flows
        flow = favoured.service.flow
        self._owed[flow] = self._owed.get(flow, 0.0) + tokens * self._costs.prompt_token_seconds_at(favoured.position)

    def pass_time(self, seconds: float) -> None:
        """A step took so long."""
        share = seconds / (len(self._owed) + 1)
        self._owed = {flow: owed - share for flow, owed in self._owed.items() if owed > share}

    def _debt_with(self, prompt: ScheduledSequence) -> float:
        """What its flow would owe if it were read now."""
        seconds = prompt.unread_tokens * self._costs.prompt_token_seconds_at(prompt.position)
        return self._owed.get(prompt.service.flow, 0.0) + seconds
