"""The formats of OpenAI's errors, and of answers of /v1/chat/completions and /v1/completions.

Whole answers are encoded from structs. The chunks of streams are assembled from bytes for speed,
because there is one per token; tests decode the chunks with the same structs.
"""

from __future__ import annotations

import abc
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from holdfast.front.output import (
    ChoiceFinished,
    EndWord,
    OutputDelta,
    OutputEvent,
    PromptProgress,
    TextDelta,
    ThoughtEnder,
    TokenCounts,
    TokenText,
    ToolArgumentsDelta,
    ToolCallStarted,
)
from holdfast.front.server.answers import AnswerFormat, StreamFormat
from holdfast.front.server.explanation import Explanation
from holdfast.front.server.problem import Advice, Problem

# function_call: only for requests that have `functions`
ChatEndWord: TypeAlias = Literal["stop", "length", "tool_calls", "function_call"]
_encode = msgspec.json.encode
_EMPTY_OBJECT = b"{}"
_DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """An error. `param` names the field of the request, such as messages.0.content; `advice` says
    what the client can do.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    advice: Advice


class ErrorBody(Struct, frozen=True, kw_only=True):
    """The body of an error response."""

    error: ErrorDetail


def openai_error(problem: Problem) -> ErrorBody:
    """The body of an error response."""
    error_type = "invalid_request_error" if problem.status < 500 else "server_error"
    if problem.status == 429:
        error_type = "rate_limit_error"
    detail = ErrorDetail(
        message=problem.message,
        type=error_type,
        param=problem.field,
        code=problem.code,
        advice=problem.advice,
    )
    return ErrorBody(error=detail)


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """Details of the prompt's tokens.

    truncated_tokens, truncated_messages: how many were left out of a prompt that did not fit; absent if
        nothing was. These tokens are not counted in the prompt's tokens.
    """

    cached_tokens: int
    truncated_tokens: int | UnsetType = UNSET
    truncated_messages: int | UnsetType = UNSET


class CompletionTokensDetails(Struct, frozen=True, kw_only=True):
    """Details of the answer's tokens.

    accepted_prediction_tokens: how many of the answer's tokens were drafted (speculative decoding);
        rejected_prediction_tokens: drafted tokens that are not part of the answer.
    reasoning_ended_by: what interrupted a thought; absent if nothing did.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_ended_by: ThoughtEnder | UnsetType = UNSET


class Usage(Struct, frozen=True, kw_only=True):
    """Exact token counts of one request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    # sent only at the end of an answer
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class ContentLogprob(Struct, frozen=True, kw_only=True):
    """A token of a chat answer, with the most likely tokens at its position (`top_logprobs`)."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ContentLogprob] | UnsetType = UNSET  # absent in the entries of such a list


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities of a chat answer."""

    content: list[ContentLogprob]
    refusal: None = None


class CalledFunction(Struct, frozen=True, kw_only=True):
    """The function of a call; `arguments` is JSON text.

    In a stream, the first chunk of a call contains the name, and later chunks contain parts of the
    arguments.
    """

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class AnswerToolCall(Struct, frozen=True, kw_only=True):
    """A tool call, or the part that a chunk adds to the tool call with number `index`."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class AnswerMessage(Struct, frozen=True, kw_only=True):
    """The assistant's message, or the part that a chunk adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same text, under the name that other clients expect
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET  # only if the request has `functions`


class ChatChoice(Struct, frozen=True, kw_only=True):
    """A choice (with `message`), or the part that a chunk adds to a choice (`delta`)."""

    index: int
    message: AnswerMessage | UnsetType = UNSET
    delta: AnswerMessage | UnsetType = UNSET
    logprobs: ChatLogprobs | None
    finish_reason: ChatEndWord | None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """A whole chat answer, or one chunk of a streamed answer."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage | UnsetType | None = UNSET
    holdfast: Explanation | UnsetType = UNSET


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities of a completion, one entry per token.

    The entry of the first token of an echoed prompt is null.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """A choice, or the part that a chunk adds to a choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndWord | None


class TextCompletion(Struct, frozen=True, kw_only=True):
    """A whole answer of /v1/completions, or one chunk of a streamed answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    holdfast: Explanation | UnsetType = UNSET


class EventFormat(StreamFormat):
    """The format of server-sent events other than answers; comments keep the connection open."""

    def error_event(self, problem: Problem) -> bytes:
        """The error as a server-sent event."""
        return b"data: %b\n\n" % msgspec.json.encode(openai_error(problem))


