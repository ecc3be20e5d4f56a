"""A waiting or running request as the scheduler sees it, and the KV memory that it takes. Counts only:
no tokens, no clock, no MLX.

A *live state* is the KV of a sequence in the engine's buffers. A new sequence may share the first
tokens of another one's live state; it then *holds* these tokens without memory of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.wire.events import WaitReason
from holdfast.wire.requests import RequestId, ServiceClass
from holdfast.worker.kv.bits import KVBits

DEFAULT_SERVICE = ServiceClass()


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
        unshared_tokens = capacity_tokens - held_tokens if held_tokens < capacity_tokens else 0
        return (
            unshared_tokens * self.kv_bytes_per_token
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
        reserve_steps = max(1, tokens // self.reserve_step_tokens)
        return min(most_tokens, reserve_steps * self.reserve_step_tokens)


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
    # how many of the first tokens are in shared live states: nothing is reserved for them
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
        """Whether it waits until its client reads: nothing is planned, and it is preempted first."""
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
        """Undo `quantize`, if the sequence was quantized."""
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
        later_boundaries = (each for each in self.boundaries if each > self.position)
        return min(end, next(later_boundaries, end)) - self.position

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
        most_rows = self.capacity_tokens - self.position
        if self.costs.block_tokens is not None:
            rows_in_block = self.costs.block_tokens - self.position % self.costs.block_tokens
            most_rows = min(most_rows, rows_in_block)
        # the first row is the last sampled token; the step samples one more token than it verifies
        return max(0, min(most_rows - 1, self.max_tokens - self.planned_answer_tokens - 2))

    def settle_draft(self, *, span_tokens: int, generated_tokens: int, repeated: int) -> None:
        """Record the result of a step that verified drafted tokens: take back what was planned for
        the rejected ones.

        span_tokens: the length of the step's span of this sequence. generated_tokens: 0 if the step failed; the span is then
        computed again without drafted tokens, or the sequence ends. repeated: how many of the
        tokens must be computed again.
        """
        rejected_tokens = span_tokens - max(generated_tokens, 1)
        self.position -= rejected_tokens + repeated
        self.planned_answer_tokens -= rejected_tokens
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
        freed_bytes = self.reserved_bytes
        self.unquantize()
        self.capacity_tokens = self.position = self.held_tokens = 0
        return freed_bytes


def check_sequences(
    queue: Sequence[ScheduledSequence],
    running: Mapping[RequestId, ScheduledSequence],
    *,
    prefilling: Sequence[ScheduledSequence],
    decoding: Sequence[ScheduledSequence],
) -> None:
    """Assert that the lists of a scheduler agree with the state of their sequences."""
    for sequences in (list(queue), list(running.values())):
        assert sequences == sorted(sequences, key=by_order), "a younger sequence is first"
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
