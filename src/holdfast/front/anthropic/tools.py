"""The tools of a request and what is asked of them: functions, Anthropic's own tools that the
client runs, and those it hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from holdfast.config import LimitsSettings
from holdfast.front.anthropic.content import CacheControl
from holdfast.front.server.fields import (
    STRICT,
    FunctionName,
    ToolMode,
    checked_definitions,
    choice_among,
    log_once,
    refuse_too_many,
)
from holdfast.front.server.problem import RequestRefused
from holdfast.wire.requests import ToolChoice

_SCHEMA = "input_schema"
_MODES: Mapping[str, ToolMode] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split()}


_TEXT, _NUMBER, _SWITCH = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_RANGE = {"type": "array", "items": _NUMBER}
_EDITS = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _NUMBER,
    "view_range": _RANGE,
}


def _commands(words: str) -> dict[str, Any]:
    return {"type": "string", "enum": words.split()}


# Tools that clients run and whose definition Anthropic's models know by heart: type without its
# date → description and schema.
_KNOWN_BY_HEART: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Runs a command in a shell that stays open.",
        _object("", command=_TEXT, restart=_SWITCH),
    ),
    "text_editor": (
        "Views, creates and edits files.",
        _object(
            "command path",
            command=_commands("view create str_replace insert undo_edit"),
            **_EDITS,
            insert_text=_TEXT,
        ),
    ),
    "memory": (
        "Views, creates and edits files of notes under /memories, which outlive the conversation.",
        _object(
            "command",
            command=_commands("view create str_replace insert delete rename"),
            **_EDITS,
            insert_text=_TEXT,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
}


@with_config(STRICT)
class MessagesTool(TypedDict):
    """A tool: a function, or one that Anthropic has defined, by its type."""

    type: NotRequired[str | None]
    name: NotRequired[FunctionName]
    description: NotRequired[str | None]
    input_schema: NotRequired[
        Annotated[dict[str, Any] | None, Field(description="JSON schema of its arguments.")]
    ]
    strict: NotRequired[
        Annotated[bool | None, Field(description="The arguments are made to fit the schema.")]
    ]
    defer_loading: NotRequired[
        Annotated[bool | None, Field(description="Not shown before a tool_reference names it.")]
    ]
    cache_control: NotRequired[CacheControl | None]


@with_config(STRICT)
class MessagesToolChoice(TypedDict):
    """Whether a tool may, must or must not be called, or which one must be."""

    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[FunctionName | None]
    disable_parallel_tool_use: NotRequired[bool | None]


class ShownTools(NamedTuple):
    """The tools as a prompt has them, without nulls, and the request's fields of their schemas.

    found: the names of those that searches have found; they stand after all others.
    """

    definitions: tuple[dict[str, Any], ...]
    schema_fields: tuple[str, ...]
    found: tuple[str, ...] = ()


def shown_tools(
    tools: Sequence[MessagesTool], *, referenced: Iterable[str], limits: LimitsSettings
) -> ShownTools:
    """Those that are offered to the model; deferred ones once they are referenced.

    Raises RequestRefused naming what cannot be served.
    """
    refuse_too_many(tools, limits.max_tools, field="tools")
    shown: list[tuple[dict[str, Any], str]] = []
    deferred: dict[str, tuple[dict[str, Any], str]] = {}
    for place, tool in enumerate(tools):
        field = f"tools.{place}"
        if (definition := _function(tool, field)) is not None and tool.get("defer_loading"):
            deferred[definition["function"]["name"]] = definition, field
        elif definition is not None:
            shown.append((definition, field))
    found = tuple(name for name in dict.fromkeys(referenced) if name in deferred)
    # Templates tell how to call tools only where they list some, so without any others the found
    # ones are listed.
    within = found if shown else ()
    shown += [deferred[name] for name in found]
    definitions, fields = (
        [definition for definition, _ in shown],
        tuple(field for _, field in shown),
    )
    checked = checked_definitions(
        definitions, fields=fields, most_parts=limits.max_tool_parts, schema=_SCHEMA
    )
    return ShownTools(checked, tuple(f"{field}.{_SCHEMA}" for field in fields), within)


def choice_of(choice: MessagesToolChoice | None, *, tools: ShownTools) -> ToolChoice:
    """What `tool_choice` asks for. Raises RequestRefused for a tool that is not among `tools`."""
    if choice is None:
        return ToolChoice()
    kind, name = choice["type"], choice.get("name")
    if kind == "tool" and not name:
        raise RequestRefused(
            "`tool_choice.name` is required",
            code="missing_required_parameter",
            field="tool_choice.name",
        )
    names = [name] if kind == "tool" and name else []
    field = "tool_choice.name" if names else "tool_choice"
    return choice_among(
        _MODES[kind],
        names,
        tools=tools.definitions,
        parallel=not choice.get("disable_parallel_tool_use"),
        field=field,
    )


def _function(tool: MessagesTool, field: str) -> dict[str, Any] | None:
    """A tool as a function; None for one that only Anthropic's servers could run."""
    kind = tool.get("type") or "custom"
    description, schema = tool.get("description"), tool.get("input_schema")
    if kind != "custom" and schema is None:
        family, _, date = kind.rpartition("_")
        known = _KNOWN_BY_HEART.get(family) if date.isdecimal() else None
        if known is None:
            log_once("a tool of type %r is left out: it is run by Anthropic's servers only", kind)
            return None
        description, schema = known[0] if description is None else description, known[1]
    for name, value in (("name", tool.get("name")), ("input_schema", schema)):
        if value is None:
            raise RequestRefused(
                f"`{field}.{name}` is required",
                code="missing_required_parameter",
                field=f"{field}.{name}",
            )
    given = {
        "name": tool["name"],
        "description": description,
        "parameters": schema,
        "strict": tool.get("strict"),
    }
    return {
        "type": "function",
        "function": {key: value for key, value in given.items() if value is not None},
    }
