"""The tools of a Responses request (functions, custom tools, namespaces of both) and `tool_choice`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from pydantic import Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from holdfast.config import LimitsSettings
from holdfast.front.server.fields import (
    MANY,
    ONE,
    STRICT,
    FunctionName,
    checked_definitions,
    choice_among,
    log_once,
    refuse_too_many,
)
from holdfast.front.server.problem import RequestRefused
from holdfast.wire.requests import ToolChoice

_SEPARATOR = "__"  # between the names of a namespace and a tool in it
_SUPPORTED = ("function", "custom")


@with_config(STRICT)
class CustomFormat(TypedDict):
    """What the text of a custom tool must be."""

    type: Literal["text", "grammar"]
    syntax: NotRequired[Literal["lark", "regex"]]
    definition: NotRequired[str]


@with_config(STRICT)
class NamespacedTool(TypedDict):
    """A tool in a namespace."""

    type: str
    name: NotRequired[FunctionName]
    description: NotRequired[str | None]
    parameters: NotRequired[
        Annotated[dict[str, Any] | None, Field(description="JSON schema of its arguments.")]
    ]
    strict: NotRequired[
        Annotated[bool | None, Field(description="Force the arguments to match the schema.")]
    ]
    format: NotRequired[Annotated[CustomFormat | None, Field(description="Of a custom tool.")]]


@with_config(STRICT)
class ResponseTool(NamespacedTool):
    """A function, custom tool or namespace. Other types are skipped: this server cannot run them."""

    tools: NotRequired[
        Annotated[list[NamespacedTool], Field(fail_fast=True, description="Of a namespace.")]
    ]


@with_config(STRICT)
class ToolNamed(TypedDict):
    """A tool by name."""

    type: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str | None]


@with_config(STRICT)
class ChosenTool(ToolNamed):
    """The tool that must be called, or (`allowed_tools`) the tools that may be called."""

    mode: NotRequired[Literal["auto", "required"]]
    tools: NotRequired[Annotated[list[ToolNamed], Field(min_length=1, fail_fast=True)]]


ResponseTools = Annotated[list[ResponseTool], Field(fail_fast=True)]
ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(ONE)] | Annotated[ChosenTool, Tag(MANY)],
    Discriminator(lambda value: MANY if isinstance(value, dict) else ONE),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTool:
    """A tool as the client calls it."""

    name: str
    namespace: str = ""  # empty: none
    is_custom: bool = False  # takes a text instead of arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """The tools of a request, as the prompt and as the client names them."""

    definitions: tuple[dict[str, Any], ...] = ()  # OpenAI-shaped
    fields: tuple[str, ...] = ()  # places of their schemas in the request
    by_model_name: Mapping[str, ClientTool] = field(default_factory=dict)
    held: tuple[str, ...] = ()  # the client said neither strict nor not strict

    def client_tool(self, model_name: str) -> ClientTool:
        """The tool that the model knows by this name. A name that the model made up is a function."""
        return self.by_model_name.get(model_name) or ClientTool(name=model_name)


def model_name(name: str, namespace: str | None) -> str:
    """The name by which the model knows a tool."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def missing(field: str) -> RequestRefused:
    """The refusal of a request that lacks a field."""
    return RequestRefused(f"`{field}` is required", code="missing_required_parameter", field=field)


def offered_tools(tools: Sequence[ResponseTool], *, limits: LimitsSettings) -> OfferedTools:
    """The tools that the model can be offered. Raises RequestRefused."""
    refuse_too_many(tools, limits.max_tools, field="tools")
    offered = list(_offered(tools))
    refuse_too_many(offered, limits.max_tools, field="tools")
    places = [place for place, _, _ in offered]
    definitions = [{"type": "function", "function": function} for _, _, function in offered]
    return OfferedTools(
        definitions=checked_definitions(
            definitions, fields=places, most_parts=limits.max_tool_parts
        ),
        fields=tuple(f"{place}.parameters" for place in places),
        by_model_name={function["name"]: tool for _, tool, function in offered},
        held=tuple(function["name"] for _, _, function in offered if "strict" not in function),
    )


