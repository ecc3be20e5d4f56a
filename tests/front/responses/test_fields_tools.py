from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from holdfast.config import LimitsSettings
from holdfast.front.request import ToolChoice
from holdfast.front.responses.fields import ClientTool, OfferedTools, choice_of, offered_tools
from holdfast.front.server.problem import RequestRefused

FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "description": "D",
    "parameters": {"type": "object"},
    "strict": True,
}
PATCH = {"type": "custom", "name": "patch", "description": "Edits."}
NAMESPACE = {"type": "namespace", "name": "ns", "description": "S", "tools": [FUNCTION, PATCH]}


def offered(*tools: Any, **limits: int) -> OfferedTools:
    return offered_tools(tools, limits=LimitsSettings(**limits))


def refused(*tools: Any, **limits: int) -> str:
    with pytest.raises(RequestRefused) as error:
        offered(*tools, **limits)
    return error.value.field


def test_a_flat_function_becomes_a_prompts_function() -> None:
    function = {"name": "f", "description": "D", "parameters": {"type": "object"}, "strict": True}
    assert offered(FUNCTION).definitions == ({"type": "function", "function": function},)
    bare = {
        "type": "function",
        "name": "f",
        "description": None,
        "parameters": None,
        "strict": None,
    }
    assert offered(bare).definitions == ({"type": "function", "function": {"name": "f"}},)


def test_a_custom_tool_becomes_a_function_with_one_text() -> None:
    got = offered(PATCH)
    (definition,) = got.definitions
    assert definition["function"]["description"] == "Edits."
    assert definition["function"]["parameters"]["required"] == ["input"]
    assert got.client_tool("patch") == ClientTool(name="patch", is_custom=True)


@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_a_custom_tools_grammar_is_shown_to_the_model(syntax: str) -> None:
    got = offered(PATCH | {"format": {"type": "grammar", "syntax": syntax, "definition": "a+"}})
    function = got.definitions[0]["function"]
    assert function["description"] == f"Edits.\n\nThe input has to match this {syntax} grammar:\na+"
    assert function["parameters"]["properties"]["input"].get("pattern") == (
        "^(?:a+)$" if syntax == "regex" else None
    )


def test_namespaced_tools_are_distinct_and_keep_both_names() -> None:
    got = offered(FUNCTION, NAMESPACE)
    assert [tool["function"]["name"] for tool in got.definitions] == ["f", "ns__f", "ns__patch"]
    assert got.client_tool("ns__patch") == ClientTool(name="patch", namespace="ns", is_custom=True)
    assert got.client_tool("made_up") == ClientTool(name="made_up")


def test_unsupported_hosted_tools_are_left_out_with_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hosted = {"type": "hosted_for_this_test", "filters": {}}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert offered(hosted, FUNCTION).definitions == offered(FUNCTION).definitions
    (record,) = caplog.records
    assert (
        "tools of type 'hosted_for_this_test', which this server cannot run" in record.getMessage()
    )


def test_an_invalid_tool_is_refused_by_its_position() -> None:
    assert refused({"type": "function"}) == "tools.0.name"
    assert refused({"type": "namespace", "tools": []}) == "tools.0.name"
    assert (
        refused({"type": "namespace", "name": "ns", "tools": [{"type": "custom"}]})
        == "tools.0.tools.0.name"
    )
    assert refused(FUNCTION, FUNCTION) == "tools.1.name"
    assert refused(NAMESPACE, {"type": "function", "name": "ns__f"}) == "tools.1.name"
    assert refused(NAMESPACE, max_tools=1) == "tools"
    deep: Any = {}
    for _ in range(70):
        deep = {"items": deep}
    assert (
        refused({"type": "web_search"}, NAMESPACE | {"tools": [FUNCTION | {"parameters": deep}]})
        == "tools.1.tools.0.parameters"
    )


CHOICES: list[tuple[Any, ToolChoice]] = [
    (None, ToolChoice()),
    ("auto", ToolChoice()),
    ("none", ToolChoice(mode="none")),
    ("required", ToolChoice(mode="required")),
    ({"type": "function", "name": "f"}, ToolChoice(mode="required", names=("f",))),
    (
        {"type": "custom", "name": "patch", "namespace": "ns"},
        ToolChoice(mode="required", names=("ns__patch",)),
    ),
    (
        {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
        },
        ToolChoice(mode="auto", names=("f",)),
    ),
    (
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
        ToolChoice(mode="none"),
    ),
]


@pytest.mark.parametrize(("choice", "meaning"), CHOICES)
def test_every_form_of_a_choice_is_understood(choice: Any, meaning: ToolChoice) -> None:
    got = choice_of(choice, tools=offered(FUNCTION, NAMESPACE), parallel=True)
    assert msgspec.structs.replace(got, enforced_names=()) == meaning


def test_tools_without_strict_follow_their_schemas_where_possible() -> None:
    loose, open_ = (
        FUNCTION | {"name": "loose", "strict": False},
        FUNCTION | {"name": "open", "strict": None},
    )
    tools = offered(FUNCTION, loose, open_, PATCH)
    assert choice_of(None, tools=tools, parallel=True).enforced_names == ("open", "patch")
    assert choice_of("none", tools=tools, parallel=True).enforced_names == ()


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        ({"type": "function", "name": "g"}, "tool_choice.name"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "web_search"}, "tool_choice.type"),
        ({"type": "mcp", "server_label": "x"}, "tool_choice.type"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
        (
            {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]},
            "tool_choice.tools",
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
            "tool_choice",
        ),
    ],
)
def test_a_choice_of_a_missing_tool_is_refused(choice: Any, field: str) -> None:
    with pytest.raises(RequestRefused) as error:
        choice_of(choice, tools=offered(FUNCTION), parallel=True)
    assert error.value.field == field
