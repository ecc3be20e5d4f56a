from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from holdfast.config import LogSettings, ServerSettings
from holdfast.errors import GenerationFailed, InvalidRequest
from holdfast.front.application import create_application
from holdfast.front.telemetry.request_log import RequestRecord
from tests.fakes.http_clients import (
    CHAT,
    COMPLETIONS,
    Exchange,
    chat_body,
    client_of,
    completion_body,
)
from tests.fakes.scripted_gateway import (
    MODEL,
    PROMPT_TOKENS,
    ScriptedGateway,
    answer,
    scripted_services,
)


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.msg.fields for record in caplog.records if isinstance(record.msg, RequestRecord)]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_one_line(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(ScriptedGateway(script=answer("Hel", "lo", cached_tokens=3))) as client:
        response = await client.post(CHAT, json=chat_body(stream=stream))
    (line,) = lines(caplog)
    wanted = {
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "model": MODEL,
        "prompt_tokens": PROMPT_TOKENS,
        "cached_tokens": 3,
        "answer_tokens": 2,
        "finish_reason": "stop",
        "client": "127.0.0.1",
        "request_id": response.headers["x-request-id"],
    }
    assert line | wanted == line
    assert {"first_token_seconds", "seconds"} <= set(line)
    assert "prompt" not in line


async def test_only_the_pages_polling_is_below_info(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(ScriptedGateway()) as client:
        await client.get("/v1/models", headers={"x-holdfast-page": "1"})
        await client.get("/v1/models")
    found = [line.levelno for line in caplog.records if isinstance(line.msg, RequestRecord)]
    assert found == [logging.DEBUG, logging.INFO]


async def test_a_refusals_line_has_its_reason_but_no_content(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with client_of(ScriptedGateway(), server=ServerSettings(api_key="sesame")) as client:
        await client.post(CHAT, json=chat_body(), headers={"authorization": "Bearer hush"})
        await client.post(
            CHAT, json=chat_body(messages="my secret"), headers={"authorization": "Bearer sesame"}
        )
        await client.get("/nope", headers={"authorization": "Bearer sesame"})
    locked, wrong, unknown = lines(caplog)
    assert (locked["status"], locked["error_code"]) == (401, "invalid_api_key")
    assert (wrong["status"], wrong["error_code"]) == (400, "invalid_type")
    assert wrong["error_message"].startswith("`messages`")
    assert (unknown["status"], unknown["error_code"]) == (404, "unknown_path")
    for hidden in ("hush", "sesame", "secret"):
        assert hidden not in caplog.text
        assert hidden not in str((locked, wrong, unknown))


@pytest.mark.parametrize("kind", ["my secret", "my secret image"])
async def test_the_type_of_a_part_is_quoted_only_to_the_client(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_of(ScriptedGateway()) as client:
        body = chat_body(messages=[{"role": "user", "content": [{"type": kind}]}])
        assert kind in (await client.post(CHAT, json=body)).json()["error"]["message"]
    assert lines(caplog)[0]["status"] == 400
    assert "secret" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_quoted_by_the_intake_is_not_logged(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = InvalidRequest("the template refuses it", shown=": my secret")
    async with client_of(ScriptedGateway(refusal=refusal)) as client:
        response = await client.post(CHAT, json=chat_body(stream=stream))
    assert response.json()["error"]["message"] == "the template refuses it: my secret"
    assert lines(caplog)[0]["error_message"] == "the template refuses it"
    assert "secret" not in caplog.text


async def test_a_disconnect_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    never = asyncio.Event()
    for script, stream, status in (([never], False, 499), ([*answer("Hel")[:1], never], True, 200)):
        exchange = Exchange(ScriptedGateway(script=script))
        running = asyncio.create_task(exchange.run(CHAT, chat_body(stream=stream)))
        if stream:
            await exchange.first_body.wait()
        exchange.gone.set()
        await running
        line = lines(caplog)[-1]
        assert (line["aborted"], line["status"]) == (True, status)
    assert "aborted by the client" in caplog.text


async def test_an_aborted_upload_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    exchange = Exchange(ScriptedGateway())
    exchange.gone.set()
    await exchange.run(CHAT, chat_body(), upload_breaks_off=True)
    (line,) = lines(caplog)
    assert (line["aborted"], line["status"]) == (True, 499)


async def test_a_failed_stream_has_the_reason_in_its_line(caplog: pytest.LogCaptureFixture) -> None:
    gateway = ScriptedGateway()
    exchange = Exchange(gateway)
    gateway.script = [*answer("Hel")[:1], exchange.first_body, GenerationFailed("the worker died")]
    await exchange.run(CHAT, chat_body(stream=True))
    (line,) = lines(caplog)
    assert (line["status"], line["error_code"], line["error_message"]) == (
        200,
        "generation_failed",
        "the worker died",
    )


async def test_polls_are_not_logged_at_info(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(ScriptedGateway()) as client:
        for path in ("/health", "/metrics", "/"):
            await client.get(path)
    assert {
        record.levelno for record in caplog.records if isinstance(record.msg, RequestRecord)
    } == {logging.DEBUG}


async def test_contents_are_logged_only_on_request(caplog: pytest.LogCaptureFixture) -> None:
    services = scripted_services(
        ScriptedGateway(script=answer("Hel", "lo")), log=LogSettings(content=True)
    )
    transport = httpx.ASGITransport(create_application(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await client.post(CHAT, json=chat_body())
        await client.post(COMPLETIONS, json=completion_body())
        await client.post(COMPLETIONS, json=completion_body(prompt=[1, 2]))
    chat, text, tokens = lines(caplog)
    assert (chat["prompt"], chat["answers"]) == ('[{"role":"user","content":"hello"}]', ["Hello"])
    assert (text["prompt"], tokens["prompt"]) == ("hello", "[1,2]")


async def test_client_behaviour_is_never_logged_as_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with client_of(ScriptedGateway()) as client:
        for body in (b"", b"{", b"[]", b'{"messages": 1}', b"\xff"):
            await client.post(CHAT, content=body)
        await client.post(CHAT, json=chat_body(model="\x1b[2J\nother"))
        await client.get("/%0a%1b[2J")
        await client.post("/v1/messages", json={})
        await client.get("/health", headers={"host": "evil.example\x1b"})
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert all(
        record.getMessage().isprintable()
        for record in caplog.records
        if isinstance(record.msg, RequestRecord)
    )


async def test_a_request_cut_by_a_server_stop_gets_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange = Exchange(ScriptedGateway())
    running = asyncio.create_task(exchange.run(CHAT, chat_body(), upload_breaks_off=True))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    await running
    assert exchange.status == 503
    assert lines(caplog)[0]["error_code"] == "model_unavailable"
