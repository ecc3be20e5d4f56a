"""The tools of a chat request and what is asked of them: OpenAI's form of today and its older one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from holdfast.config import LimitsSettings
from holdfast.http.openai.fields import STRICT
from holdfast.http.server.body import TAG_MARK
from holdfast.http.server.problem import RequestRefused
from holdfast.intake.limits import nesting_of
from holdfast.messages.requests import ToolChoice

_LONGEST_NAME = 256
_DEEPEST_SCHEMA = 64
_WORD, _OBJECT = TAG_MARK + "word", TAG_MARK + "object"
_SERVED_TYPE = "function"
FunctionName = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME, pattern=r"^[^\s\x00-\x1f\"<>{}]+$")]


def _word_or_object(value: Any) -> str:
    return _OBJECT if isinstance(value, dict) else _WORD


@with_config(STRICT)
class FunctionDefinition(TypedDict):
    """A function that the model may call."""

    name: FunctionName
    description: NotRequired[str | None]
    parameters: NotRequired[Annotated[dict[str, Any] | None, Field(description="JSON schema of its arguments.")]]
    strict: NotRequired[Annotated[bool | None, Field(description="The arguments are made to fit the schema.")]]


@with_config(STRICT)
class ToolDefinition(TypedDict):
    """A tool. Only functions are served."""

    type: str
    function: NotRequired[FunctionDefinition]


@with_config(STRICT)
class FunctionReference(TypedDict):
    """One of the functions, by name."""

    name: FunctionName


@with_config(STRICT)
class ToolReference(TypedDict):
    """One of the tools, by name."""

    type: NotRequired[Literal["function"]]
    function: FunctionReference


@with_config(STRICT)
class AllowedTools(TypedDict):
    """Some of the tools, of which the model may or must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Field(min_length=1, fail_fast=True)]


@with_config(STRICT)
class NamedChoice(TypedDict):
    """The tool that must be called (`function`), or those that may be (`allowed_tools`)."""

    type: NotRequired[Literal["function", "allowed_tools"]]
    function: NotRequired[FunctionReference]
    allowed_tools: NotRequired[AllowedTools]


ChoiceField = Annotated[
    Annotated[Literal["none", "auto", "required", "any"], Tag(_WORD)] | Annotated[NamedChoice, Tag(_OBJECT)],
    Discriminator(_word_or_object),
]
FunctionCallField = Annotated[
    Annotated[Literal["none", "auto"], Tag(_WORD)] | Annotated[FunctionReference, Tag(_OBJECT)], Discriminator(_word_or_object)
]
Tools = Annotated[list[ToolDefinition], Field(fail_fast=True)]
Functions = Annotated[list[FunctionDefinition], Field(fail_fast=True)]


def checked_tools(tools: Sequence[ToolDefinition], *, limits: LimitsSettings) -> tuple[dict[str, Any], ...]:
    """The tools as a prompt has them, without nulls. Raises RequestRefused naming what cannot be served."""
    _refuse_too_many(tools, limits.max_tools, field="tools")
    for place, tool in enumerate(tools):
        if (kind := tool["type"]) != _SERVED_TYPE:
            name, shown = f"tools.{place}.type", f", not {kind[:40]!r}"
            raise RequestRefused(f"`{name}`: only functions are supported", code="unsupported_parameter", field=name, shown=shown)
        if "function" not in tool:
            name = f"tools.{place}.function"
            raise RequestRefused(f"`{name}` is required", code="missing_required_parameter", field=name)
    return _checked(
        [_tool(tool["function"], tool) for tool in tools], field="tools.{}.function", most_parts=limits.max_tool_parts
    )


def checked_functions(functions: Sequence[FunctionDefinition], *, limits: LimitsSettings) -> tuple[dict[str, Any], ...]:
    """The functions of the older form, as tools. Raises RequestRefused."""
    _refuse_too_many(functions, limits.max_tools, field="functions")
    return _checked([_tool(function) for function in functions], field="functions.{}", most_parts=limits.max_tool_parts)


def tool_choice_of(choice: str | NamedChoice | None, *, tools: Sequence[Mapping[str, Any]], parallel: bool) -> ToolChoice:
    """What `tool_choice` asks for. Raises RequestRefused for a tool that is not among `tools`."""
    field = "tool_choice"
    if choice is None or isinstance(choice, str):
        return _choice(_MODES[choice or "auto"], (), tools=tools, parallel=parallel, field=field)
    if allowed := choice.get("allowed_tools"):
        names = [tool["function"]["name"] for tool in allowed["tools"]]
        return _choice(allowed["mode"], names, tools=tools, parallel=parallel, field=f"{field}.allowed_tools.tools")
    if function := choice.get("function"):
        return _choice("required", [function["name"]], tools=tools, parallel=parallel, field=f"{field}.function.name")
    missing = f"{field}.{choice.get('type', 'function')}"
    raise RequestRefused(f"`{missing}` is required", code="missing_required_parameter", field=missing)


def function_call_of(choice: str | FunctionReference | None, *, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """What `function_call`, the older form, asks for; its answers have one call. Raises RequestRefused."""
    if choice is None or isinstance(choice, str):
        return _choice(_MODES[choice or "auto"], (), tools=tools, parallel=False, field="function_call")
    return _choice("required", [choice["name"]], tools=tools, parallel=False, field="function_call.name")


_Mode = Literal["auto", "none", "required"]
_MODES: Mapping[str, _Mode] = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def _choice(mode: _Mode, names: Sequence[str], *, tools: Sequence[Mapping[str, Any]], parallel: bool, field: str) -> ToolChoice:
    known = {tool["function"]["name"] for tool in tools}
    if mode == "required" and not (known or names):
        raise RequestRefused(f"`{field}`: there are no tools to choose from", field=field)
    for name in names:
        if name not in known:
            raise RequestRefused(f"`{field}`: there is no such tool", field=field, shown=f": {name[:100]!r}")
    return ToolChoice(mode=mode, names=tuple(dict.fromkeys(names)), parallel=parallel)


def _tool(function: FunctionDefinition, tool: Mapping[str, Any] | None = None) -> dict[str, Any]:
    given = {name: value for name, value in function.items() if value is not None}
    further = {name: value for name, value in (tool or {}).items() if name not in ("type", "function") and value is not None}
    return {"type": _SERVED_TYPE, "function": given, **further}


def _checked(tools: Sequence[dict[str, Any]], *, field: str, most_parts: int) -> tuple[dict[str, Any], ...]:
    names: set[str] = set()
    parts = 0
    for place, tool in enumerate(tools):
        function, named = tool["function"], field.format(place)
        if (name := function["name"]) in names:
            raise RequestRefused(f"`{named}.name`: two tools have this name", field=f"{named}.name", shown=f": {name!r}")
        nesting = nesting_of(function.get("parameters"), most_parts=most_parts)
        if nesting.levels > _DEEPEST_SCHEMA:
            reason = f"`{named}.parameters`: deeper than {_DEEPEST_SCHEMA} levels"
            raise RequestRefused(reason, field=f"{named}.parameters")
        parts += nesting.parts
        if parts > most_parts:
            reason = f"`{named}`: with it the definitions of the tools have more than {most_parts:,} keys and values"
            raise RequestRefused(reason, field=named)
        names.add(name)
    return tuple(tools)


def _refuse_too_many(tools: Sequence[object], most: int, *, field: str) -> None:
    if len(tools) > most:
        raise RequestRefused(f"`{field}`: this server takes at most {most}, got {len(tools)}", field=field)
