"""OpenAI's errors, its answers as structs, and what the answers of chat and completions share.

Whole answers are encoded from the structs; the tests check the chunks of streams against them.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from holdfast.front.server.answers import AnswerFormat, Explanation, TokenCounts, WholeChoice
from holdfast.front.server.problem import Problem
from holdfast.wire.output import (
    ChoiceFinished,
    EndWord,
    OutputDelta,
    PromptProgress,
    TextDelta,
    ThoughtEnder,
    TokenText,
    ToolArgumentsDelta,
    ToolCallStarted,
)

# function_call: only for requests with `functions`
ChatEndWord: TypeAlias = Literal["stop", "length", "tool_calls", "function_call"]
_encode = msgspec.json.encode
_EMPTY = b"{}"
_DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """What went wrong; `param` names the field of the request, such as messages.0.content."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


def openai_error(problem: Problem) -> ErrorBody:
    """The body of an answer that says what went wrong."""
    kind = (
        "rate_limit_error"
        if problem.status == 429
        else "invalid_request_error"
        if problem.status < 500
        else "server_error"
    )
    return ErrorBody(
        error=ErrorDetail(
            message=problem.message, type=kind, param=problem.field, code=problem.code
        )
    )


class PromptTokensDetails(Struct, frozen=True, kw_only=True):
    """What the prompt's tokens were."""

    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True, kw_only=True):
    """What the answer's tokens were. reasoning_ended_by: where something ended a thought before the
    model did.
    """

    reasoning_tokens: int
    reasoning_ended_by: ThoughtEnder | UnsetType = UNSET


class Usage(Struct, frozen=True, kw_only=True):
    """Exact token counts of one request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    # a stream's counts so far lack it
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    # and this
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class ContentLogprob(Struct, frozen=True, kw_only=True):
    """A token of a chat answer.

    A drawn one comes with the likeliest at its place, which have none themselves.
    """

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ContentLogprob] | UnsetType = UNSET


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """Log-probabilities of a chat answer."""

    content: list[ContentLogprob]
    refusal: None = None


class CalledFunction(Struct, frozen=True, kw_only=True):
    """Whom a call calls, and with what: JSON text.

    An event of a stream has the name once, and then parts of the arguments.
    """

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class AnswerToolCall(Struct, frozen=True, kw_only=True):
    """A call of a tool, or what an event of a stream adds to it: then `index` says to which."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class AnswerMessage(Struct, frozen=True, kw_only=True):
    """The assistant's turn, or what an event of a stream adds to it."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same under its other name
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET
    # where the request had `functions`
    function_call: CalledFunction | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One answer, or an event's part of it: a whole one has `message`, an event `delta`."""

    index: int
    message: AnswerMessage | UnsetType = UNSET
    delta: AnswerMessage | UnsetType = UNSET
    logprobs: ChatLogprobs | None
    finish_reason: ChatEndWord | None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """A whole chat answer, or one event of a streamed one."""

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

    The first token of an echoed prompt has none: null.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One completion, or a chunk's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndWord | None


