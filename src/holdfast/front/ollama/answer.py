"""The formats of Ollama's answers, and the `context` by which /api/generate continues one."""

from __future__ import annotations

import abc
import time
import zlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from holdfast.front.openai.answer import ContentLogprob, content_logprobs
from holdfast.front.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    PromptProgress,
    TextDelta,
    TokenCounts,
    ToolCall,
    ToolCallFinished,
    text_of,
    tool_calls_of,
)
from holdfast.front.server.answers import AnswerFormat
from holdfast.front.server.explanation import Explanation
from holdfast.front.server.problem import Advice, Problem, invalid_field

_NANOSECONDS = 1e9
# JSON has line breaks only between values; a line of the stream must not contain any
_LINE_BREAKS = bytes.maketrans(b"\r\n", b"  ")
# JSON has these only in strings. httpx, and so Ollama's Python client, also splits lines at them.
_OTHER_BREAKS = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}


class OllamaError(Struct, frozen=True, kw_only=True):
    """An error message, and advice for the client."""

    error: str
    advice: Advice


def ollama_error(problem: Problem) -> OllamaError:
    """The body of an error response, and the last line of a failed stream."""
    return OllamaError(error=problem.message_with_field, advice=problem.advice)


class CalledTool(Struct, frozen=True, kw_only=True):
    """The function of a call."""

    index: int
    name: str
    arguments: msgspec.Raw  # a JSON object


class ToolCallLine(Struct, frozen=True, kw_only=True):
    """A complete tool call in a line."""

    id: str
    function: CalledTool


class MessageLine(Struct, frozen=True, kw_only=True):
    """The assistant's message, or the part that a line adds."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCallLine] | UnsetType = UNSET


class AnswerLine(Struct, frozen=True, kw_only=True):
    """The fields that the lines of /api/chat and of /api/generate share.

    Only the last line contains counts and durations (in nanoseconds).
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
    # Holdfast's own field: the tokens among prompt_eval_count that were not prefilled
    cached_tokens: int | UnsetType = UNSET
    # Holdfast's own fields: the tokens and messages left out of a prompt that did not fit; absent
    # if nothing was
    truncated_tokens: int | UnsetType = UNSET
    truncated_messages: int | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET
    holdfast: Explanation | UnsetType = UNSET


class ChatLine(AnswerLine, frozen=True, kw_only=True):
    """A line of a stream of /api/chat, or a whole answer."""

    message: MessageLine


class GenerateLine(AnswerLine, frozen=True, kw_only=True):
    """A line of a stream of /api/generate, or a whole answer."""

    response: str
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class ContextTurn(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One message of the conversation that an Ollama `context` (a list of integers) encodes."""

    role: Literal["system", "user", "assistant"]
    content: str
    reasoning_content: str = ""


_turns_decoder = msgspec.json.Decoder(list[ContextTurn])


def encode_context(turns: Sequence[dict[str, Any]]) -> list[int]:
    """Pack a conversation into a `context`: numbers from 0 to 255."""
    return list(zlib.compress(msgspec.json.encode(turns)))


def decode_context(numbers: Sequence[int], *, limit_bytes: int) -> tuple[dict[str, Any], ...]:
    """Return the conversation in a `context`.

    Raises RequestRefused if the numbers were not made by `encode_context`, or exceed `limit_bytes`.
    """
    decompressor = zlib.decompressobj()
    try:
        text = decompressor.decompress(bytes(numbers), limit_bytes)
        if not decompressor.eof:
            raise ValueError("it is incomplete or too long")
        return tuple(msgspec.to_builtins(turn) for turn in _turns_decoder.decode(text))
    except (ValueError, zlib.error, msgspec.DecodeError):
        raise invalid_field("context", "it was not returned by this server") from None


class OllamaAnswer(AnswerFormat):
    """Base class of the AnswerFormats of /api/chat and /api/generate. Answers have one choice.

    Tool calls are sent once they are complete; a call that was cut off is omitted.
    """

    stream_type = "application/x-ndjson"

    def __init__(self, *, model: str, shows_logprobs: bool = False) -> None:
        """model: the model's name as the client wrote it."""
        self._model = model
        self._shows_logprobs = shows_logprobs
        self._began = time.perf_counter()
        self._calls: list[OutputDelta] = []  # deltas of the call that is being generated
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
        """Return a line with this content; `fields` are further fields of AnswerLine."""

    def keep_alive(self) -> bytes:
        """Return a line without content. Clients parse each line as JSON, so it cannot be a
        comment.
        """
        return encode_line(self.line(done=False))

    def delta_event(self, event: OutputDelta) -> bytes:
        """Return a line with the new content; a call is collected until it is complete."""
        fields = self._line_fields(event)
        return encode_line(self.line(done=False, **fields)) if fields else b""

    def choice_end(self, event: ChoiceFinished) -> bytes:
        """Return nothing yet, because the last line also contains the counts."""
        self._end = event
        return b""

    def stream_end(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        assert self._end is not None, "the stream is closed before its choice has ended"
        return encode_line(self.line(**self._last_line_fields(self._end, counts, explanation)))

    def error_event(self, problem: Problem) -> bytes:
        return encode_line(ollama_error(problem))

    def complete_body(
        self, events: Iterable[OutputEvent], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """Return the whole answer as one line, which joins the lines of its stream."""
        lines: list[dict[str, Any]] = []  # arguments of `line` for each line of a stream
        for event in events:
            if isinstance(event, ChoiceFinished):
                self._end = event
            elif not isinstance(event, PromptProgress):
                lines.append(self._line_fields(event))
        assert self._end is not None, "an answer is sent after its end"
        fields = self._last_line_fields(self._end, counts, explanation)
        if self._shows_logprobs:
            fields["logprobs"] = [token for line in lines for token in line.get("logprobs", ())]
        return encode_line(
            self.line(
                text="".join([line.get("text", "") for line in lines]),
                thinking="".join([line.get("thinking", "") for line in lines]),
                calls=[call for line in lines for call in line.get("calls", ())],
                **fields,
            )
        )

    def _line_fields(self, event: OutputDelta) -> dict[str, Any]:
        """Return what a delta adds to an answer, as arguments of `line`; empty for nothing yet."""
        fields: dict[str, Any] = {}
        if event.logprobs:
            fields["logprobs"] = content_logprobs(event.logprobs)
        if not isinstance(event, TextDelta):
            self._calls.append(event)
            if isinstance(event, ToolCallFinished):
                fields["calls"] = [_call_line(tool_calls_of(self._calls)[-1], event.call)]
                self._calls.clear()
        elif event.text:
            fields["text" if event.kind == "text" else "thinking"] = event.appended
        return fields

    def _common_fields(self) -> dict[str, Any]:
        """The fields that all lines have."""
        return {"model": self._model, "created_at": timestamp()}

    def _last_line_fields(
        self, end: ChoiceFinished, counts: TokenCounts, explanation: Explanation | None
    ) -> dict[str, Any]:
        """The fields of the last line, as arguments of `line`: reason, counts and durations."""
        total_seconds = time.perf_counter() - self._began
        timings = end.timings
        # The worker measures no decode time for a single token, nor after a stop string ended the
        # answer.
        remaining_seconds = max(
            total_seconds - timings.queue_seconds - timings.prefill_seconds, 0.0
        )
        decode_seconds = timings.decode_seconds or remaining_seconds
        return {
            "done": True,
            "done_reason": "length" if end.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(total_seconds),
            "load_duration": nanoseconds(total_seconds - timings.prefill_seconds - decode_seconds),
            "prompt_eval_count": counts.prompt_tokens,
            "prompt_eval_duration": nanoseconds(timings.prefill_seconds),
            "eval_count": counts.completion_tokens,
            "eval_duration": nanoseconds(decode_seconds),
            "cached_tokens": counts.cached_tokens,
            **counts.truncated_fields(),
            "holdfast": UNSET if explanation is None else explanation,
        }


class ChatLines(OllamaAnswer):
    """The AnswerFormat of /api/chat."""

    def line(
        self,
        *,
        text: str = "",
        thinking: str = "",
        calls: list[ToolCallLine] | None = None,
        **fields: Any,
    ) -> ChatLine:
        """Return a line with a message."""
        message = MessageLine(content=text, thinking=thinking or UNSET, tool_calls=calls or UNSET)
        return ChatLine(message=message, **self._common_fields(), **fields)


class GenerateLines(OllamaAnswer):
    """The AnswerFormat of /api/generate, which does not support tools.

    turns: the conversation of the prompt; empty for a raw prompt, whose answer has no `context`.
    """

    def __init__(self, **common_arguments: Any) -> None:
        super().__init__(**common_arguments)
        self.turns: Sequence[dict[str, Any]] = ()
        self._deltas: list[OutputDelta] = []  # of the whole answer, for its `context`

    def _line_fields(self, event: OutputDelta) -> dict[str, Any]:
        self._deltas.append(event)
        return super()._line_fields(event)

    def _last_line_fields(
        self, end: ChoiceFinished, counts: TokenCounts, explanation: Explanation | None
    ) -> dict[str, Any]:
        fields = super()._last_line_fields(end, counts, explanation)
        if not self.turns:
            return fields
        answer = {
            "role": "assistant",
            "content": text_of(self._deltas),
            "reasoning_content": text_of(self._deltas, "reasoning"),
        }
        return fields | {"context": encode_context([*self.turns, answer])}

    def line(
        self,
        *,
        text: str = "",
        thinking: str = "",
        calls: list[ToolCallLine] | None = None,
        **fields: Any,
    ) -> GenerateLine:
        """Return a line that contains the text as `response`."""
        return GenerateLine(
            response=text, thinking=thinking or UNSET, **self._common_fields(), **fields
        )


def timestamp(seconds: float | None = None) -> str:
    """Format a time in seconds since 1970 (default: now) as in RFC 3339."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _call_line(call: ToolCall, number: int) -> ToolCallLine:
    """A complete call in Ollama's format. number: of the call in the answer, from 0."""
    return ToolCallLine(
        id=call.id,
        function=CalledTool(index=number, name=call.name, arguments=_one_line(call.arguments)),
    )


def encode_line(line: Struct) -> bytes:
    """Encode a line of a stream."""
    text = msgspec.json.encode(line)
    for line_break, escape in _OTHER_BREAKS.items():
        if line_break in text:
            text = text.replace(line_break, escape)
    return text + b"\n"


def _one_line(arguments: str) -> msgspec.Raw:
    """The JSON arguments of a call without line breaks."""
    return msgspec.Raw(arguments.encode().translate(_LINE_BREAKS))


def nanoseconds(seconds: float) -> int:
    """Convert to nanoseconds. At least 1, because clients divide by durations."""
    return max(1, int(seconds * _NANOSECONDS))
