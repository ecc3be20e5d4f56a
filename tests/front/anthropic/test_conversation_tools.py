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


def test_a_tool_is_a_function_without_what_only_anthropic_knows() -> None:
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
def test_tools_that_clients_run_get_the_schema_that_anthropics_models_know_by_heart(
    kind: str, name: str
) -> None:
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
def test_tools_that_anthropics_servers_run_are_left_out(kind: str) -> None:
    assert names({"type": kind, "name": "w"}, tool()) == ["f"]


def test_a_deferred_tool_is_there_once_it_was_found_behind_all_others() -> None:
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
def test_what_is_wrong_with_a_tool_is_named(tools: Any, field: str) -> None:
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
def test_what_is_asked_of_the_tools(choice: Any, expected: ToolChoice) -> None:
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
def test_a_choice_that_cannot_be_made_is_named(choice: Any, tools: Any, field: str) -> None:
    with pytest.raises(RequestRefused) as error:
        choice_of(choice, tools=shown_tools(tools, referenced=(), limits=LIMITS))
    assert error.value.field == field
