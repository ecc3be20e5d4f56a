"""The events of an answer as a client sees it, independent of any protocol."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import msgspec

from holdfast.front.request import MarkedPrefix, RankMethod
from holdfast.wire.events import CacheReport, FinishReason, Timings

TextKind: TypeAlias = Literal["text", "reasoning"]
# why an answer ended, in the words of the protocols
EndWord: TypeAlias = Literal["stop", "length", "tool_calls"]


class AnswerDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all deltas: the index of the choice that a delta extends, and the new tokens.

    Together, the deltas of a choice have all its generated tokens, including the special tokens
    that mark reasoning and tool calls. The parser of an answer creates deltas without tokens;
    `ChoiceText` adds the tokens, and the stream that merges several choices their indices.
    """

    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenText, ...] = ()


class TextDelta(AnswerDelta, frozen=True, kw_only=True):
    """New text of one kind.

    It never splits a character, and never contains part of a stop string.
    """

    text: str
    kind: TextKind = "text"
    start: int = 0  # characters of the answer before this text, with markers written out
    # goes before the text in protocols that join all text of a choice to one string
    separator: str = ""

    @property
    def appended(self) -> str:
        """The text that this delta adds if all text of a choice is joined to one string."""
        return self.separator + self.text


class ToolCallStarted(AnswerDelta, frozen=True, kw_only=True):
    """A tool call begins. The calls of a choice come one after the other, numbered from 0."""

    call: int = 0
    id: str = ""
    name: str


class ToolArgumentsDelta(AnswerDelta, frozen=True, kw_only=True):
    """More of a call's arguments. Joined, the fragments of a complete call are one JSON object."""

    call: int = 0
    text: str


class ToolCallFinished(AnswerDelta, frozen=True, kw_only=True):
    """A call is complete. A call without this event was cut off and must not be executed."""

    call: int = 0
    # names of the repairs that the parser made, as in the metric `tool_call_repairs`
    repairs: tuple[str, ...] = ()


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A whole tool call, assembled from its events."""

    id: str
    name: str
    arguments: str  # JSON text
    is_complete: bool = True  # False: the call was cut off and must not be executed


class TokenText(msgspec.Struct, frozen=True, kw_only=True):
    """A token with its log-probability, and the likeliest tokens at its position."""

    text: str
    raw: bytes  # its bytes, which may be an incomplete character
    logprob: float
    top: tuple[TokenText, ...] = ()
    text_offset: int = 0  # in characters, from the beginning of the answer or the echoed prompt


class DivergentTexts(msgspec.Struct, frozen=True, kw_only=True):
    """The point where a prompt differs from the cached sequence: the text before that point, the
    cached token, and the prompt's token.
    """

    before: str
    stored: str
    prompt: str


ThoughtEnder: TypeAlias = Literal["repetition", "request"]
"""What ended the reasoning early: the text repeated itself, or a client's request to end it."""


class TruncatedPart(msgspec.Struct, frozen=True, kw_only=True):
    """The parts left out of a prompt that did not fit the context.

    A message whose text was cut does not count as left out, but its tokens do.
    """

    tokens: int
    messages: int = 0


