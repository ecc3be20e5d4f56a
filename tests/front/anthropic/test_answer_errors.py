from __future__ import annotations

from typing import Any

import anthropic
import msgspec
import pytest

from holdfast.config import LimitsSettings
from holdfast.errors import GenerationFailed, PromptTooLong, QueueFull, WorkerUnavailable
from holdfast.front.anthropic.answer import anthropic_error
from holdfast.front.server.problem import Problem
from tests.fakes.http_clients import (
    HELLO,
    MESSAGES,
    Exchange,
    client_of,
    message_body,
    named_events_of,
    served,
)
from tests.fakes.scripted_gateway import ScriptedGateway, answer


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (421, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (529, "overloaded_error"),
    ],
)
def test_anthropics_kinds_follow_the_status(status: int, kind: str) -> None:
    problem = Problem(status=status, code="odd", message="no")
    said = msgspec.to_builtins(anthropic_error(problem))
    detail = {"type": kind, "message": "no", "advice": problem.advice}
    assert said == {"type": "error", "error": detail}


def test_the_message_contains_the_field_name() -> None:
    said = anthropic_error(Problem(status=400, code="odd", message="no", field="stop"))
    assert said.error.message == "`stop`: no"


async def refused(
    refusal: Exception | None = None, *, path: str = MESSAGES, method: str = "POST", **fields: Any
) -> Any:
    async with client_of(
        ScriptedGateway(refusal=refusal), limits=LimitsSettings(max_body_bytes=2048)
    ) as client:
        return await client.request(method, path, json=message_body(**fields))


async def test_an_error_has_the_request_id_of_its_header() -> None:
    response = await refused(model="other")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert (
        response.json()["request_id"]
        == response.headers["request-id"]
        == response.headers["x-request-id"]
    )


async def test_an_error_within_a_stream_has_it_too() -> None:
    gateway = ScriptedGateway()
    exchange = Exchange(gateway)
    gateway.script = [*answer("Hel")[:1], exchange.first_body, GenerationFailed("it broke")]
    await exchange.run(MESSAGES, message_body(stream=True))
    name, event = named_events_of(exchange.text)[-1]
    headers = dict(exchange.messages[0]["headers"])
    assert (exchange.status, name, event["request_id"]) == (
        200,
        "error",
        headers[b"request-id"].decode(),
    )


async def test_an_overlong_prompt_has_the_wording_claude_code_expects() -> None:
    response = await refused(PromptTooLong(prompt_tokens=300, context_tokens=200))
    assert (response.status_code, response.json()["error"]["type"]) == (
        400,
        "invalid_request_error",
    )
    assert response.json()["error"]["message"] == "prompt is too long: 300 tokens > 200 maximum"


async def test_a_prompt_that_fills_the_window_is_refused_too() -> None:
    response = await refused(PromptTooLong(prompt_tokens=200, context_tokens=200))
    assert response.json()["error"]["message"] == "prompt is too long: 200 tokens > 199 maximum"


async def test_a_full_queue_is_an_overload_with_retry_after() -> None:
    response = await refused(QueueFull(queued=9, limit=9, retry_after_seconds=3))
    assert (response.status_code, response.headers["retry-after"]) == (529, "3")
    assert response.json()["error"]["type"] == "overloaded_error"


async def test_a_server_without_its_model_is_overloaded_too() -> None:
    response = await refused(WorkerUnavailable("not now"))
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")


async def test_an_internal_error_reveals_no_details() -> None:
    response = await refused(RuntimeError("inner words"))
    assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")
    assert "inner words" not in response.text


@pytest.mark.parametrize(
    ("path", "method", "status", "kind"),
    [
        ("/v1/messages/nope", "POST", 404, "not_found_error"),
        (MESSAGES, "GET", 405, "invalid_request_error"),
        ("/v1/complete", "POST", 404, "not_found_error"),
    ],
)
async def test_unknown_paths_and_methods_have_its_form(
    path: str, method: str, status: int, kind: str
) -> None:
    response = await refused(path=path, method=method)
    assert (response.status_code, response.json()["type"], response.json()["error"]["type"]) == (
        status,
        "error",
        kind,
    )


async def test_too_large_a_body_has_its_form() -> None:
    response = await refused(messages=[{"role": "user", "content": "x" * 3000}])
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "path", ["/messages", "/v1/messages/", "/v1/v1/messages", "/v1/messages?beta=true"]
)
async def test_its_path_is_found_under_any_base_url(path: str) -> None:
    assert (await refused(path=path)).status_code == 200


async def test_the_official_client_raises_the_matching_errors() -> None:
    async with (
        served(ScriptedGateway(refusal=QueueFull(queued=9, limit=9, retry_after_seconds=3))) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(model="other", max_tokens=1, messages=HELLO)  # type: ignore[arg-type]
        with pytest.raises(anthropic.APIStatusError, match="requests are already waiting") as full:
            await client.messages.create(model="demo/tiny", max_tokens=1, messages=HELLO)  # type: ignore[arg-type]
    assert (unknown.value.request_id or "").startswith("req_")
    assert full.value.status_code == 529


async def test_the_official_client_raises_on_an_error_within_a_stream() -> None:
    gateway = ScriptedGateway(script=[*answer("Hel")[:1], GenerationFailed("the worker died")])
    async with (
        served(gateway) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.APIError, match="the worker died"):
            await _read(client)


async def _read(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(model="demo/tiny", max_tokens=9, messages=HELLO) as stream:  # type: ignore[arg-type]
        async for _ in stream:
            pass
