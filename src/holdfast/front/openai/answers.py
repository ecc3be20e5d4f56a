"""OpenAI's errors, its answers as structs, and what the answers of chat and completions share.

Whole answers are encoded from the structs; the tests check the chunks of streams against them.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal, TypeAlias

import msgspec

from holdfast.front.server.answers import AnswerFormat, Explanation, TokenCounts
from holdfast.front.server.problem import Problem
from holdfast.wire.output import EndWord, PromptProgress, ThoughtEnder

# function_call: only for requests with `functions`
ChatEndWord: TypeAlias = Literal["stop", "length", "tool_calls", "function_call"]
_DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong; `param` names the field of the request, such as messages.0.content."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
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


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the prompt's tokens were."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer's tokens were. reasoning_ended_by: where something ended a thought before the
    model did.
    """

    reasoning_tokens: int
    reasoning_ended_by: ThoughtEnder | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Exact token counts of one request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    # a stream's counts so far lack it
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET
    # and this
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class ContentLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token of a chat answer.

    A drawn one comes with the likeliest at its place, which have none themselves.
    """

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ContentLogprob] | msgspec.UnsetType = msgspec.UNSET


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a chat answer."""

    content: list[ContentLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a call calls, and with what: JSON text.

    An event of a stream has the name once, and then parts of the arguments.
    """

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class AnswerToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool, or what an event of a stream adds to it: then `index` says to which."""

    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: CalledFunction


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's turn, or what an event of a stream adds to it."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    refusal: msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET  # the same under its other name
    tool_calls: list[AnswerToolCall] | msgspec.UnsetType = msgspec.UNSET
    # where the request had `functions`
    function_call: CalledFunction | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or an event's part of it: a whole one has `message`, an event `delta`."""

    index: int
    message: AnswerMessage | msgspec.UnsetType = msgspec.UNSET
    delta: AnswerMessage | msgspec.UnsetType = msgspec.UNSET
    logprobs: ChatLogprobs | None
    finish_reason: ChatEndWord | None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole chat answer, or one event of a streamed one."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    holdfast: Explanation | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a completion, one entry per token.

    The first token of an echoed prompt has none: null.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, or a chunk's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndWord | None


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer of /v1/completions, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    holdfast: Explanation | msgspec.UnsetType = msgspec.UNSET


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
            "holdfast": msgspec.UNSET if explanation is None else explanation,
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
            reasoning_ended_by=msgspec.UNSET
            if counts.thought_ended_by is None
            else counts.thought_ended_by,
        ),
    )


def shown_logprob(logprob: float) -> float:
    """A log-probability as OpenAI shows it: minus infinity, which JSON cannot say, is -9999."""
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB
