"""The tools that a request declares: their names, how their JSON schemas are read, and the
conversion of values to the types in the schemas.

No I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from holdfast.front.toolcalls.literals import NUMBER, complete_value, json_text

_ALIASES: Final = {
    "str": "string", "varchar": "string", "text": "string", "char": "string", "enum": "string", "date": "string",
    "int": "integer", "long": "integer", "float": "number", "double": "number", "num": "number", "decimal": "number",
    "bool": "boolean", "list": "array", "tuple": "array", "set": "array", "dict": "object", "map": "object", "none": "null",
}  # fmt: skip
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,999})(\.0+)?")  # the number of digits in `NUMBER`
JSON_TYPES: Final = frozenset({"json", "object", "array", "number", "boolean", "null"})
"""The types of a value that the model itself marked as JSON."""
_MOST_DIGITS: Final = 9  # of the number of an item in a reference
_NAME: Final = re.compile(r"[^\s<>\"'={}()\[\],;]{1,256}")


def strings(value: Any) -> tuple[str, ...]:
    """The strings in a list, such as the value of `required`; empty if it is no list."""
    if not isinstance(value, list | tuple):
        return ()
    return tuple(each for each in value if isinstance(each, str))


def named_types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that the keyword `type` names."""
    resolve = schema.get("type")
    return (resolve,) if isinstance(resolve, str) else strings(resolve)


