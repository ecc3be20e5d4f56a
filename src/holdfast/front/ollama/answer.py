"""Ollama's answers, streamed and whole, and the context that /api/generate hands out."""

from __future__ import annotations

import abc
import time
import zlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from holdfast.front.server.answers import AnswerFormat, Explanation, TokenCounts, WholeChoice
from holdfast.front.server.problem import Problem, invalid_field
from holdfast.wire.output import (
    ChoiceFinished,
    OutputDelta,
    TextDelta,
    TokenText,
    ToolCallFinished,
    text_of,
    tool_calls_of,
)

_LEAST_LOGPROB = -9999.0  # JSON cannot say minus infinity
_NANOSECONDS = 1e9
# in JSON they stand between values only, and a line must not have any
_LINE_BREAKS = bytes.maketrans(b"\r\n", b"  ")
# Further ones, which in JSON stand in texts only: httpx, and with it Ollama's Python client, splits
# lines at these as well.
_OTHER_BREAKS = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}


class OllamaError(Struct, frozen=True, kw_only=True):
    """What went wrong, in words."""

    error: str


class CalledTool(Struct, frozen=True, kw_only=True):
    """Whom a call calls, and with what."""

    index: int
    name: str
    arguments: msgspec.Raw  # an object


class ToolCallLine(Struct, frozen=True, kw_only=True):
    """A call of a tool, whole."""

    id: str
    function: CalledTool


class MessageLine(Struct, frozen=True, kw_only=True):
    """The assistant's turn, or what a line adds to it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCallLine] | UnsetType = UNSET


class BareLogprob(Struct, frozen=True, kw_only=True):
    """A token that might have stood at a place."""

    token: str
    logprob: float
    bytes: list[int]


class LogprobLine(BareLogprob, frozen=True, kw_only=True):
    """A token of the answer, with the likeliest at its place."""

    top_logprobs: list[BareLogprob]


class AnswerLine(Struct, frozen=True, kw_only=True):
    """What the lines of both endpoints have in common.

    The counts and durations (nanoseconds) stand in the last one only.
    """

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET  # all tokens of the prompt
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    # Holdfast's own: part of prompt_eval_count that was not read again
    cached_tokens: int | UnsetType = UNSET
    logprobs: list[LogprobLine] | UnsetType = UNSET
    holdfast: Explanation | UnsetType = UNSET


class ChatLine(AnswerLine, frozen=True, kw_only=True):
    """A line of /api/chat, or all of its answer."""

    message: MessageLine


class GenerateLine(AnswerLine, frozen=True, kw_only=True):
    """A line of /api/generate, or all of its answer."""

    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class ContextTurn(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: str
    reasoning_content: str = ""


_turns = msgspec.json.Decoder(list[ContextTurn])


def packed(turns: Sequence[dict[str, Any]]) -> list[int]:
    """The turns as numbers from 0 to 255."""
    return list(zlib.compress(msgspec.json.encode(turns)))


def unpacked(numbers: Sequence[int], *, limit_bytes: int) -> tuple[dict[str, Any], ...]:
    """The turns again.

    Raises RequestRefused for what `packed` has not made, or more than so many bytes.
    """
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(bytes(numbers), limit_bytes)
        if not unpacking.eof:
            raise ValueError("it is cut, or too long")
        return tuple(msgspec.to_builtins(turn) for turn in _turns.decode(text))
    except (ValueError, zlib.error, msgspec.DecodeError):
        raise invalid_field(
            "context", "this is none that an answer of this server has brought"
        ) from None


class OllamaAnswer(AnswerFormat):
    """AnswerFormat of both endpoints, one choice each.

    Calls of tools come whole; of one that was cut nothing is said.
    """

    stream_type = "application/x-ndjson"

    def __init__(self, *, model: str, shows_logprobs: bool = False) -> None:
        """model: its name as the client wrote it."""
        self._model, self._shows_logprobs = model, shows_logprobs
        self._began = time.perf_counter()
        self._calls: list[OutputDelta] = []  # what has come of the call that is being written
        self._end: ChoiceFinished | None = None

    @abc.abstractmethod
    def line(
        self,
        *,
        text: str = "",
        thinking: str = "",
        calls: list[ToolCallLine] | None = None,
        **fields: Any,
    ) -> AnswerLine:
        """A line that says this; `fields` are those of AnswerLine beside its head."""

    def keep_alive(self) -> bytes:
        """A line that says nothing: clients read each as JSON, so there is no comment or empty line
        to send.
        """
        return written(self.line(done=False))

    def delta(self, event: OutputDelta) -> bytes:
        """News as a line; parts of calls are kept until the call is complete."""
        fields: dict[str, Any] = {"logprobs": logprobs_of(event.logprobs)} if event.logprobs else {}
        if isinstance(event, TextDelta):
            fields |= (
                {"text" if event.kind == "text" else "thinking": event.appended}
                if event.text
                else {}
            )
            return written(self.line(done=False, **fields)) if fields else b""
        self._calls.append(event)
        if isinstance(event, ToolCallFinished):
            fields["calls"] = calls_of(self._calls, first=event.call)
            self._calls.clear()
        return written(self.line(done=False, **fields)) if fields else b""

    def finish(self, event: ChoiceFinished) -> bytes:
        """Nothing yet: the last line has the counts as well."""
        self._end = event
        return b""

    def closing(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """The last line."""
        assert self._end is not None, "a stream ends behind its choice"
        return written(self.line(**self._ending(self._end, counts, explanation)))

    def broken(self, problem: Problem) -> bytes:
        """The error as the last line."""
        return written(OllamaError(error=problem.message_with_field))

    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The whole as one line."""
        (choice,) = choices
        assert choice.end is not None, "an answer is written behind its end"
        fields = self._ending(choice.end, counts, explanation)
        if self._shows_logprobs:
            fields["logprobs"] = logprobs_of(choice.logprobs)
        calls = calls_of(choice.deltas) or None
        return written(
            self.line(text=choice.text(), thinking=choice.text("reasoning"), calls=calls, **fields)
        )

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": timestamp()}

    def _ending(
        self, end: ChoiceFinished, counts: TokenCounts, explanation: Explanation | None
    ) -> dict[str, Any]:
        total, timings = time.perf_counter() - self._began, end.timings
        # Of an answer that a stop string has ended, the worker tells no time of writing, nor of a
        # single token.
        writing = timings.decode_seconds or max(
            total - timings.queue_seconds - timings.prefill_seconds, 0.0
        )
        return {
            "done": True,
            "done_reason": "length" if end.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(total),
            "load_duration": nanoseconds(total - timings.prefill_seconds - writing),
            "prompt_eval_count": counts.prompt_tokens,
            "prompt_eval_duration": nanoseconds(timings.prefill_seconds),
            "eval_count": counts.completion_tokens,
            "eval_duration": nanoseconds(writing),
            "cached_tokens": counts.cached_tokens,
            "holdfast": UNSET if explanation is None else explanation,
        }


