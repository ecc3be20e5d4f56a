"""What a protocol must say about an answer: how its stream's events look, and how the whole is put together."""

from __future__ import annotations

import abc
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import GenerationFailed, WorkerUnavailable
from holdfast.http.explanation import Explanation
from holdfast.http.openai_shapes import PromptTokensDetails, Usage
from holdfast.messages.events import FinishReason
from holdfast.messages.output import ChoiceFinished, TextDelta
from holdfast.messages.requests import GenerationRequest

_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What all parts of one answer have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def new_head(prefix: str, *, model: str, version: str) -> AnswerHead:
    """Head of a new answer; `prefix` is chatcmpl or cmpl."""
    fingerprint = f"fp_holdfast_{version.replace('.', '_')}"
    return AnswerHead(id=f"{prefix}-{uuid.uuid4().hex}", created=int(time.time()), model=model, system_fingerprint=fingerprint)


class UsageTally:
    """Adds up the token counts of one request while its choices end. A prompt counts once, however many choices it has."""

    def __init__(self, *, choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._completion_tokens = 0
        self._cached_tokens = 0

    def add(self, event: ChoiceFinished) -> None:
        """Count one choice that has ended."""
        self._completion_tokens += event.completion_tokens
        if event.index % self._choices_per_prompt == 0:  # the further choices of a prompt may share what the first has read
            self._cached_tokens += event.cached_tokens

    def usage(self, *, prompt_tokens: int) -> Usage:
        """The counts, once all choices have ended."""
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached_tokens),
        )


def shown_logprob(logprob: float) -> float:
    """A log-probability as OpenAI shows it: minus infinity, which JSON cannot say, is -9999."""
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


def refuse_broken_end(event: ChoiceFinished) -> None:
    """Raise for a choice that ended by anything else than its own stop or length: that is an error, never an answer."""
    if event.reason is FinishReason.CANCELLED:
        raise WorkerUnavailable("the server cancelled the request before it was done; please try again")
    if event.reason is FinishReason.FAILED:
        raise GenerationFailed("the request failed; the server's log has the details")


class StreamFormat(abc.ABC):
    """Events of one streamed answer as bytes, each a complete server-sent event."""

    @abc.abstractmethod
    def opening(self, *, prompt_tokens: int) -> bytes:
        """What comes before the first text; may be empty."""

    @abc.abstractmethod
    def delta(self, event: TextDelta) -> bytes:
        """New text of a choice."""

    @abc.abstractmethod
    def finish(self, event: ChoiceFinished) -> bytes:
        """The end of a choice."""

    @abc.abstractmethod
    def closing(self, usage: Usage, explanation: Explanation | None) -> bytes:
        """The token counts if the client asked for them, and the explanation if there is one; may be empty."""


class WholeAnswer(abc.ABC):
    """Collects one answer that is sent in one piece."""

    @abc.abstractmethod
    def delta(self, event: TextDelta) -> None:
        """New text of a choice."""

    @abc.abstractmethod
    def finish(self, event: ChoiceFinished) -> None:
        """The end of a choice."""

    @abc.abstractmethod
    def body(self, usage: Usage, explanation: Explanation | None) -> bytes:
        """The whole as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """A checked request: what to generate, and the form of the answer."""

    requests: Sequence[GenerationRequest]  # one per prompt
    choices_per_prompt: int
    form: StreamFormat | WholeAnswer
    explains: bool = False  # the answer is to tell what was remembered of the prompt
