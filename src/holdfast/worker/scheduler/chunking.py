"""How much of which prompt goes into a step.

Flows take turns by time: the flow whose prompts have taken the least time goes first and takes what
it can; what it leaves goes to the next. A flow that had no prompt until now starts a little behind
the others, so its short prompt is prefilled at once. It keeps its account while it is away, so it
gains nothing by coming and going. A flow that got nothing for several steps goes first in any case.

Within a flow, the oldest prompt and those ahead of it (shorter, or passed over for several steps)
each get half of the room. Which half is served first alternates, so that both progress even when a
step has room for one chunk only. What one side leaves goes to the other, then to the rest, shortest
first. So a short prompt never waits for the end of a long one, short prompts slow a long one down to
half its pace at most, and equal ones are prefilled one after the other, so that the first answer
starts early.

Batch prompts get what interactive ones leave, until they have been passed over for several steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.worker.scheduler.cost_model import CostModel
from holdfast.worker.scheduler.sequence import ScheduledSequence

PATIENCE_STEPS = 8  # whoever was passed over in more steps than this goes first
HEAD_START_SECONDS = 0.5  # of prefilling, for a flow that had no prompt until now
REMEMBERED_STEPS = 100  # for which a flow without prompts keeps its account
# A prompt alone in its step gets this much however slow the device is: smaller steps prefill 2 to 3
# times as slowly.
LEAST_ALONE_TOKENS = 256
# Then one step only decodes: the cost of a chunk is what a step takes beyond its decoding.
MIXED_STEPS_IN_A_ROW = 32


@dataclass(slots=True)
class _Flow:
    seconds: float  # of prefilling, as accounted
    seen_step: int = -2  # the last step in which it had prompts
    served_step: int = 0  # the last step in which it got room, or in which it came
    oldest_is_first: bool = True


class ChunkSharing:
    """Divides the room that each step has for prompts."""

    def __init__(self, costs: CostModel, *, min_chunk_tokens: int) -> None:
        self._costs = costs
        self._min_chunk_tokens = min_chunk_tokens
        self._flows: dict[str, _Flow] = {}
        self._clock_seconds = 0.0  # the largest account with which a flow has gone first
        self._last_mixed_step = -2
        self._mixed_steps = MIXED_STEPS_IN_A_ROW

    def share(
        self, prompts: list[ScheduledSequence], *, tokens: int, seconds: float, step: int
    ) -> list[tuple[ScheduledSequence, int]]:
        """Return the chunks of step number `step`; none if the step should only decode.

        prompts: oldest first, each with tokens left to prefill.
        seconds: what the chunks may add to the step; infinite if no sequence decodes in it.
        """
        quantum_tokens = self._min_chunk_tokens
        if math.isinf(seconds):
            seconds = self._costs.seconds_without_decoding
            if len(prompts) == 1:
                quantum_tokens = 1 if math.isinf(seconds) else LEAST_ALONE_TOKENS
        elif self._should_only_decode(step):
            return []
        room = StepRoom(self._costs, tokens=tokens, seconds=seconds, quantum_tokens=quantum_tokens)
        by_flow, batch = _by_flow(prompts, step)
        for name in self._in_turn(by_flow, step):
            flow = self._flows[name]
            spent_before = room.spent_seconds
            _share_within(by_flow[name], room, step, oldest_is_first=flow.oldest_is_first)
            spent = room.spent_seconds - spent_before
            if spent:
                flow.seconds += spent
                flow.served_step = step
                flow.oldest_is_first = not flow.oldest_is_first
        room.fill(batch)
        return list(room.taken.items())

    def _should_only_decode(self, step: int) -> bool:
        if step > self._last_mixed_step + 1 and self._costs.knows_decoding:
            self._mixed_steps = 0
        self._last_mixed_step = step
        due = self._mixed_steps >= MIXED_STEPS_IN_A_ROW
        self._mixed_steps = 0 if due else self._mixed_steps + 1
        return due

    def _in_turn(self, by_flow: dict[str, list[ScheduledSequence]], step: int) -> list[str]:
        """The flows with prompts, in the order in which they are served."""
        least_seconds = self._clock_seconds - HEAD_START_SECONDS
        for name in by_flow:
            flow = self._flows.setdefault(name, _Flow(least_seconds))
            flow.seconds = max(flow.seconds, least_seconds)
            if step - flow.seen_step > 2:  # between two steps with prompts, one may only decode
                flow.served_step = step
            flow.seen_step = step
        if len(self._flows) > len(by_flow):
            self._flows = {
                name: flow
                for name, flow in self._flows.items()
                if step - flow.seen_step <= REMEMBERED_STEPS
            }

        def turn(name: str) -> tuple[bool, float]:
            flow = self._flows[name]
            if step - flow.served_step > PATIENCE_STEPS:
                return (False, flow.served_step)
            return (True, flow.seconds)

        order = sorted(by_flow, key=turn)
        if order:
            self._clock_seconds = max(self._clock_seconds, self._flows[order[0]].seconds)
        return order


class StepRoom:
    """What is left of one step for prompts: tokens, and seconds if others decode in it."""

    def __init__(
        self, costs: CostModel, *, tokens: int, seconds: float, quantum_tokens: int
    ) -> None:
        self._costs = costs
        self._tokens = tokens
        self._seconds = seconds
        self._quantum_tokens = quantum_tokens
        self._held_tokens = 0
        self._held_seconds = 0.0
        self.spent_seconds = 0.0
        self.taken: dict[ScheduledSequence, int] = {}

    def hold_half_back(self) -> None:
        """Keep half of what is left for later."""
        self._held_tokens = self._tokens // 2
        self._held_seconds = 0.0 if math.isinf(self._seconds) else self._seconds / 2

    def release(self) -> None:
        """Give out what was held back."""
        self._held_tokens = 0
        self._held_seconds = 0.0

    def fill(self, prompts: Iterable[ScheduledSequence]) -> None:
        """Give each prompt as much as there is room for, in this order."""
        for prompt in prompts:
            if self.taken.get(prompt, 0) == prompt.longest_span:
                continue
            if not self._take(prompt):
                return

    def _take(self, prompt: ScheduledSequence) -> int:
        """Add whole quanta of a prompt, unless the prompt or a boundary ends with them.

        The first prompt of a step gets one at any cost, so that somebody progresses.
        """
        taken = self.taken.get(prompt, 0)
        wanted = longest_chunk(self._costs, prompt) - taken
        position = prompt.position + taken
        chunk_seconds = 0.0 if taken else self._costs.seconds_per_chunk()
        score_seconds = self._costs.score_seconds if prompt.scores_prompt else 0.0
        tokens = max(0, min(wanted, self._tokens - self._held_tokens))
        if not math.isinf(self._seconds):
            left = self._seconds - self._held_seconds - chunk_seconds
            within = self._costs.tokens_within(left, position, score_seconds=score_seconds)
            tokens = min(tokens, within)
        if tokens < wanted:
            tokens -= tokens % self._quantum_tokens
        if not self.taken:
            tokens = max(tokens, min(self._quantum_tokens, wanted, self._tokens))
        if tokens > 0:
            seconds = chunk_seconds + self._costs.more_chunk_seconds(
                position, tokens, score_seconds=score_seconds
            )
            self._tokens -= tokens
            self._seconds -= seconds
            self.spent_seconds += seconds
            self.taken[prompt] = taken + tokens
        return tokens


def longest_chunk(costs: CostModel, prompt: ScheduledSequence) -> int:
    """How many tokens of a prompt one step may prefill: up to the next boundary, and as many as the
    device can process at this position.
    """
    return min(prompt.longest_span, costs.most_chunk_tokens(prompt.position))


def _by_flow(
    prompts: list[ScheduledSequence], step: int
) -> tuple[dict[str, list[ScheduledSequence]], list[ScheduledSequence]]:
    """The prompts of each flow, and the batch prompts that can wait."""
    by_flow: dict[str, list[ScheduledSequence]] = {}
    batch: list[ScheduledSequence] = []
    for prompt in prompts:
        if prompt.is_batch and step - prompt.last_step <= PATIENCE_STEPS:
            batch.append(prompt)
        else:
            by_flow.setdefault(prompt.service.flow, []).append(prompt)
    return by_flow, batch


def _share_within(
    prompts: list[ScheduledSequence], room: StepRoom, step: int, *, oldest_is_first: bool
) -> None:
    oldest = prompts[:1]
    ahead, others = _rivals(prompts, step)
    if not ahead:
        room.fill(oldest)
    else:
        first, second = (oldest, ahead) if oldest_is_first else (ahead, oldest)
        room.hold_half_back()
        room.fill(first)
        room.release()
        room.fill(second)
        room.fill(first)
    room.fill(others)


def _rivals(
    prompts: list[ScheduledSequence], step: int
) -> tuple[list[ScheduledSequence], list[ScheduledSequence]]:
    """All but the oldest: those ahead of it, and the rest, each in the order of service."""
    passed_over = [each for each in prompts[1:] if step - each.last_step > PATIENCE_STEPS]
    passed_over.sort(key=lambda each: each.last_step)
    patient = [each for each in prompts[1:] if step - each.last_step <= PATIENCE_STEPS]
    patient.sort(key=lambda each: each.unread_tokens)
    shorter = [each for each in patient if each.unread_tokens < prompts[0].unread_tokens]
    return passed_over + shorter, patient[len(shorter) :]
