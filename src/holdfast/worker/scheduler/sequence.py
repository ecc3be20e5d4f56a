"""What the scheduler knows of one sequence: counts only, never a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.wire.requests import RequestId, ServiceClass

DEFAULT_SERVICE = ServiceClass()


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledSequence:
    """A request that waits or runs.

    Steps are numbered from 1 in the order they are given out. `planned_draws` runs ahead of `drawn`
    by the steps under way.
    """

    request_id: RequestId
    order: int  # of submission; smaller is older
    prompt_tokens: int
    max_tokens: int
    # results of that step and of earlier ones are of another sequence of the same id, or not wanted
    submitted_after_step: int
    # ascending; a span of the prompt ends at each of them, so that state can be kept there
    boundaries: tuple[int, ...] = ()
    service: ServiceClass = DEFAULT_SERVICE
    # before it was admitted, of the time that steps took; all times together
    waited_seconds: float = 0.0
    waits_since: float = 0.0  # of that time, while it waits
    is_idle_work: bool = False  # runs alone, in steps for whose end others can wait
    scores_prompt: bool = False  # log-probabilities of the prompt's tokens are wanted
    cached_tokens: int = 0  # need not be read: the engine begins from snapshots of them
    # of these, in memory that is counted elsewhere: nothing is reserved for them
    held_tokens: int = 0
    drawn: int = 0
    planned_draws: int = 0
    known_tokens: int = 0  # to be read before the first draw after admission
    position: int = 0  # the next token to plan
    capacity_tokens: int = 0
    reserved_bytes: int = 0
    is_paused: bool = False  # nobody reads what it says; it gets no spans and gives way first
    is_ready: bool = True  # it is known from where it is to be read; what it begins from is at hand
    last_step: int = 0  # the last step with a span of it, or that admitted it

    @property
    def may_be_admitted(self) -> bool:
        """Whether nothing but room keeps it waiting."""
        return self.is_ready and not self.is_paused

    @property
    def is_batch(self) -> bool:
        """Whether nobody waits for it."""
        return self.service.priority == "batch"

    @property
    def final_tokens(self) -> int:
        """Tokens of prompt and longest answer."""
        return self.prompt_tokens + self.max_tokens

    @property
    def unread_tokens(self) -> int:
        """Known tokens that no step has been given yet."""
        return self.known_tokens - self.position

    @property
    def longest_span(self) -> int:
        """Tokens that one span may have: up to the next boundary, or all that are unread."""
        for boundary in self.boundaries:
            if boundary > self.position:
                return min(boundary, self.known_tokens) - self.position
        return self.unread_tokens

    @property
    def is_fully_planned(self) -> bool:
        """Whether nothing is left to plan: it ends, at the latest, when the steps under way are
        observed.
        """
        return self.planned_draws >= self.max_tokens and self.position >= self.known_tokens

    def start(self, *, capacity_tokens: int, reserved_bytes: int, step: int) -> None:
        """Let it run from its first token that is not cached."""
        self.known_tokens = self.prompt_tokens + self.drawn
        self.planned_draws = self.drawn
        self.position = self.cached_tokens
        self.capacity_tokens, self.reserved_bytes = capacity_tokens, reserved_bytes
        self.last_step = step

    def stop(self) -> int:
        """Let it run no longer; returns the bytes that it had reserved.

        Draws of steps under way still count.
        """
        freed, self.reserved_bytes, self.capacity_tokens = self.reserved_bytes, 0, 0
        return freed


def check_sequences(
    queue: Sequence[ScheduledSequence],
    running: Mapping[RequestId, ScheduledSequence],
    *,
    reading: Sequence[ScheduledSequence],
    decoding: Sequence[ScheduledSequence],
) -> None:
    """Assert that the lists of a scheduler agree with each other and with their sequences."""
    for row in (list(queue), list(running.values())):
        assert row == sorted(row, key=lambda each: each.order), "somebody overtook"
    active = [sequence for sequence in running.values() if not sequence.is_paused]
    unread = [sequence for sequence in active if sequence.position < sequence.known_tokens]
    assert unread == list(reading), "the list of prompts being read is wrong"
    writing = {each for each in active if each not in unread and not each.is_fully_planned}
    assert writing == set(decoding), "the list of decoding sequences is wrong"
    assert len(writing) == len(decoding), "a sequence decodes twice"
    for sequence in running.values():
        assert sequence.position <= sequence.capacity_tokens, "a sequence outgrew its capacity"
        assert sequence.drawn <= sequence.planned_draws <= sequence.max_tokens, (
            "more is drawn than was planned"
        )


def by_order(sequence: ScheduledSequence) -> int:
    """The key that sorts by age, oldest first."""
    return sequence.order
