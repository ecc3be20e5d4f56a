from __future__ import annotations

from typing import Any

import pytest

from holdfast.config import LimitsSettings
from holdfast.front.request import ChatPrompt, ToolChoice
from tests.fakes.http_clients import CHAT, accepted_chat, chat_body, client_of, refused_chat
from tests.fakes.scripted_gateway import ScriptedGateway

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "hello"}


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


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA},
}
CLOCK = {"type": "function", "function": {"name": "mcp__clock.now"}}
TOOLS = [WEATHER, CLOCK]


async def test_tools_enter_the_prompt_unchanged_except_nulls() -> None:
    nulls = {
        "type": "function",
        "function": {"name": "f", "description": None, "parameters": None, "strict": None},
    }
    request = await accepted_chat(tools=[*TOOLS, nulls])
    assert request.prompt.tools == (WEATHER, CLOCK, {"type": "function", "function": {"name": "f"}})
    assert request.tool_choice == ToolChoice()


async def test_a_schema_keeps_the_order_of_its_keys() -> None:
    parameters = {
        "required": ["b"],
        "type": "object",
        "properties": {"b": {"type": "string"}, "a": {"type": "number"}},
    }
    request = await accepted_chat(
        tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    )
    got = request.prompt.tools[0]["function"]["parameters"]
    assert (list(got), list(got["properties"])) == (["required", "type", "properties"], ["b", "a"])


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({"tool_choice": None}, ToolChoice()),
        ({"tool_choice": "auto"}, ToolChoice()),
        ({"tool_choice": "none"}, ToolChoice(mode="none")),
        ({"tool_choice": "required"}, ToolChoice(mode="required")),
        ({"tool_choice": "any"}, ToolChoice(mode="required")),
        ({"parallel_tool_calls": False}, ToolChoice(parallel=False)),
        ({"parallel_tool_calls": True}, ToolChoice()),
        (
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
            ToolChoice(mode="required", names=("get_weather",)),
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [CLOCK, CLOCK]},
                }
            },
            ToolChoice(mode="auto", names=("mcp__clock.now",)),
        ),
    ],
)
async def test_tool_choices_are_translated(fields: dict[str, Any], choice: ToolChoice) -> None:
    assert (await accepted_chat(tools=TOOLS, **fields)).tool_choice == choice


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_a_tool_choice_without_effect_needs_no_tools(choice: str) -> None:
    assert (await accepted_chat(tool_choice=choice)).prompt.tools == ()


FUNCTION = {"name": "get_weather", "parameters": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, ToolChoice(parallel=False)),
        ({"function_call": "none"}, ToolChoice(mode="none", parallel=False)),
        (
            {"function_call": {"name": "get_weather"}},
            ToolChoice(mode="required", names=("get_weather",), parallel=False),
        ),
    ],
)
async def test_functions_become_tools_with_one_call_per_answer(
    fields: dict[str, Any], choice: ToolChoice
) -> None:
    request = await accepted_chat(functions=[FUNCTION], **fields)
    assert request.prompt.tools == ({"type": "function", "function": FUNCTION},)
    assert request.tool_choice == choice


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


async def test_schemas_may_be_64_levels_deep() -> None:
    assert (await accepted_chat(tools=[nested(64)])).prompt.tools == (nested(64),)
    assert await refused_chat(tools=[WEATHER, nested(65)]) == (400, "tools.1.function.parameters")


async def test_the_size_of_tool_definitions_is_limited() -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway, limits=LimitsSettings(max_tool_parts=7)) as client:
        fits = await client.post(CHAT, json=chat_body(tools=[WEATHER]))
        several = await client.post(CHAT, json=chat_body(tools=[WEATHER, CLOCK]))
    assert fits.status_code == 200
    assert (several.status_code, several.json()["error"]["param"]) == (400, "tools.1.function")


async def test_the_number_of_tools_is_limited() -> None:
    gateway = ScriptedGateway()
    for fields, field in (
        ({"tools": TOOLS}, "tools"),
        ({"functions": [FUNCTION, FUNCTION]}, "functions"),
    ):
        async with client_of(gateway, limits=LimitsSettings(max_tools=1)) as client:
            response = await client.post(CHAT, json=chat_body(**fields))
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
