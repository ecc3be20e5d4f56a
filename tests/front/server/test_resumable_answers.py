from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette

from holdfast.config import LimitsSettings, ServerSettings
from holdfast.errors import GenerationFailed, QueueFull
from holdfast.front.application import create_application
from holdfast.front.openai.answer import ChatAnswer
from holdfast.front.request import GenerationRequest
from holdfast.front.server.answers import GenerationPlan
from holdfast.front.server.resumable_answers import (
    RETRY_HEADER,
    RequestIdentity,
    ResumableAnswer,
    ResumableAnswers,
)
from holdfast.front.server.services import Services
from holdfast.front.telemetry.request_log import RequestRecord
from holdfast.wire.requests import SamplingParams
from tests.fakes.http_clients import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    Exchange,
    chat_body,
    completion_body,
    message_body,
    served,
)
from tests.fakes.scripted_gateway import (
    MODEL,
    ScriptedGateway,
    ScriptedStream,
    answer,
    calling,
    scripted_services,
)

PATIENT = ServerSettings(port=0, shutdown_seconds=0)
PROTOCOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, chat_body()),
    "completions": (COMPLETIONS, completion_body()),
    "messages": (MESSAGES, message_body()),
    "responses": ("/v1/responses", {"model": MODEL, "input": "hello"}),
    "responses not stored": ("/v1/responses", {"model": MODEL, "input": "hello", "store": False}),
    "ollama chat": (
        "/api/chat",
        {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]},
    ),
    "ollama generate": ("/api/generate", {"model": MODEL, "prompt": "hello"}),
}