class OpenAIAnswer(AnswerFormat):
    """Base class of the AnswerFormats of chat and completions.

    The bytes that all chunks have in common are encoded only once.

    shows_usage: the last chunk of a stream contains the token counts.
    shows_counts: every chunk contains the current token counts.
    shows_progress: a stream reports the progress of prefill, like llama.cpp's server.
    shows_logprobs: a whole answer contains the log-probabilities of its tokens.
    """

    body_type: type[ChatCompletion | TextCompletion]  # of a whole answer
    chunk_object: str  # value of `object` in a chunk
    no_text: bytes  # what a chunk that adds no text contains in place of the text

    def __init__(
        self,
        *,
        answer_id: str,
        model: str,
        version: str,
        shows_usage: bool = False,
        shows_counts: bool = False,
        shows_logprobs: bool = False,
        shows_progress: bool = False,
    ) -> None:
        self.id = answer_id
        self.model = model
        self._shows_usage = shows_usage
        self._shows_counts = shows_counts
        self._shows_logprobs = shows_logprobs
        self._shows_progress = shows_progress
        fingerprint = f"fp_holdfast_{version.replace('.', '_')}"
        # the fields that whole answers and chunks have in common
        self._head: dict[str, Any] = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        head = _encode({"id": self.id, "object": self.chunk_object, **self._head})
        self._chunk_begin = b"data: " + head[:-1] + b',"choices":['
        # the end of a chunk after its choices, unless it shows counts
        self._fixed_end = b'],"usage":null}\n\n' if shows_usage else b"]}\n\n"
        self._prompt_tokens = 0
        self._completion_tokens = 0  # counted only if chunks show counts

    def stream_start(self, *, prompt_tokens: int) -> bytes:
        """Record the number of prompt tokens for the counts in later chunks. Returns no bytes."""
        self._prompt_tokens = prompt_tokens
        return b""

    def progress_event(self, event: PromptProgress) -> bytes:
        """Return a chunk without text that reports the prefill's progress; empty if the client did
        not ask for it. `processed` includes the cached tokens.
        """
        if not self._shows_progress:
            return b""
        progress = {
            "total": event.total_tokens,
            "cache": event.cached_tokens,
            "processed": event.read_tokens,
            "time_ms": round(event.seconds * 1000),
        }
        end = self._chunk_end().removesuffix(b"}\n\n")
        choice = b'{"index":%d,%b,"logprobs":null,"finish_reason":null}' % (
            event.index,
            self.no_text,
        )
        fields = (self._chunk_begin, choice, end, _encode(progress))
        return b'%b%b%b,"prompt_progress":%b}\n\n' % fields

    def stream_end(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """Return the end mark of the stream.

        It is preceded by a chunk with token counts and explanation if the stream shows any.
        """
        fields = b""
        if self._shows_usage:
            fields += b',"usage":%b' % _encode(usage_of(counts))
        if explanation is not None:
            fields += b',"holdfast":%b' % _encode(explanation)
        return b"%b]%b}\n\n%b" % (self._chunk_begin, fields, _DONE) if fields else _DONE

    def error_event(self, problem: Problem) -> bytes:
        """Return the error as an event. No end mark follows."""
        return b"data: %b\n\n" % _encode(openai_error(problem))

    def _chunk_end(self, new_tokens: int = 0) -> bytes:
        """The part of a chunk that follows its choices. `usage` is absent, null, or the current
        counts.

        new_tokens: number of generated tokens that the chunk adds.
        """
        if not self._shows_counts:
            return self._fixed_end
        self._completion_tokens += new_tokens
        counts = (
            self._prompt_tokens,
            self._completion_tokens,
            self._prompt_tokens + self._completion_tokens,
        )
        return (
            b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % counts
        )

    def complete_body(
        self, events: Iterable[OutputEvent], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """Return the whole answer as JSON. Each choice joins what the chunks of a stream add."""
        return _encode(
            self.body_type(
                choices=[self._choice(deltas, end) for deltas, end in _group_by_choice(events)],
                usage=usage_of(counts),
                holdfast=UNSET if explanation is None else explanation,
                **self._head,
            )
        )

    @abc.abstractmethod
    def _choice(self, deltas: Sequence[OutputDelta], end: ChoiceFinished) -> Any:
        """Build one choice of a response that is not streamed, from the events of that choice."""


def _group_by_choice(
    events: Iterable[OutputEvent],
) -> Iterator[tuple[Sequence[OutputDelta], ChoiceFinished]]:
    """Iterate over the choices of a whole answer: the deltas and the end of each."""
    deltas: defaultdict[int, list[OutputDelta]] = defaultdict(list)
    ends: dict[int, ChoiceFinished] = {}
    for event in events:
        if isinstance(event, ChoiceFinished):
            ends[event.index] = event
        elif not isinstance(event, PromptProgress):
            deltas[event.index].append(event)
    for index, end in sorted(ends.items()):
        yield deltas[index], end


def usage_of(counts: TokenCounts) -> Usage:
    """Return token counts in OpenAI's format."""
    return Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        total_tokens=counts.total_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=counts.cached_tokens, **counts.truncated_fields()
        ),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=counts.reasoning_tokens,
            accepted_prediction_tokens=counts.accepted_tokens,
            rejected_prediction_tokens=counts.rejected_tokens,
            reasoning_ended_by=counts.thought_ended_by or UNSET,
        ),
    )


