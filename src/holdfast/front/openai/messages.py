"""The messages and tools of a chat request: their types, and their conversion for a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from holdfast.config import LimitsSettings
from holdfast.front.images.sources import with_notes
from holdfast.front.request import ToolChoice
from holdfast.front.server.fields import (
    STRICT,
    TAG_MARK,
    FunctionName,
    FunctionParameters,
    StrictArguments,
    TextOrMany,
    ToolMode,
    checked_definitions,
    checked_tool_choice,
    non_text_part,
    part_error,
    refuse_too_many,
)
from holdfast.front.server.problem import RequestRefused, invalid_field, missing_field

_OBJECT = TAG_MARK + "object"
_TEXT = TAG_MARK + "text"
_WORD = TAG_MARK + "word"
_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}  # type of a part → key of the text in it
_THOUGHTS = ("thinking", "reasoning")  # types of parts that hold thoughts
_ASSISTANT = "assistant"
_OLD_RESULT = "function"  # role of a result in the older form
_SERVED_TYPE = "function"  # the only type of tools that this server supports
# `tool_choice` → our mode
_MODES: Mapping[str, ToolMode] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",
}


def _object_or_text(value: Any) -> str:
    """The discriminator of `Arguments`."""
    return _OBJECT if isinstance(value, dict) else _TEXT


@with_config(STRICT)
class ContentPart(TypedDict):
    """A part of a message's content: text, an image, or an earlier thought of the assistant."""

    type: str
    text: NotRequired[str | None]
    refusal: NotRequired[str | None]
    thinking: NotRequired[Any]
    image_url: NotRequired[
        Annotated[Any, Field(description="An image: a data URL, or an object with `url`.")]
    ]


Content = TextOrMany[ContentPart]
Arguments = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[dict[str, Any], Tag(_OBJECT)],
    Discriminator(_object_or_text),
]


@with_config(STRICT)
class Prediction(TypedDict):
    """What the answer is expected to be, so that it can be generated faster."""

    type: Literal["content"]
    content: Annotated[Content, Field(description="Text, or text parts.")]


@with_config(STRICT)
class FunctionCall(TypedDict):
    """A call in an earlier turn. The arguments are JSON text (as in OpenAI) or an object."""

    name: str
    arguments: NotRequired[Arguments | None]


@with_config(STRICT)
class EarlierCall(TypedDict):
    """An entry of `tool_calls` in an earlier message of the assistant."""

    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: FunctionCall


@with_config(STRICT)
class ChatMessage(TypedDict):
    """A message of the conversation."""

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
        Annotated[FunctionCall | None, Field(description="An earlier call of one of `functions`.")]
    ]
    reasoning_content: NotRequired[
        Annotated[str | None, Field(description="The assistant's reasoning.")]
    ]
    reasoning: NotRequired[
        Annotated[str | None, Field(description="Another name for reasoning_content.")]
    ]
    thinking: NotRequired[
        Annotated[str | None, Field(description="Another name for reasoning_content.")]
    ]


def history(messages: Sequence[ChatMessage]) -> tuple[tuple[dict[str, Any], ...], bool]:
    """Convert the messages of a request to the messages of a prompt. Also returns whether they
    have images.

    Calls and results of the older form (`functions`) become tool calls, thoughts are moved from the
    content to `reasoning_content`, and parts that no model here reads are replaced by notes
    (`with_notes`). Raises RequestRefused, also for a message without content and for a text part
    without text.
    """
    return with_notes(_converted(messages))


def _converted(messages: Sequence[ChatMessage]) -> Iterator[dict[str, Any]]:
    """Convert messages to those of a prompt, as `history` does.

    In the older form, calls have no ids, so they get some, and a result belongs to the latest call
    of the function that it names.
    """
    latest_ids: dict[str, str] = {}  # for the older form: function's name → id of its last call
    for index, message in enumerate(messages):
        turn: dict[str, Any] = dict(message)
        role = turn["role"]
        content = turn.get("content")
        field = f"messages.{index}.content"
        if content is None and role != _ASSISTANT:
            reason = f"`{field}` is required for the role {role}"
            raise RequestRefused(reason, code="invalid_type", field=field)
        if isinstance(content, list):
            turn["content"] = [
                _part(part, role=role, field=f"{field}.{number}")
                for number, part in enumerate(content)
            ]
        if call := turn.pop("function_call", None):
            name = call["name"]
            latest_ids[name] = f"call_{index}"
            turn["tool_calls"] = [{"id": latest_ids[name], "type": "function", "function": call}]
        if role == _OLD_RESULT:
            name = turn.get("name") or ""
            turn |= {"role": "tool", "tool_call_id": latest_ids.get(name, f"call_{name}")}
        yield _with_thoughts_apart(turn)


def _part(part: ContentPart, *, role: str, field: str) -> dict[str, Any]:
    """A part of a message as a part of a prompt. field: the request field that contains it."""
    if part["type"] in _TEXT_KEYS:
        _refuse_unless_text(part, field)
        return dict(part)
    if part["type"] in _THOUGHTS and role == _ASSISTANT:
        return dict(part)
    return non_text_part(part, role=role, field=field)


def _with_thoughts_apart(turn: dict[str, Any]) -> dict[str, Any]:
    """Move thoughts from the content, where Mistral's clients put them, to `reasoning_content`.

    They are dropped if a field for reasoning is already set.
    """
    content = turn.get("content")
    if not isinstance(content, list) or not any(part["type"] in _THOUGHTS for part in content):
        return turn
    thoughts = "\n".join(_thought(part) for part in content if part["type"] in _THOUGHTS)
    other_parts = [part for part in content if part["type"] not in _THOUGHTS]
    turn = {**turn, "content": other_parts or None}
    if not any(turn.get(name) for name in ("reasoning_content", "reasoning", "thinking")):
        turn["reasoning_content"] = thoughts
    return turn


