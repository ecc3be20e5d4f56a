"""Exactly one Finished for each accepted request, and all events in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidRequest, QueueFull, TooLargeForMemory, WorkerUnavailable
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import (
    Accepted,
    CacheReport,
    Finished,
    FinishReason,
    PrefillFinished,
    PromptRead,
    Rejected,
    TokenLogprob,
    TokensGenerated,
)
from holdfast.worker.loop.sequences import Ledger, LiveSequence
from tests.fakes.looped_worker import a_sequence, request


def a_ledger() -> Ledger:
    seconds = iter(range(10_000))
    return Ledger(clock=lambda: float(next(seconds)))


def accept(ledger: Ledger, asked: SequenceRequest) -> LiveSequence:
    sequence = a_sequence(asked)
    ledger.accept(sequence)
    return sequence


def test_a_request_is_accepted_started_and_finished_in_order() -> None:
    ledger = a_ledger()
    sequence = accept(ledger, request("a"))
    sequence.admit(now=1.0)
    ledger.generate(sequence, (5, 6), ())
    ledger.generate(sequence, (7,), ())
    ledger.finish(sequence, FinishReason.LENGTH)
    events = ledger.take_outbox()
    assert [type(event) for event in events] == [
        Accepted,
        PrefillFinished,
        TokensGenerated,
        TokensGenerated,
        Finished,
    ]
    assert isinstance(events[-1], Finished)
    assert events[-1].completion_tokens == 3
    assert ledger.take_outbox() == []


def test_a_sequence_cannot_be_finished_twice() -> None:
    ledger = a_ledger()
    sequence = accept(ledger, request("a"))
    ledger.finish(sequence, FinishReason.CANCELLED)
    with pytest.raises(AssertionError):
        ledger.finish(sequence, FinishReason.LENGTH)


def test_a_reused_id_is_another_sequence() -> None:
    ledger = a_ledger()
    first = accept(ledger, request("a"))
    ledger.finish(first, FinishReason.CANCELLED)
    second = accept(ledger, request("a"))
    assert ledger.is_live(second)
    assert not ledger.is_live(first)
    assert ledger.find("a") is second


def test_scores_come_once_before_the_first_token_or_the_end() -> None:
    ledger = a_ledger()
    scores = (TokenLogprob(2, -1.0),)
    generated, prefill_only = (
        accept(ledger, request(name, want_prompt_logprobs=True))
        for name in ("generated", "prefill_only")
    )
    for sequence in (generated, prefill_only):
        ledger.score(sequence, scores)
    ledger.generate(generated, (5,), ())
    ledger.score(generated, scores)
    ledger.generate(generated, (6,), ())
    ledger.finish(generated, FinishReason.LENGTH)
    ledger.finish(prefill_only, FinishReason.LENGTH)
    told = [event for event in ledger.take_outbox() if isinstance(event, PrefillFinished)]
    assert [(event.request_id, event.logprobs) for event in told] == [
        ("generated", scores),
        ("prefill_only", scores),
    ]


@pytest.mark.parametrize(
    ("refusal", "kind", "field"),
    [
        (QueueFull(queued=9, limit=8, retry_after_seconds=2.5), "queue_full", ""),
        (TooLargeForMemory(needed_bytes=9, budget_bytes=8), "too_large", ""),
        (InvalidRequest("no", field="prompt"), "invalid", "prompt"),
        (WorkerUnavailable("it ends"), "shutting_down", ""),
    ],
)
def test_a_refusal_has_its_reason_and_is_final(refusal: Exception, kind: str, field: str) -> None:
    ledger = a_ledger()
    ledger.reject(request("a"), refusal)  # type: ignore[arg-type]
    (rejected,) = ledger.take_outbox()
    assert isinstance(rejected, Rejected)
    assert (rejected.kind, rejected.field) == (kind, field)
    assert (rejected.retry_after_seconds, rejected.queue_limit) == (
        (2.5, 8) if kind == "queue_full" else (0.0, 0)
    )
    assert ledger.counters.rejected == 1
    assert ledger.find("a") is None


def test_only_tokens_of_the_prompt_count_as_read() -> None:
    ledger = a_ledger()
    sequence = accept(ledger, request("a", 1, 2, 3, 4))
    for start, tokens in ((0, 3), (3, 1), (4, 1), (2, 5)):
        ledger.count_prompt(sequence, start=start, tokens=tokens)
    assert ledger.counters.prompt_tokens == 3 + 1 + 0 + 2


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["accept", "generate", *FinishReason])),
        max_size=60,
    )
)
def test_each_accepted_request_has_exactly_one_end(
    steps: list[tuple[int, object]],
) -> None:
    ledger = a_ledger()
    accepted = 0
    for number, what in steps:
        name = str(number)
        sequence = ledger.find(name)
        if what == "accept":
            if sequence is None:
                accept(ledger, request(name, max_tokens=100))
                accepted += 1
        elif sequence is not None and what == "generate":
            ledger.generate(sequence, (1,), ())
        elif sequence is not None and isinstance(what, FinishReason):
            ledger.finish(sequence, what)
        ledger.check_invariants()
    for sequence in ledger.live():
        ledger.finish(sequence, FinishReason.CANCELLED)
    open_ids: set[str] = set()
    for event in ledger.take_outbox():
        if isinstance(event, Accepted):
            assert event.request_id not in open_ids
            open_ids.add(event.request_id)
        elif isinstance(event, Finished):
            open_ids.remove(event.request_id)
        else:
            assert getattr(event, "request_id", None) in open_ids
    assert not open_ids
    assert sum(ledger.counters.finished.values()) == accepted


def test_prefill_progress_is_reported_sometimes_but_not_at_the_end() -> None:
    now = 0.0
    ledger = Ledger(clock=lambda: now)
    sequence = accept(ledger, request("a", *range(1000)))
    sequence.admit(now=0.0)
    sequence.start.report = CacheReport(ram_tokens=100)
    for now, start in ((0.4, 100), (0.6, 200), (0.9, 300), (1.1, 400), (9.0, 900)):  # noqa: B007 - the clock reads it
        ledger.count_prompt(sequence, start=start, tokens=100)
    _, *told = ledger.take_outbox()
    assert told == [
        PromptRead(
            request_id="a", total_tokens=1000, cached_tokens=100, read_tokens=300, seconds=0.6
        ),
        PromptRead(
            request_id="a", total_tokens=1000, cached_tokens=100, read_tokens=500, seconds=1.1
        ),
    ]
