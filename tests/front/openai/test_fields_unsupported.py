from __future__ import annotations

import logging
from typing import Any

import pytest

from holdfast.front.openai.endpoints import ChatCompletionRequest, CompletionRequest
from holdfast.front.openai.fields import KNOWN
from tests.fakes.http_clients import CHAT, COMPLETIONS, chat_body, client_of, completion_body
from tests.fakes.scripted_gateway import ScriptedGateway

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
REFUSED: list[tuple[str, Any]] = [
    ("audio", {"voice": "alloy", "format": "wav"}),
    ("modalities", ["text", "audio"]),
    ("web_search_options", {}),
    ("grammar", 'root ::= "x"'),
    ("guided_whitespace_pattern", " "),
    ("use_beam_search", True),
    ("min_tokens", 5),
    ("min_tokens", False),
    ("stop_token_ids", [1]),
    ("repeat_penalty", 1.1),
]
OF_CHATS: list[tuple[str, Any]] = [
    ("prediction", {"type": "content", "content": "x"}),
    ("tools", [TOOL]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "look_up"}}),
    ("functions", [{"name": "look_up"}]),
    ("function_call", {"name": "look_up"}),
    ("messages", [{"role": "user", "content": "x"}]),
    ("enable_thinking", True),
    ("reasoning_effort", "low"),
    ("thinking", {"type": "enabled"}),
    ("think", True),
    ("thinking_budget", 5),
    ("parallel_tool_calls", False),
    ("chat_template_kwargs", {"x": 1}),
]
OF_TEXTS: list[tuple[str, Any]] = [("prompt", "x"), ("echo", True), ("suffix", "x"), ("best_of", 2)]
HARMLESS: list[tuple[str, Any]] = [
    ("tools", []),
    ("tools", None),
    ("tool_choice", "none"),
    ("response_format", {"type": "text"}),
    ("response_format", None),
    ("modalities", ["text"]),
    ("min_tokens", 0),
    ("length_penalty", 1.0),
    ("parallel_tool_calls", True),
    ("user", "me"),
    ("metadata", {"a": "b"}),
    ("store", False),
    ("service_tier", "auto"),
    ("reasoning_effort", "low"),
    ("verbosity", "low"),
    ("prompt_cache_key", "k"),
    ("safety_identifier", "s"),
]


REFUSED_BY = [
    *((path, *case) for path in (CHAT, COMPLETIONS) for case in REFUSED),
    *((COMPLETIONS, *case) for case in OF_CHATS),
    *((CHAT, *case) for case in OF_TEXTS),
]


@pytest.mark.parametrize(("path", "field", "value"), REFUSED_BY)
async def test_a_field_that_requests_an_unsupported_feature_is_refused(
    path: str, field: str, value: Any
) -> None:
    gateway = ScriptedGateway()
    body = (chat_body if path == CHAT else completion_body)(**{field: value})
    async with client_of(gateway) as client:
        response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (
        400,
        field,
        "unsupported_parameter",
    )
    assert field in error["message"]
    assert gateway.requests == []


@pytest.mark.parametrize(("field", "value"), HARMLESS)
async def test_an_unsupported_field_without_a_request_is_accepted(field: str, value: Any) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CHAT, json=chat_body(**{field: value}))
    assert response.status_code == 200, response.text


async def test_an_unknown_field_is_ignored_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with client_of(ScriptedGateway()) as client:
        for _ in range(3):
            response = await client.post(CHAT, json=chat_body(frobnicate_this_test=1))
            assert response.status_code == 200
    assert caplog.text.count("frobnicate_this_test") == 1


def test_no_supported_field_is_among_the_refused() -> None:
    served = set(ChatCompletionRequest.model_fields) & set(CompletionRequest.model_fields)
    assert served & set(KNOWN) == set()
