"""An engine without a device: generates tokens by a fixed rule, copies out what it has read block by
block, and checks that plans respect the engine's contract and that restored tokens are right.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.wire.commands import SequenceRequest, ThinkingBudget
from holdfast.wire.events import TokenLogprob
from holdfast.wire.images import ImageAnswer
from holdfast.worker.engine.plan import Span, SpanResult, StepPlan

BLOCK = 4  # tokens
RAISES_AT_DISPATCH = 666  # every plan with a span of a prompt with this token id raises
RAISES_AT_COLLECT = 667
FAILS_ALONE = 668  # its sampling spans return a failure
RAISES_AT_OPEN = 669
# the step that samples for it never ends, like a device that does not answer
HANGS = 671
HOLDS_THE_LOCK = 672  # its step runs for a while without releasing the interpreter lock
RAISES_ONCE = 670  # only at the first collect: an innocent victim


def hold_the_lock(*, processor_seconds: float) -> None:
    """Run without releasing the interpreter lock, like a long native call."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    end = time.process_time() + processor_seconds
    while time.process_time() < end:
        continue
    sys.setswitchinterval(interval)


def token_at(prompt: Iterable[int], position: int) -> int:
    """The fake model's token at a position after a prompt."""
    return (sum(prompt) * 31 + position * 7) % 601


def expected_tokens(request: SequenceRequest) -> list[int]:
    """The fake model's whole answer, cut at stop tokens and length."""
    tokens: list[int] = []
    for index in range(request.max_tokens):
        tokens.append(token_at(request.prompt_token_ids, len(request.prompt_token_ids) + index))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens


@dataclass(frozen=True)
class Run:
    """A snapshot here is the sequence's position."""

    start: int
    tokens: int
    request_id: str = ""
    is_finite: bool = True

    @property
    def end(self) -> int:
        return self.start + self.tokens


@dataclass
class _Open:
    request: SequenceRequest
    known: list[int]
    capacity: int
    position: int = 0
    kept: int = 0
    generated: int = 0

    def copy(self, at_least: int) -> list[Run]:
        """The blocks of at least this many tokens that have not been copied."""
        runs = []
        while self.position - self.kept >= at_least:
            tokens = min(BLOCK, self.position - self.kept)
            runs.append(Run(self.kept, tokens, self.request.request_id))
            self.kept += tokens
        return runs


@dataclass
class _Pending:
    plan: StepPlan
    sequences: list[_Open]
    copies: dict[str, list[Run]]
    raises: bool


