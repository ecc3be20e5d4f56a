"""Tests of the load generator's client with a real socket."""

from __future__ import annotations

import asyncio

import pytest

from holdfast_bench.null_server import NullServer
from holdfast_bench.servers import free_port
from holdfast_bench.wire import Call, ServerUnreachable, get_json, split_answer
from tests.fakes.null_servers import serving

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
