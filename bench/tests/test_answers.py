"""Tests of parsing answers."""

from __future__ import annotations

import json
from typing import Any

from holdfast_bench.answers import read_answer
from holdfast_bench.wire import RawAnswer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def raw_of(*pieces: bytes, aborted: bool = False) -> RawAnswer:
    """Pieces that arrive 1, 2, 3 … seconds after sending."""
    timed = [(float(number), piece) for number, piece in enumerate(pieces, 1)]
    return RawAnswer(sent_at=0.0, pieces=timed, ended_at=float(len(pieces)), aborted=aborted)


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(words: str) -> bytes:
    return event({"choices": [{"delta": {"content": words}, "finish_reason": None}]})


END = event({"choices": [{"delta": {}, "finish_reason": "length"}]})
USAGE = event(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 5},
        },
    }
)


def test_texts_times_usage_and_finish_reason_are_parsed() -> None:
    answer = read_answer(
        raw_of(
            HEAD, b": keepalive 1/2\n\n" + text("a "), text("b"), END + USAGE + b"data: [DONE]\n\n"
        )
    )
    assert (answer.text, answer.text_times, answer.first_seconds) == ("a b", (2.0, 3.0), 2.0)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 2, 5)
    assert answer.finish_reason == "length"
    assert answer.is_good
    assert answer.gaps() == [1.0]


def test_an_event_in_two_pieces_has_the_seconds_time() -> None:
    whole = text("word")
    answer = read_answer(raw_of(HEAD, whole[:10], whole[10:], END))
    assert answer.text_times == (3.0,)


def test_chunk_sizes_between_events_are_skipped() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    def chunk(data: bytes) -> bytes:
        return f"{len(data):x}\r\n".encode() + data + b"\r\n"

    answer = read_answer(
        raw_of(head, chunk(text("a ")), chunk(text("b")), chunk(END) + b"0\r\n\r\n")
    )
    assert (answer.text, answer.text_times) == ("a b", (2.0, 3.0))
    cut = chunk(text("a ")[:20]) + chunk(text("a ")[20:])
    assert read_answer(raw_of(head, cut, chunk(END))).text == "a"


def test_reasoning_counts_as_text_without_its_marks() -> None:
    shown = read_answer(raw_of(HEAD, text("<think>hm</think>yes"), END))
    apart = read_answer(
        raw_of(HEAD, event({"choices": [{"delta": {"reasoning": "hm", "content": "yes"}}]}), END)
    )
    assert shown.text == apart.text == "hmyes"


def test_an_answer_that_is_not_streamed_is_parsed() -> None:
    body = {
        "choices": [{"message": {"content": "all"}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 1},
    }
    answer = read_answer(raw_of(b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(body).encode()))
    assert (answer.text, answer.completion_tokens, answer.first_seconds) == ("all", 1, 1.0)


def test_errors_are_reported() -> None:
    refused = read_answer(
        raw_of(b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": {"message": "too long"}}')
    )
    assert not refused.is_good
    assert "too long" in refused.error
    failed = read_answer(raw_of(HEAD, text("a"), event({"error": {"message": "the worker died"}})))
    assert "the worker died" in failed.error
    assert "without a finish_reason" in read_answer(raw_of(HEAD, text("a"))).error
    assert read_answer(raw_of(HEAD, text("a"), aborted=True)).error == ""
