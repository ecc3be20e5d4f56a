"""Which error comes first, and which requests check the headers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.http_clients import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    chat_body,
    client_of,
    completion_body,
    message_body,
)
from tests.fakes.ollama_bodies import HELLO
from tests.fakes.scripted_gateway import ScriptedGateway

RESPONSES = "/v1/responses"
WRONG = {"x-session-id": "a/b", "x-holdfast-priority": "none", "x-holdfast-timeout": "soon"}
ORDER = ("X-Session-ID", "x-holdfast-priority", "x-holdfast-timeout")


async def refusal(path: str, body: dict[str, Any], headers: dict[str, str]) -> str:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(path, json=body, headers=headers)
    return "" if response.status_code == 200 else response.text


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, chat_body(top_logprobs=2), "top_logprobs"),
        (COMPLETIONS, completion_body(suffix="x"), "suffix"),
        (MESSAGES, message_body(output_format={"type": "json_schema"}), "output_format"),
        (RESPONSES, {"input": []}, "input"),
        ("/api/chat", {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_errors_in_the_body_come_before_those_in_headers(
    path: str, body: dict[str, Any], field: str
) -> None:
    assert field in await refusal(path, body, WRONG)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body()),
        (COMPLETIONS, completion_body()),
        (MESSAGES, message_body()),
        (RESPONSES, {"input": "hello"}),
        ("/api/chat", {"messages": HELLO}),
        ("/tokenize", {"messages": HELLO}),
    ],
)
async def test_headers_are_checked_in_one_order(path: str, body: dict[str, Any]) -> None:
    for place, header in enumerate(ORDER):
        left = dict(list(WRONG.items())[place:])
        assert header in await refusal(path, body, left)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"{MESSAGES}/count_tokens", message_body()),
        (f"{RESPONSES}/input_tokens", {"input": "hello"}),
    ],
)
async def test_counting_uses_no_session(path: str, body: dict[str, Any]) -> None:
    assert await refusal(path, body, WRONG) == ""
