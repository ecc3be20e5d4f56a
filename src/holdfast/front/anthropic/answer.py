"""The format of answers of the Messages API: events, whole messages, token counts and errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType
from pydantic_core import from_json

from holdfast.errors import PromptTooLong
from holdfast.front.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    TextDelta,
    TokenCounts,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from holdfast.front.server.access import Seal
from holdfast.front.server.answers import AnswerFormat
from holdfast.front.server.explanation import Explanation
from holdfast.front.server.problem import Advice, Problem

# HTTP status → Anthropic's type of an error
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
STATUSES = {"queue_full": 529}  # code of a problem → Anthropic's HTTP status, if it differs
StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]
_LONG_SECONDS = 3600.0  # a breakpoint with at least this lifetime counts as cached for an hour
_encode = msgspec.json.encode
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_NO_INPUT = msgspec.Raw(b"{}")

# what identifies the block that is being written: the kind of a text, or the number of a call
OpenBlock: TypeAlias = Literal["text", "reasoning"] | int


class UnsupportedThread(Struct, frozen=True, kw_only=True):
    """Tells Anthropic's SDKs to send the whole conversation each time, instead of only what is new."""

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"
    unsupported: tuple[str, ...] = ("thread",)


class MessagesErrorDetail(Struct, frozen=True, kw_only=True):
    """Details of an error."""

    type: str
    message: str
    advice: Advice
    details: UnsupportedThread | UnsetType = UNSET


class MessagesError(Struct, frozen=True, kw_only=True):
    """The body of an error response. Also the last event of a stream that fails."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | UnsetType = UNSET


def anthropic_error(problem: Problem) -> MessagesError:
    """Return the body of an error response.

    Clients choose their exception by the HTTP status, and show `type` and `message`.
    """
    default_type = "invalid_request_error" if problem.status < 500 else "api_error"
    error_type = _ERROR_TYPES.get(problem.status, default_type)
    details = UnsupportedThread() if problem.field == "thread" else UNSET
    return MessagesError(
        error=MessagesErrorDetail(
            type=error_type, message=_message(problem), advice=problem.advice, details=details
        ),
        request_id=problem.request_id or UNSET,
    )


def _message(problem: Problem) -> str:
    """Return the error message for a client.

    If the prompt is too long, this is Anthropic's text: Claude Code recognizes it, and compacts the
    conversation.
    """
    if isinstance(cause := problem.cause, PromptTooLong):
        # one less than the prompt if that is what fits, because the answer needs a token, too
        most_tokens = min(cause.context_tokens, cause.prompt_tokens - 1)
        return f"prompt is too long: {cause.prompt_tokens} tokens > {most_tokens} maximum"
    return problem.message_with_field


class DirectCaller(Struct, frozen=True, kw_only=True):
    """States that the model calls the tool itself, not through a program that Anthropic runs."""

    type: Literal["direct"] = "direct"


class AnswerBlock(Struct, frozen=True, kw_only=True):
    """A block of an answer. The type of the block decides which fields it has."""

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
    """A whole answer, or, without content and stop reason, the head of a streamed answer."""

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
    """An event of a stream. The type of the event decides which fields it has."""

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
    """The number of tokens in a prompt."""

    input_tokens: int


class CacheCreation(Struct, frozen=True, kw_only=True):
    """How many of cache_creation_input_tokens stay cached for five minutes, and for an hour."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class ThinkingTokens(Struct, frozen=True, kw_only=True):
    """The part of output_tokens that was spent on thoughts, including their markers."""

    thinking_tokens: int


class MessageUsage(Struct, frozen=True, kw_only=True):
    """Token counts. The first three add up to the number of tokens in the prompt."""

    input_tokens: int  # prefilled tokens after the last breakpoint
    cache_creation_input_tokens: int  # prefilled tokens up to the last breakpoint
    cache_read_input_tokens: int  # cached tokens
    cache_creation: CacheCreation
    output_tokens: int  # including thoughts
    output_tokens_details: ThinkingTokens
    # Holdfast's own fields: the tokens and messages left out of a prompt that did not fit, not
    # counted above; absent if nothing was
    truncated_tokens: int | UnsetType = UNSET
    truncated_messages: int | UnsetType = UNSET
    # These concern Anthropic's own service; clients that check types expect these fields.
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"
    inference_geo: None = None


