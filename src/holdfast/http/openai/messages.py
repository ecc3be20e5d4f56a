"""The messages of a chat request: which are accepted. They go on as they came; intake makes them what a template expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from holdfast.http.openai.fields import STRICT, one_or_many
from holdfast.http.server.body import TAG_MARK
from holdfast.http.server.problem import RequestRefused

_ONE, _MANY, _OBJECT, _TEXT = (TAG_MARK + name for name in ("one", "many", "object", "text"))
_MEDIA = ("image", "audio", "video", "file")
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}  # type of a part → key of its text
_MAY_BE_EMPTY = "assistant"


def _object_or_text(value: Any) -> str:
    return _OBJECT if isinstance(value, dict) else _TEXT


@with_config(STRICT)
class ContentPart(TypedDict):
    """A part of a message's content. Only text is served by this version."""

    type: str
    text: NotRequired[str | None]
    refusal: NotRequired[str | None]


Content = Annotated[
    Annotated[str, Tag(_ONE)] | Annotated[list[ContentPart], Field(fail_fast=True), Tag(_MANY)], Discriminator(one_or_many)
]
Arguments = Annotated[Annotated[str, Tag(_TEXT)] | Annotated[dict[str, Any], Tag(_OBJECT)], Discriminator(_object_or_text)]


@with_config(STRICT)
class FunctionCall(TypedDict):
    """A call that the assistant made in an earlier turn. OpenAI sends the arguments as text, others as an object."""

    name: str
    arguments: NotRequired[Arguments | None]


@with_config(STRICT)
class ToolCall(TypedDict):
    """One entry of an earlier assistant message's `tool_calls`."""

    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: FunctionCall


@with_config(STRICT)
class ChatMessage(TypedDict):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: NotRequired[Annotated[Content | None, Field(description="Text, or text parts. May be null for the assistant.")]]
    name: NotRequired[str | None]
    tool_calls: NotRequired[Annotated[list[ToolCall], Field(fail_fast=True)] | None]
    tool_call_id: NotRequired[str | None]


def refuse_what_is_not_text(messages: Sequence[ChatMessage]) -> None:
    """Raise RequestRefused naming the first message or part that has no text where it must, or something else than text."""
    for position, message in enumerate(messages):
        field = f"messages.{position}.content"
        content = message.get("content")
        if content is None and message["role"] != _MAY_BE_EMPTY:
            reason = f"`{field}` is required for the role {message['role']}"
            raise RequestRefused(reason, code="invalid_type", field=field)
        if isinstance(content, list):
            for place, part in enumerate(content):
                _refuse_unless_text(part, f"{field}.{place}")


def _refuse_unless_text(part: ContentPart, field: str) -> None:
    kind = part["type"]
    key = _TEXT_PARTS.get(kind)
    if key is not None:
        if not isinstance(part.get(key), str):
            raise RequestRefused(f"`{field}.{key}` is required", code="missing_required_parameter", field=f"{field}.{key}")
    elif any(media in kind for media in _MEDIA):
        message, shown = f"`{field}`: only text is supported by this version yet", f", not parts of type {kind[:40]!r}"
        raise RequestRefused(message, code="unsupported_content", field=field, shown=shown)
    else:
        raise RequestRefused(f"`{field}.type`: unknown part type", field=f"{field}.type", shown=f" {kind[:40]!r}")
