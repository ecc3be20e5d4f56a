"""The messages of a chat request: what is accepted, and the plain form in which they go to the chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from holdfast.http.body import TAG_MARK
from holdfast.http.errors import RequestRefused
from holdfast.http.openai_fields import STRICT, one_or_many

_ONE, _MANY = TAG_MARK + "one", TAG_MARK + "many"
_MEDIA = ("image", "audio", "video", "file")
_NEED_CONTENT = ("system", "developer", "user", "tool", "function")


class ContentPart(BaseModel):
    """A part of a message's content. Only text is served by this version."""

    model_config = STRICT

    type: str
    text: str | None = None
    refusal: str | None = None


Content = Annotated[Annotated[str, Tag(_ONE)] | Annotated[list[ContentPart], Tag(_MANY)], Discriminator(one_or_many)]


@with_config(STRICT)
class FunctionCall(TypedDict):
    """A call that the assistant made in an earlier turn."""

    name: str
    arguments: NotRequired[str]


@with_config(STRICT)
class ToolCall(TypedDict):
    """One entry of an earlier assistant message's `tool_calls`."""

    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: FunctionCall


class ChatMessage(BaseModel):
    """One turn of the conversation."""

    model_config = STRICT

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = Field(None, description="Text, or a list of text parts. May be null for the assistant.")
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


def plain_messages(messages: list[ChatMessage]) -> tuple[dict[str, Any], ...]:
    """The messages as dictionaries with text as content, the same for every way of writing the same conversation."""
    return tuple(_plain(message, f"messages.{position}") for position, message in enumerate(messages))


def _plain(message: ChatMessage, field: str) -> dict[str, Any]:
    if message.content is None and message.role in _NEED_CONTENT:
        reason = f"`{field}.content` is required for the role {message.role}"
        raise RequestRefused(reason, code="invalid_type", field=f"{field}.content")
    if message.content is None or isinstance(message.content, str):
        content = message.content or ""
    else:
        content = "".join(_text(part, f"{field}.content.{position}") for position, part in enumerate(message.content))
    # Templates know no "developer"; it is what newer clients call the system's role.
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = message.tool_calls
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    plain.update((key, value) for key, value in (message.model_extra or {}).items() if value is not None)
    return plain


def _text(part: ContentPart, field: str) -> str:
    if part.type in ("text", "input_text", "output_text"):
        if part.text is None:
            raise RequestRefused(f"`{field}.text` is required", code="missing_required_parameter", field=f"{field}.text")
        return part.text
    if part.type == "refusal":
        return part.refusal or ""
    if any(kind in part.type for kind in _MEDIA):
        message = f"`{field}`: parts of type {part.type[:40]!r} are not supported by this version yet; send text"
        raise RequestRefused(message, code="unsupported_content", field=field)
    raise RequestRefused(f"`{field}.type`: unknown part type {part.type[:40]!r}", field=f"{field}.type")
