"""Ollama's answers as structs: each is a line of a stream, or the whole of an answer."""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.front.server.explanation import Explanation


class OllamaError(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, in words."""

    error: str


class CalledTool(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a call calls, and with what."""

    index: int
    name: str
    arguments: msgspec.Raw  # an object


class ToolCallLine(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool, whole."""

    id: str
    function: CalledTool


class MessageLine(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's turn, or what a line adds to it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallLine] | msgspec.UnsetType = msgspec.UNSET


class BareLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that might have stood at a place."""

    token: str
    logprob: float
    bytes: list[int]


class LogprobLine(BareLogprob, frozen=True, kw_only=True):
    """A token of the answer, with the likeliest at its place."""

    top_logprobs: list[BareLogprob]


class AnswerLine(msgspec.Struct, frozen=True, kw_only=True):
    """What the lines of both endpoints have in common.

    The counts and durations (nanoseconds) stand in the last one only.
    """

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET  # all tokens of the prompt
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    # Holdfast's own: part of prompt_eval_count that was not read again
    cached_tokens: int | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[LogprobLine] | msgspec.UnsetType = msgspec.UNSET
    holdfast: Explanation | msgspec.UnsetType = msgspec.UNSET


class ChatLine(AnswerLine, frozen=True, kw_only=True):
    """A line of /api/chat, or all of its answer."""

    message: MessageLine


class GenerateLine(AnswerLine, frozen=True, kw_only=True):
    """A line of /api/generate, or all of its answer."""

    response: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    context: list[int] | msgspec.UnsetType = msgspec.UNSET