def shown_logprob(logprob: float) -> float:
    """Return a log-probability in OpenAI's format: -9999 for minus infinity, which JSON lacks."""
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


class ChatAnswer(OpenAIAnswer):
    """The AnswerFormat of /v1/chat/completions.

    calls_functions: the request has `functions`, so the only call is shown as `function_call`.
    """

    body_type = ChatCompletion
    chunk_object = "chat.completion.chunk"
    no_text = b'"delta":{}'

    def __init__(
        self, *, choices: int, calls_functions: bool = False, **common_arguments: Any
    ) -> None:
        super().__init__(**common_arguments)
        self._calls_functions = calls_functions
        # the beginning of a chunk of each choice, up to the value of `delta`
        self._choice_begins = [
            self._chunk_begin + b'{"index":%d,"delta":' % index for index in range(choices)
        ]

    def keep_alive(self) -> bytes:
        """Return an empty chunk: some clients ignore comments and time out without events."""
        return (
            self._choice_begins[0] + b'{},"logprobs":null,"finish_reason":null}' + self._chunk_end()
        )

    def stream_start(self, *, prompt_tokens: int) -> bytes:
        """Return the first chunk of each choice, which carries the role."""
        super().stream_start(prompt_tokens=prompt_tokens)
        role = b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        end = self._chunk_end()
        return b"".join([begin + role + end for begin in self._choice_begins])

    def delta_event(self, event: OutputDelta) -> bytes:
        """Return a chunk with the new content; empty if there is neither content nor
        log-probabilities. The end of a tool call has no content.
        """
        added = _encode(self._message_delta(event))
        end = self._chunk_end(len(event.token_ids))
        if added == _EMPTY_OBJECT and not event.logprobs:
            return b""
        logprobs = _encode(_chat_logprobs(event.logprobs)) if event.logprobs else b"null"
        fields = (self._choice_begins[event.index], added, logprobs, end)
        return b'%b%b,"logprobs":%b,"finish_reason":null}%b' % fields

    def choice_end(self, event: ChoiceFinished) -> bytes:
        reason = self._finish_reason(event.finish_reason).encode()
        end = b'{},"logprobs":null,"finish_reason":"%b"}' % reason
        return self._choice_begins[event.index] + end + self._chunk_end()

    def _choice(self, deltas: Sequence[OutputDelta], end: ChoiceFinished) -> ChatChoice:
        return ChatChoice(
            index=end.index,
            message=_merge_messages([self._message_delta(delta) for delta in deltas]),
            logprobs=_chat_logprobs(_tokens(deltas)) if self._shows_logprobs else None,
            finish_reason=self._finish_reason(end.finish_reason),
        )

    def _message_delta(self, event: OutputDelta) -> AnswerMessage:
        """Return what an event adds to the message, as the `delta` of a chunk."""
        if isinstance(event, TextDelta):
            text = event.appended
            if event.kind == "text":
                return AnswerMessage(content=text)
            return AnswerMessage(reasoning_content=text, reasoning=text)
        if isinstance(event, ToolCallStarted):
            function = CalledFunction(name=event.name, arguments="")
            call = AnswerToolCall(index=event.call, id=event.id, type="function", function=function)
        elif isinstance(event, ToolArgumentsDelta):
            function = CalledFunction(arguments=event.text)
            call = AnswerToolCall(index=event.call, function=function)
        else:
            return AnswerMessage()
        if self._calls_functions:
            return AnswerMessage(function_call=function)
        return AnswerMessage(tool_calls=[call])

    def _finish_reason(self, reason: EndWord) -> ChatEndWord:
        return "function_call" if self._calls_functions and reason == "tool_calls" else reason


def _merge_messages(deltas: Sequence[AnswerMessage]) -> AnswerMessage:
    """Return the message that these deltas of chunks add up to, as clients join them."""
    content = "".join([delta.content or "" for delta in deltas])
    reasoning = "".join([delta.reasoning or "" for delta in deltas])
    functions = _merge_functions([delta.function_call for delta in deltas if delta.function_call])
    call_deltas = [call for delta in deltas for call in delta.tool_calls or ()]
    calls = [
        AnswerToolCall(id=call.id, type=call.type, function=function)
        for call, function in zip(
            [call for call in call_deltas if call.id is not UNSET],
            _merge_functions([call.function for call in call_deltas]),
            strict=True,
        )
    ]
    return AnswerMessage(
        role="assistant",
        content=content or (None if reasoning or calls or functions else ""),
        refusal=None,
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=calls or UNSET,
        function_call=functions[0] if functions else UNSET,
    )


