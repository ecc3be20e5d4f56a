from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.output import ChoiceFinished, PromptProgress, TextDelta, ToolCallFinished
from holdfast.front.telemetry.metrics import Metrics
from holdfast.front.telemetry.request_log import (
    AnswerRecord,
    RequestRecord,
    current_record,
    escaped,
    printable,
    waiting_for,
    write_line,
    write_progress,
)
from holdfast.wire.events import CacheOutcome, CacheReport, FinishReason, Timings, WaitReason


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(clock: Clock, **fields: object) -> RequestRecord:
    given = {
        "method": "POST",
        "path": "/v1/chat/completions",
        "client": "10.0.0.7",
        "status": 200,
        **fields,
    }
    return RequestRecord(clock=clock, **given)  # type: ignore[arg-type]


def ended(index: int, tokens: int, *, cached: int = 0) -> ChoiceFinished:
    return ChoiceFinished(
        index=index,
        reason=FinishReason.STOP,
        prompt_tokens=812,
        completion_tokens=tokens,
        cache_report=CacheReport(ram_tokens=cached),
    )


def accepted(clock: Clock, **options: object) -> AnswerRecord:
    answer = AnswerRecord(Metrics(), clock=clock)
    answer.note_accepted("demo", **options)  # type: ignore[arg-type]
    return answer


def answered(clock: Clock, **options: object) -> AnswerRecord:
    answer = accepted(clock, prompt_tokens=812, **options)
    for seconds, text in ((0.5, "Hel"), (1.0, "lo")):
        clock.now += seconds
        answer.observe(TextDelta(index=0, text=text, token_ids=(1, 2)))
    answer.observe(ended(0, 5, cached=640))
    return answer


def test_the_line_of_an_answer_has_tokens_and_speed() -> None:
    clock = Clock()
    served = record(clock, model="demo")
    served.answer = answered(clock)
    clock.now += 0.25
    assert str(served) == (
        "10.0.0.7 POST /v1/chat/completions 200 demo prompt 812 (640 cached) answer 5 first 0.50 s "
        "4.0 tok/s in 1.75 s stop"
    )
    assert served.fields == {
        "client": "10.0.0.7",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "model": "demo",
        "prompt_tokens": 812,
        "cached_tokens": 640,
        "answer_tokens": 5,
        "first_token_seconds": 0.5,
        "tokens_per_second": 4.0,
        "finish_reason": "stop",
        "seconds": 1.75,
    }


def test_the_line_shows_waits_in_front_and_worker() -> None:
    clock = Clock()
    served = record(clock, model="demo")
    with current_record(served), waiting_for(WaitReason.LOAD):
        assert served.waits_for is WaitReason.LOAD
        clock.now += 2.0
    assert served.waits_for is None
    served.answer = accepted(clock, prompt_tokens=812)
    for index, seconds in enumerate((1.0, 1.5)):
        end = ended(index, 5)
        timings = Timings(waited={WaitReason.MEMORY: seconds, WaitReason.DISK: 0.001})
        served.answer.observe(msgspec.structs.replace(end, timings=timings))
    assert "in 2.00 s (waited for load 2.00 s, memory 1.50 s)" in str(served)
    assert served.fields["waited_seconds"] == {"load": 2.0, "memory": 1.5}


def test_waits_outside_a_request_are_ignored() -> None:
    with waiting_for(WaitReason.PLACE):
        served = record(Clock())
    assert served.waits == {}


def test_a_request_without_an_answer_lacks_token_figures() -> None:
    assert str(record(Clock(), path="/v1/models")) == "10.0.0.7 POST /v1/models 200 in 0.00 s"


def test_a_refusal_has_a_shortened_reason() -> None:
    refused = record(Clock(), status=400)
    refused.fail(code="invalid_value", message="m" * 1000)
    assert "400 in 0.00 s invalid_value: mmm" in str(refused)
    assert len(str(refused)) < 300
    assert len(refused.fields["error_message"]) < 200


def test_an_aborted_request_is_logged_with_the_received_tokens() -> None:
    clock = Clock()
    gone = record(clock, is_aborted=True)
    gone.answer = accepted(clock, prompt_tokens=7)
    gone.answer.observe(TextDelta(index=0, text="a", token_ids=(1,)))
    assert str(gone).endswith("prompt 7 answer 1 first 0.00 s in 0.00 s aborted by the client")


def test_an_answer_that_arrives_in_one_burst_lacks_a_speed() -> None:
    clock = Clock()
    answer = accepted(clock, prompt_tokens=7)
    for _ in range(8):
        answer.observe(TextDelta(index=0, text="a", token_ids=(1,)))
        clock.now += 0.00002
    assert answer.tokens_per_second is None


def test_several_choices_are_summed_and_their_prompt_counts_once() -> None:
    clock = Clock()
    answer = accepted(clock, prompt_tokens=10, choices_per_prompt=2)
    for index in range(4):
        answer.observe(ended(index, 3, cached=4))
    assert (answer.tokens, answer.cached_tokens) == (12, 8)
    assert answer.tokens_per_second is None


@pytest.mark.parametrize(
    "path", ["/v1/\x1b]0;owned\x07", "/v1/\n12:00:00 INFO    10.0.0.1 GET / 200", "/\u202e"]
)
def test_a_path_cannot_control_the_terminal_or_forge_lines(path: str) -> None:
    hostile = record(Clock(), path=path, model="a\x1b[31mb", client="\x07")
    assert str(hostile).isprintable()