def choice_of(
    choice: str | ChosenTool | None, *, offered: OfferedTools, parallel: bool
) -> ToolChoice:
    """The meaning of `tool_choice`. Raises RequestRefused for a tool that is not offered."""
    tools: Sequence[Mapping[str, Any]] = offered.definitions
    names: list[str] = []
    mode: Any = choice or "auto"
    place = "tool_choice"
    if isinstance(choice, dict):
        if choice.get("type") != "allowed_tools":
            mode = "required"
            names = [_chosen(choice, place)]
            place = "tool_choice.name"
        else:
            mode = choice.get("mode", "auto")
            names = _allowed(choice)
            if names:
                place = "tool_choice.tools"
            else:  # hosted tools only, which are not offered
                tools = ()
                mode = "none" if mode == "auto" else mode
    asked = choice_among(mode, names, tools=tools, parallel=parallel, field=place)
    return asked if asked.mode == "none" else msgspec.structs.replace(asked, held=offered.held)


def _allowed(choice: ChosenTool) -> list[str]:
    if "tools" not in choice:
        raise missing("tool_choice.tools")
    return [
        _chosen(tool, f"tool_choice.tools.{number}")
        for number, tool in enumerate(choice["tools"])
        if tool.get("type", "function") in _SUPPORTED
    ]


def _chosen(tool: ToolNamed, place: str) -> str:
    if (kind := tool.get("type", "function")) not in _SUPPORTED:
        name = f"{place}.type"
        raise RequestRefused(
            f"`{name}`: only functions and custom tools can be chosen here",
            code="unsupported_parameter",
            field=name,
            shown=f", not {kind[:40]!r}",
        )
    if not tool.get("name"):
        raise missing(f"{place}.name")
    return model_name(tool["name"], tool.get("namespace"))


def _offered(tools: Sequence[ResponseTool]) -> Iterator[tuple[str, ClientTool, dict[str, Any]]]:
    """Each supported tool: its place in the request, the tool, and the model's function."""
    for number, tool in enumerate(tools):
        place = f"tools.{number}"
        if tool["type"] != "namespace":
            yield from _one(tool, place, "")
            continue
        namespace = _name(tool, place)
        for inner, each in enumerate(tool.get("tools", ())):
            yield from _one(each, f"{place}.tools.{inner}", namespace)


def _one(
    tool: NamespacedTool, place: str, namespace: str
) -> Iterator[tuple[str, ClientTool, dict[str, Any]]]:
    kind = tool["type"]
    if kind not in _SUPPORTED:
        log_once("skipped tools of type %r, which this server cannot run", kind)
        return
    name = _name(tool, place)
    client = ClientTool(name=name, namespace=namespace, is_custom=kind == "custom")
    function = _custom(tool) if client.is_custom else _function(tool)
    yield place, client, {"name": model_name(name, namespace), **function}


def _name(tool: NamespacedTool, place: str) -> str:
    if "name" not in tool:
        raise missing(f"{place}.name")
    return tool["name"]


def _function(tool: NamespacedTool) -> dict[str, Any]:
    given = {key: tool.get(key) for key in ("description", "parameters", "strict")}
    return {key: value for key, value in given.items() if value is not None}


def _custom(tool: NamespacedTool) -> dict[str, Any]:
    """A function with one text. The description tells the model the grammar of the text."""
    form = tool.get("format") or {"type": "text"}
    definition = form.get("definition", "")
    description = tool.get("description") or ""
    if form["type"] == "grammar" and definition:
        syntax = form.get("syntax", "lark")
        description += f"\n\nThe input has to match this {syntax} grammar:\n{definition}"
    text = {"type": "string", "description": "The whole input of the tool, as it is."}
    if form.get("syntax") == "regex":
        text["pattern"] = f"^(?:{definition})$"
    parameters = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    function: dict[str, Any] = {"parameters": parameters}
    if description:
        function = {"description": description.strip(), **function}
    return function
