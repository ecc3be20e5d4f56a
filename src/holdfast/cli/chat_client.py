"""What `holdfast chat` needs of a server: its models, and one streamed answer after the other."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from holdfast.cli.server_client import ServerClient, ServerFailed, error_text, json_object

# an answer that took less from its first text to its last came in one piece, or as good as that
_LEAST_SECONDS = 0.05


@dataclass(slots=True, kw_only=True)
class AnswerStatistics:
    """How one answer went, as seen from here."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    exact: bool = False  # the server gave the counts; else they are pieces of text, counted here
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    finish_reason: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token; 0 when there is nothing to measure: what came all at once
        says nothing of speed.
        """
        seconds = self.total_seconds - self.first_token_seconds
        return (
            (self.completion_tokens - 1) / seconds
            if self.completion_tokens > 1 and seconds > _LEAST_SECONDS
            else 0.0
        )


class AnswerPiece(NamedTuple):
    """A part of an answer as it comes: text, thought, or a call of a tool, which comes whole."""

    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    call: dict[str, Any] | None = None  # of the kind call


async def answer_pieces(
    server: ServerClient, body: dict[str, Any], statistics: AnswerStatistics
) -> AsyncGenerator[AnswerPiece, None]:
    """The pieces of one answer, in OpenAI's form; `statistics` is filled in on the way.

    Raises ServerFailed.

    Cancelling the task that reads them stops the answer.
    """
    began = time.monotonic()
    # others may refuse it
    options = {"include_usage": True} | (
        {"continuous_usage_stats": True} if server.is_holdfast else {}
    )
    request = {**body, "stream": True, "stream_options": options}
    async with server.lines("/v1/chat/completions", request) as lines:
        async for piece in _pieces(lines, statistics):
            now = time.monotonic() - began
            statistics.first_token_seconds = statistics.first_token_seconds or now
            statistics.total_seconds = now
            yield piece
    if not statistics.finish_reason:
        raise ServerFailed("the answer broke off: the server closed the connection before its end")


async def _pieces(
    lines: AsyncIterator[str], statistics: AnswerStatistics
) -> AsyncIterator[AnswerPiece]:
    open_call: dict[str, Any] = {}
    async for line in lines:
        field, _, value = line.partition(":")
        if field != "data" or value.strip() == "[DONE]":
            continue
        chunk = json_object(value)
        if "error" in chunk:
            raise ServerFailed(error_text(value))
        if usage := chunk.get("usage"):
            _take_usage(usage, statistics)
        for choice in chunk.get("choices", ()):
            statistics.finish_reason = choice.get("finish_reason") or statistics.finish_reason
            delta = choice.get("delta") or {}
            said = [*_texts(delta)]
            calls = delta.get("tool_calls") or []
            if open_call and (said or choice.get("finish_reason")):
                yield _whole(open_call)
                open_call = {}
            for part in calls:
                if open_call and part.get("index", 0) != open_call["index"]:
                    yield _whole(open_call)
                    open_call = {}
                open_call = _extended(open_call, part)
            statistics.completion_tokens += 0 if statistics.exact else len(said) + bool(calls)
            for piece in said:
                yield piece


def _texts(delta: dict[str, Any]) -> Iterator[AnswerPiece]:
    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
        yield AnswerPiece("reasoning", thought)
    if text := delta.get("content"):
        yield AnswerPiece("text", text)


def _whole(call: dict[str, Any]) -> AnswerPiece:
    return AnswerPiece(
        "call", call={name: value for name, value in call.items() if name != "index"}
    )


def _extended(call: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A call with a further part of it."""
    before, added = call.get("function", {}), part.get("function") or {}
    return {
        "index": part.get("index", 0),
        "id": call.get("id") or part.get("id", ""),
        "type": "function",
        "function": {
            "name": before.get("name") or added.get("name") or "",
            "arguments": before.get("arguments", "") + (added.get("arguments") or ""),
        },
    }


def _take_usage(usage: dict[str, Any], statistics: AnswerStatistics) -> None:
    statistics.exact = True
    statistics.prompt_tokens = usage.get("prompt_tokens", 0)
    statistics.completion_tokens = usage.get("completion_tokens", 0)
    statistics.cached_tokens = (usage.get("prompt_tokens_details") or {}).get(
        "cached_tokens", statistics.cached_tokens
    )