def greedy(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body with temperature 0, which always gives the same tokens."""
    return (
        {**body, "options": {"temperature": 0}}
        if path.startswith("/api/")
        else {**body, "temperature": 0}
    )


def greedy_chat(**fields: Any) -> dict[str, Any]:
    return chat_body(**{"temperature": 0, **fields})


EVERY_PROTOCOL = pytest.mark.parametrize("name", PROTOCOLS)


@dataclass
class Line:
    """An in-memory server, a model that speaks when told to, and clients that come and go."""

    gateway: ScriptedGateway
    settings: ServerSettings = PATIENT
    limits: LimitsSettings = field(default_factory=LimitsSettings)
    services: Services = field(init=False)
    app: Starlette = field(init=False)

    def __post_init__(self) -> None:
        self.services = scripted_services(self.gateway, server=self.settings, limits=self.limits)
        self.app = create_application(self.services)

    def exchange(self) -> Exchange:
        exchange = Exchange(self.gateway)
        exchange.app = self.app
        return exchange

    async def lost(
        self,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str] | None = None,
        address: str = "127.0.0.1",
    ) -> tuple[Exchange, asyncio.Task[None]]:
        """A client whose connection breaks during the answer; it has received the beginning of a
        stream.
        """
        exchange = self.exchange()
        before = len(self.gateway.streams)
        running = asyncio.create_task(exchange.run(path, body, headers=headers, address=address))
        await self.gateway.until(lambda: len(self.gateway.requests) > before)
        if body.get("stream", path.startswith("/api/")):
            await exchange.first_body.wait()
        while len(self.gateway.streams) == before:
            await asyncio.sleep(0)
        lost = [active for active in self.services.answers.active if not active.is_abandoned][-1]
        exchange.gone.set()
        while not lost.record.is_aborted and not running.done():
            await asyncio.sleep(0)
        return exchange, running

    async def at_rest(self) -> None:
        """Return when abandoned answers have ended."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def whole(self, path: str, body: dict[str, Any], **given: Any) -> Exchange:
        """A client that stays until it has received everything."""
        exchange = self.exchange()
        async with asyncio.timeout(60):
            await exchange.run(path, body, **given)
        return exchange


def in_two_parts(*, until: asyncio.Event) -> list[Any]:
    begun, *rest = answer("Hel", "lo", " there")
    return [begun, until, *rest]


@asynccontextmanager
async def line(script: Any, **given: Any) -> AsyncIterator[Line]:
    made = Line(ScriptedGateway(script=script), **given)
    yield made
    await made.services.answers.resumable.cancel_lost()
    made.services.answers.resumable.check_invariants()


@EVERY_PROTOCOL
async def test_a_lost_stream_is_replayed_to_the_same_request(name: str) -> None:
    path, body = PROTOCOLS[name]
    body = {**greedy(path, body), "stream": True}
    goes_on = asyncio.Event()
    async with line(in_two_parts(until=goes_on)) as server:
        first, running = await server.lost(path, body)
        goes_on.set()
        second = await server.whole(path, body)
        await running
        assert len(server.gateway.requests) == 1
        assert second.status == 200
        assert len(first.text) > 10
        assert second.text.startswith(first.text)
        alone = await server.whole(path, {**body, "temperature": 0.5})
        assert len(alone.text.splitlines()) == len(second.text.splitlines())


@EVERY_PROTOCOL
async def test_a_lost_whole_answer_is_replayed_to_the_same_request(name: str) -> None:
    path, body = PROTOCOLS[name]
    body = {**greedy(path, body), "stream": False}
    goes_on = asyncio.Event()
    async with line(in_two_parts(until=goes_on)) as server:
        first, running = await server.lost(path, body)
        second = asyncio.create_task(server.whole(path, body))
        await asyncio.sleep(0)
        goes_on.set()
        got = await second
        await running
        assert (len(server.gateway.requests), first.messages) == (1, [])
        assert got.status == 200
        assert "Hello there" in got.text


@pytest.mark.parametrize("streams", [True, False])
@EVERY_PROTOCOL
async def test_a_request_repeated_after_stopping_gets_a_new_answer(
    name: str, streams: bool
) -> None:
    path, body = PROTOCOLS[name]
    body = {**body, "stream": streams}
    goes_on = asyncio.Event()
    async with line(lambda _: in_two_parts(until=goes_on)) as server:
        _, stopped = await server.lost(path, body)
        goes_on.set()
        again = await server.whole(path, body)
        await stopped
        assert (again.status, len(server.gateway.requests)) == (200, 2)


@pytest.mark.parametrize(
    ("fields", "first", "second", "answers"),
    [
        ({"temperature": 0}, {}, {}, 1),
        ({"temperature": 0.7, "seed": 5}, {}, {}, 1),
        ({"temperature": 0.7}, {RETRY_HEADER: "0"}, {RETRY_HEADER: "1"}, 1),
        ({"temperature": 0.7}, {RETRY_HEADER: "0"}, {RETRY_HEADER: "2"}, 1),
        ({"temperature": 0.7}, {"idempotency-key": "a"}, {"idempotency-key": "a"}, 1),
        ({"temperature": 0.7}, {}, {}, 2),
        ({"temperature": 0.7}, {RETRY_HEADER: "0"}, {RETRY_HEADER: "0"}, 2),
        ({"temperature": 0.7}, {RETRY_HEADER: "0"}, {RETRY_HEADER: "none"}, 2),
        ({}, {}, {}, 2),
    ],
)
async def test_a_lost_answer_is_reused_for_retries_and_deterministic_requests(
    fields: dict[str, Any], first: dict[str, str], second: dict[str, str], answers: int
) -> None:
    goes_on = asyncio.Event()
    async with line(lambda _: in_two_parts(until=goes_on)) as server:
        _, running = await server.lost(CHAT, chat_body(stream=True, **fields), headers=first)
        goes_on.set()
        await server.whole(CHAT, chat_body(stream=True, **fields), headers=second)
        await running
        assert len(server.gateway.requests) == answers


async def test_a_greedy_model_makes_a_request_repeatable() -> None:
    goes_on = asyncio.Event()
    async with line(lambda _: in_two_parts(until=goes_on)) as server:
        server.gateway.generation_defaults = {"temperature": 0.0}
        _, running = await server.lost(CHAT, chat_body(stream=True))
        goes_on.set()
        await server.whole(CHAT, chat_body(stream=True))
        await running
        assert len(server.gateway.requests) == 1


@pytest.mark.parametrize(
    ("settings", "headers", "fields", "holds"),
    [
        (PATIENT, {}, {"temperature": 0}, True),
        (PATIENT, {}, {}, False),
        (PATIENT, {RETRY_HEADER: "0"}, {}, True),
        (ServerSettings(reconnect_seconds=0), {RETRY_HEADER: "0"}, {"temperature": 0}, False),
        (ServerSettings(reconnect_seconds=0), {"idempotency-key": "a"}, {}, True),
    ],
)
async def test_events_are_recorded_only_if_they_may_be_replayed(
    settings: ServerSettings, headers: dict[str, str], fields: dict[str, Any], holds: bool
) -> None:
    goes_on = asyncio.Event()
    async with line(in_two_parts(until=goes_on), settings=settings) as server:
        exchange = server.exchange()
        running = asyncio.create_task(
            exchange.run(CHAT, chat_body(stream=True, **fields), headers=headers)
        )
        await exchange.first_body.wait()
        assert (server.services.answers.resumable.buffered_bytes > 0) == holds
        goes_on.set()
        await running


async def test_another_query_gets_another_answer() -> None:
    goes_on = asyncio.Event()
    async with line(lambda _: in_two_parts(until=goes_on)) as server:
        await server.lost(CHAT, greedy_chat(stream=True))
        goes_on.set()
        await server.whole(CHAT, greedy_chat(stream=True), query="beta=true")
        assert len(server.gateway.requests) == 2


async def test_a_follower_gets_everything_if_the_first_client_leaves() -> None:
    goes_on = asyncio.Event()
    key = {"idempotency-key": "k"}
    async with line(in_two_parts(until=goes_on)) as server:
        first = server.exchange()
        running = asyncio.create_task(first.run(CHAT, chat_body(stream=True), headers=key))
        await first.first_body.wait()
        second = server.exchange()
        following = asyncio.create_task(second.run(CHAT, chat_body(stream=True), headers=key))
        await second.first_body.wait()
        server.services.access.drain.begin(60)
        first.gone.set()
        while not any(active.record.is_aborted for active in server.services.answers.active):
            await asyncio.sleep(0)
        goes_on.set()
        await following
        await running
        assert second.text.endswith("data: [DONE]\n\n")


async def test_a_followed_answer_does_not_exceed_the_total_size() -> None:
    key = {"idempotency-key": "k"}
    goes_on = asyncio.Event()
    begun, end = answer("Hel")
    script = [begun, goes_on, *answer(*["lo"] * 200)[:-1], end]
    async with line(script) as server:
        held = server.services.answers.resumable
        held._most_bytes = 2000
        first = server.exchange()
        running = asyncio.create_task(first.run(CHAT, chat_body(stream=True), headers=key))
        await first.first_body.wait()
        second = server.exchange()
        following = asyncio.create_task(second.run(CHAT, chat_body(stream=True), headers=key))
        await second.first_body.wait()
        goes_on.set()
        while not running.done():
            held.check_invariants()
            await asyncio.sleep(0)
        await following
        assert first.text.endswith("data: [DONE]\n\n")
        assert second.text.endswith("data: [DONE]\n\n") or "reads this slowly" in second.text
        assert held.buffered_bytes == 0


def test_an_identity_stays_the_same_without_its_body() -> None:
    def identity(body: bytes, *, is_freed: bool) -> RequestIdentity:
        made = RequestIdentity(b"a", body)
        if is_freed:
            made.free_body()
        return made

    for one, other in itertools.product([False, True], repeat=2):
        first = identity(b"same", is_freed=one)
        assert {first: 1}.get(identity(b"same", is_freed=other)) == 1
        assert {first: 1}.get(identity(b"else", is_freed=other)) is None
        assert first != identity(b"longer", is_freed=other)


async def test_a_lost_answer_keeps_no_body_of_an_earlier_answer() -> None:
    held = ResumableAnswers()
    bodies = [bytes(bytearray(1000)) for _ in range(2)]
    kept = sys.getrefcount(bodies[0])

    def begin(body: bytes) -> ResumableAnswer:
        made = held.begin(RequestIdentity(b"a", body, attempt=0), plan(), record())
        made.mark_accepted(ScriptedStream((), lambda: None))
        return made

    first, lost = map(begin, bodies)
    assert not held.client_left(first, PATIENT, has_all=True)
    assert held.client_left(lost, PATIENT, has_all=False)
    held.check_invariants()
    del first
    gc.collect()
    assert [sys.getrefcount(bodies[place]) for place in range(2)] == [kept, kept]
    assert held.claim(RequestIdentity(b"a", bodies[0], attempt=1)) is lost
    assert held.claim(RequestIdentity(b"a", bytes(999), attempt=1)) is None
    held.client_left(lost, PATIENT, has_all=True)
    held.check_invariants()
    assert not held._by_head


async def test_a_slow_follower_is_told_that_its_answer_was_dropped() -> None:
    held = ResumableAnswers(most_bytes=1500)
    identity = RequestIdentity(b"a", has_idempotency_key=True)
    made = held.begin(identity, plan(), record())
    made.mark_accepted(ScriptedStream((), lambda: None))
    assert held.claim(identity) is made
    slow = made.events_after(-1)
    for _ in range(10):
        held.record(made, b"x" * 300)
        held.check_invariants()
    assert held.claim(identity) is None
    with pytest.raises(GenerationFailed, match="this slowly"):
        _ = [frame async for frame in slow]


async def test_a_fast_follower_gets_an_answer_larger_than_the_limit() -> None:
    held = ResumableAnswers(most_bytes=1500)
    identity = RequestIdentity(b"a", has_idempotency_key=True)
    made = held.begin(identity, plan(), record())
    made.mark_accepted(ScriptedStream((), lambda: None))
    assert held.claim(identity) is made
    events = made.events_after(-1)
    assert await anext(events) == b""
    for number in range(20):
        held.record(made, b"%d" % number * 100)
        held.check_invariants()
        assert await anext(events) == b"%d" % number * 100


async def test_delivered_keyed_answers_do_not_evict_lost_ones() -> None:
    async with line(lambda _: in_two_parts(until=asyncio.Event())) as server:
        _, running = await server.lost(CHAT, greedy_chat(stream=True))
        server.gateway.script = lambda _: answer("yes")
        for number in range(20):
            await server.whole(CHAT, greedy_chat(), headers={"idempotency-key": str(number)})
        await server.at_rest()
        assert not running.done()
        assert len(server.services.answers.resumable) == 21


async def test_lost_answers_do_not_evict_those_of_other_clients() -> None:
    async with line(lambda _: in_two_parts(until=asyncio.Event())) as server:
        _, running = await server.lost(CHAT, greedy_chat(stream=True), address="127.0.0.2")
        for seed in range(17):
            await server.lost(CHAT, greedy_chat(stream=True, seed=seed))
        await server.at_rest()
        assert not running.done()


async def test_finished_lost_answers_are_evicted_first() -> None:
    goes_on = asyncio.Event()
    async with line(lambda _: in_two_parts(until=asyncio.Event())) as server:
        _, oldest = await server.lost(CHAT, greedy_chat(stream=True, seed=100))
        server.gateway.script = lambda _: in_two_parts(until=goes_on)
        _, ended = await server.lost(CHAT, greedy_chat(stream=True, seed=101))
        goes_on.set()
        await ended
        server.gateway.script = lambda _: in_two_parts(until=asyncio.Event())
        for seed in range(15):
            await server.lost(CHAT, greedy_chat(stream=True, seed=seed))
        await server.at_rest()
        assert not oldest.done()


@pytest.mark.parametrize("streams", [True, False])
async def test_a_rejoining_request_is_listed_and_can_be_cancelled(streams: bool) -> None:
    async with line(lambda _: in_two_parts(until=asyncio.Event())) as server:
        _, running = await server.lost(
            CHAT, greedy_chat(stream=streams), headers={"x-request-id": "first"}
        )
        again = server.exchange()
        headers = {"x-request-id": "second"}
        following = asyncio.create_task(
            again.run(CHAT, greedy_chat(stream=streams), headers=headers)
        )
        while len(list(server.services.answers.active)) < 2:
            await asyncio.sleep(0)
        if streams:
            await again.first_body.wait()
        transport = httpx.ASGITransport(server.app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8321"
        ) as admin:
            shown = (await admin.get("/admin/requests")).json()["requests"]
            assert [each["id"] for each in shown] == ["first", "second"]
            assert "abandoned" not in [each["state"] for each in shown]
            assert shown[1]["model"] == MODEL
            assert (await admin.delete("/admin/requests/second")).status_code == 200
        await following
        await running
        assert "request_cancelled" in again.text
        assert len(server.services.answers.resumable) == 0


async def test_unloading_a_model_does_not_wait_for_a_lost_client() -> None:
    path, body = PROTOCOLS["ollama chat"]
    async with line(lambda _: in_two_parts(until=asyncio.Event())) as server:
        _, running = await server.lost(path, {**greedy(path, body), "keep_alive": 0})
        async with asyncio.timeout(60):
            await running
        assert server.gateway.closed == [server.gateway.request.request_id]


@pytest.mark.parametrize("streams", [True, False])
async def test_an_answer_finished_without_a_client_waits_for_its_request(streams: bool) -> None:
    goes_on = asyncio.Event()
    async with line(in_two_parts(until=goes_on)) as server:
        _, running = await server.lost(CHAT, greedy_chat(stream=streams))
        goes_on.set()
        await running
        second = await server.whole(CHAT, greedy_chat(stream=streams))
        assert len(server.gateway.requests) == 1
        assert "Hel" in second.text
        third = await server.whole(CHAT, greedy_chat(stream=streams))
        assert len(server.gateway.requests) == 2
        assert third.text != second.text  # another answer has another id


async def test_tool_calls_are_replayed_too() -> None:
    goes_on = asyncio.Event()
    called = calling(("look", '{"path": "notes"}'), thought="I look.")
    async with line([*called[:3], goes_on, *called[3:]]) as server:
        body = greedy_chat(stream=True, tools=[{"type": "function", "function": {"name": "look"}}])
        first, running = await server.lost(CHAT, body)
        goes_on.set()
        second = await server.whole(CHAT, body)
        await running
        assert second.text.startswith(first.text)
        assert second.text.count('"name":"look"') == 1
        assert '"finish_reason":"tool_calls"' in second.text


async def test_repeated_connection_losses_still_deliver_the_answer() -> None:
    goes_on = asyncio.Event()
    async with line(in_two_parts(until=goes_on)) as server:
        _, running = await server.lost(CHAT, greedy_chat(stream=True))
        for _ in range(3):
            again = server.exchange()
            following = asyncio.create_task(again.run(CHAT, greedy_chat(stream=True)))
            await again.first_body.wait()
            again.gone.set()
            await following
        goes_on.set()
        last = await server.whole(CHAT, greedy_chat(stream=True))
        await running
        assert len(server.gateway.requests) == 1
        assert last.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("of_taker", [False, True])
async def test_a_client_leaving_with_the_last_event_has_its_answer(
    of_taker: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    goes_on = asyncio.Event()
    async with line(lambda _: in_two_parts(until=goes_on)) as server:
        if of_taker:
            await server.lost(CHAT, greedy_chat(stream=True))
        goes_on.set()
        hasty = server.exchange()
        hasty.leaves_behind = b"[DONE]"
        await hasty.run(CHAT, greedy_chat(stream=True))
        assert len(server.gateway.requests) == 1
        assert "aborted by the client" not in str(caplog.records[-1].msg)
        assert len(server.services.answers.resumable) == 0
        await server.whole(CHAT, greedy_chat(stream=True))
        assert len(server.gateway.requests) == 2


@pytest.mark.parametrize("streams", [True, False])
async def test_a_delivered_answer_is_not_reused(streams: bool) -> None:
    gateway = ScriptedGateway(script=lambda _: answer("Hel", "lo"))
    async with served(gateway, settings=PATIENT) as url, httpx.AsyncClient(timeout=60) as client:
        texts = [
            (await client.post(url + CHAT, json=greedy_chat(stream=streams))).text for _ in range(5)
        ]
    assert len(gateway.requests) == len(set(texts)) == 5


async def test_equal_requests_of_connected_clients_get_different_answers() -> None:
    goes_on = asyncio.Event()
    async with line(lambda _: in_two_parts(until=goes_on)) as server:
        both = [asyncio.create_task(server.whole(CHAT, greedy_chat())) for _ in range(2)]
        await server.gateway.until(lambda: len(server.gateway.requests) == 2)
        goes_on.set()
        first, second = [await each for each in both]
        assert first.text != second.text
        await server.whole(CHAT, greedy_chat())
        assert len(server.gateway.requests) == 3


async def test_a_lost_answer_is_given_to_one_request() -> None:
    goes_on = asyncio.Event()
    async with line(lambda _: in_two_parts(until=goes_on)) as server:
        await server.lost(CHAT, greedy_chat(stream=True))
        both = [asyncio.create_task(server.whole(CHAT, greedy_chat(stream=True))) for _ in range(2)]
        await server.gateway.until(lambda: len(server.gateway.requests) == 2)
        goes_on.set()
        first, second = [await each for each in both]
        assert first.text != second.text


@pytest.mark.parametrize(
    ("path", "changed", "headers"),
    [
        (CHAT, {"temperature": 0.5}, {}),
        (CHAT, {"cache_salt": "another"}, {}),
        (CHAT, {}, {"x-holdfast-tenant": "another"}),
        (CHAT, {}, {"x-session-id": "another"}),
        (CHAT, {}, {"x-holdfast-explain": "1"}),
        (CHAT, {}, {"idempotency-key": "another"}),
        (COMPLETIONS, {"messages": None, "prompt": "hello"}, {}),
    ],
)
async def test_a_different_request_gets_another_answer(
    path: str, changed: Any, headers: dict[str, str]
) -> None:
    goes_on = asyncio.Event()
    async with line(lambda _: in_two_parts(until=goes_on)) as server:
        await server.lost(CHAT, greedy_chat(stream=True))
        goes_on.set()
        body = {
            name: value
            for name, value in greedy_chat(stream=True, **changed).items()
            if value is not None
        }
        await server.whole(path, body, headers=headers)
        assert len(server.gateway.requests) == 2


async def test_headers_that_change_between_retries_are_ignored() -> None:
    goes_on = asyncio.Event()
    async with line(in_two_parts(until=goes_on)) as server:
        await server.lost(
            CHAT,
            greedy_chat(stream=True),
            headers={"x-stainless-retry-count": "0", "x-request-id": "a"},
        )
        goes_on.set()
        again = {"x-stainless-retry-count": "1", "x-request-id": "b", "traceparent": "00-1-1-01"}
        await server.whole(CHAT, greedy_chat(stream=True), headers=again)
        assert len(server.gateway.requests) == 1


async def test_another_address_gets_another_answer() -> None:
    goes_on = asyncio.Event()
    async with line(lambda _: in_two_parts(until=goes_on)) as server:
        await server.lost(CHAT, greedy_chat(stream=True))
        goes_on.set()
        await server.whole(CHAT, greedy_chat(stream=True), address="127.0.0.2")
        assert len(server.gateway.requests) == 2


@pytest.mark.parametrize("streams", [True, False])
async def test_an_idempotency_key_returns_the_delivered_answer(streams: bool) -> None:
    async with line(answer("Hel", "lo")) as server:
        key = {"idempotency-key": "stainless-python-retry-1"}
        first = await server.whole(CHAT, greedy_chat(stream=streams), headers=key)
        second = await server.whole(CHAT, greedy_chat(stream=streams), headers=key)
        third = await server.whole(CHAT, greedy_chat(stream=streams), headers=key)
        assert first.text == second.text == third.text
        assert len(server.gateway.requests) == 1


async def test_an_idempotency_key_joins_a_running_answer() -> None:
    goes_on = asyncio.Event()
    async with line(in_two_parts(until=goes_on)) as server:
        key = {"idempotency-key": "k"}
        first = asyncio.create_task(server.whole(CHAT, greedy_chat(stream=True), headers=key))
        await server.gateway.until(lambda: bool(server.gateway.requests))
        second = asyncio.create_task(server.whole(CHAT, greedy_chat(stream=True), headers=key))
        await asyncio.sleep(0)
        goes_on.set()
        assert (await first).text == (await second).text
        assert len(server.gateway.requests) == 1


def stream_of(server: Line) -> ScriptedStream:
    (stream,) = server.gateway.streams
    return stream


async def test_an_abandoned_answer_pauses_and_resumes_with_its_client() -> None:
    goes_on = asyncio.Event()
    settings = ServerSettings(unattended_seconds=0)
    async with line(in_two_parts(until=goes_on), settings=settings) as server:
        _, running = await server.lost(CHAT, greedy_chat(stream=True))
        while not stream_of(server).is_paused:
            await asyncio.sleep(0)
        second = asyncio.create_task(server.whole(CHAT, greedy_chat(stream=True)))
        while stream_of(server).is_paused:
            await asyncio.sleep(0)
        goes_on.set()
        await second
        await running
        assert len(server.gateway.requests) == 1, "nothing was generated twice"


async def test_an_abandoned_answer_pauses_when_another_request_arrives() -> None:
    goes_on = asyncio.Event()
    settings = ServerSettings(unattended_seconds=3600)
    async with line(lambda _: in_two_parts(until=goes_on), settings=settings) as server:
        await server.lost(CHAT, greedy_chat(stream=True))
        assert not stream_of(server).is_paused
        other = asyncio.create_task(server.whole(CHAT, greedy_chat(seed=1)))
        await server.gateway.until(lambda: len(server.gateway.requests) == 2)
        assert server.gateway.streams[0].is_paused
        _, running = await server.lost(CHAT, greedy_chat(stream=True, seed=2))
        assert server.gateway.streams[2].is_paused, (
            "one that is lost while others run pauses at once"
        )
        goes_on.set()
        await other
        await running


async def test_an_abandoned_answer_is_cancelled_if_its_client_stays_away() -> None:
    settings = ServerSettings(reconnect_seconds=0.001)
    async with line(in_two_parts(until=asyncio.Event()), settings=settings) as server:
        _, running = await server.lost(CHAT, greedy_chat(stream=True))
        async with asyncio.timeout(60):
            await running
        assert server.gateway.closed == [server.gateway.request.request_id]
        assert len(server.services.answers.resumable) == 0


async def test_without_reconnect_time_work_ends_with_the_connection() -> None:
    settings = ServerSettings(reconnect_seconds=0)
    async with line(in_two_parts(until=asyncio.Event()), settings=settings) as server:
        _, running = await server.lost(CHAT, greedy_chat(stream=True))
        await running
        assert server.gateway.closed == [server.gateway.request.request_id]


async def test_an_answer_that_failed_while_abandoned_is_generated_again() -> None:
    fails = asyncio.Event()
    scripts = iter(
        [[*answer("Hel")[:1], fails, GenerationFailed("the worker died")], answer("Hel", "lo")]
    )
    async with line(lambda _: next(scripts)) as server:
        _, running = await server.lost(CHAT, greedy_chat(stream=True))
        fails.set()
        await running
        second = await server.whole(CHAT, greedy_chat(stream=True))
        assert len(server.gateway.requests) == 2
        assert second.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("streams", [True, False])
async def test_a_failed_answer_fails_its_new_client(streams: bool) -> None:
    fails = asyncio.Event()
    async with line([*answer("Hel")[:1], fails, GenerationFailed("the worker died")]) as server:
        _, running = await server.lost(CHAT, greedy_chat(stream=streams))
        second = asyncio.create_task(server.whole(CHAT, greedy_chat(stream=streams)))
        await asyncio.sleep(0)
        fails.set()
        assert "the worker died" in (await second).text
        await running


async def test_abandoned_answers_free_their_places_in_the_queue() -> None:
    async with line(lambda _: in_two_parts(until=asyncio.Event())) as server:
        _, running = await server.lost(CHAT, greedy_chat(stream=True))
        server.gateway.script = answer("yes")
        server.gateway.refuses_while = lambda: not server.gateway.closed
        server.gateway.passing_refusal = QueueFull(queued=1, limit=1, retry_after_seconds=1)
        other = await server.whole(CHAT, greedy_chat(seed=1))
        assert (other.status, running.done()) == (200, True)


async def test_an_abandoned_answer_does_not_count_for_its_caller() -> None:
    limits = LimitsSettings(max_requests_per_address=1)
    async with line(lambda _: in_two_parts(until=asyncio.Event()), limits=limits) as server:
        await server.lost(CHAT, greedy_chat(stream=True))
        server.gateway.script = answer("yes")
        assert (await server.whole(CHAT, greedy_chat(seed=1))).status == 200


async def test_an_abandoned_answer_is_listed_and_can_be_cancelled() -> None:
    async with line(lambda _: in_two_parts(until=asyncio.Event())) as server:
        _, running = await server.lost(CHAT, greedy_chat(stream=True))
        transport = httpx.ASGITransport(server.app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8321"
        ) as admin:
            (shown,) = (await admin.get("/admin/requests")).json()["requests"]
            assert shown["state"] == "abandoned"
            await admin.delete(f"/admin/requests/{shown['id']}")
        await running
        assert len(server.services.answers.resumable) == 0


async def test_the_log_line_names_the_reused_answers_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    goes_on = asyncio.Event()
    async with line(in_two_parts(until=goes_on)) as server:
        _, running = await server.lost(
            CHAT, greedy_chat(stream=True), headers={"x-request-id": "first"}
        )
        goes_on.set()
        await server.whole(CHAT, greedy_chat(stream=True), headers={"x-request-id": "second"})
        await running
        said = [each.msg for each in caplog.records if isinstance(each.msg, RequestRecord)]
        lines = {each.request_id: each for each in said}
        assert lines["second"].fields["rejoined"] == "first"
        assert "rejoined first" in str(lines["second"])
        assert lines["first"].fields["answer_tokens"] == 3
        assert "answer_tokens" not in lines["second"].fields, "tokens are counted once"


async def test_the_number_of_abandoned_answers_is_limited() -> None:
    async with line(lambda _: in_two_parts(until=asyncio.Event())) as server:
        lost = [
            (await server.lost(CHAT, greedy_chat(stream=True, seed=seed)))[1] for seed in range(17)
        ]
        async with asyncio.timeout(60):
            await lost[0]
        assert not any(running.done() for running in lost[1:])


async def test_oversized_answers_are_cancelled_with_their_connection() -> None:
    async with line(in_two_parts(until=asyncio.Event())) as server:
        server.services.answers.resumable._most_bytes = 100
        _, running = await server.lost(CHAT, greedy_chat(stream=True))
        async with asyncio.timeout(60):
            await running
        assert server.services.answers.resumable.buffered_bytes == 0


def plan() -> GenerationPlan:
    request = GenerationRequest(request_id="a", model=MODEL, prompt="", streams=True)
    return [request], ChatAnswer(answer_id="a", choices=1, model=MODEL, version="1")


def record() -> RequestRecord:
    return RequestRecord(method="POST", path=CHAT, client="127.0.0.1")


def stream_at(*, temperature: float) -> ScriptedStream:
    stream = ScriptedStream((), lambda: None)
    stream.sampling = SamplingParams(temperature=temperature)
    return stream


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "keep", "lose", "take", "read", "leave", "end", "way"]),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=40,
)


