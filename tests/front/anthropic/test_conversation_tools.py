from __future__ import annotations

from typing import Any

import pytest

from holdfast.config import LimitsSettings
from holdfast.front.anthropic.conversation import MessagesTool, choice_of, shown_tools
from holdfast.front.request import ToolChoice
from holdfast.front.server.problem import RequestRefused

LIMITS = LimitsSettings(max_tools=4)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def tool(name: str = "f", **more: Any) -> MessagesTool:
    return {"name": name, "input_schema": SCHEMA, **more}  # type: ignore[typeddict-item]


def nested(levels: int) -> dict[str, Any]:
    return {"items": nested(levels - 1)} if levels else {}


def names(*tools: MessagesTool, referenced: tuple[str, ...] = ()) -> list[str]:
    return [
        shown["function"]["name"]
        for shown in shown_tools(tools, referenced=referenced, limits=LIMITS).definitions
    ]


def test_a_tool_becomes_a_function_without_anthropics_own_fields() -> None:
    given = tool(
        description="d",
        strict=True,
        eager_input_streaming=True,
        cache_control={"type": "ephemeral"},
        type="custom",
    )
    (shown,) = shown_tools([given], referenced=(), limits=LIMITS).definitions
    function = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
    assert shown == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("bash_20250124", "bash"),
        ("text_editor_20250728", "str_replace_based_edit_tool"),
        ("memory_20250818", "memory"),
    ],
)
def test_tools_run_by_clients_get_their_known_schemas(kind: str, name: str) -> None:
    (shown,) = shown_tools([{"type": kind, "name": name}], referenced=(), limits=LIMITS).definitions
    assert "command" in shown["function"]["parameters"]["properties"]
    assert shown["function"]["description"]


@pytest.mark.parametrize(
    "kind",
    [
        "web_search_20260318",
        "code_execution_20250825",
        "tool_search_tool_regex_20251119",
        "bash_new",
    ],
)
def test_tools_run_by_anthropics_servers_are_left_out(kind: str) -> None:
    assert names({"type": kind, "name": "w"}, tool()) == ["f"]


def test_a_deferred_tool_is_appended_once_found() -> None:
    tools = tool("late", defer_loading=True), tool("early"), tool("never", defer_loading=True)
    assert names(*tools) == ["early"]
    assert names(*tools, referenced=("nobody", "late", "late")) == ["early", "late"]


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([{"name": "f"}], "tools.0.input_schema"),
        ([{"input_schema": SCHEMA}], "tools.0.name"),
        ([{"type": "web_search_20260318", "name": "w"}, tool(), tool()], "tools.2.name"),
        ([{"name": "f", "input_schema": nested(70)}], "tools.0.input_schema"),
        ([tool(str(number)) for number in range(5)], "tools"),
    ],
)
def test_an_invalid_tool_is_refused_by_field(tools: Any, field: str) -> None:
    with pytest.raises(RequestRefused) as error:
        shown_tools(tools, referenced=(), limits=LIMITS)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
        ({"type": "any"}, ToolChoice(mode="required")),
        ({"type": "none"}, ToolChoice(mode="none")),
        ({"type": "tool", "name": "f"}, ToolChoice(mode="required", names=("f",))),
    ],
)
def test_tool_choices_are_translated(choice: Any, expected: ToolChoice) -> None:
    assert choice_of(choice, tools=shown_tools([tool()], referenced=(), limits=LIMITS)) == expected


@pytest.mark.parametrize(
    ("choice", "tools", "field"),
    [
        ({"type": "any"}, [], "tool_choice"),
        ({"type": "tool"}, [tool()], "tool_choice.name"),
        ({"type": "tool", "name": "g"}, [tool()], "tool_choice.name"),
        (
            {"type": "tool", "name": "w"},
            [tool(), {"type": "web_search_20260318", "name": "w"}],
            "tool_choice.name",
        ),
    ],
)
def test_an_impossible_tool_choice_is_refused_by_field(choice: Any, tools: Any, field: str) -> None:
    with pytest.raises(RequestRefused) as error:
        choice_of(choice, tools=shown_tools(tools, referenced=(), limits=LIMITS))
    assert error.value.field == field