def _thought(part: Mapping[str, Any]) -> str:
    """The text of a part that holds a thought, which is a text or a list of text parts."""
    thought = part.get("thinking") or part.get("text") or ""
    pieces = thought if isinstance(thought, list) else [thought]
    texts = [piece.get("text") if isinstance(piece, dict) else piece for piece in pieces]
    return "".join(text for text in texts if isinstance(text, str))


def predicted_text(prediction: Prediction) -> str:
    """The text of a prediction. Raises RequestRefused for parts that are not text."""
    content = prediction["content"]
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        _refuse_unless_text(part, f"prediction.content.{index}")
    return "".join(str(part[_TEXT_KEYS[part["type"]]]) for part in content)  # type: ignore[literal-required]


def _refuse_unless_text(part: ContentPart, field: str) -> None:
    """Raise InvalidRequest unless the part is text. field: the request field that has it."""
    kind = part["type"]
    key = _TEXT_KEYS.get(kind)
    if key is None:
        raise part_error(kind, field=field)
    if not isinstance(part.get(key), str):
        raise missing_field(f"{field}.{key}")


def _word_or_object(value: Any) -> str:
    """The discriminator of `ChoiceField` and `FunctionCallField`."""
    return _OBJECT if isinstance(value, dict) else _WORD


@with_config(STRICT)
class FunctionDefinition(TypedDict):
    """A function that the model may call."""

    name: FunctionName
    description: NotRequired[str | None]
    parameters: NotRequired[FunctionParameters]
    strict: NotRequired[StrictArguments]


@with_config(STRICT)
class ToolDefinition(TypedDict):
    """A tool. Only functions are supported."""

    type: str
    function: NotRequired[FunctionDefinition]


@with_config(STRICT)
class FunctionReference(TypedDict):
    """A reference to a function by its name."""

    name: FunctionName


@with_config(STRICT)
class ToolReference(TypedDict):
    """A reference to a tool by its name."""

    type: NotRequired[Literal["function"]]
    function: FunctionReference


@with_config(STRICT)
class AllowedTools(TypedDict):
    """The tools that the model may or must call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Field(min_length=1, fail_fast=True)]


@with_config(STRICT)
class NamedChoice(TypedDict):
    """The tool that must be called (`function`) or tools that may be called (`allowed_tools`)."""

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
    """Return the tools for a prompt; fields that are null are left out.

    Raises RequestRefused, which names the invalid field.
    """
    refuse_too_many(tools, limits.max_tools, field="tools")
    for index, tool in enumerate(tools):
        if (kind := tool["type"]) != _SERVED_TYPE:
            raise invalid_field(
                f"tools.{index}.type",
                "only functions are supported",
                code="unsupported_parameter",
                shown=f", not {kind[:40]!r}",
            )
        if "function" not in tool:
            raise missing_field(f"tools.{index}.function")
    return checked_definitions(
        [_tool(tool["function"], tool) for tool in tools],
        field="tools.{}.function",
        most_parts=limits.max_tool_parts,
    )


def checked_functions(
    functions: Sequence[FunctionDefinition], *, limits: LimitsSettings
) -> tuple[dict[str, Any], ...]:
    """Convert the older field `functions` to tools for a prompt. Raises RequestRefused."""
    refuse_too_many(functions, limits.max_tools, field="functions")
    return checked_definitions(
        [_tool(function) for function in functions],
        field="functions.{}",
        most_parts=limits.max_tool_parts,
    )


def tool_choice_of(
    choice: str | NamedChoice | None, *, tools: Sequence[Mapping[str, Any]], parallel: bool
) -> ToolChoice:
    """Interpret `tool_choice`. Raises RequestRefused for a tool that is not among `tools`."""
    field = "tool_choice"
    names: list[str] = []
    if choice is None or isinstance(choice, str):
        mode = _MODES[choice or "auto"]
    elif allowed := choice.get("allowed_tools"):
        mode = allowed["mode"]
        names = [tool["function"]["name"] for tool in allowed["tools"]]
        field = f"{field}.allowed_tools.tools"
    elif function := choice.get("function"):
        mode = "required"
        names = [function["name"]]
        field = f"{field}.function.name"
    else:
        raise missing_field(f"{field}.{choice.get('type', 'function')}")
    return checked_tool_choice(mode, names, tools=tools, parallel=parallel, field=field)


def function_call_of(
    choice: str | FunctionReference | None, *, tools: Sequence[Mapping[str, Any]]
) -> ToolChoice:
    """Interpret `function_call`, the older form (at most one call). Raises RequestRefused."""
    field = "function_call"
    names: list[str] = []
    if choice is None or isinstance(choice, str):
        mode = _MODES[choice or "auto"]
    else:
        mode = "required"
        names = [choice["name"]]
        field = f"{field}.name"
    return checked_tool_choice(mode, names, tools=tools, parallel=False, field=field)


def _tool(function: FunctionDefinition, tool: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A tool of a prompt, without fields that are null. tool: the client's tool; None: the client
    sent only the function, in the older form.
    """
    function_fields = {name: value for name, value in function.items() if value is not None}
    tool_fields = {
        name: value
        for name, value in (tool or {}).items()
        if name not in ("type", "function") and value is not None
    }
    return {"type": _SERVED_TYPE, "function": function_fields, **tool_fields}