def test_contents_are_logged_only_on_request_and_limited() -> None:
    clock = Clock()
    silent, told = record(clock), record(clock)
    silent.answer, told.answer = answered(clock), answered(clock, prompt="Say\nhello")
    assert "Hel" not in str(silent) + str(silent.fields)
    assert str(told).splitlines()[1:] == [r"    prompt: Say\nhello", "    answer: Hello"]
    assert (told.fields["prompt"], told.fields["answers"]) == ("Say\nhello", ["Hello"])
    for _ in range(3):
        told.answer.observe(TextDelta(index=0, text="x" * 15_000))
    assert len(str(told)) < 40_000


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        ("/health", 200, logging.DEBUG),
        ("/health", 503, logging.DEBUG),
        ("/metrics", 200, logging.DEBUG),
        ("/admin/caller", 200, logging.DEBUG),
        ("/v1/models", 200, logging.INFO),
        ("/v1/chat/completions", 400, logging.INFO),
        ("/v1/chat/completions", 500, logging.INFO),
    ],
)
def test_polls_are_debug_lines_and_client_errors_info(
    path: str, status: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        write_line(record(Clock(), path=path, status=status))
    assert [line.levelno for line in caplog.records] == [level]


@pytest.mark.parametrize(
    ("method", "path", "level"),
    [
        ("GET", "/v1/models", logging.DEBUG),
        ("GET", "/v1/sessions", logging.DEBUG),
        ("PATCH", "/v1/sessions/a", logging.INFO),
        ("POST", "/v1/responses", logging.INFO),
    ],
)
def test_only_the_pages_reads_are_debug_lines(
    method: str, path: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        write_line(record(Clock(), method=method, path=path, status=200, is_from_page=True))
    assert [line.levelno for line in caplog.records] == [level]


def lines_about(
    reads: list[tuple[float, int]],
    caplog: pytest.LogCaptureFixture,
    *,
    total: int = 17_403,
    cached: int = 0,
) -> list[str]:
    """reads: the tokens read after these numbers of seconds."""
    clock = Clock()
    asked = record(clock, model="demo")
    asked.answer = accepted(clock, prompt_tokens=total)
    began = clock.now
    with caplog.at_level(logging.INFO):
        for seconds, tokens in reads:
            clock.now = began + seconds
            progress = PromptProgress(
                index=0,
                total_tokens=total,
                cached_tokens=cached,
                read_tokens=tokens,
                seconds=seconds,
            )
            write_progress(asked, progress)
    return [entry.getMessage() for entry in caplog.records]


def test_a_long_prefill_is_logged_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    lines = lines_about(
        [(1.0, 512), (2.0, 1024), (6.5, 3000), (7.0, 3500), (12.0, 8192), (30.0, 17_403)],
        caplog,
        cached=12,
    )
    assert lines == [
        "10.0.0.7 POST /v1/chat/completions demo prefill 512 of 17,403 tokens (12 cached) after "
        "1.0 s, about 34 s left",
        "10.0.0.7 POST /v1/chat/completions demo prefill 3,000 of 17,403 tokens (12 cached) after "
        "6.5 s, about 31 s left",
        "10.0.0.7 POST /v1/chat/completions demo prefill 8,192 of 17,403 tokens (12 cached) after "
        "12.0 s, about 14 s left",
    ]


def test_a_short_prefill_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_about([(0.5, 500), (1.0, 900)], caplog, total=1000) == []


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model": "m", **labels})


def test_first_text_is_timed_from_the_request_gaps_per_choice() -> None:
    metrics, clock = Metrics(), Clock()
    answer = AnswerRecord(metrics, clock=clock)
    clock.now += 0.5
    answer.note_accepted("m", prompt_tokens=10)
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
    answer.note_accepted("m", prompt_tokens=10)
    answer.observe(
        ChoiceFinished(
            index=0,
            reason=FinishReason.STOP,
            prompt_tokens=10,
            completion_tokens=4,
            cache_report=CacheReport(ram_tokens=2, disk_tokens=1),
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
    answer.note_accepted("m", prompt_tokens=10)
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
    answer.note_accepted("m", prompt_tokens=10)
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
    answer.note_accepted("m", prompt_tokens=10)
    for seconds in (0.5, 0.02, 0.04):
        clock.now += seconds
        answer.observe(TextDelta(index=0, text="x", token_ids=(1,)))
    report = CacheReport(
        outcome=CacheOutcome.COMPLETE, ram_tokens=6, lookup_seconds=0.001, restore_seconds=0.03
    )
    timings = Timings(queue_seconds=0.1, prefill_seconds=0.3, decode_seconds=0.06)
    answer.observe(
        finished(cache_report=report, timings=timings, accepted_tokens=2, rejected_tokens=3)
    )
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
    answer.note_accepted("m", prompt_tokens=10)
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


@given(text=st.text())
def test_any_text_becomes_printable(text: str) -> None:
    assert escaped(text).isprintable()
    assert printable(text, longest=10).isprintable()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", r"a\nb"),
        ("\x1b[2Jx", r"\x1b[2Jx"),
        ("\u202eabc", r"\u202eabc"),
        ("grüße ☃", "grüße ☃"),
        ("\ud83d", r"\ud83d"),
    ],
)
def test_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_a_long_text_is_cut_with_a_note() -> None:
    assert printable("abcdef", longest=4) == "abcd… (2 more characters)"
