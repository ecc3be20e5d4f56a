"""The tools that a request declares, and values that a model wrote as text, typed by their schemas. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from holdfast.front.toolcalls.literals import NUMBER, Literals, json_text, whole

_ALIASES = {
    "str": "string", "varchar": "string", "text": "string", "char": "string", "enum": "string", "date": "string",
    "int": "integer", "long": "integer", "float": "number", "double": "number", "num": "number", "decimal": "number",
    "bool": "boolean", "list": "array", "tuple": "array", "set": "array", "dict": "object", "map": "object", "none": "null",
}  # fmt: skip
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,999})(\.0+)?")  # no longer than `NUMBER`
# of a value that the model itself calls JSON
JSON_TYPES = frozenset({"json", "object", "array", "number", "boolean", "null"})
_MAX_DEPTH = 16  # of references and unions in a schema
_PYTHON = Literals()
_NAME = re.compile(r"[^\s<>\"'={}()\[\],;]{1,256}")
_PREFIX = "functions."


class TypedValue(NamedTuple):
    """A value as JSON text, and the name of what was mended to read it."""

    json: str
    repair: str = ""


class ParameterTypes:
    """Which types the parameters of one tool may have."""

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        """parameters: the JSON Schema of the tool's arguments, as the client sent it."""
        self._root = parameters if isinstance(parameters, Mapping) else {}
        found = self._root.get("properties")
        self.properties: Mapping[str, Any] = found if isinstance(found, Mapping) else {}

    def of(self, key: str) -> frozenset[str]:
        """The names of the types that JSON Schema allows for a parameter; empty: it says nothing."""
        return self.allowed(self.properties.get(key))

    def allowed(self, schema: Any) -> frozenset[str]:
        """The same of any schema of this tool."""
        return frozenset(
            _ALIASES.get(name.lower(), name.lower()) for name in self._types(schema, _MAX_DEPTH)
        )

    def inner(self, schema: Any, key: str) -> Any:
        """The schema of a member of an object, or else of an array's items; None: there is none."""
        return next(
            chain(self._members(schema, key, _MAX_DEPTH), self._items(schema, _MAX_DEPTH)), None
        )

    def declares(self, schema: Any, key: str) -> bool:
        """Whether a schema of this tool, or a branch of it, has a member of that name."""
        return any(True for _ in self._members(schema, key, _MAX_DEPTH))

    def _members(self, schema: Any, key: str, depth: int) -> Iterator[Any]:
        """What a schema and its branches say of a member."""
        if not isinstance(schema, Mapping) or not depth:
            return
        if isinstance(members := schema.get("properties"), Mapping) and key in members:
            yield members[key]
        for branch in self._branches(schema):
            yield from self._members(branch, key, depth - 1)

    def _items(self, schema: Any, depth: int) -> Iterator[Any]:
        """What a schema and its branches say of the items of an array."""
        if not isinstance(schema, Mapping) or not depth:
            return
        if isinstance(schema.get("items"), Mapping):
            yield schema["items"]
        for branch in self._branches(schema):
            yield from self._items(branch, depth - 1)

    def _branches(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """What a schema refers to, and the schemas that it is put together from."""
        if "$ref" in schema:
            yield self._target(schema["$ref"])
        for word in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(word), list):
                yield from branches

    def _types(self, schema: Any, depth: int) -> Iterator[str]:
        if not isinstance(schema, Mapping) or not depth:
            return
        for branch in self._branches(schema):
            yield from self._types(branch, depth - 1)
        named = schema.get("type")
        if named:
            yield from (
                name
                for name in (named if isinstance(named, list) else [named])
                if isinstance(name, str)
            )
        elif "enum" in schema or "const" in schema:
            values = (
                schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
            )
            yield from (type_of(value) for value in values)
        elif "properties" in schema:
            yield "object"
        elif "items" in schema:
            yield "array"

    def _target(self, reference: Any) -> Any:
        """What a `#/...` reference points to."""
        target: Any = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        for step in filter(None, reference[1:].split("/")):
            if not isinstance(target, Mapping):
                return None
            target = target.get(step.replace("~1", "/").replace("~0", "~"))
        return target


