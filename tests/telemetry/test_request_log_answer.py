from __future__ import annotations

from holdfast.telemetry.metrics import Metrics
from holdfast.telemetry.request_log import AnswerRecord
from holdfast.wire.events import CacheReport, FinishReason, Timings
from holdfast.wire.output import ChoiceFinished, TextDelta, ToolCallFinished


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model": "m", **labels})


def test_the_first_text_is_measured_from_the_request_and_gaps_per_choice() -> None:
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


def test_an_answer_ended_by_a_stop_string_is_timed_here() -> None:
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
