"""Tool definitions as the strictest templates require them."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tool_definitions import complete_tool
from holdfast.front.request import ChatPrompt

STRICT = (
    "{% for tool in tools or [] %}{% set f = tool.function %}{{ f.name + ': ' + f.description }}("
    "{% for name, p in f.parameters.properties.items() %}{{ name + ': ' + p.type }}{% endfor %}){% "
    "endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def shown(function: dict[str, Any]) -> str:
    tool = {"type": "function", "function": function}
    template = ChatTemplate({"default": STRICT}, special_tokens={})
    return template.render(ChatPrompt(messages=({"role": "user", "content": ""},), tools=(tool,)))


def test_missing_descriptions_and_types_are_added_for_strict_templates() -> None:
    assert shown({"name": "f"}) == "f: ()"
    assert shown({"name": "f", "parameters": {"properties": {"x": {}}}}) == "f: (x: string)"


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": ["null", "integer"]}, "integer"),
        ({"anyOf": [{"type": "null"}, {"type": "number"}]}, "number"),
        ({"enum": [1, 2]}, "integer"),
        ({"enum": [True]}, "boolean"),
        ({"properties": {}}, "object"),
        ({"$ref": "#/x"}, "string"),
        (True, "string"),
        ({"type": 7}, "string"),
    ],
)
def test_each_parameter_has_one_type(schema: Any, kind: str) -> None:
    tool = {
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
    }
    assert complete_tool(tool)["function"]["parameters"]["properties"]["x"]["type"] == kind


def test_existing_values_are_kept() -> None:
    parameters = {
        "type": "object",
        "description": "all",
        "properties": {
            "x": {
                "type": "array",
                "description": "d",
                "items": {"type": "integer", "description": "one"},
            }
        },
        "required": ["x"],
        "additionalProperties": {"type": "string", "description": ""},
    }
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "F", "parameters": parameters},
    }
    assert complete_tool(tool) == tool


def test_an_endless_definition_is_cut() -> None:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"again": schema}
    assert complete_tool({"name": "f", "parameters": schema})["parameters"]["type"] == "object"


def test_unknown_types_are_shown_unchanged() -> None:
    assert (
        shown(
            {"name": "f", "description": "d", "parameters": {"properties": {"x": {"type": "odd"}}}}
        )
        == "f: d(x: odd)"
    )
