"""The types of a tool's arguments, and the conversion of the texts that a model writes to these types.

No I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from holdfast.front.toolcalls.json_schema import References, type_of, types_of
from holdfast.front.toolcalls.literals import NUMBER, complete_value, json_text

# names of types that are not JSON Schema's, but that clients use
_ALIASES: Final = {
    "str": "string", "varchar": "string", "text": "string", "char": "string", "enum": "string", "date": "string",
    "int": "integer", "long": "integer", "float": "number", "double": "number", "num": "number", "decimal": "number",
    "bool": "boolean", "list": "array", "tuple": "array", "set": "array", "dict": "object", "map": "object", "none": "null",
}  # fmt: skip
# with at most as many digits as `NUMBER`
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,999})(\.0+)?")
JSON_TYPES: Final = frozenset({"json", "object", "array", "number", "boolean", "null"})
"""The types of a value that the model itself marked as JSON."""


class ParameterTypes:
    """The types that the parameters of one tool may have."""

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        """parameters: the JSON Schema of the tool's arguments, as the client sent it."""
        root = parameters if isinstance(parameters, Mapping) else {}
        self._references = References(root)
        properties = root.get("properties")
        self.properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}

    def of_parameter(self, key: str) -> frozenset[str]:
        """Return the JSON Schema names of a parameter's types; empty if they are unknown."""
        return self.allowed_types(self.properties.get(key))

    def allowed_types(self, schema: Any) -> frozenset[str]:
        """Return the types that a schema allows."""
        names = (name.lower() for node in self.branches(schema) for name in types_of(node))
        return frozenset(_ALIASES.get(name, name) for name in names)

    def inner_schema(self, schema: Any, key: str) -> Any:
        """Return the schema of an object's member, or else of an array's items, or else None."""
        for members in self._declared_members(schema):
            if key in members:
                return members[key]
        for node in self.branches(schema):
            if isinstance(node.get("items"), Mapping):
                return node["items"]
        return None

    def declares(self, schema: Any, key: str) -> bool:
        """Whether a schema or one of its branches declares a member with this name."""
        return any(key in members for members in self._declared_members(schema))

    def _declared_members(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the `properties` of a schema and of each of its branches."""
        for node in self.branches(schema):
            if isinstance(members := node.get("properties"), Mapping):
                yield members

    def branches(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Iterate over a schema, the schemas it refers to, and those it combines, each once."""
        pending = [schema]
        visited_ids: set[int] = set()
        while pending:
            node = pending.pop()
            if not isinstance(node, Mapping) or id(node) in visited_ids:
                continue
            visited_ids.add(id(node))
            yield node
            next_nodes: list[Any] = []
            if isinstance(reference := node.get("$ref"), str):
                with suppress(LookupError):
                    next_nodes.append(self._references.target(reference))
            for keyword in ("anyOf", "oneOf", "allOf"):
                if isinstance(branches := node.get(keyword), list):
                    next_nodes += branches
            pending += reversed(next_nodes)


class TypedValue(NamedTuple):
    """A value as JSON text, and the name of the repair that was needed to read it."""

    json: str
    repair: str = ""


def convert_to_type(raw: str, types: frozenset[str]) -> TypedValue:
    """Convert a text to a value of one of these types, or else to a string.

    If `types` is empty, the types are unknown, and only an object or an array is recognized.

    Numbers keep their spelling and JSON keeps its white space, so that the model's own text comes
    back as the same tokens.
    """
    text = raw.strip()
    if "json" in types and from_json(text) is not None:
        return TypedValue(text)
    if "null" in types and text in ("null", "None"):
        return TypedValue("null")
    if "boolean" in types and text.lower() in ("true", "false"):
        return TypedValue(text.lower())
    if "number" in types and NUMBER.fullmatch(text):
        return TypedValue(text)
    if "integer" in types and _INTEGER.fullmatch(text):
        return TypedValue(text)
    if text[:1] in ("{", "[") and (not types or types & {"object", "array"}):
        parsed = _object_or_array(text)
        if parsed is not None and ("string" not in types or type_of(parsed[0]) in types):
            return parsed[1]
    if text[:1] == '"' and types & {"object", "array"} and "string" not in types:
        inner = from_json(text)
        parsed = _object_or_array(inner) if isinstance(inner, str) else None
        if parsed is not None:
            return TypedValue(parsed[1].json, "encoded_twice")
    return TypedValue(json_text(raw))


def _object_or_array(text: str) -> tuple[Any, TypedValue] | None:
    """Parse an object or array in JSON or Python syntax. Returns the value and its JSON text."""
    value = from_json(text)
    if isinstance(value, (dict, list)):
        return value, TypedValue(text)
    repaired = complete_value(text) or ""
    value = from_json(repaired)
    if not isinstance(value, (dict, list)):
        return None
    return value, TypedValue(repaired, "python_literal")


def from_json(text: str) -> Any:
    """Return the value of a JSON text, or None if the text is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> Any:
    """Raise ValueError for NaN and the infinities, which Python's parser would accept."""
    raise ValueError(f"{name} is not JSON")
