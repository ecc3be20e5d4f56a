from __future__ import annotations

from typing import Any

import pytest

from holdfast.config import LimitsSettings
from holdfast.front.request import ToolChoice
from tests.fakes.http_clients import CHAT, accepted_chat, chat_body, client_of, refused_chat
from tests.fakes.scripted_gateway import ScriptedGateway

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA},
}
CLOCK = {"type": "function", "function": {"name": "mcp__clock.now"}}
TOOLS = [WEATHER, CLOCK]
ALL_NAMES: tuple[str, ...] = ()


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


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [WEATHER, {"type": "custom", "custom": {"name": "x"}}]}, "tools.1.type"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [named("")]}, "tools.0.function.name"),
        ({"tools": [named("two words")]}, "tools.0.function.name"),
        ({"tools": [named("x" * 257)]}, "tools.0.function.name"),
        ({"tools": [named("<tool_call>")]}, "tools.0.function.name"),
        ({"tools": [CLOCK, CLOCK]}, "tools.1.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools.0.function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
            "tools.0.function.strict",
        ),
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools.0"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": named("nobody")}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": named("get_weather")}, "tool_choice.function.name"),
        ({"functions": [FUNCTION], "tools": TOOLS}, "functions"),
        ({"functions": [FUNCTION, FUNCTION]}, "functions.1.name"),
        ({"functions": [FUNCTION], "function_call": {"name": "nobody"}}, "function_call.name"),
        ({"function_call": {"name": "get_weather"}}, "function_call.name"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
async def test_unsupported_tools_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    assert await refused_chat(**fields) == (400, field)


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
