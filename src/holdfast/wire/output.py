"""What a client sees of an answer: typed events, neutral of protocol.

Leaf module: no MLX, no web framework.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from holdfast.wire.events import CacheReport, FinishReason, Timings
from holdfast.wire.requests import RankMethod

TextKind: TypeAlias = Literal["text", "reasoning"]
# why an answer ended, as protocols name it
EndWord: TypeAlias = Literal["stop", "length", "tool_calls"]


class AnswerDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What all news of one choice have in common: which choice, and the tokens that became certain
    with it.

    The token ids of all deltas of a choice, joined, are the tokens that were generated, up to its
    end; those of markers too.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenText, ...] = ()


class TextDelta(AnswerDelta, frozen=True, kw_only=True):
    """New text, all of one kind.

    UTF-8 is never split and no part of a stop string is ever in visible text.
    """

    text: str
    kind: TextKind = "text"
    # goes before the text where a protocol has all text of a choice in one string
    separator: str = ""

    @property
    def appended(self) -> str:
        """What this adds to the one string."""
        return self.separator + self.text


class ToolCallStarted(AnswerDelta, frozen=True, kw_only=True):
    """The model calls a tool. Calls of a choice come one after the other, numbered from 0."""

    call: int
    id: str
    name: str


class ToolArgumentsDelta(AnswerDelta, frozen=True, kw_only=True):
    """More of a call's arguments, as JSON text.

    The fragments of a call that ends join to one JSON object.
    """

    call: int
    text: str


class ToolCallFinished(AnswerDelta, frozen=True, kw_only=True):
    """A call is complete. One without this event was cut by the answer's end and must not be run."""

    call: int
    repairs: tuple[str, ...] = ()  # what was mended to read it, by the names that the metric has


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool, whole: what the events of one call come to."""

    id: str
    name: str
    arguments: str  # JSON text
    is_complete: bool = True  # else it was cut by the answer's end, and must not be run


class TokenText(msgspec.Struct, frozen=True, kw_only=True):
    """A token as shown to a client: text, raw bytes, log-probability, rivals."""

    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenText, ...] = ()
    # characters from the beginning of the answer (prompt included when echoed)
    text_offset: int = 0


class DivergentTexts(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's first token that differs from what is kept, as text: what stands before it, the
    kept one, the prompt's own.
    """

    before: str
    stored: str
    prompt: str


ThoughtEnder: TypeAlias = Literal["repetition", "request"]
"""What ended a thought in the middle: it went round in circles, or its client asked for its end."""


class ChoiceFinished(msgspec.Struct, frozen=True, kw_only=True):
    """Last event of one choice.

    `timings` lacks the decoding of an answer that a stop string has ended.
    """

    index: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    timings: Timings = Timings()
    memory: CacheReport = CacheReport()
    divergent: DivergentTexts | None = None  # for memory.divergence
    # part of completion_tokens, up to and including the marker that ends the thought
    reasoning_tokens: int = 0
    calls: int = 0  # complete calls of tools
    stop_string: str | None = None  # the one of the request that ended the answer
    resumptions: int = 0  # workers that ended while they had it
    # None: the model ended its thoughts itself, or its budget did
    thought_ended_by: ThoughtEnder | None = None

    @property
    def finish_reason(self) -> EndWord:
        """Why the answer ended; of one that ended by itself."""
        if self.reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.calls else "stop"

    @property
    def cached_tokens(self) -> int:
        """The part of prompt_tokens that was not read again."""
        return self.memory.cached_tokens


class TextRead(msgspec.Struct, frozen=True, kw_only=True):
    """What reading one text took of which nothing is continued."""

    prompt_tokens: int
    timings: Timings = Timings()
    memory: CacheReport = CacheReport()


class Embedding(TextRead, frozen=True, kw_only=True):
    """The vector that stands for one text."""

    # float32 in the order of the machine (little-endian wherever MLX runs), of length 1
    vector: bytes


class Relevance(TextRead, frozen=True, kw_only=True):
    """How much one document is about a query."""

    method: RankMethod
    score: float  # 0 to 1
    logprob: float  # natural; of the yes, or the mean of the query's tokens


class PromptProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the prompt of a choice is read.

    Only prompts that take long have this, and requests that ask for it.
    """

    index: int
    total_tokens: int
    cached_tokens: int  # of these, need not be read
    read_tokens: int  # of these, are read; those that were cached included
    seconds: float  # since its turn came


OutputDelta: TypeAlias = TextDelta | ToolCallStarted | ToolArgumentsDelta | ToolCallFinished
OutputEvent: TypeAlias = OutputDelta | ChoiceFinished | PromptProgress


def text_of(deltas: Iterable[OutputDelta], kind: TextKind = "text") -> str:
    """All text of one kind of a choice."""
    return "".join(
        [delta.appended for delta in deltas if isinstance(delta, TextDelta) and delta.kind == kind]
    )


def separator(before: str, after: str) -> str:
    """What goes between two texts of an answer that a call or a thought has parted, where they
    become one string.
    """
    if not before or not after or before.endswith("\n") or after.startswith("\n"):
        return ""
    return "\n"


def tool_calls_of(deltas: Iterable[OutputDelta]) -> tuple[ToolCall, ...]:
    """The calls of a choice, in order; one that was cut is the last."""
    heads: dict[int, ToolCallStarted] = {}
    arguments: dict[int, list[str]] = {}
    complete: set[int] = set()
    for delta in deltas:
        if isinstance(delta, ToolCallStarted):
            heads[delta.call], arguments[delta.call] = delta, []
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
