"""The tokens committed to the cache and the time of the commit, with an engine and a cache without
arrays.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from holdfast.worker.engine.plan import Span, SpanResult, StepPlan
from holdfast.worker.loop.cache_client import CacheClient
from holdfast.worker.loop.device_steps import DispatchedStep
from holdfast.worker.loop.sequences import Ledger, LiveSequence
from holdfast.worker.prefix.chain import Cursor, Root
from tests.fakes.fake_cache import FakeCache
from tests.fakes.fake_engine import BLOCK, FakeEngine, Run
from tests.fakes.looped_worker import a_scheduler, a_sequence, flight_of, request


class Committing:
    """Sequences that read, are closed and committed; each read is a separate step."""

    def __init__(self) -> None:
        self.cache, self.engine = FakeCache(), FakeEngine()
        self.ended: list[str] = []
        self.client = CacheClient(
            self.cache,  # type: ignore[arg-type]
            engine=self.engine,  # type: ignore[arg-type]
            scheduler=a_scheduler(),
            ledger=Ledger(clock=time.perf_counter),
            on_end=lambda sequence: self.ended.append(sequence.request.request_id),
        )

    def open(self, name: str, *, tokens: int = 20) -> LiveSequence:
        asked = request(name, *range(1, tokens + 1))
        self.engine.open(asked, capacity_tokens=100)
        sequence = a_sequence(asked)
        sequence.start.cursor = Cursor(Root(b""))
        sequence.is_open = True
        return sequence

    def read(self, sequence: LiveSequence, tokens: int) -> DispatchedStep:
        """Run one step of this many tokens."""
        name = sequence.request.request_id
        span = Span(
            request_id=name, start=self.engine.opened[name].position, tokens=tokens, samples=False
        )
        plan = StepPlan(spans=(span,))
        pending = self.engine.dispatch(plan)
        self.engine.collect(pending)
        return flight_of(plan, sequence, pending)

    def commit(self, flight: DispatchedStep, *, failure: str = "") -> None:
        spans = flight.plan.spans
        results = tuple(SpanResult(request_id=each.request_id, failure=failure) for each in spans)
        self.client.end_step(flight, results)

    def close(self, sequence: LiveSequence, *, has_ended: bool = True) -> None:
        self.client.release_sequence(sequence, is_healthy=True, has_ended=has_ended)
        sequence.is_open = False


def test_a_step_commits_only_whole_blocks() -> None:
    subject = Committing()
    a = subject.open("a")
    subject.commit(subject.read(a, 2 * BLOCK + 1))
    assert subject.cache.inserted == [("a", BLOCK), ("a", 2 * BLOCK)]
    assert len(a.inserted) == 2
    assert not subject.client.flush()


def test_blocks_of_a_failed_sequence_are_not_committed() -> None:
    subject = Committing()
    a = subject.open("a")
    subject.commit(subject.read(a, BLOCK), failure="it fails")
    assert (subject.cache.blocks, subject.cache.inserted) == (set(), [])


def test_the_rest_of_a_sequence_is_committed_with_the_next_step() -> None:
    subject = Committing()
    a, b = subject.open("a"), subject.open("b")
    subject.commit(subject.read(a, BLOCK + 2))
    subject.close(a)
    assert subject.client.is_computing_for([a])
    assert not subject.client.is_computing_for([b])
    subject.commit(subject.read(b, 1))
    assert subject.ended == [], "it is computed with that step"
    assert not subject.client.is_computing_for([a])
    subject.commit(subject.read(b, 1))
    assert subject.ended == ["a"]
    assert subject.cache.inserted[-1] == ("a", BLOCK + 2)


def test_a_preempted_sequence_has_not_ended() -> None:
    subject = Committing()
    a = subject.open("a")
    subject.read(a, 3)
    subject.close(a, has_ended=False)
    subject.client.flush()
    assert (subject.cache.inserted, subject.ended) == ([("a", 3)], [])


def test_a_flush_commits_all_rests() -> None:
    subject = Committing()
    a, b = subject.open("a"), subject.open("b")
    for sequence in (a, b):
        subject.read(sequence, 3)
        subject.close(sequence)
    assert subject.client.flush()
    assert subject.ended == ["a", "b"]
    assert not subject.client.flush()


@pytest.mark.parametrize("fails_alone", [False, True])
def test_the_rest_of_a_sequence_that_failed_is_discarded(fails_alone: bool) -> None:
    subject = Committing()
    a, b = subject.open("a"), subject.open("b")
    steps = [subject.read(sequence, BLOCK - 1) for sequence in (a, b)]
    for sequence in (a, b):
        subject.close(sequence)
    if fails_alone:
        subject.commit(steps[0], failure="it fails")
    else:
        subject.client.end_step(steps[0], None)
    subject.client.flush()
    assert subject.ended == ["b"]
    assert [name for name, _ in subject.cache.inserted] == ["b"]


def test_a_failed_commit_does_not_affect_other_sequences(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    subject = Committing()
    a, b = subject.open("a"), subject.open("b")
    for sequence in (a, b):
        subject.read(sequence, BLOCK)
        subject.close(sequence)
    keep, failures = subject.cache.store_snapshots, [RuntimeError("the cache fails")]

    def fails_once(*args: Any, **more: Any) -> tuple[bytes, ...]:
        if failures:
            raise failures.pop()
        return keep(*args, **more)

    monkeypatch.setattr(subject.cache, "store_snapshots", fails_once)
    subject.client.flush()
    assert subject.ended == ["b"]
    assert [record.message for record in caplog.records] == ["the rest of request a is not cached"]


def test_no_block_is_committed_twice() -> None:
    subject = Committing()
    a = subject.open("a")
    subject.commit(subject.read(a, BLOCK))
    subject.commit(subject.read(a, BLOCK))
    subject.close(a)
    subject.client.flush()
    assert [end for _, end in subject.cache.inserted] == [BLOCK, 2 * BLOCK]


def test_the_log_names_the_request_whose_values_are_not_finite(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    subject = Committing()
    a, b = subject.open("a"), subject.open("b")
    steps = [subject.read(a, BLOCK), subject.read(b, BLOCK)]
    copies = {"a": [Run(0, BLOCK, "a", is_finite=False)]}
    monkeypatch.setattr(subject.engine, "take_copies", lambda pending: copies)
    caplog.set_level("DEBUG")
    subject.commit(steps[0])
    monkeypatch.undo()
    subject.commit(steps[1])
    assert caplog.messages == ["the KV of request a is not cached: its values are not finite"]
