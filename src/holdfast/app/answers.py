"""What the library gives back: whole answers and streams of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from holdfast.intake.answer_observer import Observe
from holdfast.intake.stream import refusal
from holdfast.link.in_process import BlockingEventStream
from holdfast.messages.events import CacheReport, FinishReason, Rejected, Timings
from holdfast.messages.output import ChoiceFinished, OutputDelta, TextDelta, TokenText
from holdfast.parsing.choice import ChoiceText


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]  # of the visible text
    finish_reason: str  # "stop", "length" or "cancelled"
    prompt_tokens: int
    completion_tokens: int  # stop tokens included
    cached_tokens: int = 0
    logprobs: tuple[TokenText, ...] = ()
    timings: Timings = Timings()
    memory: CacheReport = CacheReport()

    def __str__(self) -> str:
        return self.text


class TextStream:
    """Iterator over the pieces of an answer's text. Use as a context manager, or `close` it, to stop early. One consumer."""

    def __init__(self, events: BlockingEventStream, choice: ChoiceText, *, prompt_tokens: int, observe: Observe) -> None:
        self._events, self._choice, self._observe = events, choice, observe
        self._prompt_tokens = prompt_tokens
        self._deltas: list[OutputDelta] = []
        self._finished: ChoiceFinished | None = None
        self._pieces = self._read()

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

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
            text="".join(delta.text for delta in self._deltas if isinstance(delta, TextDelta)),
            token_ids=tuple(token for delta in self._deltas for token in delta.token_ids),
            finish_reason=finished.reason.value,
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            cached_tokens=finished.cached_tokens,
            logprobs=tuple(token for delta in self._deltas for token in delta.logprobs),
            timings=finished.timings,
            memory=finished.memory,
        )

    def read_all(self) -> Completion:
        """Wait for the end and return the whole answer."""
        for _ in self:
            continue
        return self.completion

    def close(self) -> None:
        """Stop the work within a step, if it has not ended."""
        self._events.close()

    def _read(self) -> Iterator[str]:
        """Text as it comes. Raises what a refusal means, and GenerationFailed."""
        for event in self._events:
            if isinstance(event, Rejected):
                raise refusal(event)
            for output in self._choice.feed(event):
                self._observe(output)
                if isinstance(output, ChoiceFinished):
                    self._finished = output
                    continue
                self._deltas.append(output)
                if isinstance(output, TextDelta) and output.text:
                    yield output.text
            if self._choice.done:
                self.close()
                return
