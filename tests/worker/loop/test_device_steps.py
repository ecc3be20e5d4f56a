"""Steps that fail at any call: the step reports it, and three lone failures in a row mean a
broken device.
"""

from __future__ import annotations

import pytest

from holdfast.worker.engine.plan import Span, StepPlan
from holdfast.worker.loop.device_steps import (
    FAILURES_OF_A_BROKEN_DEVICE,
    DeviceBroken,
    DeviceSteps,
    DispatchedStep,
)
from tests.fakes.fake_engine import (
    RAISES_AT_COLLECT,
    RAISES_AT_DISPATCH,
    RAISES_ONCE,
    FakeEngine,
    expected_tokens,
)
from tests.fakes.looped_worker import a_sequence, request


def a_step(engine: FakeEngine, *prompts: tuple[int, ...]) -> DispatchedStep:
    asked = [
        request(f"r{len(engine.opened) + index}", *prompt) for index, prompt in enumerate(prompts)
    ]
    for each in asked:
        engine.open(each, capacity_tokens=100)
    spans = tuple(
        Span(request_id=each.request_id, start=0, tokens=len(each.prompt_token_ids), samples=True)
        for each in asked
    )
    return DispatchedStep(
        scheduled=StepPlan(spans=spans),
        plan=StepPlan(spans=spans),
        sequences=tuple(a_sequence(each) for each in asked),
        attempts=(0,) * len(asked),
        started_at=0.0,
        expected_seconds=None,
    )


def steps(engine: FakeEngine) -> DeviceSteps:
    return DeviceSteps(engine, retry_chunk_tokens=8)  # type: ignore[arg-type]


def test_a_successful_step_returns_the_drawn_tokens() -> None:
    engine = FakeEngine()
    subject, step = steps(engine), a_step(engine, (1, 2), (3,))
    subject.dispatch(step)
    result = subject.collect(step, later=None)
    assert result is not None
    assert [each.token_ids for each in result] == [
        tuple(expected_tokens(sequence.request)[:1]) for sequence in step.sequences
    ]


def test_an_undispatchable_step_is_suspect_and_returns_nothing() -> None:
    engine = FakeEngine()
    subject, step = steps(engine), a_step(engine, (1, RAISES_AT_DISPATCH))
    subject.dispatch(step)
    assert step.is_suspect
    assert subject.collect(step, later=None) is None
    assert not engine.pending


def test_a_failed_step_makes_the_next_one_suspect() -> None:
    engine = FakeEngine()
    subject = steps(engine)
    first, behind = a_step(engine, (1, RAISES_ONCE)), a_step(engine, (5, 6))
    subject.dispatch(first)
    subject.dispatch(behind)
    assert subject.collect(first, later=behind) is None
    assert behind.is_suspect
    assert subject.collect(behind, later=None) is None, "what it gives cannot be trusted"


def test_a_flight_without_sequences_touches_no_device() -> None:
    subject = steps(FakeEngine(is_broken=True))
    empty = a_step(FakeEngine())
    subject.dispatch(empty)
    result = subject.collect(empty, later=None)
    assert result is not None
    assert result == ()


def test_the_last_step_is_awaited_and_its_failure_is_harmless() -> None:
    engine = FakeEngine()
    subject = steps(engine)
    good, bad = a_step(engine, (1, 2)), a_step(engine, (1, RAISES_AT_COLLECT))
    assert subject.collect_last(good) is None, "it was never step"
    subject.dispatch(good)
    assert subject.collect_last(good) is not None
    subject.dispatch(bad)
    assert subject.collect_last(bad) is None


def test_consecutive_lone_failures_mean_a_broken_device() -> None:
    engine = FakeEngine()
    subject = steps(engine)
    good, guilty = a_step(engine, (1, 2)), a_step(engine, (1, RAISES_AT_COLLECT))
    for _ in range(FAILURES_OF_A_BROKEN_DEVICE - 1):
        assert "the device failed" in retried(subject, engine, guilty)
    assert retried(subject, engine, good) == ""
    for _ in range(FAILURES_OF_A_BROKEN_DEVICE - 1):
        assert retried(subject, engine, guilty)
    with pytest.raises(DeviceBroken):
        retried(subject, engine, guilty)


def test_a_sequence_that_cannot_be_reopened_fails_too() -> None:
    engine = FakeEngine()
    subject, step = steps(engine), a_step(engine, (1, 2))

    def reopen() -> None:
        raise MemoryError("no room")

    assert "no room" in subject.retry_alone(step.plan.spans[0], reopen=reopen).failure


def test_a_sequence_whose_state_was_dropped_gets_no_results() -> None:
    engine = FakeEngine()
    subject, step = steps(engine), a_step(engine, (1, 2), (3, 4))
    subject.dispatch(step)
    step.sequences[0].drop_state()
    result = subject.collect(step, later=None)
    assert result is not None
    assert [sequence for _, sequence, _ in step.current_results(result)] == [step.sequences[1]]
    assert step.healthy(result) == (step.sequences[1],)
    assert step.unhealthy(result) == ()


def retried(
    subject: DeviceSteps, engine: FakeEngine, step: DispatchedStep, *, was_alone: bool = True
) -> str:
    (span,) = step.plan.spans
    (sequence,) = step.sequences

    def reopen() -> None:
        engine.close(span.request_id)
        engine.open(sequence.request, capacity_tokens=10_000)

    return subject.retry_alone(span, reopen=reopen, was_alone=was_alone).failure


def limited_steps(engine: FakeEngine) -> tuple[DeviceSteps, list[int]]:
    limits: list[int] = []
    return DeviceSteps(engine, retry_chunk_tokens=2048, limit_chunks=limits.append), limits  # type: ignore[arg-type]


def chunk_sizes(engine: FakeEngine) -> list[int]:
    return [span.tokens for plan in engine.plans for span in plan.spans]


@pytest.mark.parametrize(("largest", "size"), [(600, 512), (511, 128), (128, 128)])
def test_oversized_chunks_are_quartered_and_the_size_remembered(largest: int, size: int) -> None:
    engine = FakeEngine(largest_chunk=largest)
    subject, limits = limited_steps(engine)
    assert retried(subject, engine, a_step(engine, tuple(range(1, 601)) + (7,) * 1448)) == ""
    assert limits == [size]
    engine.plans.clear()
    assert retried(subject, engine, a_step(engine, (5,) * 2048)) == ""
    assert max(chunk_sizes(engine)) <= size, "the next retry begins with what is known to work"


def test_a_chunk_fails_after_two_smaller_retries() -> None:
    engine = FakeEngine(largest_chunk=63)
    subject, limits = limited_steps(engine)
    assert "the device failed" in retried(subject, engine, a_step(engine, (5,) * 2048))
    assert chunk_sizes(engine) == [512, 128]
    assert limits == []


def test_failed_batches_do_not_limit_the_chunk_size() -> None:
    engine = FakeEngine()
    subject, limits = limited_steps(engine)
    assert retried(subject, engine, a_step(engine, (5,) * 2048), was_alone=False) == ""
    assert limits == []


def test_a_failing_decode_step_limits_no_chunks() -> None:
    engine = FakeEngine()
    subject, limits = limited_steps(engine)
    assert retried(subject, engine, a_step(engine, (5,))) == ""
    assert limits == []
