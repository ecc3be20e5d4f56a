"""The answers of Messages, streamed and whole: their shapes, their usage, and errors."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType
from pydantic_core import from_json

from holdfast.errors import PromptTooLong
from holdfast.front.server.answers import AnswerFormat, Explanation, TokenCounts, WholeChoice
from holdfast.front.server.problem import Problem
from holdfast.front.server.sealing import Seal
from holdfast.wire.output import (
    ChoiceFinished,
    OutputDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
STATUSES = {"queue_full": 529}  # of problems that Anthropic gives another status
StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]
_LONG_SECONDS = 3600.0
_encode = msgspec.json.encode
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_NO_INPUT = msgspec.Raw(b"{}")

Place: TypeAlias = Literal["text", "reasoning"] | int  # the kind of text, or the number of the call


class MessagesErrorDetail(Struct, frozen=True, kw_only=True):
    """What went wrong."""

    type: str
    message: str


class MessagesError(Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success, and the event that ends a stream that fails."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | UnsetType = UNSET


def anthropic_error(problem: Problem) -> MessagesError:
    """The body of an answer that says what went wrong.

    Clients choose the exception by the status, and show type and message.
    """
    kind = _KINDS.get(
        problem.status, "invalid_request_error" if problem.status < 500 else "api_error"
    )
    return MessagesError(
        error=MessagesErrorDetail(type=kind, message=_message(problem)),
        request_id=problem.request_id or UNSET,
    )


def _message(problem: Problem) -> str:
    """Claude Code knows by these words, and the two numbers, that it has to make the conversation
    shorter.
    """
    if isinstance(cause := problem.cause, PromptTooLong):
        most = min(cause.context_tokens, cause.prompt_tokens - 1)  # an answer needs a token too
        return f"prompt is too long: {cause.prompt_tokens} tokens > {most} maximum"
    return problem.message_with_field


class DirectCaller(Struct, frozen=True, kw_only=True):
    """The model itself calls, not a program of Anthropic's."""

    type: Literal["direct"] = "direct"


class AnswerBlock(Struct, frozen=True, kw_only=True):
    """A piece of an answer, all of one kind: each kind has fields of its own."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    citations: UnsetType | None = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: msgspec.Raw | UnsetType = UNSET  # a JSON object
    caller: DirectCaller | UnsetType = UNSET


class MessageAnswer(Struct, frozen=True, kw_only=True):
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
    holdfast: Explanation | UnsetType = UNSET


class MessageEvent(Struct, frozen=True, kw_only=True):
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
    message: MessageAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: AnswerBlock | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    error: MessagesErrorDetail | UnsetType = UNSET
    holdfast: Explanation | UnsetType = UNSET


class TokenCount(Struct, frozen=True, kw_only=True):
    """How long a prompt is."""

    input_tokens: int


class CacheCreation(Struct, frozen=True, kw_only=True):
    """cache_creation_input_tokens by the time for which they are kept."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class ThinkingTokens(Struct, frozen=True, kw_only=True):
    """Those of output_tokens that belong to thoughts, their markers included."""

    thinking_tokens: int


class MessageUsage(Struct, frozen=True, kw_only=True):
    """The prompt has input_tokens + cache_creation_input_tokens + cache_read_input_tokens tokens."""

    input_tokens: int  # read anew, behind the last breakpoint
    cache_creation_input_tokens: int  # read anew, up to the last breakpoint
    cache_read_input_tokens: int  # not read again
    cache_creation: CacheCreation
    output_tokens: int  # with those of thoughts
    output_tokens_details: ThinkingTokens
    # Of Anthropic's own service; clients that check its types expect them.
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"
    inference_geo: None = None


