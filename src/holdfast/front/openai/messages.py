"""The messages and tools of a chat request: what is accepted, and the form that the prompt gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from holdfast.config import LimitsSettings
from holdfast.front.server.fields import (
    STRICT,
    TAG_MARK,
    FunctionName,
    ToolMode,
    checked_definitions,
    choice_among,
    is_media,
    one_or_many,
    refuse_too_many,
    refused_media,
    without_media,
)
from holdfast.front.server.problem import RequestRefused, invalid_field, missing_field
from holdfast.wire.requests import ToolChoice

_ONE = TAG_MARK + "one"
_MANY = TAG_MARK + "many"
_OBJECT = TAG_MARK + "object"
_TEXT = TAG_MARK + "text"
_WORD = TAG_MARK + "word"
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}  # type of a part → key of its text
_THOUGHTS = ("thinking", "reasoning")  # types of parts
_MAY_BE_EMPTY = _MAY_THINK = "assistant"
_OLD_RESULT = "function"
_RESULTS = frozenset({"tool", _OLD_RESULT})  # roles
_SERVED_TYPE = "function"
_MODES: Mapping[str, ToolMode] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",
}


def _object_or_text(value: Any) -> str:
    return _OBJECT if isinstance(value, dict) else _TEXT


@with_config(STRICT)
class ContentPart(TypedDict):
    """A part of a message's content: text, or an earlier thought of the assistant's."""

    type: str
    text: NotRequired[str | None]
    refusal: NotRequired[str | None]
    thinking: NotRequired[Any]


Content = Annotated[
    Annotated[str, Tag(_ONE)] | Annotated[list[ContentPart], Field(fail_fast=True), Tag(_MANY)],
    Discriminator(one_or_many),
]
Arguments = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[dict[str, Any], Tag(_OBJECT)],
    Discriminator(_object_or_text),
]


@with_config(STRICT)
class FunctionCall(TypedDict):
    """A call that the assistant made in an earlier turn.

    OpenAI sends the arguments as text, others as an object.
    """

    name: str
    arguments: NotRequired[Arguments | None]


@with_config(STRICT)
class EarlierCall(TypedDict):
    """One entry of an earlier assistant message's `tool_calls`."""

    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: FunctionCall


@with_config(STRICT)
class ChatMessage(TypedDict):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: NotRequired[
        Annotated[
            Content | None, Field(description="Text, or text parts. May be null for the assistant.")
        ]
    ]
    name: NotRequired[str | None]
    tool_calls: NotRequired[Annotated[list[EarlierCall], Field(fail_fast=True)] | None]
    tool_call_id: NotRequired[str | None]
    function_call: NotRequired[
        Annotated[
            FunctionCall | None, Field(description="An earlier call in the form of `functions`.")
        ]
    ]
    reasoning_content: NotRequired[
        Annotated[str | None, Field(description="What the assistant thought before it answered.")]
    ]
    reasoning: NotRequired[Annotated[str | None, Field(description="The same under another name.")]]
    thinking: NotRequired[Annotated[str | None, Field(description="The same under another name.")]]


def history(messages: Sequence[ChatMessage]) -> tuple[dict[str, Any], ...]:
    """The messages as a prompt has them: calls and results of the older form (`functions`) in the
    newer one, thoughts apart.

    Results have notes in the place of media.
    """
    ready: list[dict[str, Any]] = []
    latest: dict[str, str] = {}  # name of a function of the older form → id of its latest call
    for place, message in enumerate(messages):
        turn: dict[str, Any] = dict(message)
        if turn["role"] in _RESULTS and isinstance(turn.get("content"), list):
            turn["content"] = without_media(turn["content"])
        if call := turn.pop("function_call", None):
            name = call["name"]
            latest[name] = f"call_{place}"
            turn["tool_calls"] = [{"id": latest[name], "type": "function", "function": call}]
        if turn["role"] == _OLD_RESULT:
            name = turn.get("name") or ""
            turn |= {"role": "tool", "tool_call_id": latest.get(name, f"call_{name}")}
        ready.append(_with_thoughts_apart(turn))
    return tuple(ready)


def _with_thoughts_apart(turn: dict[str, Any]) -> dict[str, Any]:
    """Mistral's clients send a thought as a part of the content: what the other fields for it say
    goes before that.
    """
    content = turn.get("content")
    if not isinstance(content, list) or not any(part["type"] in _THOUGHTS for part in content):
        return turn
    thoughts = "\n".join(_thought(part) for part in content if part["type"] in _THOUGHTS)
    said = any(turn.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    rest = [part for part in content if part["type"] not in _THOUGHTS]
    return {**turn, "content": rest or None, **({} if said else {"reasoning_content": thoughts})}


def _thought(part: Mapping[str, Any]) -> str:
    given = part.get("thinking") or part.get("text") or ""
    pieces = given if isinstance(given, list) else [given]
    texts = [piece.get("text") if isinstance(piece, dict) else piece for piece in pieces]
    return "".join(text for text in texts if isinstance(text, str))


def refuse_what_is_not_text(messages: Sequence[ChatMessage]) -> None:
    """Raise RequestRefused naming the first message or part that has no text where it must, or
    something else than text.

    What a thought of the assistant's, or media in the result of a tool, become in a prompt is text.
    """
    for position, message in enumerate(messages):
        field = f"messages.{position}.content"
        content = message.get("content")
        if content is None and message["role"] != _MAY_BE_EMPTY:
            reason = f"`{field}` is required for the role {message['role']}"
            raise RequestRefused(reason, code="invalid_type", field=field)
        if isinstance(content, list):
            for place, part in enumerate(content):
                is_thought = part["type"] in _THOUGHTS and message["role"] == _MAY_THINK
                if not is_thought and not (is_media(part["type"]) and message["role"] in _RESULTS):
                    _refuse_unless_text(part, f"{field}.{place}")


def _refuse_unless_text(part: ContentPart, field: str) -> None:
    kind = part["type"]
    key = _TEXT_PARTS.get(kind)
    if key is not None:
        if not isinstance(part.get(key), str):
            raise missing_field(f"{field}.{key}")
    elif is_media(kind):
        raise refused_media(kind, field=field)
    else:
        raise invalid_field(f"{field}.type", "unknown part type", shown=f" {kind[:40]!r}")


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
            raise invalid_field(
                name, "only functions are supported", code="unsupported_parameter", shown=shown
            )
        if "function" not in tool:
            name = f"tools.{place}.function"
            raise missing_field(name)
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
    raise missing_field(missing)


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