@given(acts=ACTS)
def test_any_client_behaviour_keeps_counts_right_and_answers_unshared(
    acts: list[tuple[str, int, bool]],
) -> None:
    async def live() -> None:
        held = ResumableAnswers(most_bytes=1500, most_lost=2)
        made: list[ResumableAnswer] = []
        with_first_client: set[ResumableAnswer] = set()
        followers: list[tuple[ResumableAnswer, AsyncIterator[bytes]]] = []
        read: dict[AsyncIterator[bytes], int] = {}

        def leave(answer: ResumableAnswer, *, has_all: bool) -> None:
            was_left_by_all = answer.clients == 1
            is_wanted = held.client_left(answer, PATIENT, has_all=has_all)
            assert is_wanted or (was_left_by_all and answer.discarded.is_set())

        for act, which, flag in acts:
            chosen = made[which % len(made)] if made else None
            identity = RequestIdentity(
                b"%d" % which, sender=str(which % 2), has_idempotency_key=flag
            )
            if act == "begin":
                made.append(held.begin(identity, plan(), record()))
                with_first_client.add(made[-1])
                made[-1].mark_accepted(stream_at(temperature=0.0 if flag or which else 1.0))
            elif act == "take":
                if (taken := held.claim(identity)) is not None:
                    assert flag or taken.clients == 1
                    followers.append((taken, taken.events_after(-1)))
                    read[followers[-1][1]] = 0
            elif act == "read" and followers:
                answer, events = followers[which % len(followers)]
                if read[events] <= answer.next_place:  # the opening, then the events
                    read[events] += 1
                    with contextlib.suppress(GenerationFailed, StopAsyncIteration):
                        await anext(events)
            elif act == "leave" and followers:
                answer, events = followers.pop(which % len(followers))
                del read[events], events
                leave(answer, has_all=flag and answer.has_ended)
            elif chosen is None:
                continue
            elif act == "keep" and not chosen.generation_ended.is_set():
                held.record(chosen, b"x" * 300)
            elif act == "lose" and chosen in with_first_client:
                with_first_client.discard(chosen)
                leave(chosen, has_all=False)
            elif act == "end" and not chosen.generation_ended.is_set():
                if flag:
                    chosen.end()
                held.mark_ended(chosen)
                if chosen in with_first_client:
                    with_first_client.discard(chosen)
                    leave(chosen, has_all=True)
            elif act == "way":
                held.pause_lost()
            held.check_invariants()
        for each in made:
            each.generation_ended.set()
        await held.cancel_lost()
        for each in made:
            each.cancel_timers()

    asyncio.run(live())
