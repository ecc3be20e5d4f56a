"""Anthropic's answers as structs.

Whole answers and the heads of streams are encoded from them; the tests check all events.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from holdfast.front.anthropic.errors import MessagesErrorDetail
from holdfast.front.anthropic.usage import MessageUsage
from holdfast.front.server.explanation import Explanation

StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class DirectCaller(msgspec.Struct, frozen=True, kw_only=True):
    """The model itself calls, not a program of Anthropic's."""

    type: Literal["direct"] = "direct"


class AnswerBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer, all of one kind: each kind has fields of its own."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | msgspec.UnsetType = msgspec.UNSET
    citations: msgspec.UnsetType | None = msgspec.UNSET
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    signature: str | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # a JSON object
    caller: DirectCaller | msgspec.UnsetType = msgspec.UNSET


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, and without content and reason the head of a streamed one."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: MessageUsage
    holdfast: Explanation | msgspec.UnsetType = msgspec.UNSET


class MessageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream; each type has fields of its own."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: MessageAnswer | msgspec.UnsetType = msgspec.UNSET
    index: int | msgspec.UnsetType = msgspec.UNSET
    content_block: AnswerBlock | msgspec.UnsetType = msgspec.UNSET
    delta: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    usage: MessageUsage | msgspec.UnsetType = msgspec.UNSET
    error: MessagesErrorDetail | msgspec.UnsetType = msgspec.UNSET
    holdfast: Explanation | msgspec.UnsetType = msgspec.UNSET


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """How long a prompt is."""

    input_tokens: int
