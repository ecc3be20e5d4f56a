"""What the library gives back: whole answers and streams of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from holdfast.front.answers.choice import ChoiceText
from holdfast.front.prompt.conversation import answer_message
from holdfast.front.prompt.stream import Observe, refusal
from holdfast.library.in_process import BlockingEventStream
from holdfast.wire.events import CacheReport, FinishReason, Rejected, Timings
from holdfast.wire.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    PromptProgress,
    TextDelta,
    TokenText,
    ToolCall,
    text_of,
    tool_calls_of,
)

_ENDS_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str  # the visible text, without thoughts and calls
    token_ids: tuple[int, ...]  # all that were generated, those of markers included
    finish_reason: str  # "stop", "length", "tool_calls" or "cancelled"
    prompt_tokens: int
    completion_tokens: int  # stop tokens included
    cached_tokens: int = 0
    reasoning: str = ""  # what the model thought
    tool_calls: tuple[ToolCall, ...] = ()  # in order; one that is not complete must not be run
    reasoning_tokens: int = 0  # part of completion_tokens
    logprobs: tuple[TokenText, ...] = ()
    timings: Timings = Timings()
    memory: CacheReport = CacheReport()

    def __str__(self) -> str:
        return self.text

    @property
    def message(self) -> dict[str, Any]:
        """The answer as an OpenAI-shaped message, for the next turn of the conversation."""
        return answer_message(self.text, reasoning=self.reasoning, calls=self.tool_calls)


class TextStream:
    """Iterator over the pieces of an answer's visible text; `events` has all of it, thoughts and
    calls of tools too.

    Use as a context manager, or `close` it, to stop early. One consumer, of either kind.
    """

    def __init__(
        self,
        events: BlockingEventStream,
        choice: ChoiceText,
        *,
        prompt_tokens: int,
        observe: Observe,
    ) -> None:
        self._events, self._choice, self._observe = events, choice, observe
        self._prompt_tokens = prompt_tokens
        self._deltas: list[OutputDelta] = []
        self._finished: ChoiceFinished | None = None
        self._outputs = self._read()

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        return next(
            event.appended
            for event in self._outputs
            if isinstance(event, TextDelta) and event.kind == "text" and event.text
        )

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def events(self) -> Iterator[OutputEvent]:
        """All that the answer consists of, as it comes: text, thoughts, calls and their arguments,
        and its end.
        """
        return self._outputs

    @property
    def completion(self) -> Completion:
        """The answer as far as it was read; whole after the end of the iteration."""
        finished = self._finished or ChoiceFinished(
            index=0,
            reason=FinishReason.CANCELLED,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._choice.completion_tokens,
            timings=self._choice.timings,
            memory=self._choice.memory,
        )
        return Completion(
            text=text_of(self._deltas),
            token_ids=tuple(token for delta in self._deltas for token in delta.token_ids),
            finish_reason=finished.finish_reason
            if finished.reason in _ENDS_BY_ITSELF
            else finished.reason.value,
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            cached_tokens=finished.cached_tokens,
            reasoning=text_of(self._deltas, "reasoning"),
            tool_calls=tool_calls_of(self._deltas),
            reasoning_tokens=finished.reasoning_tokens,
            logprobs=tuple(token for delta in self._deltas for token in delta.logprobs),
            timings=finished.timings,
            memory=finished.memory,
        )

    def read_all(self) -> Completion:
        """Wait for the end and return the whole answer."""
        for _ in self._outputs:
            continue
        return self.completion

    def close(self) -> None:
        """Stop the work within a step, if it has not ended."""
        self._events.close()

    def _read(self) -> Iterator[OutputEvent]:
        """Events as they come. Raises what a refusal means, and GenerationFailed."""
        for event in self._events:
            if isinstance(event, Rejected):
                raise refusal(event)
            for output in self._choice.feed(event):
                if isinstance(output, PromptProgress):
                    continue
                self._observe(output)
                if isinstance(output, ChoiceFinished):
                    self._finished = output
                else:
                    self._deltas.append(output)
                yield output
            if self._choice.done:
                self.close()
                return
