"""Measures one request on its way: acceptance, first text, gaps, end."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from prometheus_client import Histogram

from holdfast.messages.output import ChoiceFinished, OutputEvent, TextDelta
from holdfast.telemetry.metrics import Metrics


class RequestWatch:
    """Follows the events of one request and books them. Made when the request comes in: from then on it counts."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = perf_counter) -> None:
        self._metrics, self._clock = metrics, clock
        self._began = clock()
        self._model = ""
        self.accept_seconds = 0.0
        self._first_text: dict[int, float] = {}
        self._latest_text: dict[int, float] = {}
        self._gaps: Histogram | None = None

    def accepted(self, model: str, *, dropped_tokens: int = 0) -> None:
        """The request is in the worker's queue. Only from here on it is booked, under a model that is known to exist."""
        self._model = model
        self.accept_seconds = self._clock() - self._began
        self._metrics.accept_seconds.labels(model).observe(self.accept_seconds)
        self._metrics.dropped_tokens.labels(model).inc(dropped_tokens)
        self._gaps = self._metrics.inter_token_seconds.labels(model)

    def observe(self, event: OutputEvent) -> None:
        """Book one event."""
        now = self._clock()
        if isinstance(event, TextDelta):
            self._observe_text(event.index, now)
        else:
            self._observe_end(event, now)

    def first_text_seconds(self, index: int) -> float | None:
        """How long the first text of a choice took since the request came in; None as long as there is none."""
        at = self._first_text.get(index)
        return None if at is None else at - self._began

    def close(self) -> None:
        """The answer is over, whole or not."""
        if self._model:
            self._metrics.request_seconds.labels(self._model).observe(self._clock() - self._began)

    def _observe_text(self, index: int, now: float) -> None:
        latest = self._latest_text.get(index)
        if latest is None:
            self._first_text[index] = now
            self._metrics.first_token_seconds.labels(self._model).observe(now - self._began)
        elif self._gaps is not None:
            self._gaps.observe(now - latest)
        self._latest_text[index] = now

    def _observe_end(self, event: ChoiceFinished, now: float) -> None:
        metrics, model = self._metrics, self._model
        metrics.requests.labels(model, event.reason.value).inc()
        metrics.prompt_tokens.labels(model).inc(event.prompt_tokens)
        metrics.completion_tokens.labels(model).inc(event.completion_tokens)
        metrics.cached_tokens.labels(model).inc(event.cached_tokens)
        metrics.queue_seconds.labels(model).observe(event.timings.queue_seconds)
        metrics.prefill_seconds.labels(model).observe(event.timings.prefill_seconds)
        metrics.decode_seconds.labels(model).observe(event.timings.decode_seconds or self._decode_seconds(event.index, now))

    def _decode_seconds(self, index: int, now: float) -> float:
        """For an answer that was cut by a stop string: its worker was not waited for."""
        return now - self._first_text.get(index, now)
