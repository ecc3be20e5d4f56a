"""The sequences of the scheduler, and the order in which they are admitted and preempted.

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

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.wire.events import WaitReason
from holdfast.wire.requests import RequestId, ServiceClass
from holdfast.worker.kv.bits import KVBits

DEFAULT_SERVICE = ServiceClass()
_MOST_TURNS = 4096  # flows whose turns are remembered, including ended ones
# the estimate of when a refused client should retry: its start value, how much of the latest
# measurement it takes over, and its limits
_FIRST_RETRY_SECONDS = 2.0
_LATEST_SHARE = 0.2
_SHORTEST_RETRY_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCosts:
    """How much KV memory a sequence takes, which depends on the model and on the form of its keys
    and values.
    """

    kv_bytes_per_token: int  # growing layers only
    fixed_bytes_per_sequence: int  # windows and recurrent states
    draft_bytes_per_token: int = 0  # of the draft model's state, which holds every token itself
    reserve_step_tokens: int = 256  # capacities are multiples of this
    block_tokens: int | None = None  # no span crosses a multiple of this; None: no limit
    form: KVBits = "native"  # of keys and values

    def bytes_for(self, capacity_tokens: int, *, held_tokens: int = 0) -> int:
        """The bytes to reserve for one sequence of this capacity. Memory is not reserved for its
        first `held_tokens` tokens, because live states hold them.
        """
        # a comparison is faster than max(), and every step does this for each running sequence
        own_tokens = capacity_tokens - held_tokens if held_tokens < capacity_tokens else 0
        return (
            own_tokens * self.kv_bytes_per_token
            + capacity_tokens * self.draft_bytes_per_token
            + self.fixed_bytes_per_sequence
        )

    def longest_sequence(self, budget_bytes: int, *, most_tokens: int) -> int:
        """The length of the longest sequence that fits a budget, but at most `most_tokens`.

        At least `reserve_step_tokens`, even if these do not fit: requests are then refused one by
        one, with a reason.
        """
        bytes_per_token = self.kv_bytes_per_token + self.draft_bytes_per_token
        if not bytes_per_token:
            return most_tokens
        tokens = (budget_bytes - self.fixed_bytes_per_sequence) // bytes_per_token
        steps = max(1, tokens // self.reserve_step_tokens)
        return min(most_tokens, steps * self.reserve_step_tokens)


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledSequence:
    """A waiting or running request as the scheduler sees it: counts only, no tokens.

    Steps are numbered from 1 in the order of their plans. `planned_answer_tokens` counts the
    generated tokens and those that dispatched steps will generate.
    """

    request_id: RequestId
    prompt_tokens: int
    max_tokens: int
    # tokens of the answer; those that an earlier worker generated are prefilled like the prompt
    generated_tokens: int = 0
    costs: SequenceCosts
    native_costs: SequenceCosts | None = None  # those before it was quantized; None: it was not
    # ascending; spans of the prompt end there so that state can be saved
    boundaries: tuple[int, ...] = ()
    # parts of the prompt that must be prefilled in one span each, even if that is longer than a
    # step should be
    indivisible: tuple[tuple[int, int], ...] = ()
    service: ServiceClass = DEFAULT_SERVICE
    # runs alone, in short steps, because a new request cancels it and waits for its current step
    is_idle_work: bool = False
    scores_prompt: bool = False  # log-probabilities of the prompt are requested: slower prefill
    order: int = 0  # order of submission; smaller is older
    submitted_after_step: int = 0  # results up to this step belong to an earlier use of the id
    waited_seconds: float = 0.0  # total time in the queue, as the sum of step durations
    waits_since: float = 0.0
    # In the queue, a sequence that waits for anything but a running slot and memory keeps its
    # position and lets others pass. A running sequence may wait for its client or for an image.
    waits_for: WaitReason | None = None
    # the next token to plan; while the sequence waits, the first that is not cached
    position: int = 0
    # how many of the first tokens are in buffers of live states: nothing is reserved for them
    held_tokens: int = 0
    planned_answer_tokens: int = 0
    known_tokens: int = 0  # length of the prompt and of the answer at the time of admission
    capacity_tokens: int = 0  # 0 while it waits
    last_step: int = 0  # the last step with one of its spans, or the step that admitted it
    # whether its last step verifies drafted tokens: planning stops until it is known how many are
    # accepted
    is_verifying: bool = False
    repeated: int = 0  # tokens of the last step that the next span must compute again first

    def __post_init__(self) -> None:
        parts = itertools.chain(*self.indivisible)
        self.boundaries = tuple(sorted({*self.boundaries, *parts}))

    @property
    def may_be_admitted(self) -> bool:
        """Whether the sequence waits for nothing but a running slot and memory."""
        return self.waits_for is None or self.waits_for is WaitReason.MEMORY

    @property
    def is_paused(self) -> bool:
        """Whether the client does not read: nothing is planned, and it is preempted first."""
        return self.waits_for is WaitReason.READER

    @property
    def is_running(self) -> bool:
        return self.capacity_tokens > 0

    @property
    def reserved_bytes(self) -> int:
        if not self.capacity_tokens:
            return 0
        return self.costs.bytes_for(self.capacity_tokens, held_tokens=self.held_tokens)

    def start_after(self, cached_tokens: int, *, held_tokens: int = 0) -> None:
        """Let the waiting sequence start after its cached tokens, of which live states hold some."""
        assert not self.is_running, "a running sequence has started already"
        assert 0 <= cached_tokens < self.prompt_tokens + self.generated_tokens, (
            "the last known token is always prefilled"
        )
        self.position = cached_tokens
        self.held_tokens = held_tokens

    def quantize(self, costs: SequenceCosts, *, held_tokens: int) -> None:
        """Change the costs of the running sequence, because its keys and values were quantized. It
        has the former costs again when it stops or starts over (`unquantize`).
        """
        self.native_costs = self.costs
        self.costs = costs
        self.held_tokens = held_tokens

    def unquantize(self) -> None:
        self.costs = self.native_costs or self.costs
        self.native_costs = None

    @property
    def is_batch(self) -> bool:
        return self.service.priority == "batch"

    @property
    def final_tokens(self) -> int:
        return self.prompt_tokens + self.max_tokens

    @property
    def unplanned_tokens(self) -> int:
        """The number of known tokens that no plan contains yet."""
        return self.known_tokens - self.position

    @property
    def longest_span(self) -> int:
        """The largest possible next span: up to a boundary, the block's or the prompt's end."""
        end = self.known_tokens
        if self.costs.block_tokens is not None:
            end = min(
                end,
                self.position - self.position % self.costs.block_tokens + self.costs.block_tokens,
            )
        later = (boundary for boundary in self.boundaries if boundary > self.position)
        return min(end, next(later, end)) - self.position

    def is_indivisible(self, position: int) -> bool:
        """Whether the span that contains a position must reach the next boundary."""
        return any(start <= position < end for start, end in self.indivisible)

    @property
    def most_drafted(self) -> int:
        """The largest number of drafted tokens that the next span of the decoding sequence may have.

        At least one token of the answer is planned later, so that `is_fully_planned` never depends
        on the accepted tokens.
        """
        if self.repeated:
            return 0
        room = self.capacity_tokens - self.position
        if self.costs.block_tokens is not None:
            room = min(room, self.costs.block_tokens - self.position % self.costs.block_tokens)
        return max(0, min(room - 1, self.max_tokens - self.planned_answer_tokens - 2))

    def settle_draft(self, *, verified: int, generated_tokens: int, repeated: int) -> None:
        """Record the result of a step that verified drafted tokens: take back what was planned for
        the rejected ones.

        verified: the tokens of the span. generated_tokens: 0 if the step failed; the span is then
        computed again without drafted tokens, or the sequence ends. repeated: how many of the
        tokens must be computed again.
        """
        rejected = verified - max(generated_tokens, 1)
        self.position -= rejected + repeated
        self.planned_answer_tokens -= rejected
        self.repeated = repeated
        self.is_verifying = False

    @property
    def is_fully_planned(self) -> bool:
        """Whether all is planned: the sequence ends with the dispatched steps at the latest."""
        return self.planned_answer_tokens >= self.max_tokens and self.position >= self.known_tokens

    def start(self, *, capacity_tokens: int, step: int) -> None:
        """Start to run the sequence, from its first token that is not cached."""
        self.known_tokens = self.prompt_tokens + self.generated_tokens
        self.planned_answer_tokens = self.generated_tokens
        self.capacity_tokens = capacity_tokens
        self.last_step = step
        self.is_verifying = False
        self.repeated = 0

    def stop(self) -> int:
        """Stop running the sequence; returns the bytes that were reserved for it. Tokens that
        dispatched steps generate still count.
        """
        freed = self.reserved_bytes
        self.unquantize()
        self.capacity_tokens = self.position = self.held_tokens = 0
        return freed


def check_sequences(
    queue: Sequence[ScheduledSequence],
    running: Mapping[RequestId, ScheduledSequence],
    *,
    prefilling: Sequence[ScheduledSequence],
    decoding: Sequence[ScheduledSequence],
) -> None:
    """Assert that the lists of a scheduler agree with the state of their sequences."""
    for row in (list(queue), list(running.values())):
        assert row == sorted(row, key=by_order), "a younger sequence is first"
    active = [sequence for sequence in running.values() if not sequence.is_paused]
    unplanned = [sequence for sequence in active if sequence.position < sequence.known_tokens]
    assert unplanned == list(prefilling), "the list of prompts being prefilled is wrong"
    generating = {each for each in active if each not in unplanned and not each.is_fully_planned}
    assert generating == set(decoding), "the list of decoding sequences is wrong"
    assert len(generating) == len(decoding), "a sequence decodes twice"
    for sequence in running.values():
        assert sequence.position <= sequence.capacity_tokens, "a sequence outgrew its capacity"
        assert sequence.generated_tokens <= sequence.planned_answer_tokens <= sequence.max_tokens, (
            "more tokens are generated than were planned"
        )


def by_order(sequence: ScheduledSequence) -> int:
    """A key for sorting by age, oldest first."""
    return sequence.order


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
        self._batch_known = 0
        self._turns: dict[str, int] = {}  # by flow; the lowest number is next
        self._admissions = 0
        self._now = 0.0

    @property
    def is_first_come_first_served(self) -> bool:
        return len(self._sequences_of_flow) <= 1 and not self._batch_known

    @property
    def flows(self) -> int:
        return len(self._sequences_of_flow)

    def may_wait(self, flow: str, queue: Sequence[ScheduledSequence], *, limit: int) -> bool:
        """Whether one more request of a flow may join the queue: if the queue has room, or if the
        flow has less than its share of a full queue.
        """
        if len(queue) < limit:
            return True
        own = sum(sequence.service.flow == flow for sequence in queue)
        return own < limit // (len(self._sequences_of_flow) + (flow not in self._sequences_of_flow))

    def add_sequence(self, sequence: ScheduledSequence) -> None:
        flow = sequence.service.flow
        self._sequences_of_flow[flow] += 1
        self._batch_known += sequence.is_batch
        self._turns.setdefault(flow, self._admissions)
        sequence.waits_since = self._now

    def forget(self, sequence: ScheduledSequence) -> None:
        flow = sequence.service.flow
        self._sequences_of_flow[flow] -= 1
        self._batch_known -= sequence.is_batch
        if not self._sequences_of_flow[flow]:
            del self._sequences_of_flow[flow]
            # forget ended flows if there is no other flow to take turns with, or if too many are
            # remembered
            if len(self._sequences_of_flow) <= 1 or len(self._turns) > _MOST_TURNS:
                self._turns = {each: self._turns[each] for each in self._sequences_of_flow}

    def admit(self, sequence: ScheduledSequence) -> None:
        sequence.waited_seconds += self._now - sequence.waits_since
        self._admissions += 1
        # the flow's next turn comes after that of a flow that joins now
        self._turns[sequence.service.flow] = self._admissions + 1

    def preempt(self, sequence: ScheduledSequence) -> None:
        sequence.waits_since = self._now

    def pass_time(self, seconds: float) -> None:
        self._now += seconds

    def next(
        self, queue: Iterable[ScheduledSequence], running: Iterable[ScheduledSequence]
    ) -> ScheduledSequence | None:
        """The sequence to admit next, among those that may be admitted. queue: oldest first."""
        able = (sequence for sequence in queue if sequence.may_be_admitted)
        if self.is_first_come_first_served:
            return next(able, None)
        oldest_of_flows: dict[tuple[str, bool], ScheduledSequence] = {}
        # the oldest of each flow, even if it was preempted and has waited less than a younger one
        for sequence in able:
            oldest_of_flows.setdefault((sequence.service.flow, sequence.is_batch), sequence)
        if len(oldest_of_flows) <= 1:
            return next(iter(oldest_of_flows.values()), None)
        counts = self._counts(running)
        return min(
            oldest_of_flows.values(),
            key=lambda each: (
                *self._class_and_level(each, counts),
                self._turns[each.service.flow],
                each.order,
            ),
        )

    def ranks(self, running: Mapping[RequestId, ScheduledSequence]) -> dict[RequestId, Rank]:
        """The rank of each running sequence. running: oldest first."""
        levels: Counter[str] = Counter()
        found: dict[RequestId, Rank] = {}
        by_class = sorted(running.values(), key=self._priority_class)  # stable: then by age
        for sequence in by_class:
            flow = sequence.service.flow
            found[sequence.request_id] = Rank(
                self._priority_class(sequence), levels[flow], sequence.order
            )
            levels[flow] += 1
        return found

    def preemptible(
        self, waiting: ScheduledSequence, running: Mapping[RequestId, ScheduledSequence]
    ) -> Iterator[ScheduledSequence]:
        """Yield the running sequences that a waiting one may preempt, the first victim first."""
        if self.is_first_come_first_served:
            return
        own = self._class_and_level(waiting, self._counts(running.values()))
        ranks = self.ranks(running)
        flow = (waiting.service.flow, waiting.is_batch)
        for request_id, rank in sorted(ranks.items(), key=lambda each: each[1], reverse=True):
            if (rank.priority_class, rank.level) <= own:
                return
            sequence = running[request_id]
            # an older one of the same flow is not preempted: it would be admitted next, and the two
            # would preempt each other forever
            is_older = sequence.order < waiting.order
            is_same_flow = (sequence.service.flow, sequence.is_batch) == flow
            if not sequence.is_fully_planned and not (is_same_flow and is_older):
                yield sequence

    def _priority_class(self, sequence: ScheduledSequence, *, waits: bool = False) -> int:
        """See `Rank`. waits: whether the sequence waits now, so that this wait counts, too."""
        if not sequence.is_batch:
            return 0
        waited = sequence.waited_seconds + (self._now - sequence.waits_since if waits else 0.0)
        return int(waited < self._aging_seconds)

    def _counts(self, running: Iterable[ScheduledSequence]) -> Counter[tuple[str, int]]:
        return Counter(
            (sequence.service.flow, self._priority_class(sequence)) for sequence in running
        )

    def _class_and_level(
        self, waiting: ScheduledSequence, counts: Counter[tuple[str, int]]
    ) -> tuple[int, int]:
        """The class and level that a waiting sequence would have if it ran."""
        flow = waiting.service.flow
        own_class = self._priority_class(waiting, waits=True)
        return own_class, sum(counts[flow, other] for other in range(own_class + 1))


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
            latest = self._busy_seconds / ends
            self._seconds_per_end += _LATEST_SHARE * (latest - self._seconds_per_end)
            self._busy_seconds = 0.0

    @property
    def seconds(self) -> float:
        seconds = max(self._seconds_per_end, self._busy_seconds, _SHORTEST_RETRY_SECONDS)
        return min(seconds, _LONGEST_RETRY_SECONDS)
