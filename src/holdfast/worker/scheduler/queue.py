"""The order in which the sequences of the scheduler are admitted and preempted.

Interactive requests go before batch requests. Requests of one flow (a client, see `ServiceClass`)
are served in order. Running slots are shared max-min fairly among flows: the running sequences of a
flow have the levels 0, 1, 2, ... in the order of their age, and a lower level goes before a higher
one, regardless of when they were submitted. On the same level, flows take turns. A waiting sequence preempts running
sequences on a higher level than its own would be; once these wait, their level would be the same or
higher, so they never preempt it in turn. A batch request that has waited long enough counts as
interactive.

With one flow and no batch requests, this is first come, first served. `RetryEstimate` is the
Retry-After of requests that find the queue full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from holdfast.wire.requests import RequestId
from holdfast.worker.scheduler.sequence import ScheduledSequence

_MOST_TURNS = 4096  # flows whose turns are remembered, including ended ones
# the estimate of when a refused client should retry: its start value, how much of the latest
# measurement it takes over, and its limits
_FIRST_RETRY_SECONDS = 2.0
_LATEST_SHARE = 0.2
_SHORTEST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0


class Rank(NamedTuple):
    """How urgent a running sequence is: lowest first; the highest is preempted first."""

    priority_class: int  # 0: interactive; 1: batch, until it has waited long enough
    level: int  # how many older sequences of its flow run
    order: int  # of submission


class FairShare:
    """Shares running slots fairly among flows. Time is measured as the sum of step durations, so it
    stops while the worker is idle.
    """

    def __init__(self, *, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        # waiting and running sequences of each flow
        self._sequences_of_flow: Counter[str] = Counter()
        self._batch_sequences = 0
        self._turn_of_flow: dict[str, int] = {}  # the lowest number is next
        self._admissions = 0
        self._now = 0.0  # the sum of step durations, in seconds

    @property
    def is_first_come_first_served(self) -> bool:
        """Whether age alone decides, because there is one flow at most and no batch request."""
        return len(self._sequences_of_flow) <= 1 and not self._batch_sequences

    @property
    def flows(self) -> int:
        return len(self._sequences_of_flow)

    def may_wait(self, flow: str, queue: Sequence[ScheduledSequence], *, limit: int) -> bool:
        """Whether one more request of a flow may join the queue: if the queue has room, or if the
        flow has less than its share of a full queue.
        """
        if len(queue) < limit:
            return True
        queued_of_flow = sum(sequence.service.flow == flow for sequence in queue)
        flows = len(self._sequences_of_flow) + (flow not in self._sequences_of_flow)
        return queued_of_flow < limit // flows

    def add_sequence(self, sequence: ScheduledSequence) -> None:
        flow = sequence.service.flow
        self._sequences_of_flow[flow] += 1
        self._batch_sequences += sequence.is_batch
        self._turn_of_flow.setdefault(flow, self._admissions)
        sequence.waits_since = self._now

    def forget(self, sequence: ScheduledSequence) -> None:
        flow = sequence.service.flow
        self._sequences_of_flow[flow] -= 1
        self._batch_sequences -= sequence.is_batch
        if not self._sequences_of_flow[flow]:
            del self._sequences_of_flow[flow]
            # forget ended flows if there is no other flow to take turns with, or if too many are
            # remembered
            if len(self._sequences_of_flow) <= 1 or len(self._turn_of_flow) > _MOST_TURNS:
                self._turn_of_flow = {
                    each: self._turn_of_flow[each] for each in self._sequences_of_flow
                }

    def admit(self, sequence: ScheduledSequence) -> None:
        """Record that a sequence leaves the queue to run; this uses up the turn of its flow."""
        sequence.waited_seconds += self._now - sequence.waits_since
        self._admissions += 1
        # the flow's next turn comes after that of a flow that joins now
        self._turn_of_flow[sequence.service.flow] = self._admissions + 1

    def preempt(self, sequence: ScheduledSequence) -> None:
        sequence.waits_since = self._now

    def pass_time(self, seconds: float) -> None:
        self._now += seconds

    def next(
        self, queue: Iterable[ScheduledSequence], running: Iterable[ScheduledSequence]
    ) -> ScheduledSequence | None:
        """The sequence to admit next, among those that may be admitted. queue: oldest first."""
        admissible = (sequence for sequence in queue if sequence.may_be_admitted)
        if self.is_first_come_first_served:
            return next(admissible, None)
        oldest_of_flows: dict[tuple[str, bool], ScheduledSequence] = {}
        # the oldest of each flow, even if it was preempted and has waited less than a younger one
        for sequence in admissible:
            oldest_of_flows.setdefault((sequence.service.flow, sequence.is_batch), sequence)
        if len(oldest_of_flows) <= 1:
            return next(iter(oldest_of_flows.values()), None)
        counts = self._running_counts(running)
        return min(
            oldest_of_flows.values(),
            key=lambda each: (
                *self._class_and_level(each, counts),
                self._turn_of_flow[each.service.flow],
                each.order,
            ),
        )

    def ranks(self, running: Mapping[RequestId, ScheduledSequence]) -> dict[RequestId, Rank]:
        """The rank of each running sequence. running: oldest first."""
        levels: Counter[str] = Counter()
        ranks: dict[RequestId, Rank] = {}
        by_class = sorted(running.values(), key=self._priority_class)  # stable: then by age
        for sequence in by_class:
            flow = sequence.service.flow
            ranks[sequence.request_id] = Rank(
                self._priority_class(sequence), levels[flow], sequence.order
            )
            levels[flow] += 1
        return ranks

    def preemptible(
        self, waiting: ScheduledSequence, running: Mapping[RequestId, ScheduledSequence]
    ) -> Iterator[ScheduledSequence]:
        """Yield the running sequences that a waiting one may preempt, the first victim first."""
        if self.is_first_come_first_served:
            return
        own_urgency = self._class_and_level(waiting, self._running_counts(running.values()))
        ranks = self.ranks(running)
        own_flow = (waiting.service.flow, waiting.is_batch)
        for request_id, rank in sorted(ranks.items(), key=lambda each: each[1], reverse=True):
            if (rank.priority_class, rank.level) <= own_urgency:
                return
            sequence = running[request_id]
            # an older one of the same flow is not preempted: it would be admitted next, and the two
            # would preempt each other forever
            is_older = sequence.order < waiting.order
            is_same_flow = (sequence.service.flow, sequence.is_batch) == own_flow
            if not sequence.is_fully_planned and not (is_same_flow and is_older):
                yield sequence

    def _priority_class(self, sequence: ScheduledSequence, *, waits: bool = False) -> int:
        """0: interactive, or batch that has waited long enough; 1: other batch. waits: whether the
        sequence waits now, so that this wait counts, too.
        """
        if not sequence.is_batch:
            return 0
        waited = sequence.waited_seconds + (self._now - sequence.waits_since if waits else 0.0)
        return int(waited < self._aging_seconds)

    def _running_counts(self, running: Iterable[ScheduledSequence]) -> Counter[tuple[str, int]]:
        """How many sequences run, by flow and priority class (see `Rank`)."""
        return Counter(
            (sequence.service.flow, self._priority_class(sequence)) for sequence in running
        )

    def _class_and_level(
        self, waiting: ScheduledSequence, counts: Counter[tuple[str, int]]
    ) -> tuple[int, int]:
        """The class and level that a waiting sequence would have if it ran."""
        flow = waiting.service.flow
        own_class = self._priority_class(waiting, waits=True)
        level = sum(counts[flow, priority_class] for priority_class in range(own_class + 1))
        return own_class, level


class RetryEstimate:
    """Estimates when a client that found the queue full should retry: in the time that it
    recently took until a sequence ended.
    """

    def __init__(self) -> None:
        self._seconds_per_end = _FIRST_RETRY_SECONDS
        self._busy_seconds = 0.0  # since the last end

    def learn(self, *, seconds: float, ends: int) -> None:
        """Learn from one step. ends: the number of sequences that ended with the step."""
        self._busy_seconds += seconds
        if ends:
            measured = self._busy_seconds / ends
            self._seconds_per_end += _LATEST_SHARE * (measured - self._seconds_per_end)
            self._busy_seconds = 0.0

    @property
    def seconds(self) -> float:
        seconds = max(self._seconds_per_end, self._busy_seconds, _SHORTEST_RETRY_SECONDS)
        return min(seconds, _LONGEST_RETRY_SECONDS)
