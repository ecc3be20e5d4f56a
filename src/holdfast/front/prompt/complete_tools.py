"""Definitions of tools with all that a chat template may ask for: some take for granted what JSON
Schema leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_MOST_LEVELS: Final = 16
_BY_VALUE: Final = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def complete_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The definition with a description, parameters, and one type for each of them."""
    function = tool.get("function")
    if isinstance(function, Mapping):
        return {"type": "function", **tool, "function": _function(function)}
    return _function(tool)


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    return {
        "description": "",
        **function,
        "parameters": _schema(parameters if isinstance(parameters, Mapping) else {}, "object", 0),
    }


def _schema(schema: Any, fallback: str, level: int) -> dict[str, Any]:
    given = schema if isinstance(schema, Mapping) and level < _MOST_LEVELS else {}
    kind = _type(given, fallback)
    ready: dict[str, Any] = {"description": "", **given, "type": kind}
    if kind == "array":
        ready["items"] = _schema(given.get("items"), "string", level + 1)
    if kind == "object":
        properties = given.get("properties")
        named = properties if isinstance(properties, Mapping) else {}
        ready["properties"] = {
            name: _schema(each, "string", level + 1) for name, each in named.items()
        }
        ready.setdefault("required", [])
        if not isinstance(given.get("additionalProperties"), Mapping):
            ready["additionalProperties"] = {"type": "string", "description": ""}
    return ready


def _type(schema: Mapping[str, Any], fallback: str) -> str:
    """The type that is given, or of several the first that is not null."""
    given = schema.get("type")
    for kind in given if isinstance(given, list) else (given,):
        if isinstance(kind, str) and kind != "null":
            return kind
    for word in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(word)
        for choice in choices if isinstance(choices, list) else ():
            if (
                isinstance(choice, Mapping)
                and isinstance(choice.get("type"), str)
                and choice["type"] != "null"
            ):
                return str(choice["type"])
    values = schema.get("enum")
    if isinstance(values, list) and values:
        return _BY_VALUE.get(type(values[0]), "string")
    return "object" if "properties" in schema else fallback
