from __future__ import annotations

import pytest

from holdfast.errors import (
    GenerationFailed,
    HoldfastError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    RenderingUnavailable,
    ResponsesUnavailable,
    TooLargeForMemory,
    UnknownModel,
    WorkerUnavailable,
)
from holdfast.front.server.problem import RequestRefused, problem_of
from tests.fakes.http_clients import CHAT, chat_body, client_of
from tests.fakes.scripted_gateway import ScriptedGateway

CASES: list[tuple[Exception, int, str, str | None]] = [
    (InvalidRequest("no", field="stop"), 400, "invalid_value", "stop"),
    (UnknownModel(model="x", available=("demo",)), 404, "model_not_found", "model"),
    (PromptTooLong(prompt_tokens=9, context_tokens=8), 400, "context_length_exceeded", "messages"),
    (
        TooLargeForMemory(needed_bytes=9, budget_bytes=8),
        400,
        "request_too_large_for_memory",
        None,
    ),
    (QueueFull(queued=256, limit=256, retry_after_seconds=0.2), 503, "queue_full", None),
    (WorkerUnavailable("the worker is restarting"), 503, "model_unavailable", None),
    (RenderingUnavailable(template="default", why="no process"), 503, "model_unavailable", None),
    (ResponsesUnavailable("the disk is full"), 503, "responses_unavailable", None),
    (GenerationFailed("sampling failed"), 500, "generation_failed", None),
    (RequestRefused("no", status=421, code="host_not_allowed"), 421, "host_not_allowed", None),
]


@pytest.mark.parametrize(
    ("error", "status", "code", "param"), CASES, ids=lambda value: type(value).__name__
)
async def test_every_gateway_error_has_its_status_in_openais_form(
    error: Exception, status: int, code: str, param: str | None
) -> None:
    async with client_of(ScriptedGateway(refusal=error)) as client:
        for stream in (False, True):
            response = await client.post(CHAT, json=chat_body(stream=stream))
            assert response.status_code == status
            assert response.headers["content-type"] == "application/json"
            detail = response.json()["error"]
            assert (detail["code"], detail["param"], detail["message"]) == (code, param, str(error))
            assert detail["type"] == ("server_error" if status >= 500 else "invalid_request_error")


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, "1"), (0.2, "1"), (1.1, "2"), (30.0, "30")])
def test_a_full_queue_has_retry_after_in_whole_seconds(seconds: float, shown: str) -> None:
    problem = problem_of(QueueFull(queued=4, limit=4, retry_after_seconds=seconds))
    assert problem.headers == {"retry-after": shown}


def test_an_unavailable_worker_has_retry_after() -> None:
    assert int(problem_of(WorkerUnavailable("gone")).headers["retry-after"]) >= 1


async def test_an_unexpected_error_is_a_500_without_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with client_of(ScriptedGateway(refusal=RuntimeError("the secret"))) as client:
        response = await client.post(CHAT, json=chat_body())
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "the secret" not in response.text
    assert "the secret" in caplog.text


def test_our_errors_without_a_status_are_a_500() -> None:
    assert problem_of(HoldfastError("odd")).status == 500