def listed_values(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """The only values that a schema allows (`enum`, `const`); None if it lists none."""
    if isinstance(listed := schema.get("enum"), list | tuple):
        return listed
    return [schema["const"]] if "const" in schema else None


def items_of(schema: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """The schemas of an array's first items, one each, and the schema of all others."""
    first, others = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(others, list):  # as in draft 7
        return others, schema.get("additionalItems", True)
    return first, others


def definition_name(reference: str) -> str:
    """The name of the definition in `$defs` that a reference points to."""
    return reference.rpartition("/")[2]


def types_of(schema: Mapping[str, Any]) -> Iterator[str]:
    """Iterate over the types that a schema allows directly; none if it does not say."""
    if schema.get("type"):
        yield from named_types(schema)
    elif (values := listed_values(schema)) is not None:
        yield from map(type_of, values)
    elif "properties" in schema or "required" in schema:
        yield "object"
    elif "items" in schema or "prefixItems" in schema:
        yield "array"


class References:
    """Resolves the references of one JSON schema. Other documents are not loaded."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def target(self, reference: str) -> Any:
        """Return what a `$ref` points to. Raises LookupError if it does not point into the schema."""
        base, _, fragment = reference.partition("#")
        if base and not (isinstance(self._root, dict) and base == self._root.get("$id")):
            raise LookupError(reference)
        if fragment and not fragment.startswith("/") and fragment in self._anchors:
            return self._anchors[fragment]
        target = self._root
        for step in fragment.removeprefix("/").split("/") if fragment else ():
            target = _member(target, step)
        return target

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        pending = [self._root]
        while pending:
            node = pending.pop()
            if isinstance(node, Mapping):
                if isinstance(node.get("$anchor"), str):
                    found[node["$anchor"]] = node
                pending.extend(node.values())
            elif isinstance(node, list | tuple):
                pending.extend(node)
        return found


def _member(node: Any, step: str) -> Any:
    """What one step of a JSON pointer leads to. Raises LookupError.

    As clients write them, names may lack the escapes of URLs, and empty steps lead nowhere.
    """
    if isinstance(node, list) and step.isdecimal() and len(step) <= _MOST_DIGITS:
        return node[int(step)]
    if isinstance(node, Mapping):
        for name in (step, unquote(step)):
            name = name.replace("~1", "/").replace("~0", "~")
            if name in node:
                return node[name]
        if not step:
            return node
    raise LookupError(step)


class ToolName(NamedTuple):
    """The tool that a call names.

    declared: whether the request declares the tool. repaired: whether the model spelled its name
    differently.
    """

    name: str
    declared: bool
    repaired: bool = False


class DeclaredTools:
    """The names and parameters of a request's tools, given in OpenAI's format."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._parameters = {
            each["name"]: each.get("parameters")
            for each in functions
            if isinstance(each.get("name"), str)
        }

    def resolve(self, written: str) -> ToolName | None:
        """Return the tool that the model means, or None if the text cannot be a tool's name.

        Differences in case, `-`, `_` and `.` are ignored if only one declared tool matches.
        """
        written = written.strip().strip("\"'")
        if not _NAME.fullmatch(written):
            return None
        if written in self._parameters:
            return ToolName(written, declared=True)
        alike = self._by_normalized_name.get(_normalized_name(written), ())
        if len(alike) == 1:
            return ToolName(alike[0], declared=True, repaired=True)
        return ToolName(written, declared=False)

    def declares(self, name: str) -> bool:
        """Whether there is a tool with exactly this name."""
        return name in self._parameters

    def required(self, name: str) -> frozenset[str]:
        """Return the names of a tool's required arguments."""
        parameters = self._parameters.get(name)
        found = parameters.get("required") if isinstance(parameters, Mapping) else None
        return frozenset(strings(found))

    def only_match(self, arguments: Any) -> str:
        """Return the only tool that accepts these arguments; empty unless exactly one does."""
        if not isinstance(arguments, Mapping) or not arguments:
            return ""
        given = set(arguments)
        matching = [
            name
            for name in self._parameters
            if self.required(name) <= given <= set(self.parameters(name).properties)
        ]
        return matching[0] if len(matching) == 1 else ""

    def parameters(self, name: str) -> ParameterTypes:
        """Return the types of a tool's parameters."""
        return ParameterTypes(self._parameters.get(name))

    @cached_property
    def _by_normalized_name(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self._parameters:
            found.setdefault(_normalized_name(name), []).append(name)
        return found


def _normalized_name(name: str) -> str:
    return re.sub(r"[-_.\s]", "", name.removeprefix("functions.")).lower()


class ParameterTypes:
    """The types that the parameters of one tool may have."""

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        """parameters: the JSON Schema of the tool's arguments, as the client sent it."""
        root = parameters if isinstance(parameters, Mapping) else {}
        self._references = References(root)
        found = root.get("properties")
        self.properties: Mapping[str, Any] = found if isinstance(found, Mapping) else {}

    def of_parameter(self, key: str) -> frozenset[str]:
        """Return the JSON Schema names of a parameter's types; empty if they are unknown."""
        return self.allowed(self.properties.get(key))

    def allowed(self, schema: Any) -> frozenset[str]:
        """Return the types that a schema allows."""
        names = (name.lower() for node in self.branches(schema) for name in types_of(node))
        return frozenset(_ALIASES.get(name, name) for name in names)

    def inner(self, schema: Any, key: str) -> Any:
        """Return the schema of an object's member, or else of an array's items, or else None."""
        for members in self._members(schema):
            if key in members:
                return members[key]
        for node in self.branches(schema):
            if isinstance(node.get("items"), Mapping):
                return node["items"]
        return None

    def declares(self, schema: Any, key: str) -> bool:
        """Whether a schema or one of its branches declares a member with this name."""
        return any(key in members for members in self._members(schema))

    def _members(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        for node in self.branches(schema):
            if isinstance(members := node.get("properties"), Mapping):
                yield members

    def branches(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Iterate over a schema, the schemas it refers to, and those it combines, each once."""
        pending = [schema]
        seen: set[int] = set()
        while pending:
            node = pending.pop()
            if not isinstance(node, Mapping) or id(node) in seen:
                continue
            seen.add(id(node))
            yield node
            found: list[Any] = []
            if isinstance(reference := node.get("$ref"), str):
                with suppress(LookupError):
                    found.append(self._references.target(reference))
            for word in ("anyOf", "oneOf", "allOf"):
                if isinstance(branches := node.get(word), list):
                    found += branches
            pending += reversed(found)


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
        found = _object_or_array(text)
        if found is not None and ("string" not in types or type_of(found[0]) in types):
            return found[1]
    if text[:1] == '"' and types & {"object", "array"} and "string" not in types:
        inner = from_json(text)
        found = _object_or_array(inner) if isinstance(inner, str) else None
        if found is not None:
            return TypedValue(found[1].json, "encoded_twice")
    return TypedValue(json_text(raw))


def _object_or_array(text: str) -> tuple[Any, TypedValue] | None:
    """Parse an object or array in JSON or Python syntax. Returns the value and its JSON text."""
    found = from_json(text)
    if isinstance(found, (dict, list)):
        return found, TypedValue(text)
    repaired = complete_value(text) or ""
    found = from_json(repaired)
    if not isinstance(found, (dict, list)):
        return None
    return found, TypedValue(repaired, "python_literal")


def from_json(text: str) -> Any:
    """Return the value of a JSON text, or None if the text is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_TYPES: Final = {
    bool: "boolean",  # before int, because a bool is also an int
    str: "string",
    int: "integer",
    float: "number",
    Mapping: "object",
    list: "array",
}


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return next((name for kind, name in _TYPES.items() if isinstance(value, kind)), "null")
