"""OpenAI's answers as structs.

Whole answers are encoded from them; the streams' chunks are checked against them in the tests.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from holdfast.front.server.explanation import Explanation
from holdfast.wire.output import EndWord, ThoughtEnder

# the last: of requests with `functions`
ChatEndWord: TypeAlias = Literal["stop", "length", "tool_calls", "function_call"]


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