@dataclass
class FakeEngine:
    """Deterministic; `is_broken` makes every dispatch raise."""

    is_broken: bool = False
    opened: dict[str, _Open] = field(default_factory=dict)
    pending: list[_Pending] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    raised_once: bool = False
    rest_raises: bool = False
    restored: list[tuple[str, int]] = field(default_factory=list)
    remembers_plans: bool = True
    runs_ahead: bool = True
    # a step with a longer span raises, like a device without enough memory
    largest_chunk: int = 1 << 30

    image_reuse_refused = ""

    def indivisible(self, request: SequenceRequest) -> tuple[tuple[int, int], ...]:
        return ()

    is_reading_images = False

    def has_unprepared_images(self, *_: object, **__: object) -> bool:
        return False

    def poll_images(self) -> list[ImageAnswer]:
        return []

    def close_images(self) -> None:
        pass

    def lacks_images(self, span: Span) -> bool:
        return False

    def shortest_span(self, request_id: str, start: int) -> int:
        return 1

    def longest_span(self, request_id: str, start: int) -> int:
        return sys.maxsize

    def open(
        self,
        request: SequenceRequest,
        *,
        generated: tuple[int, ...] = (),
        capacity_tokens: int,
        form: str = "native",
        base: None = None,
        snapshots: Sequence[int] = (),
        copy_policy: object = None,
    ) -> None:
        assert request.request_id not in self.opened
        if RAISES_AT_OPEN in request.prompt_token_ids:
            raise ValueError("cannot be opened")
        known, cached = [*request.prompt_token_ids, *generated], len(snapshots)
        assert known[:cached] == [*snapshots], "restored other tokens than the sequence has"
        self.opened[request.request_id] = _Open(request, known, capacity_tokens, cached, cached)
        if cached:
            self.restored.append((request.request_id, cached))

    def reserve_tokens(self, request_id: str, capacity_tokens: int) -> None:
        assert capacity_tokens >= self.opened[request_id].capacity
        self.opened[request_id].capacity = capacity_tokens

    def limit_thoughts(
        self, request_id: str, budget: ThinkingBudget, *, generated: Sequence[int]
    ) -> None:
        raise AssertionError("this engine's sequences have no thoughts")

    def close(self, request_id: str) -> None:
        del self.opened[request_id]

    def dispatch(self, plan: StepPlan) -> _Pending:
        assert plan.spans, "an empty plan is not dispatched"
        assert len(self.pending) < 2, "pipelined by one step only"
        sequences = [self.opened[span.request_id] for span in plan.spans]
        for span, sequence in zip(plan.spans, sequences, strict=True):
            self._advance(span, sequence)
        if self.is_broken or any(
            RAISES_AT_DISPATCH in each.request.prompt_token_ids for each in sequences
        ):
            raise RuntimeError("the device refuses the step")
        victims = not self.raised_once and any(
            RAISES_ONCE in each.request.prompt_token_ids for each in sequences
        )
        self.raised_once = self.raised_once or victims
        raises = (
            victims
            or any(span.tokens > self.largest_chunk for span in plan.spans)
            or any(RAISES_AT_COLLECT in each.request.prompt_token_ids for each in sequences)
        )
        if self.remembers_plans:
            self.plans.append(plan)
        copies = {
            each.request.request_id: copied for each in sequences if (copied := each.copy(BLOCK))
        }
        self.pending.append(_Pending(plan, sequences, copies, raises))
        return self.pending[-1]

    def collect(self, pending: _Pending) -> tuple[SpanResult, ...]:
        assert self.pending[0] is pending, "steps are collected in order"
        self.pending.pop(0)
        if any(HANGS in sequence.request.prompt_token_ids for sequence in pending.sequences):
            os.read(os.pipe()[0], 1)
        for span, sequence in zip(pending.plan.spans, pending.sequences, strict=True):
            if HOLDS_THE_LOCK in sequence.request.prompt_token_ids and span.start == 0:
                hold_the_lock(processor_seconds=0.6)
        if pending.raises:
            raise RuntimeError("the device failed in this step")
        return tuple(map(_result, pending.plan.spans, pending.sequences))

    def take_copies(self, pending: _Pending) -> dict[str, list[Run]]:
        return pending.copies

    def copy_remaining(self, request_id: str) -> list[Run]:
        if self.rest_raises:
            raise RuntimeError("the rest cannot be copied out")
        return self.opened[request_id].copy(1)

    def check_device(self) -> None:
        if self.is_broken:
            raise RuntimeError("the device refuses everything")

    def abandon_pending(self) -> None:
        self.pending.clear()

    @staticmethod
    def _advance(span: Span, sequence: _Open) -> None:
        assert span.start == sequence.position, (
            f"{span} does not follow position {sequence.position}"
        )
        sequence.position += span.tokens
        assert sequence.position <= sequence.capacity, "beyond the reserved capacity"
        known = len(sequence.known) + sequence.generated
        assert sequence.position <= known, "reads a token that nobody knows"
        assert span.samples <= (sequence.position == known), "draws before the end of what is known"
        sequence.generated += span.samples


def _result(span: Span, sequence: _Open) -> SpanResult:
    request = sequence.request
    if span.samples and FAILS_ALONE in request.prompt_token_ids:
        return SpanResult(request_id=span.request_id, failure="not a number")
    scores: tuple[TokenLogprob, ...] = ()
    prompt = request.prompt_token_ids
    if request.want_prompt_logprobs and span.start < len(prompt):
        scores = tuple(
            TokenLogprob(token, -1.0)
            for token in prompt[span.start + 1 : span.start + span.tokens + 1]
        )
    if not span.samples:
        return SpanResult(request_id=span.request_id, prompt_logprobs=scores)
    token = token_at(prompt, span.start + span.tokens)
    logprobs = (TokenLogprob(token, -0.5),) if request.want_logprobs else ()
    return SpanResult(
        request_id=span.request_id, token_ids=(token,), logprobs=logprobs, prompt_logprobs=scores
    )
