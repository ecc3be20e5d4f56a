"""Follows one request on its way: acceptance, text, gaps, end; for the metrics and for its line in
the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from prometheus_client import Histogram

from holdfast.telemetry.metrics import Metrics
from holdfast.telemetry.request_log import LONGEST_CONTENT
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

# of an answer from its first text on: what came all at once says nothing of speed
_LEAST_SECONDS = 0.01


class AnswerRecord:
    """Books the events of one answer, and keeps what the log says of it.

    Made when the request comes in: from then on it counts.
    """

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = perf_counter) -> None:
        self._metrics, self._clock = metrics, clock
        self.ends: list[tuple[ChoiceFinished, float]] = []  # with the time at which each came
        self.began = clock()
        self._model, self.prompt = "", ""
        self.accept_seconds = 0.0
        self.prompt_tokens = self.put_back_tokens = self.dropped_tokens = 0
        self.texts: dict[int, str] = {}  # by choice
        # by choice whose prompt takes long, the latest
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
        """The request is in the worker's queue.

        Only from here on it is booked, under a model that is known to exist.

        prompt: what was asked, empty unless contents are logged; then the answers' texts are kept
        as well.
        """
        self._model, self.prompt, self._choices_per_prompt = model, prompt, choices_per_prompt
        self.prompt_tokens, self.put_back_tokens, self.dropped_tokens = (
            prompt_tokens,
            put_back_tokens,
            dropped_tokens,
        )
        self.accept_seconds = self._clock() - self.began
        self._metrics.accept_seconds.labels(model).observe(self.accept_seconds)
        self._metrics.put_back_tokens.labels(model).inc(put_back_tokens)
        self._metrics.dropped_tokens.labels(model).inc(dropped_tokens)
        self._gaps = self._metrics.inter_token_seconds.labels(model)

    def observe(self, event: OutputEvent) -> None:
        """Book one event."""
        now = self._clock()
        if isinstance(event, ChoiceFinished):
            self._observe_end(event, now)
        elif isinstance(event, PromptProgress):
            self.progress[event.index] = event
        else:
            self._observe_news(event, now)

    def has_read(self, model: str, prompts: Sequence[TextRead]) -> None:
        """Prompts were read, of which nothing was to be continued."""
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
        """The answer is over, whole or not."""
        if self._model:
            self._metrics.request_seconds.labels(self._model).observe(self._clock() - self.began)

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were not read again; known once the answer has ended."""
        return sum(self._cached.values()) if self._cached else None

    @property
    def resumptions(self) -> int:
        """Workers that died in the middle of it, of all choices together; known once it has ended."""
        return sum(end.resumptions for end, _ in self.ends)

    @property
    def thought_ended_by(self) -> ThoughtEnder | None:
        """What ended a thought of any choice before the model did."""
        return next(
            (end.thought_ended_by for end, _ in self.ends if end.thought_ended_by is not None), None
        )

    @property
    def tokens(self) -> int:
        """Of all choices, as far as they came."""
        return sum(self._tokens.values())

    @property
    def tokens_per_second(self) -> float | None:
        """How fast the answer came from its first text on, all choices together; None when there is
        too little to tell.
        """
        following, first_text_at = self.tokens - len(self._tokens), self.first_text_at
        if first_text_at is None or following < 1:
            return None
        seconds = max(self._latest_text.values()) - first_text_at
        return None if seconds < _LEAST_SECONDS else following / seconds

    @property
    def prefilled_tokens(self) -> int:
        """How much of the prompts is read, as far as was told."""
        return sum(progress.read_tokens for progress in self.progress.values())

    @property
    def first_text_at(self) -> float | None:
        """When the first text of any choice came; None as long as there is none."""
        return min(self._first_text.values(), default=None)

    def first_text_seconds(self, index: int) -> float | None:
        """How long the first text of a choice took since the request came in; None as long as there
        is none.
        """
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
        # Without one of its own, the answer was cut by a stop string: its worker was not waited
        # for.
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
        # further choices of a prompt may share what the first has read
        if event.index % self._choices_per_prompt == 0:
            self._cached[event.index] = event.cached_tokens