def typed(raw: str, types: frozenset[str]) -> TypedValue:
    """The value that the text stands for, given the types it may have (empty: not known).

    A number keeps its spelling and valid JSON its white space: what the model wrote comes back as
    the same tokens.
    """
    text = raw.strip()
    if "json" in types and from_json(text) is not None:
        return TypedValue(text)
    if "null" in types and text in ("null", "None"):
        return TypedValue("null")
    if "boolean" in types and text.lower() in ("true", "false"):
        return TypedValue(text.lower())
    if ("number" in types and NUMBER.fullmatch(text)) or (
        "integer" in types and _INTEGER.fullmatch(text)
    ):
        return TypedValue(text)
    if text[:1] in ("{", "[") and (not types or types & {"object", "array"}):
        found = _structure(text)
        if found is not None and ("string" not in types or type_of(found[0]) in types):
            return found[1]
    if text[:1] == '"' and types & {"object", "array"} and "string" not in types:
        inner = from_json(text)
        found = _structure(inner) if isinstance(inner, str) else None
        if found is not None:
            return TypedValue(found[1].json, "encoded_twice")
    return TypedValue(json_text(raw))


def _structure(text: str) -> tuple[Any, TypedValue] | None:
    """An object or array and its JSON text; of Python's spelling too."""
    found = from_json(text)
    if isinstance(found, (dict, list)):
        return found, TypedValue(text)
    mended = whole(text, _PYTHON)
    found = None if mended is None else from_json(mended)
    return (
        (found, TypedValue(mended, "python_literal"))
        if mended and isinstance(found, (dict, list))
        else None
    )


def from_json(text: str) -> Any:
    """The value of a JSON text; None when it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    for kind, name in (
        (str, "string"),
        (int, "integer"),
        (float, "number"),
        (Mapping, "object"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "null"


class ToolName(NamedTuple):
    """The tool that a call is of."""

    name: str
    declared: bool
    repaired: bool = False


class DeclaredTools:
    """Names and parameters of the tools of a request, given as OpenAI shapes them."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._parameters = {
            each["name"]: each.get("parameters")
            for each in functions
            if isinstance(each.get("name"), str)
        }

    def named(self, written: str) -> ToolName | None:
        """The tool that is meant; None: that is no name.

        Case and `-`, `_`, `.` are mended where only one tool fits then.
        """
        written = written.strip().strip("\"'")
        if not _NAME.fullmatch(written):
            return None
        if written in self._parameters:
            return ToolName(written, declared=True)
        alike = self._alike.get(_essence(written), ())
        return (
            ToolName(alike[0], declared=True, repaired=True)
            if len(alike) == 1
            else ToolName(written, declared=False)
        )

    def declares(self, name: str) -> bool:
        """Whether there is a tool of exactly this name."""
        return name in self._parameters

    def required(self, name: str) -> frozenset[str]:
        """The arguments that a tool cannot do without."""
        parameters = self._parameters.get(name)
        found = parameters.get("required") if isinstance(parameters, Mapping) else None
        return (
            frozenset(key for key in found if isinstance(key, str))
            if isinstance(found, list)
            else frozenset()
        )

    def only_fitting(self, arguments: Any) -> str:
        """The only tool that takes these arguments; empty when there are several, or none."""
        if not isinstance(arguments, Mapping) or not arguments:
            return ""
        given = set(arguments)
        fitting = [
            name
            for name in self._parameters
            if self.required(name) <= given <= set(self.parameters(name).properties)
        ]
        return fitting[0] if len(fitting) == 1 else ""

    def parameters(self, name: str) -> ParameterTypes:
        """The types of a tool's parameters."""
        return ParameterTypes(self._parameters.get(name))

    @cached_property
    def _alike(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self._parameters:
            found.setdefault(_essence(name), []).append(name)
        return found


def _essence(name: str) -> str:
    return re.sub(r"[-_.\s]", "", name.removeprefix(_PREFIX)).lower()