def usage_of(counts: TokenCounts) -> MessageUsage:
    """The counts of one answer."""
    cached = counts.cached_tokens
    last = max((each.tokens for each in counts.breakpoints), default=0)
    last_long = max(
        (each.tokens for each in counts.breakpoints if each.seconds >= _LONG_SECONDS), default=0
    )
    created, long = max(0, last - cached), max(0, last_long - cached)
    return MessageUsage(
        input_tokens=counts.prompt_tokens - cached - created,
        cache_creation_input_tokens=created,
        cache_read_input_tokens=cached,
        cache_creation=CacheCreation(
            ephemeral_5m_input_tokens=created - long, ephemeral_1h_input_tokens=long
        ),
        output_tokens=counts.completion_tokens,
        output_tokens_details=ThinkingTokens(thinking_tokens=counts.reasoning_tokens),
    )


class MessagesAnswer(AnswerFormat):
    """AnswerFormat of an answer.

    max_tokens: as the request has it. hides_thinking: the blocks of thinking have no text, but a
    signature that carries it.
    """

    def __init__(
        self, *, model: str, seal: Seal, max_tokens: int, hides_thinking: bool = False
    ) -> None:
        self.id, self.model = f"msg_{uuid.uuid4().hex}", model
        self._seal, self._max_tokens, self._hides_thinking = seal, max_tokens, hides_thinking
        self._open: Place | None = None  # the block that is being written
        self._blocks = 0  # that were begun
        self._thought: list[str] = []  # of that block
        self._end: ChoiceFinished | None = None

    def keep_alive(self) -> bytes:
        """A ping: Claude Code counts events, not bytes."""
        return _PING

    def opening(self, *, prompt_tokens: int) -> bytes:
        """The head. What of the prompt was reused is not known yet: the counts at the end go before
        these.
        """
        usage = usage_of(
            TokenCounts(prompt_tokens=prompt_tokens, completion_tokens=0, cached_tokens=0)
        )
        head = MessageAnswer(
            id=self.id, model=self.model, content=[], stop_reason=None, usage=usage
        )
        return b'event: message_start\ndata: {"type":"message_start","message":%b}\n\n' % _encode(
            head
        )

    def delta(self, event: OutputDelta) -> bytes:
        """News of a block; the block before it ends, and it begins, with the first of them."""
        place = _place(event)
        if place is None:
            return b""
        before = b"" if place == self._open else self._stop() + self._start(place, event)
        if isinstance(event, TextDelta):
            return before + self._text(event)
        if isinstance(event, ToolArgumentsDelta):
            return before + (
                self._delta(b"input_json_delta", b"partial_json", event.text) if event.text else b""
            )
        return before + (self._stop() if isinstance(event, ToolCallFinished) else b"")

    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of the last block."""
        self._end = event
        return self._stop()

    def closing(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """Why it ended, and the counts."""
        assert self._end is not None, "an answer has an end"
        reason, sequence = self._end_of(self._end, counts)
        delta = _encode(
            {
                "stop_reason": reason,
                "stop_sequence": sequence,
                "stop_details": None,
                "container": None,
            }
        )
        extra = b"" if explanation is None else b',"holdfast":%b' % _encode(explanation)
        usage = _encode(usage_of(counts))
        data = b'{"type":"message_delta","delta":%b,"usage":%b%b}' % (delta, usage, extra)
        return b"event: message_delta\ndata: %b\n\n%b" % (data, _STOP)

    def broken(self, problem: Problem) -> bytes:
        """The error as an event; nothing follows."""
        return b"event: error\ndata: %b\n\n" % _encode(anthropic_error(problem))

    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The whole as JSON."""
        (choice,) = choices
        assert choice.end is not None, "an answer has an end"
        reason, sequence = self._end_of(choice.end, counts)
        answer = MessageAnswer(
            id=self.id,
            model=self.model,
            content=[self._block(place, deltas) for place, deltas in _by_block(choice.deltas)],
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage_of(counts),
            holdfast=UNSET if explanation is None else explanation,
        )
        return _encode(answer)

    def _start(self, place: Place, event: OutputDelta) -> bytes:
        if isinstance(event, ToolCallStarted):
            block = AnswerBlock(
                type="tool_use",
                id=event.id,
                name=event.name,
                input=_NO_INPUT,
                caller=DirectCaller(),
            )
        elif place == "text":
            block = AnswerBlock(type="text", text="", citations=None)
        else:
            block = AnswerBlock(type="thinking", thinking="", signature="")
        self._open, self._blocks = place, self._blocks + 1
        data = b'{"type":"content_block_start","index":%d,"content_block":%b}' % (
            self._blocks - 1,
            _encode(block),
        )
        return b"event: content_block_start\ndata: %b\n\n" % data

    def _text(self, event: TextDelta) -> bytes:
        if event.kind == "text":
            return self._delta(b"text_delta", b"text", event.text)
        self._thought.append(event.text)
        return (
            b"" if self._hides_thinking else self._delta(b"thinking_delta", b"thinking", event.text)
        )

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "reasoning":
            signed = self._delta(
                b"signature_delta", b"signature", self._signature("".join(self._thought))
            )
            self._thought.clear()
        self._open = None
        data = b'{"type":"content_block_stop","index":%d}' % (self._blocks - 1)
        return b"%bevent: content_block_stop\ndata: %b\n\n" % (signed, data)

    def _delta(self, kind: bytes, key: bytes, text: str) -> bytes:
        delta = b'{"type":"%b","%b":%b}' % (kind, key, _encode(text))
        data = b'{"type":"content_block_delta","index":%d,"delta":%b}' % (self._blocks - 1, delta)
        return b"event: content_block_delta\ndata: %b\n\n" % data

    def _signature(self, thought: str) -> str:
        return self._seal.close(thought) if self._hides_thinking else self._seal.sign(thought)

    def _block(self, place: Place, deltas: Sequence[OutputDelta]) -> AnswerBlock:
        if isinstance(place, int):
            return _call(deltas)
        text = "".join([delta.text for delta in deltas if isinstance(delta, TextDelta)])
        if place == "text":
            return AnswerBlock(type="text", text=text, citations=None)
        return AnswerBlock(
            type="thinking",
            thinking="" if self._hides_thinking else text,
            signature=self._signature(text),
        )

    def _end_of(self, end: ChoiceFinished, counts: TokenCounts) -> tuple[StopReason, str | None]:
        """Why it ended, and the stop sequence if it was one."""
        if end.finish_reason == "length":
            return (
                "max_tokens"
                if counts.completion_tokens >= self._max_tokens
                else "model_context_window_exceeded"
            ), None
        if end.finish_reason == "tool_calls":
            return "tool_use", None
        return ("end_turn" if end.stop_string is None else "stop_sequence"), end.stop_string


