from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from holdfast.config import LimitsSettings, ServerSettings
from holdfast.errors import (
    GenerationFailed,
    HoldfastError,
    ImagesRefused,
    ImageTooLarge,
    ImageUnresolved,
    InvalidRequest,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    RenderingUnavailable,
    ResponsesUnavailable,
    TemplateOverrun,
    TimeLimitExceeded,
    TooLargeForMemory,
    UnknownModel,
    UnusableModel,
    WorkerUnavailable,
)
from holdfast.front.server.problem import RequestRefused, problem_of
from tests.fakes.agent_rules import AGENTS, PROTOCOLS, Reaction, Refusal
from tests.fakes.http_clients import CHAT, COMPLETIONS, HELLO, MESSAGES, chat_body, client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway

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


# How agents react to refusals: each kind of refusal, in each protocol, under each agent's rules.

PATHS: Mapping[str, tuple[str, str]] = {  # protocol → path, and the field for the answer's length
    "chat": (CHAT, "max_tokens"),
    "completions": (COMPLETIONS, "max_tokens"),
    "responses": ("/v1/responses", "max_output_tokens"),
    "messages": (MESSAGES, "max_tokens"),
    "ollama": ("/api/chat", "num_predict"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of refusal: its cause, the server's advice, and acceptable reactions."""

    advice: str
    reactions: tuple[Reaction, ...]
    error: Exception | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    length: Any = None  # of the answer, in the protocol's own field
    content: bytes | None = None
    server: ServerSettings | None = None


KINDS: Mapping[str, Kind] = {
    "the prompt does not fit": Kind(
        error=PromptTooLong(prompt_tokens=9000, context_tokens=8192),
        advice="compact",
        reactions=("compact",),
    ),
    "the body is too large": Kind(
        fields={"metadata": {"padding": "x" * 5000}},
        advice="compact",
        reactions=("compact", "stop"),
    ),
    "the image is too large": Kind(
        error=ImageTooLarge("it has 9,000 × 9,000 pixels, but at most 40,000,000 are allowed"),
        advice="shrink_image",
        reactions=("shrink", "stop"),
    ),
    "the model reads text only": Kind(
        error=ImagesRefused("this model reads text only", field="messages.0.content.1"),
        advice="fix_request",
        reactions=("stop",),
    ),
    "it needs more memory than there is": Kind(
        error=TooLargeForMemory(needed_bytes=9, budget_bytes=8),
        advice="fix_request",
        reactions=("stop",),
    ),
    "the answer's length is wrong": Kind(length=-7, advice="fix_request", reactions=("stop",)),
    "the answer's length is a text": Kind(length="9", advice="fix_request", reactions=("stop",)),
    "a field is wrong": Kind(
        fields={"temperature": "hot", "options": {"temperature": "hot"}},
        advice="fix_request",
        reactions=("stop",),
    ),
    "a wrong value talks of an overflow": Kind(
        fields={
            "temperature": "exceeds the context window",
            "options": {"temperature": "exceeds the context window"},
        },
        advice="fix_request",
        reactions=("stop",),
    ),
    "a refusal names a field like an overflow": Kind(
        error=InvalidRequest("cannot be used here", field="max_tokens"),
        advice="fix_request",
        reactions=("stop",),
    ),
    "it is not JSON": Kind(content=b"{", advice="fix_request", reactions=("stop",)),
    "the model is unknown": Kind(
        fields={"model": "nope"},
        error=UnknownModel(model="nope", available=(MODEL,)),
        advice="pull_model",
        reactions=("stop",),
    ),
    "the key is wrong": Kind(
        server=ServerSettings(api_key="right"), advice="none", reactions=("stop",)
    ),
    "the queue is full": Kind(
        error=QueueFull(queued=4, limit=4, retry_after_seconds=2),
        advice="wait",
        reactions=("retry",),
    ),
    "the model is loading": Kind(
        error=WorkerUnavailable("model 'demo/tiny' is still loading; please try again"),
        advice="wait",
        reactions=("retry",),
    ),
    "the model cannot be loaded": Kind(
        error=ModelLoadError("the folder has no weights"), advice="wait", reactions=("retry",)
    ),
    "the model's files are damaged": Kind(
        error=UnusableModel("model.safetensors is damaged: holdfast models pull owner/name"),
        advice="pull_model",
        reactions=("stop",),
    ),
    "an image has no place in the prompt": Kind(
        error=ImageUnresolved(), advice="none", reactions=("retry", "stop")
    ),
    "the worker died": Kind(
        error=GenerationFailed("the worker died"), advice="wait", reactions=("retry",)
    ),
    "the request kills workers": Kind(
        error=GenerationFailed("it killed two workers", is_deadly=True),
        advice="none",
        reactions=("retry", "stop"),  # not all agents read x-should-retry
    ),
    "the template overran": Kind(
        error=TemplateOverrun(template="default", why="took more than 5 s"),
        advice="none",
        reactions=("retry", "stop"),
    ),
    "the time limit is over": Kind(
        error=TimeLimitExceeded(seconds=2), advice="none", reactions=("retry", "stop")
    ),
}


async def refused(protocol: str, kind: Kind, *, stream: bool, agent: str) -> httpx.Response:
    path, length = PATHS[protocol]
    body: dict[str, Any] = {"model": MODEL, "stream": stream}
    if protocol == "completions":
        body["prompt"] = "hello"
    else:
        body["input" if protocol == "responses" else "messages"] = HELLO
    if protocol == "messages":
        body["max_tokens"] = 100
    body |= kind.fields
    if kind.length is not None and protocol == "ollama":
        body["options"] = {length: kind.length}
    elif kind.length is not None:
        body[length] = kind.length
    async with client_of(
        ScriptedGateway(refusal=kind.error),
        limits=LimitsSettings(max_body_bytes=4096),
        server=kind.server,
    ) as client:
        content = kind.content or json.dumps(body).encode()
        headers = {"originator": "codex_exec"} if agent == "Codex" else {}
        return await client.post(path, content=content, headers=headers)


def read(response: httpx.Response) -> Refusal:
    """What a client sees: an error response, or the failed end of a stream of Responses."""
    if response.status_code != 200:
        return Refusal(status=response.status_code, headers=response.headers, body=response.json())
    *_, last = [line for line in response.text.splitlines() if line.startswith("data: ")]
    event = json.loads(last.removeprefix("data: "))
    assert event["type"] == "response.failed", event
    return Refusal(status=200, headers={}, body=event["response"])


@pytest.mark.parametrize("protocol", PATHS)
@pytest.mark.parametrize("name", KINDS)
async def test_every_agent_reacts_usefully_and_gets_the_advice(name: str, protocol: str) -> None:
    kind = KINDS[name]
    if kind.length == -7 and protocol == "ollama":
        pytest.skip("there, a negative length means no limit")
    agents = [agent for agent, protocols in PROTOCOLS.items() if protocol in protocols]
    others = [agent for agent in agents or ["opencode"] if agent != "Codex"]
    asked = [
        (others, False),
        (others, True),
        ([agent for agent in agents if agent == "Codex"], True),
    ]
    for same, stream in asked:
        if not same:
            continue
        response = await refused(protocol, kind, stream=stream, agent=same[0])
        refusal = read(response)
        detail = refusal.body if protocol == "ollama" else refusal.detail
        assert detail["advice"] == kind.advice, response.text
        for agent in same:
            did = AGENTS[agent](refusal)
            assert did in kind.reactions, f"{agent}: {did} upon {response.text}"


def test_the_advice_of_each_kind_is_documented() -> None:
    with open("docs/reference/errors.md", encoding="utf-8") as file:
        text = file.read()
    for advice in {kind.advice for kind in KINDS.values()}:
        assert f"| `{advice}` |" in text