def _merge_functions(deltas: Iterable[CalledFunction]) -> list[CalledFunction]:
    """Join the parts of functions that are called one after the other. A name begins a function."""
    functions: list[tuple[str, list[str]]] = []
    for delta in deltas:
        if not isinstance(delta.name, UnsetType):
            functions.append((delta.name, []))
        functions[-1][1].append(delta.arguments or "")
    return [CalledFunction(name=name, arguments="".join(parts)) for name, parts in functions]


def _chat_logprobs(tokens: Sequence[TokenText]) -> ChatLogprobs:
    return ChatLogprobs(content=content_logprobs(tokens))


def content_logprobs(tokens: Sequence[TokenText]) -> list[ContentLogprob]:
    """Return tokens in OpenAI's format, each with the most likely tokens at its position."""
    return [
        msgspec.structs.replace(
            _logprob_of(token), top_logprobs=[_logprob_of(each) for each in token.top]
        )
        for token in tokens
    ]


def _logprob_of(token: TokenText) -> ContentLogprob:
    """A token in OpenAI's format, without the list of other likely tokens."""
    return ContentLogprob(
        token=token.text, logprob=shown_logprob(token.logprob), bytes=list(token.raw)
    )


class CompletionAnswer(OpenAIAnswer):
    """The AnswerFormat of /v1/completions. An answer contains the choices of all prompts."""

    body_type = TextCompletion
    chunk_object = "text_completion"
    no_text = b'"text":""'

    def keep_alive(self) -> bytes:
        """Return an empty chunk: some clients ignore comments and time out without events."""
        choice = b'{"index":0,"text":"","logprobs":null,"finish_reason":null}'
        return self._chunk_begin + choice + self._chunk_end()

    def delta_event(self, event: OutputDelta) -> bytes:
        if not isinstance(event, TextDelta):
            return b""
        logprobs = _encode(completion_logprobs(event.logprobs)) if event.logprobs else b"null"
        parts = (
            self._chunk_begin,
            event.index,
            _encode(event.text),
            logprobs,
            self._chunk_end(len(event.token_ids)),
        )
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}%b' % parts

    def choice_end(self, event: ChoiceFinished) -> bytes:
        parts = (self._chunk_begin, event.index, event.finish_reason.encode(), self._chunk_end())
        return b'%b{"index":%d,"text":"","logprobs":null,"finish_reason":"%b"}%b' % parts

    def _choice(self, deltas: Sequence[OutputDelta], end: ChoiceFinished) -> CompletionChoice:
        return CompletionChoice(
            index=end.index,
            text="".join([delta.text for delta in deltas if isinstance(delta, TextDelta)]),
            logprobs=completion_logprobs(_tokens(deltas)) if self._shows_logprobs else None,
            finish_reason=end.finish_reason,
        )


def _tokens(deltas: Iterable[OutputDelta]) -> list[TokenText]:
    """The tokens of all deltas, with their log-probabilities."""
    return [token for delta in deltas for token in delta.logprobs]


def completion_logprobs(tokens: Iterable[TokenText]) -> CompletionLogprobs:
    """Return tokens in the format of /v1/completions.

    A token without a log-probability (NaN) is the first token of an echoed prompt.
    """
    logprobs = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token in tokens:
        text = _token_text(token)
        has_logprob = not math.isnan(token.logprob)
        logprobs.text_offset.append(token.text_offset)
        logprobs.tokens.append(text)
        logprobs.token_logprobs.append(shown_logprob(token.logprob) if has_logprob else None)
        logprobs.top_logprobs.append(_likeliest(text, token) if has_logprob else None)
    return logprobs


def _likeliest(text: str, token: TokenText) -> dict[str, float]:
    """The most likely tokens at the position of a token: text → log-probability.

    text: of the token, as `_token_text` returns it.
    """
    likeliest: dict[str, float] = {}
    for candidate in token.top:
        # if two tokens have the same text, the more likely one comes first and is used
        likeliest.setdefault(_token_text(candidate), shown_logprob(candidate.logprob))
    # the sampled token is always included
    likeliest.setdefault(text, shown_logprob(token.logprob))
    return likeliest


def _token_text(token: TokenText) -> str:
    """The text of a token; its bytes, as OpenAI writes them, if they are not whole characters."""
    try:
        token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)  # part of a character
    return token.text