def usage_of(counts: TokenCounts) -> MessageUsage:
    """Return the token counts of one answer.

    Tokens up to the client's last breakpoint count as written to the cache, unless they were cached
    before: for an hour up to the last breakpoint that asks for that, else for five minutes.
    """
    cached = counts.cached_tokens
    breakpoints = counts.breakpoints
    tokens_to_last = max((each.tokens for each in breakpoints), default=0)
    tokens_to_last_long = max(
        (each.tokens for each in breakpoints if each.seconds >= _LONG_SECONDS), default=0
    )
    created = max(0, tokens_to_last - cached)
    created_for_an_hour = max(0, tokens_to_last_long - cached)
    return MessageUsage(
        input_tokens=counts.prompt_tokens - cached - created,
        cache_creation_input_tokens=created,
        cache_read_input_tokens=cached,
        cache_creation=CacheCreation(
            ephemeral_5m_input_tokens=created - created_for_an_hour,
            ephemeral_1h_input_tokens=created_for_an_hour,
        ),
        output_tokens=counts.completion_tokens,
        output_tokens_details=ThinkingTokens(thinking_tokens=counts.reasoning_tokens),
        **counts.truncated_fields(),
    )


class MessagesAnswer(AnswerFormat):
    """The AnswerFormat of the Messages API. Unstreamed messages are built from the same events.

    max_tokens: as in the request.
    hides_thinking: thinking blocks have no text, only a signature that contains the text.
    seal: signs or encrypts thoughts, so that the client can send them back but not change them.
    """

    def __init__(
        self,
        *,
        answer_id: str,
        model: str,
        seal: Seal,
        max_tokens: int,
        hides_thinking: bool = False,
    ) -> None:
        self.id = answer_id
        self.model = model
        self._seal = seal
        self._max_tokens = max_tokens
        self._hides_thinking = hides_thinking
        self._content: list[AnswerBlock] = []  # the last block is incomplete while it is open
        self._open_block: OpenBlock | None = None  # None: between two blocks
        self._pieces: list[str] = []  # text, thought or arguments of the open block
        self._end: ChoiceFinished | None = None

    def keep_alive(self) -> bytes:
        """Return a ping: Claude Code ignores comments and gives up when no events arrive."""
        return _PING

    def stream_start(self, *, prompt_tokens: int) -> bytes:
        """Return the head. It counts the whole prompt as uncached; the final counts are exact."""
        counts = TokenCounts(prompt_tokens=prompt_tokens, completion_tokens=0, cached_tokens=0)
        head = MessageAnswer(
            id=self.id, model=self.model, content=[], stop_reason=None, usage=usage_of(counts)
        )
        data = _encode(head)
        return b'event: message_start\ndata: {"type":"message_start","message":%b}\n\n' % data

    def delta_event(self, event: OutputDelta) -> bytes:
        """Return more of a block. The first delta of a block also ends the previous block."""
        block = _block_of(event)
        if block is None:
            return b""
        block_change = (
            b""
            if block == self._open_block
            else self._stop_block() + self._start_block(block, event)
        )
        if isinstance(event, TextDelta):
            return block_change + self._text_delta(event)
        if isinstance(event, ToolArgumentsDelta):
            return block_change + self._arguments_delta(event)
        if isinstance(event, ToolCallFinished):
            return block_change + self._stop_block(is_complete=True)
        return block_change

    def choice_end(self, event: ChoiceFinished) -> bytes:
        self._end = event
        return self._stop_block()

    def stream_end(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """Return the stop reason and the token counts."""
        reason, sequence = self._stop_reason(counts)
        delta = {
            "stop_reason": reason,
            "stop_sequence": sequence,
            "stop_details": None,
            "container": None,
        }
        extra = b"" if explanation is None else b',"holdfast":%b' % _encode(explanation)
        usage = _encode(usage_of(counts))
        data = b'{"type":"message_delta","delta":%b,"usage":%b%b}' % (_encode(delta), usage, extra)
        return b"event: message_delta\ndata: %b\n\n%b" % (data, _STOP)

    def error_event(self, problem: Problem) -> bytes:
        return b"event: error\ndata: %b\n\n" % _encode(anthropic_error(problem))

    def complete_body(
        self, events: Iterable[OutputEvent], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        for event in events:
            self.event_bytes(event)
        reason, sequence = self._stop_reason(counts)
        answer = MessageAnswer(
            id=self.id,
            model=self.model,
            content=self._content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage_of(counts),
            holdfast=UNSET if explanation is None else explanation,
        )
        return _encode(answer)

    def _start_block(self, new_block: OpenBlock, event: OutputDelta) -> bytes:
        """Begin a block, still empty. event: its first delta."""
        if isinstance(event, ToolCallStarted):
            block = AnswerBlock(
                type="tool_use",
                id=event.id,
                name=event.name,
                input=_NO_INPUT,
                caller=DirectCaller(),
            )
        elif new_block == "text":
            block = AnswerBlock(type="text", text="", citations=None)
        else:
            block = AnswerBlock(type="thinking", thinking="", signature="")
        self._open_block = new_block
        self._content.append(block)
        data = b'{"type":"content_block_start","index":%d,"content_block":%b}' % (
            len(self._content) - 1,
            _encode(block),
        )
        return b"event: content_block_start\ndata: %b\n\n" % data

    def _text_delta(self, event: TextDelta) -> bytes:
        self._pieces.append(event.text)
        if event.kind == "text":
            return self._delta(b"text_delta", b"text", event.text)
        if self._hides_thinking:
            return b""
        return self._delta(b"thinking_delta", b"thinking", event.text)

    def _arguments_delta(self, event: ToolArgumentsDelta) -> bytes:
        self._pieces.append(event.text)
        if not event.text:
            return b""
        return self._delta(b"input_json_delta", b"partial_json", event.text)

    def _stop_block(self, *, is_complete: bool = False) -> bytes:
        """End the open block, if there is one. is_complete: the block is a call that was not cut
        off.
        """
        if self._open_block is None:
            return b""
        signature_event = b""  # only thinking blocks have one
        text = "".join(self._pieces)
        fields: dict[str, Any] = {"text": text}
        if self._open_block == "reasoning":
            create_signature = self._seal.encrypt if self._hides_thinking else self._seal.sign
            signature = create_signature(text)
            signature_event = self._delta(b"signature_delta", b"signature", signature)
            fields = {"thinking": "" if self._hides_thinking else text, "signature": signature}
        elif self._open_block != "text":
            fields = {"input": _call_input(text, is_complete=is_complete)}
        self._content[-1] = msgspec.structs.replace(self._content[-1], **fields)
        self._pieces.clear()
        self._open_block = None
        data = b'{"type":"content_block_stop","index":%d}' % (len(self._content) - 1)
        return b"%bevent: content_block_stop\ndata: %b\n\n" % (signature_event, data)

    def _delta(self, kind: bytes, key: bytes, text: str) -> bytes:
        """The event that adds to the open block. kind: type of the delta. key: its text's field."""
        delta = b'{"type":"%b","%b":%b}' % (kind, key, _encode(text))
        index = len(self._content) - 1
        data = b'{"type":"content_block_delta","index":%d,"delta":%b}' % (index, delta)
        return b"event: content_block_delta\ndata: %b\n\n" % data

    def _stop_reason(self, counts: TokenCounts) -> tuple[StopReason, str | None]:
        """Return the stop reason, and the stop sequence if there is one."""
        assert self._end is not None, "the answer has not ended"
        if self._end.finish_reason == "length":
            is_at_limit = counts.completion_tokens >= self._max_tokens
            return "max_tokens" if is_at_limit else "model_context_window_exceeded", None
        if self._end.finish_reason == "tool_calls":
            return "tool_use", None
        stop_string = self._end.stop_string
        return "end_turn" if stop_string is None else "stop_sequence", stop_string


def _block_of(event: OutputDelta) -> OpenBlock | None:
    """Return the block that an event belongs to, or None for an event without new content."""
    if isinstance(event, TextDelta):
        return event.kind if event.text else None
    return event.call


def _call_input(arguments: str, *, is_complete: bool) -> msgspec.Raw:
    """Return the arguments of a call. If the call was cut off, return the part that is JSON, as
    clients that read streams do.
    """
    if not arguments:
        return _NO_INPUT
    if is_complete:
        return msgspec.Raw(arguments.encode())
    return msgspec.Raw(_encode(from_json(arguments, allow_partial=True)))