def _place(event: OutputDelta) -> Place | None:
    """The block that an event belongs to; None for one that says nothing."""
    if isinstance(event, TextDelta):
        return event.kind if event.text else None
    return event.call


def _by_block(deltas: Iterable[OutputDelta]) -> list[tuple[Place, list[OutputDelta]]]:
    blocks: list[tuple[Place, list[OutputDelta]]] = []
    for delta in deltas:
        if (place := _place(delta)) is None:
            continue
        if not blocks or blocks[-1][0] != place:
            blocks.append((place, []))
        blocks[-1][1].append(delta)
    return blocks


def _call(deltas: Sequence[OutputDelta]) -> AnswerBlock:
    """A call. Of the arguments of one that was cut, as much is shown as is JSON: so do the clients
    that read streams.
    """
    head = next(delta for delta in deltas if isinstance(delta, ToolCallStarted))
    arguments = "".join([delta.text for delta in deltas if isinstance(delta, ToolArgumentsDelta)])
    given = msgspec.Raw(arguments.encode()) if arguments else _NO_INPUT
    if arguments and not any(isinstance(delta, ToolCallFinished) for delta in deltas):
        given = msgspec.Raw(_encode(from_json(arguments, allow_partial=True)))
    return AnswerBlock(
        type="tool_use", id=head.id, name=head.name, input=given, caller=DirectCaller()
    )
