"""The tools of a Responses request: functions, custom tools, namespaces of both; and what is asked
of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from pydantic import Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from holdfast.config import LimitsSettings
from holdfast.front.server.fields import (
    STRICT,
    TAG_MARK,
    FunctionName,
    checked_definitions,
    choice_among,
    refuse_too_many,
)
from holdfast.front.server.problem import RequestRefused
from holdfast.wire.requests import ToolChoice

_log = logging.getLogger(__name__)
_WORD, _OBJECT = TAG_MARK + "word", TAG_MARK + "object"
_SEPARATOR = "__"  # between the names of a namespace and of a tool in it
_MOST_REMEMBERED = 100
_skipped: set[str] = set()


@with_config(STRICT)
class CustomFormat(TypedDict):
    """What the text of a custom tool has to be."""

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
        Annotated[bool | None, Field(description="The arguments are made to fit the schema.")]
    ]
    format: NotRequired[Annotated[CustomFormat | None, Field(description="Of a custom tool.")]]


@with_config(STRICT)
class ResponseTool(NamespacedTool):
    """A tool: function, custom or namespace.

    Those of other types are left out, as nobody here could run them.
    """

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
    """The tool that must be called, or (`allowed_tools`) those that may be."""

    mode: NotRequired[Literal["auto", "required"]]
    tools: NotRequired[Annotated[list[ToolNamed], Field(min_length=1, fail_fast=True)]]


def _word_or_object(value: Any) -> str:
    return _OBJECT if isinstance(value, dict) else _WORD


ResponseTools = Annotated[list[ResponseTool], Field(fail_fast=True)]
ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(_WORD)]
    | Annotated[ChosenTool, Tag(_OBJECT)],
    Discriminator(_word_or_object),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTool:
    """A tool as the client calls it."""

    name: str
    namespace: str = ""  # empty: none
    is_custom: bool = False  # it takes a text, not arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """The tools of a request: as a prompt has them, OpenAI-shaped, and whose each name there is."""

    definitions: tuple[dict[str, Any], ...] = ()
    fields: tuple[str, ...] = ()  # of the request, in which each has its schema
    by_model_name: Mapping[str, ClientTool] = field(default_factory=dict)
    # those of which the client says neither that they are strict nor that they are not
    held: tuple[str, ...] = ()

    def client_tool(self, model_name: str) -> ClientTool:
        """The tool that the model calls so; one that it made up is a function."""
        return self.by_model_name.get(model_name) or ClientTool(name=model_name)


def model_name(name: str, namespace: str | None) -> str:
    """The name under which the model knows a tool."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def offered_tools(tools: Sequence[ResponseTool], *, limits: LimitsSettings) -> OfferedTools:
    """The tools that can be offered to the model. Raises RequestRefused naming what is wrong."""
    refuse_too_many(tools, limits.max_tools, field="tools")
    found = [*_offered(tools)]
    refuse_too_many(found, limits.max_tools, field="tools")
    places, clients, definitions = zip(*found, strict=True) if found else ((), (), ())
    checked = checked_definitions(definitions, fields=places, most_parts=limits.max_tool_parts)
    names = [definition["function"]["name"] for definition in checked]
    return OfferedTools(
        definitions=checked,
        fields=tuple(f"{place}.parameters" for place in places),
        by_model_name=dict(zip(names, clients, strict=True)),
        held=tuple(
            name
            for name, tool in zip(names, checked, strict=True)
            if "strict" not in tool["function"]
        ),
    )


def choice_of(
    choice: str | ChosenTool | None, *, offered: OfferedTools, parallel: bool
) -> ToolChoice:
    """What `tool_choice` asks for.

    Raises RequestRefused for a tool that is not among those offered.
    """
    asked = _choice_among(choice, offered.definitions, parallel=parallel, field="tool_choice")
    return asked if asked.mode == "none" else msgspec.structs.replace(asked, held=offered.held)


