"""The messages of a chat request: which are accepted.

They go on as they came; intake makes them what a template expects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from holdfast.front.server.body import TAG_MARK
from holdfast.front.server.fields import STRICT, one_or_many
from holdfast.front.server.media import is_media, refused_media, without_media
from holdfast.front.server.problem import RequestRefused

_ONE, _MANY, _OBJECT, _TEXT = (TAG_MARK + name for name in ("one", "many", "object", "text"))
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
            raise RequestRefused(
                f"`{field}.{key}` is required",
                code="missing_required_parameter",
                field=f"{field}.{key}",
            )
    elif is_media(kind):
        raise refused_media(kind, field=field)
    else:
        raise RequestRefused(
            f"`{field}.type`: unknown part type", field=f"{field}.type", shown=f" {kind[:40]!r}"
        )
