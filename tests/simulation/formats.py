"""The formats of answers that agents ask for: JSON, or one of some texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.simulation.actions import Turn

_TEXTS = ["yes", "yesterday", "no"]
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
# by name. So small that answers often end, and with texts that begin alike
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "any": {"type": "object"},
    "pick": {"enum": _TEXTS},
    "point": {
        "type": "object",
        "properties": {"x": _NUMBER, "yes": {"enum": _TEXTS}},
        "required": ["x", "yes"],
        "additionalProperties": False,
    },
    "words": {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 3},
            "is_last": {"type": "boolean"},
        },
        "required": ["words"],
        "additionalProperties": False,
    },
}


def format_fields(turn: Turn) -> dict[str, Any]:
    """The fields of a request that ask for the turn's format."""
    if not turn.format:
        return {}
    schema = {"type": "json_schema", "schema": SCHEMAS[turn.format]}
    match turn.protocol:
        case "messages":
            return {"output_config": {"format": schema}}
        case "responses" if turn.format == "any":
            return {"text": {"format": {"type": "json_object"}}}
        case "responses":
            return {"text": {"format": {"name": turn.format, **schema}}}
        case _ if turn.format == "pick":
            return {"structured_outputs": {"choice": _TEXTS}}
        case _ if turn.format == "any":
            return {"response_format": {"type": "json_object"}}
        case _:
            named = {"name": turn.format, "schema": SCHEMAS[turn.format]}
            return {"response_format": {"type": "json_schema", "json_schema": named}}


def is_of_format(text: str, turn: Turn) -> bool:
    """Whether an answer has the turn's format."""
    if turn.format == "pick" and turn.protocol in ("chat", "completions"):
        return text in _TEXTS
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return fits(value, SCHEMAS[turn.format])


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value fits a schema of the kinds above."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "array":
            items = isinstance(value, list) and len(value) <= schema["maxItems"]
            return items and all(fits(each, schema["items"]) for each in value)
    if not isinstance(value, dict) or not set(schema.get("required", ())) <= value.keys():
        return False
    properties = schema.get("properties")
    return properties is None or all(
        name in properties and fits(each, properties[name]) for name, each in value.items()
    )
