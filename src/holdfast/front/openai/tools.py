"""The tools of a chat request and what is asked of them: OpenAI's form of today and its older one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from holdfast.config import LimitsSettings
from holdfast.front.server.body import TAG_MARK
from holdfast.front.server.fields import STRICT, refuse_too_many
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.tools import FunctionName, ToolMode, checked_definitions, choice_among
from holdfast.wire.requests import ToolChoice

_WORD, _OBJECT = TAG_MARK + "word", TAG_MARK + "object"
_SERVED_TYPE = "function"
_MODES: Mapping[str, ToolMode] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",
}


def _word_or_object(value: Any) -> str:
    return _OBJECT if isinstance(value, dict) else _WORD


@with_config(STRICT)
class FunctionDefinition(TypedDict):
    """A function that the model may call."""

    name: FunctionName
    description: NotRequired[str | None]
    parameters: NotRequired[
        Annotated[dict[str, Any] | None, Field(description="JSON schema of its arguments.")]
    ]
    strict: NotRequired[
        Annotated[bool | None, Field(description="The arguments are made to fit the schema.")]
    ]


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
    Annotated[Literal["none", "auto", "required", "any"], Tag(_WORD)]
    | Annotated[NamedChoice, Tag(_OBJECT)],
    Discriminator(_word_or_object),
]
FunctionCallField = Annotated[
    Annotated[Literal["none", "auto"], Tag(_WORD)] | Annotated[FunctionReference, Tag(_OBJECT)],
    Discriminator(_word_or_object),
]
Tools = Annotated[list[ToolDefinition], Field(fail_fast=True)]
Functions = Annotated[list[FunctionDefinition], Field(fail_fast=True)]


def checked_tools(
    tools: Sequence[ToolDefinition], *, limits: LimitsSettings
) -> tuple[dict[str, Any], ...]:
    """The tools as a prompt has them, without nulls.

    Raises RequestRefused naming what cannot be served.
    """
    refuse_too_many(tools, limits.max_tools, field="tools")
    for place, tool in enumerate(tools):
        if (kind := tool["type"]) != _SERVED_TYPE:
            name, shown = f"tools.{place}.type", f", not {kind[:40]!r}"
            raise RequestRefused(
                f"`{name}`: only functions are supported",
                code="unsupported_parameter",
                field=name,
                shown=shown,
            )
        if "function" not in tool:
            name = f"tools.{place}.function"
            raise RequestRefused(
                f"`{name}` is required", code="missing_required_parameter", field=name
            )
    return checked_definitions(
        [_tool(tool["function"], tool) for tool in tools],
        field="tools.{}.function",
        most_parts=limits.max_tool_parts,
    )


def checked_functions(
    functions: Sequence[FunctionDefinition], *, limits: LimitsSettings
) -> tuple[dict[str, Any], ...]:
    """The functions of the older form, as tools. Raises RequestRefused."""
    refuse_too_many(functions, limits.max_tools, field="functions")
    return checked_definitions(
        [_tool(function) for function in functions],
        field="functions.{}",
        most_parts=limits.max_tool_parts,
    )


def tool_choice_of(
    choice: str | NamedChoice | None, *, tools: Sequence[Mapping[str, Any]], parallel: bool
) -> ToolChoice:
    """What `tool_choice` asks for. Raises RequestRefused for a tool that is not among `tools`."""
    field = "tool_choice"
    if choice is None or isinstance(choice, str):
        return choice_among(
            _MODES[choice or "auto"], (), tools=tools, parallel=parallel, field=field
        )
    if allowed := choice.get("allowed_tools"):
        names = [tool["function"]["name"] for tool in allowed["tools"]]
        return choice_among(
            allowed["mode"],
            names,
            tools=tools,
            parallel=parallel,
            field=f"{field}.allowed_tools.tools",
        )
    if function := choice.get("function"):
        return choice_among(
            "required",
            [function["name"]],
            tools=tools,
            parallel=parallel,
            field=f"{field}.function.name",
        )
    missing = f"{field}.{choice.get('type', 'function')}"
    raise RequestRefused(
        f"`{missing}` is required", code="missing_required_parameter", field=missing
    )


def function_call_of(
    choice: str | FunctionReference | None, *, tools: Sequence[Mapping[str, Any]]
) -> ToolChoice:
    """What `function_call`, the older form, asks for; its answers have one call.

    Raises RequestRefused.
    """
    if choice is None or isinstance(choice, str):
        return choice_among(
            _MODES[choice or "auto"], (), tools=tools, parallel=False, field="function_call"
        )
    return choice_among(
        "required", [choice["name"]], tools=tools, parallel=False, field="function_call.name"
    )


def _tool(function: FunctionDefinition, tool: Mapping[str, Any] | None = None) -> dict[str, Any]:
    given = {name: value for name, value in function.items() if value is not None}
    further = {
        name: value
        for name, value in (tool or {}).items()
        if name not in ("type", "function") and value is not None
    }
    return {"type": _SERVED_TYPE, "function": given, **further}
