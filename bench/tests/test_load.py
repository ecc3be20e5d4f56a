"""Tests of the load generator: parsing answers, and its client with a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from holdfast_bench.load import read_answer
from holdfast_bench.null_server import NullServer
from holdfast_bench.servers import free_port
from holdfast_bench.wire import Call, RawAnswer, ServerUnreachable, get_json, split_answer
from tests.fakes.null_servers import serving

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


# -- the client

BODY = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 4, "stream": True}


async def test_every_piece_has_its_arrival_time() -> None:
    async with serving(NullServer(token_seconds=0.005)) as url:
        raw = await Call(url=f"{url}/v1/chat/completions", body=BODY).run()
    times = [at for at, _ in raw.pieces]
    assert times == sorted(times)
    assert raw.sent_at < times[0]
    assert times[-1] - times[0] >= 0.005
    assert raw.content().count(b"data: ") == 7  # four texts, the reason, usage, the end mark
    assert not raw.error


async def test_an_abort_ends_the_call_without_an_error() -> None:
    server = NullServer(prompt_token_seconds=30.0)
    async with serving(server) as url:
        call = Call(url=f"{url}/v1/chat/completions", body=BODY)
        running = asyncio.create_task(call.run())
        while not server.seen:
            await asyncio.sleep(0)
        call.abort()
        raw = await running
    assert raw.aborted
    assert not raw.error


async def test_a_silent_server_leads_to_a_timeout() -> None:
    async with serving(NullServer(prompt_token_seconds=30.0)) as url:
        raw = await Call(url=f"{url}/v1/chat/completions", body=BODY, timeout_seconds=0.05).run()
    assert "no end within" in raw.error


async def test_an_unreachable_server_raises() -> None:
    with pytest.raises(ServerUnreachable, match="cannot be reached"):
        await get_json(f"http://127.0.0.1:{free_port()}/v1/models")


async def test_get_json_returns_status_and_body() -> None:
    async with serving(NullServer()) as url:
        assert await get_json(f"{url}/v1/models") == (
            200,
            {"object": "list", "data": [{"id": "null"}]},
        )
        assert (await get_json(f"{url}/nothing"))[0] == 404


def test_chunked_bodies_are_joined_even_if_cut_off() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert split_answer(head + b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n") == (200, b"hello world")
    assert split_answer(head + b"5\r\nhello\r\n6\r\n wo") == (200, b"hello wo")
    assert split_answer(b"") == (0, b"")
