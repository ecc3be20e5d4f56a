"""The tools that an answer may call, as grammars need them: names, and what their arguments have to
be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import InvalidRequest
from holdfast.front.structured.checked import checked_schema
from holdfast.front.structured.schema import CleanSchema, Schema, SchemaBounds, SchemaFault
from holdfast.wire.requests import ChatPrompt, ToolChoice

_ANY_ARGUMENTS = CleanSchema(schema={"type": "object"})
_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
_DEEPEST = 16  # references and `allOf` followed for the members of an object


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The members that an object may have: schemas by name, in order."""

    properties: Mapping[str, Any]
    required: frozenset[str]
    others: Any  # schema of all further ones; False: there are none
    left_out: tuple[str, ...] = ()  # keywords of the object that these do not show


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """A tool that may be called. place: where its schema stands in the request."""

    name: str
    arguments: Schema
    place: str = ""
    strict: bool = False  # a keyword that is not enforced is an error
    unenforced: tuple[str, ...] = ()

    def definition(self, reference: str) -> Any:
        """What a `$ref` of its clean schema points to."""
        return self.arguments.get("$defs", {}).get(reference.rsplit("/", 1)[-1], {})

    def members(self, node: Schema, *, depth: int = 0) -> Members:
        """The members of an object of its schema, wherever they are declared."""
        left_out: list[str] = [
            word
            for word in ("anyOf", "oneOf", "patternProperties", "minProperties", "maxProperties")
            if word in node
        ]
        found = dict[str, Any](node.get("properties", {}))
        required, others = {*node.get("required", ())}, node.get("additionalProperties", True)
        parts = [
            *node.get("allOf", ()),
            *((self.definition(node["$ref"]),) if "$ref" in node else ()),
        ]
        for part in parts if depth < _DEEPEST else ():
            if isinstance(part, dict):
                more = self.members(part, depth=depth + 1)
                found.update(more.properties)
                required |= more.required
                others = others if more.others is True else more.others
                left_out += more.left_out
        declared = {name: schema for name, schema in found.items() if schema is not False}
        declared.update(dict.fromkeys(sorted(required - declared.keys()), others))
        return Members(
            properties=declared,
            required=frozenset(required),
            others=others,
            left_out=tuple(left_out),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBlock:
    """All calls of an answer as a family writes them: `opening`, a call, more of them each behind
    `again`, `closing`.

    calls: of each tool, the text up to its arguments, and an expression for the rest. In all texts
        there may be markers.
    left_out: keywords that it does not enforce, by the name of the tool; such a family has no way
        to.
    """

    opening: str
    calls: Sequence[tuple[str, str]]
    again: str
    closing: str = ""
    is_single: bool = False  # the family writes one call in an answer
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether the client wants its arguments to fit the schema, whatever the model would say."""
    return tool.get("function", tool).get("strict") is True


def callable_tools(
    prompt: ChatPrompt, choice: ToolChoice, *, bounds: SchemaBounds, enforce_all: bool
) -> tuple[CallableTool, ...]:
    """The prompt's tools that may be called, their schemas checked.

    Raises InvalidRequest where strict ones cannot be enforced.

    enforce_all: the schemas of tools that are not strict bind too, as far as a grammar can enforce
    them; else those of tools that the choice holds to them.
    """
    found = []
    for number, tool in enumerate(prompt.tools):
        function = tool.get("function", tool)
        name, strict = function["name"], is_strict(tool)
        if choice.names and name not in choice.names:
            continue
        place = (
            prompt.tool_fields[number]
            if prompt.tool_fields
            else f"tools.{number}.function.parameters"
        )
        checked = _ANY_ARGUMENTS
        if strict or enforce_all or name in choice.held:
            checked = _arguments(
                function.get("parameters"), bounds=bounds, strict=strict, place=place
            )
        arguments = checked.schema if isinstance(checked.schema, dict) else {"type": "object"}
        unenforced = in_tool(name, checked.unenforced)
        found.append(
            CallableTool(
                name=name, arguments=arguments, place=place, strict=strict, unenforced=unenforced
            )
        )
    return tuple(found)


def in_tool(name: str, places: Sequence[str]) -> tuple[str, ...]:
    """Places in a tool's schema, with the tool's name."""
    return tuple(f"{name}/{place.removeprefix('#').removeprefix('/')}" for place in places)


def _arguments(parameters: Any, *, bounds: SchemaBounds, strict: bool, place: str) -> CleanSchema:
    if not parameters:
        return CleanSchema(schema=_NO_ARGUMENTS)
    if isinstance(parameters, dict) and "type" not in parameters:
        parameters = {"type": "object", **parameters}
    try:
        return checked_schema(parameters, bounds=bounds, strict=strict)
    except SchemaFault as fault:
        raise InvalidRequest(f"`{place}`: {fault.reason}", field=place, shown=fault.where) from None
