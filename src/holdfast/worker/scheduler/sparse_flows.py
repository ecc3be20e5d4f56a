"""Whose prompts are read before those of all others: short ones, of flows that had none to be read
until now.

So who asks now and then does not share each step with those who always have prompts to be read. As
in FQ-CoDel (RFC 8290) such flows are called sparse, or new, the others old: a new flow is old as
soon as its prompt is read, and new again when it has had none for a step. What was read before its
turn counts against it: it is a deficit, and made up for by its equal share of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.worker.scheduler.cost_model import CostModel
from holdfast.worker.scheduler.sequence import ScheduledSequence

MOST_SECONDS = 0.5  # of reading, that a flow may be ahead of the others
MOST_STEPS = 8  # in a row, in which old flows read nothing
# what was before is forgotten; there may be one step between two with prompts that only decodes
_FRESH_STEPS = 2


class SparseFlows:
    """Remembers which flows are old, and how far the new ones are ahead."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._old: frozenset[str] = frozenset()
        self._deficits: dict[str, float] = {}  # seconds; those of flows that are gone, too
        self._step = self._steps_in_a_row = 0

    def first(
        self, groups: Sequence[list[ScheduledSequence]], *, step: int
    ) -> list[ScheduledSequence]:
        """The prompts that alone are read in this step; empty: it is shared. groups: the prompts of
        each flow, oldest first.
        """
        flows = {group[0].service.flow for group in groups}
        is_fresh = step <= self._step + _FRESH_STEPS
        if not (is_fresh and self._old & flows) or self._steps_in_a_row >= MOST_STEPS:
            return []
        new = [
            group[0]
            for group in groups
            if group[0].service.flow not in self._old and not group[0].is_batch
        ]
        ahead = {prompt: self._deficit_with(prompt, tokens=prompt.unread_tokens) for prompt in new}
        return sorted(
            (prompt for prompt in new if ahead[prompt] < MOST_SECONDS),
            key=lambda prompt: ahead[prompt],
        )

    def note(
        self,
        groups: Sequence[list[ScheduledSequence]],
        *,
        read_first: Mapping[ScheduledSequence, int],
        step: int,
    ) -> None:
        """Prompts were dealt out for a step; read_first: so many tokens of those that go first,
        before they count as read.
        """
        flows = frozenset(group[0].service.flow for group in groups)
        self._step = step
        self._steps_in_a_row = self._steps_in_a_row + 1 if read_first else 0
        self._old = self._old & flows if read_first else flows
        for prompt, tokens in read_first.items():
            self._deficits[prompt.service.flow] = self._deficit_with(prompt, tokens=tokens)
            if tokens == prompt.unread_tokens:
                self._old |= {prompt.service.flow}

    def pass_time(self, seconds: float) -> None:
        """A step took so long."""
        if self._deficits:
            share = seconds / len(self._old.union(self._deficits))
            self._deficits = {
                flow: deficit - share for flow, deficit in self._deficits.items() if deficit > share
            }

    def _deficit_with(self, prompt: ScheduledSequence, *, tokens: int) -> float:
        """How far its flow is ahead when it has read so many tokens more."""
        score_seconds = self._costs.score_seconds if prompt.scores_prompt else 0.0
        reading = self._costs.more_chunk_seconds(
            prompt.position, tokens, score_seconds=score_seconds
        )
        return (
            self._deficits.get(prompt.service.flow, 0.0) + self._costs.seconds_per_chunk() + reading
        )
