from __future__ import annotations

from typing import Any

import pytest

from holdfast.front.output import ChoiceFinished, TextDelta, ToolCallFinished
from holdfast.front.telemetry.metrics import Metrics
from holdfast.front.telemetry.request_log import AnswerRecord
from holdfast.wire.events import CacheOutcome, CacheReport, FinishReason, Timings, WaitReason


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model": "m", **labels})


def test_first_text_is_timed_from_the_request_gaps_per_choice() -> None:
    metrics, clock = Metrics(), Clock()
    answer = AnswerRecord(metrics, clock=clock)
    clock.now += 0.5
    answer.accepted("m", prompt_tokens=10)
    for seconds, index in ((1.0, 0), (2.0, 1), (3.0, 0), (1.0, 1)):
        clock.now += seconds
        answer.observe(TextDelta(index=index, text="x"))
    answer.close()
    assert sample(metrics, "holdfast_accept_seconds_sum") == 0.5
    assert sample(metrics, "holdfast_first_token_seconds_sum") == 1.5 + 3.5
    assert sample(metrics, "holdfast_inter_token_seconds_sum") == 5.0 + 4.0
    assert sample(metrics, "holdfast_inter_token_seconds_count") == 2
    assert sample(metrics, "holdfast_request_seconds_sum") == 7.5


def test_the_workers_times_and_counts_are_recorded_at_the_end() -> None:
    metrics = Metrics()
    answer = AnswerRecord(metrics)
    answer.accepted("m", prompt_tokens=10)
    answer.observe(
        ChoiceFinished(
            index=0,
            reason=FinishReason.STOP,
            prompt_tokens=10,
            completion_tokens=4,
            memory=CacheReport(ram_tokens=2, disk_tokens=1),
            timings=Timings(queue_seconds=1.0, prefill_seconds=2.0, decode_seconds=3.0),
        )
    )
    assert sample(metrics, "holdfast_requests_total", reason="stop") == 1
    assert sample(metrics, "holdfast_request_prompt_tokens_total") == 10
    assert sample(metrics, "holdfast_request_completion_tokens_total") == 4
    assert sample(metrics, "holdfast_request_cached_tokens_total") == 3
    assert sample(metrics, "holdfast_queue_seconds_sum") == 1.0
    assert sample(metrics, "holdfast_prefill_seconds_sum") == 2.0
    assert sample(metrics, "holdfast_decode_seconds_sum") == 3.0


def test_calls_repairs_and_reasoning_tokens_are_counted() -> None:
    metrics = Metrics()
    answer = AnswerRecord(metrics)
    answer.accepted("m", prompt_tokens=10)
    answer.observe(ToolCallFinished(index=0, call=0, repairs=("trailing_comma", "name")))
    answer.observe(ToolCallFinished(index=0, call=1, repairs=("name",)))
    answer.observe(
        ChoiceFinished(
            index=0,
            reason=FinishReason.STOP,
            prompt_tokens=10,
            completion_tokens=4,
            reasoning_tokens=3,
            calls=2,
        )
    )
    assert sample(metrics, "holdfast_tool_calls_total") == 2
    assert sample(metrics, "holdfast_tool_call_repairs_total", repair="name") == 2
    assert sample(metrics, "holdfast_tool_call_repairs_total", repair="trailing_comma") == 1
    assert sample(metrics, "holdfast_request_reasoning_tokens_total") == 3


def test_a_refused_request_counts_for_no_model() -> None:
    metrics = Metrics()
    AnswerRecord(metrics).close()
    assert b"holdfast_request_seconds_count" not in metrics.exposition({})


def test_answers_ended_by_stop_strings_are_timed_here() -> None:
    metrics = Metrics()
    now = [10.0]
    answer = AnswerRecord(metrics, clock=lambda: now[0])
    now[0] = 11.0
    answer.accepted("m", prompt_tokens=10)
    assert (answer.accept_seconds, answer.first_text_seconds(0)) == (1.0, None)
    now[0] = 13.0
    answer.observe(TextDelta(index=0, text="a"))
    now[0] = 17.0
    cut = ChoiceFinished(
        index=0,
        reason=FinishReason.STOP,
        prompt_tokens=1,
        completion_tokens=2,
        timings=Timings(prefill_seconds=2.0),
    )
    answer.observe(cut)
    assert answer.first_text_seconds(0) == 3.0
    assert sample(metrics, "holdfast_prefill_seconds_sum") == 2.0
    assert sample(metrics, "holdfast_decode_seconds_sum") == 4.0


def finished(**facts: Any) -> ChoiceFinished:
    usual = {"index": 0, "reason": FinishReason.STOP, "prompt_tokens": 10, "completion_tokens": 4}
    return ChoiceFinished(**(usual | facts))


def test_history_and_metrics_get_the_same_values() -> None:
    metrics, clock = Metrics(), Clock()
    answer = AnswerRecord(metrics, clock=clock)
    answer.accepted("m", prompt_tokens=10)
    for seconds in (0.5, 0.02, 0.04):
        clock.now += seconds
        answer.observe(TextDelta(index=0, text="x", token_ids=(1,)))
    memory = CacheReport(
        outcome=CacheOutcome.COMPLETE, ram_tokens=6, lookup_seconds=0.001, restore_seconds=0.03
    )
    timings = Timings(queue_seconds=0.1, prefill_seconds=0.3, decode_seconds=0.06)
    answer.observe(finished(memory=memory, timings=timings, accepted_tokens=2, rejected_tokens=3))
    answer.close({WaitReason.PLACE: 1.0, WaitReason.LOAD: 2.0})
    total = metrics.history.report("15m").total
    assert (total.answers, total.prompt_tokens, total.cached_tokens) == (1, 10, 6)
    assert (total.generated_tokens, total.drafted_tokens, total.accepted_tokens) == (4, 5, 2)
    means = {
        name: getattr(total, name).mean
        for name in ("load", "queue", "lookup", "restore", "prefill", "first_token", "gap")
    }
    assert means == {
        "load": 3.0,
        "queue": 0.1,
        "lookup": 0.001,
        "restore": 0.03,
        "prefill": 0.3,
        "first_token": 0.5,
        "gap": 0.03,
    }
    assert total.gap is not None and total.gap.count == 2
    assert total.speed is not None and total.speed.mean == pytest.approx(3 / 0.06)


def test_phases_that_did_not_happen_are_empty_in_the_history() -> None:
    metrics = Metrics()
    answer = AnswerRecord(metrics)
    answer.accepted("m", prompt_tokens=10)
    answer.observe(finished(completion_tokens=0, reason=FinishReason.CANCELLED))
    answer.close({WaitReason.LOAD: 0.0001})
    total = metrics.history.report("15m").total
    assert total.answers == 1
    phases = ("load", "queue", "lookup", "restore", "prefill", "first_token", "gap", "speed")
    assert [getattr(total, name) for name in phases] == [None] * 8


def test_a_request_without_a_model_is_not_in_the_history() -> None:
    metrics = Metrics()
    AnswerRecord(metrics).close({WaitReason.LOAD: 3.0})
    assert metrics.history.models == frozenset()