class ChatLines(OllamaAnswer):
    """AnswerFormat of /api/chat."""

    def line(
        self,
        *,
        text: str = "",
        thinking: str = "",
        calls: list[ToolCallLine] | None = None,
        **fields: Any,
    ) -> ChatLine:
        """With all of it in the message."""
        message = MessageLine(content=text, thinking=thinking or UNSET, tool_calls=calls or UNSET)
        return ChatLine(message=message, **self._head(), **fields)


class GenerateLines(OllamaAnswer):
    """AnswerFormat of /api/generate, which knows no tools.

    turns: of the conversation that is answered; empty for a raw prompt, whose answers have no
    `context`.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.turns: Sequence[dict[str, Any]] = ()
        self._said: list[OutputDelta] = []

    def delta(self, event: OutputDelta) -> bytes:
        """News as a line."""
        self._said.append(event)
        return super().delta(event)

    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The whole as one line."""
        self._said = choices[0].deltas
        return super().whole(choices, counts, explanation)

    def _ending(
        self, end: ChoiceFinished, counts: TokenCounts, explanation: Explanation | None
    ) -> dict[str, Any]:
        ending = super()._ending(end, counts, explanation)
        if not self.turns:
            return ending
        answer = {
            "role": "assistant",
            "content": text_of(self._said),
            "reasoning_content": text_of(self._said, "reasoning"),
        }
        return ending | {"context": packed([*self.turns, answer])}

    def line(
        self,
        *,
        text: str = "",
        thinking: str = "",
        calls: list[ToolCallLine] | None = None,
        **fields: Any,
    ) -> GenerateLine:
        """With the text as `response`."""
        return GenerateLine(response=text, thinking=thinking or UNSET, **self._head(), **fields)


def timestamp(seconds: float | None = None) -> str:
    """A time in seconds since 1970, or now, in RFC 3339."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def calls_of(deltas: Iterable[OutputDelta], *, first: int = 0) -> list[ToolCallLine]:
    """The complete calls among these, of which the first one has that number."""
    return [
        ToolCallLine(
            id=call.id,
            function=CalledTool(index=number, name=call.name, arguments=_one_line(call.arguments)),
        )
        for number, call in enumerate(tool_calls_of(deltas), first)
        if call.is_complete
    ]


def logprobs_of(tokens: Iterable[TokenText]) -> list[LogprobLine]:
    """Tokens as Ollama shows them."""
    return [
        LogprobLine(
            **_token(token), top_logprobs=[BareLogprob(**_token(rival)) for rival in token.top]
        )
        for token in tokens
    ]


def written(line: Struct) -> bytes:
    """A line of a stream."""
    text = msgspec.json.encode(line)
    for found, escape in _OTHER_BREAKS.items():
        if found in text:
            text = text.replace(found, escape)
    return text + b"\n"


def _token(token: TokenText) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": max(token.logprob, _LEAST_LOGPROB),
        "bytes": list(token.raw),
    }


def _one_line(arguments: str) -> msgspec.Raw:
    return msgspec.Raw(arguments.encode().translate(_LINE_BREAKS))


def nanoseconds(seconds: float) -> int:
    """At least one: clients divide by durations."""
    return max(1, int(seconds * _NANOSECONDS))
