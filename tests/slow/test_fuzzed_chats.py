"""Ten thousand requests that no honest client sends: each gets an answer that is described, and none is the server's fault."""

from __future__ import annotations

import asyncio
import collections
import json
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from holdfast.http.openai.errors import ErrorBody
from holdfast.http.openai.shapes import ChatCompletion
from tests.fakes.fuzzed_bodies import BodyFuzzer
from tests.fakes.http_clients import CHAT, events_of
from tests.fakes.server_process import ServerProcess

pytestmark = pytest.mark.slow
BODIES, AT_ONCE = 10_000, 8
STATUSES = {200, 400, 404, 413}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess("--store", "off", "--name", "demo", "--log-level", "error")
    server.wait_ready()
    yield server
    assert server.stop() == 0, server.log()


async def test_fuzzed_chats_are_answered_or_refused_by_name(server: ServerProcess) -> None:
    fuzzer = BodyFuzzer(11, model="demo")
    counted: collections.Counter[str] = collections.Counter()
    pid = server.model()["pid"]
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:

        async def work() -> None:
            while counted["bodies"] < BODIES:
                counted["bodies"] += 1
                body = fuzzer.body()
                response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
                counted[str(response.status_code)] += 1
                described(response, body)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    assert counted["200"] > BODIES // 20, counted
    assert counted["400"] > BODIES // 20, counted
    assert server.model()["pid"] == pid, "the worker was lost"


def described(response: httpx.Response, body: bytes) -> None:
    """The answer has a status and a form that are described."""
    told = f"{response.status_code} {response.text[:300]} for {body[:1000]!r}"
    assert response.status_code in STATUSES, told
    if response.status_code != 200:
        error = msgspec.json.decode(response.content, type=ErrorBody).error
        assert error.param or error.code in ("invalid_json", "invalid_type"), told
    elif response.headers["content-type"] == "application/json":
        msgspec.json.decode(response.content, type=ChatCompletion)
    else:
        *events, last = events_of(response.text)
        assert last == "[DONE]", told
        for event in events:
            msgspec.json.decode(json.dumps(event).encode("utf-8", "surrogatepass"), type=ChatCompletion)
