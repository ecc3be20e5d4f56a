from __future__ import annotations

from typing import Any

import pytest

from holdfast.front.request import ChatPrompt
from tests.fakes.http_clients import CHAT, chat_body, client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "hello"}
BAD: list[tuple[Any, str]] = [
    ([], "messages"),
    (None, "messages"),
    ("hello", "messages"),
    ({}, "messages"),
    ([1], "messages.0"),
    (["hello"], "messages.0"),
    ([None], "messages.0"),
    ([{"content": "x"}], "messages.0.role"),
    ([{"role": "god", "content": "x"}], "messages.0.role"),
    ([{"role": 1, "content": "x"}], "messages.0.role"),
    ([{"role": "user"}], "messages.0.content"),
    ([{"role": "user", "content": None}], "messages.0.content"),
    ([{"role": "user", "content": 5}], "messages.0.content"),
    ([{"role": "user", "content": {"text": "x"}}], "messages.0.content"),
    ([{"role": "user", "content": [1]}], "messages.0.content.0"),
    ([{"role": "user", "content": ["x"]}], "messages.0.content.0"),
    ([{"role": "user", "content": [{}]}], "messages.0.content.0.type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages.0.content.0.text"),
    ([{"role": "user", "content": [{"type": "smell", "text": "x"}]}], "messages.0.content.0.type"),
    ([{"role": "user", "content": [TEXT, IMAGE]}], "messages.0.content.1.image_url"),
    ([{"role": "system", "content": [TEXT, IMAGE]}], "messages.0.content.1"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0"),
    (
        [{"role": "user", "content": [{"type": "image", "image": "0" * 64}]}],
        "messages.0.content.0.image",
    ),
    (
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        "messages.0.content.0",
    ),
    ([{"role": "user", "content": [{"type": "file", "file": {}}]}], "messages.0.content.0"),
    (
        [{"role": "user", "content": "x"}, {"role": "tool", "content": None, "tool_call_id": "1"}],
        "messages.1.content",
    ),
    ([{"role": "user", "content": "x", "name": 1}], "messages.0.name"),
    ([{"role": "assistant", "tool_calls": "x"}], "messages.0.tool_calls"),
    ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls.0.function"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
        "messages.0.tool_calls.0.function.name",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 1}}]}],
        "messages.0.tool_calls.0.function.arguments",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "a"}}]}],
        "messages.0.tool_calls.0.type",
    ),
]


@pytest.mark.parametrize(("messages", "param"), BAD, ids=lambda value: str(value)[:60])
async def test_a_bad_message_is_a_400_with_its_place(messages: Any, param: str) -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post(CHAT, json={"model": MODEL, "messages": messages})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert gateway.requests == []


async def test_a_text_model_refuses_an_image_with_the_reason() -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(
            CHAT, json=chat_body(messages=[{"role": "user", "content": [IMAGE]}])
        )
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_content")
    assert error["message"] == "this model reads text only"
    assert error["param"] == "messages.0.content.0.image_url"


async def test_a_system_prompts_image_is_refused_with_allowed_places() -> None:
    async with client_of(ScriptedGateway()) as client:
        messages = [{"role": "system", "content": [IMAGE]}, {"role": "user", "content": "x"}]
        response = await client.post(CHAT, json=chat_body(messages=messages))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_content")
    assert error["message"] == "images are allowed in user messages and tool results only"
    assert error["param"] == "messages.0.content.0"


@pytest.mark.parametrize("role", ["tool", "function"])
async def test_images_in_tool_results_are_shown_to_the_model(role: str) -> None:
    gateway = ScriptedGateway()
    result = {"role": role, "name": "look", "tool_call_id": "call_1", "content": [TEXT, IMAGE]}
    async with client_of(gateway) as client:
        response = await client.post(
            CHAT, json=chat_body(messages=[{"role": "user", "content": "x"}, result])
        )
    assert response.status_code == 200, response.text
    assert isinstance(gateway.request.prompt, ChatPrompt)
    note = {"type": "text", "text": "[image/png left out: this model takes text only]"}
    assert gateway.request.prompt.messages[1]["content"] == [TEXT, note]


CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"word": "kelp"}'},
}
CONVERSATIONS: list[list[Any]] = [
    [{"role": "user", "content": ""}],
    [
        {
            "role": "user",
            "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
        }
    ],
    [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "x", "name": "ann"}],
    [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_content": "z", "refusal": None},
    ],
    [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
    [
        {"role": "user", "content": "what is kelp?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "text", "text": "an alga"}],
        },
    ],
    [
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "look_up", "arguments": {"word": "kelp"}}}],
        }
    ],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "look_up"}}]}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=lambda value: str(value)[:60])
async def test_a_valid_conversation_is_passed_on_unchanged(messages: list[Any]) -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post(CHAT, json=chat_body(messages=messages))
    assert response.status_code == 200, response.text
    assert isinstance(gateway.request.prompt, ChatPrompt)
    assert list(gateway.request.prompt.messages) == messages