def _choice_among(
    choice: str | ChosenTool | None,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool,
    field: str,
) -> ToolChoice:
    if choice is None or isinstance(choice, str):
        mode: Any = choice or "auto"
        return choice_among(mode, (), tools=tools, parallel=parallel, field=field)
    if choice.get("type") == "allowed_tools":
        if "tools" not in choice:
            raise RequestRefused(
                f"`{field}.tools` is required",
                code="missing_required_parameter",
                field=f"{field}.tools",
            )
        given = [(tool, f"{field}.tools.{place}") for place, tool in enumerate(choice["tools"])]
        # Hosted tools among those allowed were left out of the request's tools, so there is nothing
        # to choose of them.
        names = [
            _chosen(tool, place) for tool, place in given if tool.get("type", "function") in _OWN
        ]
        mode = choice.get("mode", "auto")
        if not names:
            return choice_among(
                "none" if mode == "auto" else mode, (), tools=(), parallel=parallel, field=field
            )
        return choice_among(mode, names, tools=tools, parallel=parallel, field=f"{field}.tools")
    return choice_among(
        "required", [_chosen(choice, field)], tools=tools, parallel=parallel, field=f"{field}.name"
    )


_OWN = ("function", "custom")


def _chosen(tool: ToolNamed | ChosenTool, field: str) -> str:
    if (kind := tool.get("type", "function")) not in _OWN:
        name, shown = f"{field}.type", f", not {kind[:40]!r}"
        reason = "only functions and custom tools can be chosen here"
        raise RequestRefused(
            f"`{name}`: {reason}", code="unsupported_parameter", field=name, shown=shown
        )
    if not tool.get("name"):
        raise RequestRefused(
            f"`{field}.name` is required", code="missing_required_parameter", field=f"{field}.name"
        )
    return model_name(tool["name"], tool.get("namespace"))


def _offered(tools: Sequence[ResponseTool]) -> Iterator[tuple[str, ClientTool, dict[str, Any]]]:
    """Each tool that can be offered: its place in the request, itself, and its definition."""
    for number, tool in enumerate(tools):
        place = f"tools.{number}"
        if tool["type"] == "namespace":
            namespace = _named(tool, place)
            for inner, each in enumerate(tool.get("tools", ())):
                yield from _one(each, f"{place}.tools.{inner}", namespace)
        else:
            yield from _one(tool, place, "")


def _one(
    tool: NamespacedTool, place: str, namespace: str
) -> Iterator[tuple[str, ClientTool, dict[str, Any]]]:
    kind = tool["type"]
    if kind not in _OWN:
        _log_skipped(kind)
        return
    name = _named(tool, place)
    client = ClientTool(name=name, namespace=namespace, is_custom=kind == "custom")
    function = {
        "name": model_name(name, namespace),
        **(_custom(tool) if client.is_custom else _function(tool)),
    }
    yield place, client, {"type": "function", "function": function}


def _named(tool: NamespacedTool, place: str) -> str:
    if "name" not in tool:
        raise RequestRefused(
            f"`{place}.name` is required", code="missing_required_parameter", field=f"{place}.name"
        )
    return tool["name"]


def _function(tool: NamespacedTool) -> dict[str, Any]:
    given = {key: tool.get(key) for key in ("description", "parameters", "strict")}
    return {key: value for key, value in given.items() if value is not None}


def _custom(tool: NamespacedTool) -> dict[str, Any]:
    """A function with one text. A grammar of it is told to the model in words."""
    form = tool.get("format") or {"type": "text"}
    said = tool.get("description") or ""
    if form["type"] == "grammar" and (definition := form.get("definition")):
        said += (
            f"\n\nThe input has to match this {form.get('syntax', 'lark')} grammar:\n{definition}"
        )
    text = {"type": "string", "description": "The whole input of the tool, as it is."}
    if form.get("syntax") == "regex":
        text["pattern"] = f"^(?:{form.get('definition', '')})$"
    parameters = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    return {**({"description": said.strip()} if said else {}), "parameters": parameters}


def _log_skipped(kind: str) -> None:
    if kind not in _skipped and len(_skipped) < _MOST_REMEMBERED:
        _skipped.add(kind)
        _log.warning(
            "requests offer tools of type %r, which this server cannot run; the model is not told "
            "of them",
            kind[:100],
        )
