"""Records the events of one answer, for the metrics and the request's log line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from prometheus_client import Histogram

from holdfast.telemetry.metrics import Metrics
from holdfast.telemetry.printable import LONGEST_CONTENT
from holdfast.wire.events import FinishReason
from holdfast.wire.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    PromptProgress,
    TextDelta,
    TextRead,
    ThoughtEnder,
    ToolCallFinished,
)

_MIN_SPEED_SECONDS = 0.01  # an answer that arrived at once has no meaningful speed


class AnswerRecord:
    """Records the events of one answer. Its clock starts when it is created, with the request."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = perf_counter) -> None:
        self._metrics, self._clock = metrics, clock
        self.ends: list[tuple[ChoiceFinished, float]] = []  # with the time of each
        self.began = clock()
        self._model, self.prompt = "", ""
        self.accept_seconds = 0.0
        self.prompt_tokens = self.put_back_tokens = self.dropped_tokens = 0
        self.texts: dict[int, str] = {}  # by choice
        # by choice, the latest; only long prefills report it
        self.progress: dict[int, PromptProgress] = {}
        self.progress_logged_at: float | None = None
        self.finish_reasons: list[str] = []
        self._choices_per_prompt = 1
        self._tokens: dict[int, int] = {}  # by choice
        self._cached: dict[int, int] = {}  # by choice that has ended
        self._first_text: dict[int, float] = {}
        self._latest_text: dict[int, float] = {}
        self._gaps: Histogram | None = None

    def accepted(
        self,
        model: str,
        *,
        prompt_tokens: int,
        put_back_tokens: int = 0,
        dropped_tokens: int = 0,
        choices_per_prompt: int = 1,
        prompt: str = "",
    ) -> None:
        """The request is in the worker's queue. Metrics start here, where the model is known to exist.

        prompt: empty unless contents are logged; then the texts of the answers are kept, too.
        """
        self._model = model
        self.prompt = prompt
        self._choices_per_prompt = choices_per_prompt
        self.prompt_tokens = prompt_tokens
        self.put_back_tokens = put_back_tokens
        self.dropped_tokens = dropped_tokens
        self.accept_seconds = self._clock() - self.began
        self._metrics.accept_seconds.labels(model).observe(self.accept_seconds)
        self._metrics.put_back_tokens.labels(model).inc(put_back_tokens)
        self._metrics.dropped_tokens.labels(model).inc(dropped_tokens)
        self._gaps = self._metrics.inter_token_seconds.labels(model)

    def observe(self, event: OutputEvent) -> None:
        """Record one event."""
        now = self._clock()
        if isinstance(event, ChoiceFinished):
            self._observe_end(event, now)
        elif isinstance(event, PromptProgress):
            self.progress[event.index] = event
        else:
            self._observe_news(event, now)

    def has_read(self, model: str, prompts: Sequence[TextRead]) -> None:
        """Record prompts that were read without generating, such as for embeddings."""
        self._model = model
        self.prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
        for index, prompt in enumerate(prompts):
            end = ChoiceFinished(
                index=index,
                reason=FinishReason.STOP,
                prompt_tokens=prompt.prompt_tokens,
                completion_tokens=0,
                timings=prompt.timings,
                memory=prompt.memory,
            )
            self._observe_end(end, self._clock())

    def close(self) -> None:
        """The answer has ended, complete or not."""
        if self._model:
            self._metrics.request_seconds.labels(self._model).observe(self._clock() - self.began)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that needed no prefill; None before the answer has ended."""
        return sum(self._cached.values()) if self._cached else None

    @property
    def resumptions(self) -> int:
        """How often another worker continued a choice after a crash; known at the end."""
        return sum(end.resumptions for end, _ in self.ends)

    @property
    def thought_ended_by(self) -> ThoughtEnder | None:
        """What ended the reasoning of a choice before the model did."""
        return next(
            (end.thought_ended_by for end, _ in self.ends if end.thought_ended_by is not None), None
        )

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens of all choices that have ended."""
        return sum(end.reasoning_tokens for end, _ in self.ends)

    @property
    def tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(self._tokens.values())

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of all choices together after the first text; None if there is too little to tell."""
        following, first_text_at = self.tokens - len(self._tokens), self.first_text_at
        if first_text_at is None or following < 1:
            return None
        seconds = max(self._latest_text.values()) - first_text_at
        return None if seconds < _MIN_SPEED_SECONDS else following / seconds

    @property
    def prefilled_tokens(self) -> int:
        """Reported progress of the prompts."""
        return sum(progress.read_tokens for progress in self.progress.values())

    @property
    def first_text_at(self) -> float | None:
        """Time of the first text of any choice; None before that."""
        return min(self._first_text.values(), default=None)

    def first_text_seconds(self, index: int) -> float | None:
        """Seconds from the request to the first text of a choice; None before that."""
        at = self._first_text.get(index)
        return None if at is None else at - self.began

    def _observe_news(self, event: OutputDelta, now: float) -> None:
        index = event.index
        latest = self._latest_text.get(index)
        if latest is None:
            self._first_text[index] = now
            self._metrics.first_token_seconds.labels(self._model).observe(now - self.began)
        elif self._gaps is not None:
            self._gaps.observe(now - latest)
        self._latest_text[index] = now
        self._tokens[index] = self._tokens.get(index, 0) + len(event.token_ids)
        if isinstance(event, ToolCallFinished):
            self._metrics.tool_calls.labels(self._model).inc()
            for repair in event.repairs:
                self._metrics.tool_call_repairs.labels(self._model, repair).inc()
        if (
            isinstance(event, TextDelta)
            and self.prompt
            and len(self.texts.get(index, "")) < LONGEST_CONTENT
        ):
            self.texts[index] = self.texts.get(index, "") + event.appended

    def _observe_end(self, event: ChoiceFinished, now: float) -> None:
        metrics, model = self._metrics, self._model
        # 0 if a stop string ended the answer before the worker did
        decode_seconds = event.timings.decode_seconds or now - self._first_text.get(
            event.index, now
        )
        metrics.requests.labels(model, event.reason.value).inc()
        metrics.prompt_tokens.labels(model).inc(event.prompt_tokens)
        metrics.completion_tokens.labels(model).inc(event.completion_tokens)
        metrics.cached_tokens.labels(model).inc(event.cached_tokens)
        metrics.reasoning_tokens.labels(model).inc(event.reasoning_tokens)
        metrics.queue_seconds.labels(model).observe(event.timings.queue_seconds)
        metrics.prefill_seconds.labels(model).observe(event.timings.prefill_seconds)
        metrics.decode_seconds.labels(model).observe(decode_seconds)
        self.finish_reasons.append(event.reason.value)
        self.ends.append((event, now))
        self._tokens[event.index] = event.completion_tokens
        # further choices of a prompt share its prefill
        if event.index % self._choices_per_prompt == 0:
            self._cached[event.index] = event.cached_tokens
