"""What a dialect must say about an answer: what to generate for it, and how its parts, its end and
its errors look.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.front.server.caller import Caller
from holdfast.front.server.explanation import Explanation
from holdfast.front.server.problem import Problem
from holdfast.wire.commands import PinnedPrefix
from holdfast.wire.output import (
    ChoiceFinished,
    EndWord,
    OutputDelta,
    PromptProgress,
    TextKind,
    ThoughtEnder,
    TokenText,
    ToolCall,
    text_of,
    tool_calls_of,
)
from holdfast.wire.requests import GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Exact token counts of one answer. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # part of prompt_tokens that was not read again
    reasoning_tokens: int = 0  # part of completion_tokens
    # of any choice; None: no thought was ended in the middle
    thought_ended_by: ThoughtEnder | None = None
    # where the prompt has the cache breakpoints of its client, ascending
    breakpoints: tuple[PinnedPrefix, ...] = ()


@dataclass(slots=True)
class WholeChoice:
    """One choice of an answer that is sent in one piece."""

    deltas: list[OutputDelta] = field(default_factory=list)
    finish_reason: EndWord = "stop"
    end: ChoiceFinished | None = None  # its last event, once it has come

    def text(self, kind: TextKind = "text") -> str:
        """All of its text of one kind."""
        return text_of(self.deltas, kind)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Its calls of tools, in order."""
        return tool_calls_of(self.deltas)

    @property
    def logprobs(self) -> list[TokenText]:
        """Those of all its tokens, in order."""
        return [token for delta in self.deltas for token in delta.logprobs]


KEEP_ALIVE_COMMENT = b": keep-alive\n\n"  # what every reader of server-sent events passes over


class StreamFormat(abc.ABC):
    """What the writer of a stream must know of it, whatever its events are."""

    stream_type: ClassVar[str] = "text/event-stream; charset=utf-8"

    def keep_alive(self) -> bytes:
        """What keeps the line open while nothing comes, before the opening too; empty where there
        is no such thing.
        """
        return KEEP_ALIVE_COMMENT

    def keep_alive_of_follower(self) -> bytes:
        """The same for one of several clients of the stream: nothing that counts as an event of it."""
        return self.keep_alive()

    @abc.abstractmethod
    def broken(self, problem: Problem) -> bytes:
        """The end of a stream that was begun and then failed."""


class AnswerFormat(StreamFormat):
    """How one answer looks: the events of a stream, each complete as the protocol frames it, or the
    whole as JSON.
    """

    def sampled_by(self, sampling: SamplingParams) -> None:
        """The request is accepted, and its answer is drawn like this."""

    def opening(self, *, prompt_tokens: int) -> bytes:
        """What comes before the first text; may be empty."""
        return b""

    @abc.abstractmethod
    def delta(self, event: OutputDelta) -> bytes:
        """News of a choice: text, reasoning, calls. Empty where the protocol says nothing of it."""

    def progress(self, event: PromptProgress) -> bytes:
        """How far the prompt is read; empty unless the client has asked for it, and the protocol
        has a form for it.
        """
        return b""

    @abc.abstractmethod
    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of a choice."""

    @abc.abstractmethod
    def closing(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """The end of a stream: token counts and explanation as far as the client asked for them,
        and the end mark.
        """

    @abc.abstractmethod
    def whole(
        self, choices: Sequence[WholeChoice], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The whole answer as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """A checked request: what to generate, and the form of the answer."""

    requests: Sequence[GenerationRequest]  # one per prompt
    form: AnswerFormat
    streams: bool = False
    choices_per_prompt: int = 1
    explains: bool = False  # the answer is to say what was found of the prompt in the cache
    cache_salt: str = ""  # what is kept under it is there for requests with the same one only
    session_id: str | None = None  # as the body has it, unchecked; the header goes before it
    session_key: str = ""  # names the session where neither does; any text
    can_wait: bool = False  # nobody waits for the answer, as the body has it
    caller: Caller = field(default_factory=Caller)
    time_limit_seconds: float = 0.0  # for all of it, waiting included; 0: none
