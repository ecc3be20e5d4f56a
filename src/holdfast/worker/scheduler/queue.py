"""Whose turn it is, and who gives way: interactive before batch, and nobody's second sequence
before somebody's first.

Requests of one flow (who asks) are served in their order. Among flows it is max-min fair over
places: each running sequence of a flow has a level, 0 for its first, 1 for its second, and a lower
level goes before a higher one, whoever came first. On one level flows take turns. What runs on a
higher level than a waiting one would have gives way to it; it is on the same or a higher level when
it waits itself, so it never takes the place back. A request of a batch that has waited long enough
counts as interactive.

While there is one flow and no batch, all of this is first come, first served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.wire.requests import RequestId, ServiceClass

DEFAULT_SERVICE = ServiceClass()
# priority class (0: interactive), level, order; the highest gives way first
Rank: TypeAlias = tuple[int, int, int]

_MOST_TURNS = 4096  # flows, those that are gone among them


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


class FairShare:
    """Keeps count of flows. Time is what steps took: while nothing runs, nobody waits."""

    def __init__(self, *, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        self._known: Counter[str] = Counter()  # waiting and running sequences of each flow
        self._batch_known = 0
        # grows with each admission: of two flows the lower one is next
        self._turns: dict[str, int] = {}
        self._admissions = 0
        self._now = 0.0

    @property
    def is_first_come_first_served(self) -> bool:
        """Whether order alone decides."""
        return len(self._known) <= 1 and not self._batch_known

    @property
    def flows(self) -> int:
        """Flows of which anything waits or runs."""
        return len(self._known)

    def may_wait(self, flow: str, queue: Sequence[ScheduledSequence], *, limit: int) -> bool:
        """Whether one more of a flow may wait: there is room, or others fill the queue and it has
        less than its share of it.
        """
        if len(queue) < limit:
            return True
        own = sum(1 for sequence in queue if sequence.service.flow == flow)
        return own < limit // (len(self._known) + (flow not in self._known))

    def join(self, sequence: ScheduledSequence) -> None:
        """A sequence is submitted."""
        flow = sequence.service.flow
        self._known[flow] += 1
        self._batch_known += sequence.is_batch
        self._turns.setdefault(flow, self._admissions)
        sequence.waits_since = self._now

    def forget(self, sequence: ScheduledSequence) -> None:
        """A sequence has ended."""
        flow = sequence.service.flow
        self._known[flow] -= 1
        self._batch_known -= sequence.is_batch
        if not self._known[flow]:
            del self._known[flow]
            # there is nobody to take turns with, or too many were
            if len(self._known) <= 1 or len(self._turns) > _MOST_TURNS:
                self._turns = {each: self._turns[each] for each in self._known}

    def admit(self, sequence: ScheduledSequence) -> None:
        """A sequence runs from now on."""
        sequence.waited_seconds += self._now - sequence.waits_since
        self._admissions += 1
        self._turns[sequence.service.flow] = self._admissions + 1  # behind a flow that comes now

    def preempt(self, sequence: ScheduledSequence) -> None:
        """A sequence waits again."""
        sequence.waits_since = self._now

    def pass_time(self, seconds: float) -> None:
        """A step took so long."""
        self._now += seconds

    def next(
        self, queue: Iterable[ScheduledSequence], running: Iterable[ScheduledSequence]
    ) -> ScheduledSequence | None:
        """Whose turn it is of those that may be admitted. queue: oldest first."""
        able = (sequence for sequence in queue if sequence.may_be_admitted)
        if self.is_first_come_first_served:
            return next(able, None)
        firsts: dict[tuple[str, bool], ScheduledSequence] = {}
        # one that gave way has waited less than a younger one may have, and goes before it all the
        # same
        for sequence in able:
            firsts.setdefault((sequence.service.flow, sequence.is_batch), sequence)
        if len(firsts) <= 1:
            return next(iter(firsts.values()), None)
        counts = self._counts(running)
        return min(
            firsts.values(),
            key=lambda each: (
                *self._standing(each, counts),
                self._turns[each.service.flow],
                each.order,
            ),
        )

    def ranks(self, running: Mapping[RequestId, ScheduledSequence]) -> dict[RequestId, Rank]:
        """Who gives way before whom. running: oldest first."""
        levels: Counter[str] = Counter()
        found: dict[RequestId, Rank] = {}
        for sequence in sorted(running.values(), key=self._class):  # stable: by age within a class
            flow = sequence.service.flow
            found[sequence.request_id] = self._class(sequence), levels[flow], sequence.order
            levels[flow] += 1
        return found

    def givers(
        self, waiting: ScheduledSequence, running: Mapping[RequestId, ScheduledSequence]
    ) -> Iterator[ScheduledSequence]:
        """Those that have to make room for a waiting one if there is none, the first to do so
        first.
        """
        if self.is_first_come_first_served:
            return
        standing = self._standing(waiting, self._counts(running.values()))
        ranks = self.ranks(running)
        for sequence in sorted(
            running.values(), key=lambda each: ranks[each.request_id], reverse=True
        ):
            if ranks[sequence.request_id][:2] <= standing:
                return
            is_elder = (sequence.service.flow, sequence.is_batch) == (
                waiting.service.flow,
                waiting.is_batch,
            )
            if not sequence.is_fully_planned and not (is_elder and sequence.order < waiting.order):
                yield sequence  # an elder would go before the waiting one again, and both for ever

    def _class(self, sequence: ScheduledSequence, *, waits: bool = False) -> int:
        if not sequence.is_batch:
            return 0
        waited = sequence.waited_seconds + (self._now - sequence.waits_since if waits else 0.0)
        return int(waited < self._aging_seconds)

    def _counts(self, running: Iterable[ScheduledSequence]) -> Counter[tuple[str, int]]:
        return Counter((sequence.service.flow, self._class(sequence)) for sequence in running)

    def _standing(
        self, waiting: ScheduledSequence, counts: Counter[tuple[str, int]]
    ) -> tuple[int, int]:
        """Class and level that it would have if it ran."""
        flow, its_class = waiting.service.flow, self._class(waiting, waits=True)
        return its_class, sum(counts[flow, other] for other in range(its_class + 1))