class TextCompletion(Struct, frozen=True, kw_only=True):
    """A whole answer of /v1/completions, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    holdfast: Explanation | UnsetType = UNSET


class OpenAIAnswer(AnswerFormat):
    """AnswerFormat of both endpoints. All that is the same in every chunk is encoded once.

    shows_usage: a stream's last chunk has the token counts. shows_counts: every chunk has those so
        far.
    shows_progress: a stream tells how far the prompt is read, as llama.cpp's server does.
    shows_logprobs: a whole answer has the log-probabilities of its tokens.
    """

    id_prefix: str  # chatcmpl or cmpl
    chunk_object: str  # what a chunk of a stream is called
    no_news: bytes  # of a choice, in a chunk

    def __init__(
        self,
        *,
        model: str,
        version: str,
        shows_usage: bool = False,
        shows_counts: bool = False,
        shows_logprobs: bool = False,
        shows_progress: bool = False,
    ) -> None:
        self.id, self.model = f"{self.id_prefix}-{uuid.uuid4().hex}", model
        self._shows_usage, self._shows_counts, self._shows_logprobs = (
            shows_usage,
            shows_counts,
            shows_logprobs,
        )
        self._shows_progress = shows_progress
        fingerprint = f"fp_holdfast_{version.replace('.', '_')}"
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        head = msgspec.json.encode({"id": self.id, "object": self.chunk_object, **self._head})
        self._chunk_begin = b"data: " + head[:-1] + b',"choices":['
        self._fixed_end = b'],"usage":null}\n\n' if shows_usage else b"]}\n\n"
        self._prompt_tokens = self._completion_tokens = 0

    def opening(self, *, prompt_tokens: int) -> bytes:
        """Nothing, but from here on the prompt counts."""
        self._prompt_tokens = prompt_tokens
        return b""

    def progress(self, event: PromptProgress) -> bytes:
        """A chunk without news of the choice; `processed` has what was cached in it."""
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
            self.no_news,
        )
        return b'%b%b%b,"prompt_progress":%b}\n\n' % (
            self._chunk_begin,
            choice,
            end,
            msgspec.json.encode(progress),
        )

    def closing(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """A chunk that has no choices, only token counts and explanation, if there is one of both;
        then the end mark.
        """
        parts = {
            b"usage": usage_of(counts) if self._shows_usage else None,
            b"holdfast": explanation,
        }
        said = b"".join(
            b',"%b":%b' % (name, msgspec.json.encode(part))
            for name, part in parts.items()
            if part is not None
        )
        return b"%b]%b}\n\n%b" % (self._chunk_begin, said, _DONE) if said else _DONE

    def broken(self, problem: Problem) -> bytes:
        """The error as an event; no end mark follows."""
        return b"data: %b\n\n" % msgspec.json.encode(openai_error(problem))

    def _chunk_end(self, new_tokens: int = 0) -> bytes:
        """What follows the choices of a chunk that brings so many tokens: no `usage`, null, or the
        counts so far.
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

    def _around_choices(
        self, counts: TokenCounts, explanation: Explanation | None
    ) -> dict[str, Any]:
        """The fields of a whole answer beside its choices."""
        return {
            **self._head,
            "usage": usage_of(counts),
            "holdfast": UNSET if explanation is None else explanation,
        }


def usage_of(counts: TokenCounts) -> Usage:
    """Token counts as OpenAI shows them."""
    return Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        total_tokens=counts.prompt_tokens + counts.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=counts.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=counts.reasoning_tokens,
            reasoning_ended_by=UNSET
            if counts.thought_ended_by is None
            else counts.thought_ended_by,
        ),
    )


def shown_logprob(logprob: float) -> float:
    """A log-probability as OpenAI shows it: minus infinity, which JSON cannot say, is -9999."""
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


class ChatAnswer(OpenAIAnswer):
    """AnswerFormat of a chat answer.

    calls_functions: a call is shown in the form that belongs to the request's `functions`, of which
    an answer has one.
    """

    id_prefix, chunk_object = "chatcmpl", "chat.completion.chunk"
    no_news = b'"delta":{}'

    def __init__(self, *, choices: int, calls_functions: bool = False, **given: Any) -> None:
        super().__init__(**given)
        self._calls_functions = calls_functions
        self._choices = [
            self._chunk_begin + b'{"index":%d,"delta":' % index for index in range(choices)
        ]

    def keep_alive(self) -> bytes:
        """A chunk that says nothing: some clients give up on a stream whose events cease, and do
        not see comments.
        """
        return self._choices[0] + b'{},"logprobs":null,"finish_reason":null}' + self._chunk_end()

    def opening(self, *, prompt_tokens: int) -> bytes:
        """One chunk per choice that says who speaks."""
        super().opening(prompt_tokens=prompt_tokens)
        said = (
            b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            + self._chunk_end()
        )
        return b"".join(choice + said for choice in self._choices)

    def delta(self, event: OutputDelta) -> bytes:
        """News of a choice.

        The end of a call has no form of its own; its tokens have log-probabilities, though, and
        count.
        """
        said = self._said(event)
        logprobs = _encode(_chat_logprobs(event.logprobs)) if event.logprobs else b"null"
        end = self._chunk_end(len(event.token_ids))
        if said == _EMPTY and not event.logprobs:
            return b""
        return b'%b%b,"logprobs":%b,"finish_reason":null}%b' % (
            self._choices[event.index],
            said,
            logprobs,
            end,
        )

    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of a choice."""
        end = (
            b'{},"logprobs":null,"finish_reason":"%b"}'
            % self._end_word(event.finish_reason).encode()
        )
        return self._choices[event.index] + end + self._chunk_end()

    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The whole as JSON."""
        shown = [
            ChatChoice(
                index=index,
                message=self._message(choice),
                logprobs=_chat_logprobs(choice.logprobs) if self._shows_logprobs else None,
                finish_reason=self._end_word(choice.finish_reason),
            )
            for index, choice in enumerate(choices)
        ]
        return _encode(ChatCompletion(choices=shown, **self._around_choices(counts, explanation)))

    def _said(self, event: OutputDelta) -> bytes:
        """What an event says, as the `delta` of a chunk."""
        if isinstance(event, TextDelta):
            text = _encode(event.appended)
            return (
                b'{"content":%b}' % text
                if event.kind == "text"
                else b'{"reasoning_content":%b,"reasoning":%b}' % (text, text)
            )
        if isinstance(event, ToolCallStarted):
            function = CalledFunction(name=event.name, arguments="")
            call = AnswerToolCall(index=event.call, id=event.id, type="function", function=function)
        elif isinstance(event, ToolArgumentsDelta):
            function = CalledFunction(arguments=event.text)
            call = AnswerToolCall(index=event.call, function=function)
        else:
            return _EMPTY
        if self._calls_functions:
            return b'{"function_call":%b}' % _encode(function)
        return b'{"tool_calls":[%b]}' % _encode(call)

    def _message(self, choice: WholeChoice) -> AnswerMessage:
        content, reasoning, calls = choice.text(), choice.text("reasoning"), choice.tool_calls
        functions = [CalledFunction(name=call.name, arguments=call.arguments) for call in calls]
        in_use = [
            AnswerToolCall(id=call.id, type="function", function=function)
            for call, function in zip(calls, functions, strict=True)
        ]
        return AnswerMessage(
            role="assistant",
            content=content or (None if reasoning or calls else ""),
            refusal=None,
            reasoning_content=reasoning or UNSET,
            reasoning=reasoning or UNSET,
            tool_calls=in_use if calls and not self._calls_functions else UNSET,
            function_call=functions[0] if calls and self._calls_functions else UNSET,
        )

    def _end_word(self, word: EndWord) -> ChatEndWord:
        return "function_call" if self._calls_functions and word == "tool_calls" else word