class ChoiceFinished(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of a choice.

    cache_report: what the prefix cache supplied.
    timings: the decoding time is missing if a stop string ended the answer.
    """

    index: int = 0
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    timings: Timings = Timings()
    cache_report: CacheReport = CacheReport()
    divergent: DivergentTexts | None = None  # the texts at `cache_report.divergence`
    # included in completion_tokens; the marker that ends the reasoning is counted, too
    reasoning_tokens: int = 0
    # drafted tokens that became part of the answer, and others; 0 if a stop string ended the answer
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    calls: int = 0  # complete tool calls
    stop_string: str | None = None  # the stop string that ended the answer
    # characters at the end of the last token that a stop string hid from the client
    unseen_characters: int = 0
    repeats: bool = False  # the answer was ended because it kept repeating itself
    resumptions: int = 0  # how often another worker has continued the answer
    # None: the model or the budget ended the reasoning
    thought_ended_by: ThoughtEnder | None = None

    @property
    def finish_reason(self) -> EndWord:
        """Why the answer ended, unless it failed or was cancelled."""
        if self.reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.calls else "stop"

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the cache and were not prefilled."""
        return self.cache_report.cached_tokens

    @property
    def read_tokens(self) -> int:
        """Prompt tokens that were prefilled."""
        return self.prompt_tokens - self.cache_report.cached_tokens


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Exact token counts of one answer. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # part of prompt_tokens that was not prefilled
    reasoning_tokens: int = 0  # part of completion_tokens
    accepted_tokens: int = 0  # part of completion_tokens that was drafted
    rejected_tokens: int = 0  # drafted, but not part of the answer
    thought_ended_by: ThoughtEnder | None = None  # None: no thought was interrupted
    breakpoints: tuple[MarkedPrefix, ...] = ()  # the client's cache breakpoints, ascending
    # part of the client's prompt that did not fit the context
    left_out: TruncatedPart | None = None

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the answer."""
        return self.prompt_tokens + self.completion_tokens

    def truncated_fields(self) -> dict[str, Any]:
        """The fields of an answer that say what was left out of the prompt; empty if nothing was."""
        if self.left_out is None:
            return {}
        return {
            "truncated_tokens": self.left_out.tokens,
            "truncated_messages": self.left_out.messages,
        }


class TextRead(msgspec.Struct, frozen=True, kw_only=True):
    """The result for a text that was prefilled without generating an answer."""

    prompt_tokens: int
    timings: Timings = Timings()
    cache_report: CacheReport = CacheReport()


class Embedding(TextRead, frozen=True, kw_only=True):
    """The embedding of one text."""

    vector: bytes  # float32, little-endian, normalized


class Relevance(TextRead, frozen=True, kw_only=True):
    """The relevance of one document to a query."""

    method: RankMethod
    score: float  # 0 to 1
    # natural log-probability of the model's yes, or the mean of those of the query's tokens
    logprob: float


class PromptProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a choice's prefill.

    Sent if the prefill takes long, or if the request asked for progress.
    """

    index: int = 0
    total_tokens: int
    cached_tokens: int  # prompt tokens that were found in the cache
    read_tokens: int  # prompt tokens that are cached or prefilled so far
    seconds: float  # since the admission of the request


OutputDelta: TypeAlias = TextDelta | ToolCallStarted | ToolArgumentsDelta | ToolCallFinished
OutputEvent: TypeAlias = OutputDelta | ChoiceFinished | PromptProgress


def text_of(deltas: Iterable[OutputDelta], kind: TextKind = "text") -> str:
    """Join the text of all deltas of one kind."""
    return "".join(
        [delta.appended for delta in deltas if isinstance(delta, TextDelta) and delta.kind == kind]
    )


def separator(before: str, after: str) -> str:
    """Return what to insert when two texts become one string without the tool call or reasoning
    that was between them.
    """
    if not before or not after or before.endswith("\n") or after.startswith("\n"):
        return ""
    return "\n"


def tool_calls_of(deltas: Iterable[OutputDelta]) -> tuple[ToolCall, ...]:
    """The tool calls of a choice, in order."""
    heads: dict[int, ToolCallStarted] = {}
    arguments: dict[int, list[str]] = {}
    complete: set[int] = set()
    for delta in deltas:
        if isinstance(delta, ToolCallStarted):
            heads[delta.call] = delta
            arguments[delta.call] = []
        elif isinstance(delta, ToolArgumentsDelta):
            arguments[delta.call].append(delta.text)
        elif isinstance(delta, ToolCallFinished):
            complete.add(delta.call)
    return tuple(
        ToolCall(
            id=head.id,
            name=head.name,
            arguments="".join(arguments[call]),
            is_complete=call in complete,
        )
        for call, head in heads.items()
    )
