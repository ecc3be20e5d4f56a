"""The tools that an answer may call, as grammars need them: names, and what their arguments have to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import InvalidRequest
from holdfast.intake.grammars.checked import checked_schema
from holdfast.intake.grammars.schema import CleanSchema, Schema, SchemaBounds, SchemaFault
from holdfast.messages.requests import ToolChoice

_ANY_ARGUMENTS = CleanSchema(schema={"type": "object"})
_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """A tool that may be called. field: where it stands in the request. strict: a keyword that is not enforced is an error."""

    name: str
    arguments: Schema
    field: str = ""
    strict: bool = False
    unenforced: tuple[str, ...] = ()

    def definition(self, reference: str) -> Any:
        """What a `$ref` of its clean schema points to."""
        return self.arguments.get("$defs", {}).get(reference.rsplit("/", 1)[-1], {})


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether the client wants its arguments to fit the schema, whatever the model would say."""
    return tool.get("function", tool).get("strict") is True


def callable_tools(
    tools: Sequence[Mapping[str, Any]], choice: ToolChoice, *, bounds: SchemaBounds, enforce_all: bool
) -> tuple[CallableTool, ...]:
    """The tools that a request allows to be called, their schemas checked. Raises InvalidRequest for what is strict and cannot be.

    enforce_all: the schemas of tools that are not strict bind too, as far as a grammar can enforce them.
    """
    found = []
    for number, tool in enumerate(tools):
        function = tool.get("function", tool)
        if choice.names and function["name"] not in choice.names:
            continue
        strict = is_strict(tool)
        field = f"tools.{number}.function.parameters"
        checked = _ANY_ARGUMENTS
        if strict or enforce_all:
            checked = _arguments(function.get("parameters"), bounds=bounds, strict=strict, field=field)
        arguments = checked.schema if isinstance(checked.schema, dict) else {"type": "object"}
        name = function["name"]
        found.append(
            CallableTool(name=name, arguments=arguments, field=field, strict=strict, unenforced=_places(name, checked.unenforced))
        )
    return tuple(found)


def _arguments(parameters: Any, *, bounds: SchemaBounds, strict: bool, field: str) -> CleanSchema:
    if not parameters:
        return CleanSchema(schema=_NO_ARGUMENTS)
    if isinstance(parameters, dict) and "type" not in parameters:
        parameters = {"type": "object", **parameters}
    try:
        return checked_schema(parameters, bounds=bounds, strict=strict)
    except SchemaFault as fault:
        raise InvalidRequest(f"`{field}`: {fault.reason}", field=field, shown=fault.where) from None


def _places(name: str, unenforced: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name}{place.removeprefix('#')}" for place in unenforced)