def _chat_logprobs(tokens: Sequence[TokenText]) -> ChatLogprobs:
    return ChatLogprobs(content=content_logprobs(tokens))


def content_logprobs(tokens: Sequence[TokenText]) -> list[ContentLogprob]:
    """Drawn tokens as OpenAI shows them, each with the likeliest at its place."""
    return [
        msgspec.structs.replace(
            _bare_logprob(token), top_logprobs=[_bare_logprob(rival) for rival in token.top]
        )
        for token in tokens
    ]


def _bare_logprob(token: TokenText) -> ContentLogprob:
    return ContentLogprob(
        token=token.text, logprob=shown_logprob(token.logprob), bytes=list(token.raw)
    )


class CompletionAnswer(OpenAIAnswer):
    """AnswerFormat of a completion, of all its prompts' choices."""

    id_prefix, chunk_object = "cmpl", "text_completion"
    no_news = b'"text":""'

    def keep_alive(self) -> bytes:
        """A chunk without text: some clients give up on a stream whose events cease, and do not see
        comments.
        """
        return (
            self._chunk_begin
            + b'{"index":0,"text":"","logprobs":null,"finish_reason":null}'
            + self._chunk_end()
        )

    def delta(self, event: OutputDelta) -> bytes:
        """New text of a choice."""
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

    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of a choice."""
        parts = (self._chunk_begin, event.index, event.finish_reason.encode(), self._chunk_end())
        return b'%b{"index":%d,"text":"","logprobs":null,"finish_reason":"%b"}%b' % parts

    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The whole as JSON."""
        shown = [
            CompletionChoice(
                index=index,
                text=choice.text(),
                logprobs=completion_logprobs(choice.logprobs) if self._shows_logprobs else None,
                finish_reason=choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ]
        return _encode(TextCompletion(choices=shown, **self._around_choices(counts, explanation)))


def completion_logprobs(tokens: Iterable[TokenText]) -> CompletionLogprobs:
    """The older logprobs shape.

    NaN stands for a token that has no logprob: the first of an echoed prompt.
    """
    shape = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token in tokens:
        name = _name(token)
        scored = not math.isnan(token.logprob)
        shape.text_offset.append(token.text_offset)
        shape.tokens.append(name)
        shape.token_logprobs.append(shown_logprob(token.logprob) if scored else None)
        shape.top_logprobs.append(_likeliest(name, token) if scored else None)
    return shape


def _likeliest(name: str, token: TokenText) -> dict[str, float]:
    likeliest: dict[str, float] = {}
    for rival in token.top:
        # two tokens may read alike; the likelier one stays
        likeliest.setdefault(_name(rival), shown_logprob(rival.logprob))
    # the chosen token is always among them
    likeliest.setdefault(name, shown_logprob(token.logprob))
    return likeliest


def _name(token: TokenText) -> str:
    try:
        token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)  # a part of a character
    return token.text
