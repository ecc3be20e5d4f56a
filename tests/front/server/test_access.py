from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import LimitsSettings
from holdfast.front.server.access import Caller, ConcurrentAnswers, KeyRing, named_key, write_keys
from holdfast.front.server.problem import RequestRefused
from tests.fakes.http_clients import CHAT, MESSAGES, chat_body, client_of, message_body
from tests.fakes.scripted_gateway import ScriptedGateway, answer

LIMITS = LimitsSettings(max_requests_per_address=2)


def keys_in(folder: Path) -> KeyRing:
    made = (
        named_key(name, name, is_admin=False, priority="interactive", max_requests=most)
        for name, most in (("a", 1), ("b", None))
    )
    write_keys(folder / "keys.json", tuple(made))
    return KeyRing(str(folder / "keys.json"))


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        (CHAT, chat_body(), "rate_limit_error"),
        (MESSAGES, message_body(), "rate_limit_error"),
        ("/v1/responses", {"input": "hi"}, "rate_limit"),
        (
            "/api/chat",
            {"model": "demo/tiny", "messages": [{"role": "user", "content": "hi"}]},
            "the limit is 2",
        ),
    ],
)
async def test_a_request_above_the_cap_gets_its_protocols_busy_error(
    path: str, body: dict[str, Any], word: str
) -> None:
    held = asyncio.Event()
    gateway = ScriptedGateway([held, *answer("done")])
    async with client_of(gateway, limits=LIMITS) as client:
        running = [asyncio.create_task(client.post(CHAT, json=chat_body())) for _ in range(2)]
        while len(gateway.requests) < 2:
            await asyncio.sleep(0)
        refused = await client.post(path, json=body)
        held.set()
        assert [(await each).status_code for each in running] == [200, 200]
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert word in refused.text
        assert (await client.post(path, json=body)).status_code == 200  # the places are free again


async def test_a_request_that_can_never_fit_the_cap_says_so() -> None:
    async with client_of(ScriptedGateway(), limits=LIMITS) as client:
        response = await client.post(CHAT, json=chat_body(n=3))
    assert response.status_code == 400
    assert "request fewer" in response.text


def counted(at_once: ConcurrentAnswers, caller: Caller, answers: int = 1, **limits: int) -> Any:
    return at_once.counted(caller, answers, limits=LimitsSettings(**limits))


def test_keys_and_addresses_are_counted_separately(tmp_path: Path) -> None:
    ring, at_once = keys_in(tmp_path), ConcurrentAnswers()
    a, b = (Caller(address="10.0.0.1", key=ring.find(name)) for name in (b"a", b"b"))
    elsewhere = Caller(address="10.0.0.2", key=ring.find(b"b"))
    caps = {"max_requests_per_key": 3, "max_requests_per_address": 3}
    with counted(at_once, a, **caps), counted(at_once, b, 2, **caps):
        with (
            pytest.raises(RequestRefused, match="key a has 1 answers"),
            counted(at_once, a, **caps),
        ):
            pass
        with pytest.raises(RequestRefused, match=r"10\.0\.0\.1 has 3"), counted(at_once, b, **caps):
            pass
        with counted(at_once, elsewhere, **caps):
            pass


def test_a_new_cap_counts_the_answers_that_began_without_one() -> None:
    at_once = ConcurrentAnswers()
    caller = Caller(address="10.0.0.1")
    with (
        counted(at_once, caller, 1000),
        counted(at_once, caller, 1000),
        pytest.raises(RequestRefused, match="has 2000 answers"),
        counted(at_once, caller, max_requests_per_address=1),
    ):
        pass
    with counted(at_once, caller, max_requests_per_address=1):  # everything was returned
        pass


def test_retry_after_follows_from_the_duration_of_answers() -> None:
    now = [0.0]
    at_once, caller = ConcurrentAnswers(clock=lambda: now[0]), Caller(address="x")
    for _ in range(40):
        with counted(at_once, caller, max_requests_per_address=2):
            now[0] += 20.0
    with (
        counted(at_once, caller, 2, max_requests_per_address=2),
        pytest.raises(RequestRefused) as refused,
        counted(at_once, caller, max_requests_per_address=2),
    ):
        pass
    assert refused.value.retry_after_seconds == 10
