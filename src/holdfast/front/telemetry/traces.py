"""OpenTelemetry traces: a span per request, with child spans for intake, queue, prefill and decode.

They require the setting `log.traces` and the package extra `otel`. Spans are created when a request
has finished, from times that are measured anyway. So the span of the request is also created here,
and not by OpenTelemetry's ASGI middleware. A thread of the SDK exports the spans, and drops those
that a slow collector does not accept in time. The variables OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and OTEL_BSP_… configure the export. Spans contain no prompts
or answers.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import ConfigError
from holdfast.front.output import ChoiceFinished
from holdfast.front.request import ChatPrompt, GenerationRequest
from holdfast.front.telemetry.request_log import UNKNOWN_ROUTE, RequestRecord
from holdfast.wire.events import FinishReason

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from holdfast.front.telemetry.request_log import AnswerRecord

_EXPORT_ERROR_SECONDS = 600.0  # between two log lines about a failing collector
CLOSE_SECONDS = 2.0  # time for the last export
_PARENT_HEADERS = frozenset({b"traceparent", b"tracestate", b"baggage"})


class Traces:
    """Creates the spans of finished requests.

    Event loop's thread only; a thread of the provider exports.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import propagate, trace

        self._provider, self._trace, self._propagate = provider, trace, propagate
        self._tracer = provider.get_tracer("holdfast")

    def book(
        self, record: RequestRecord, *, route: str, headers: Iterable[tuple[bytes, bytes]]
    ) -> None:
        """Create the spans of a finished request, as children of the client's traceparent.

        Requests by which programs or the page poll get no spans.
        """
        if record.is_quiet:
            return
        wall = _WallClock(latest=record.began + record.seconds)
        parent_headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in _PARENT_HEADERS
        }
        root = self._tracer.start_span(
            f"{record.method} {route}",
            context=self._propagate.extract(parent_headers),
            kind=self._trace.SpanKind.SERVER,
            start_time=wall.ns(record.began),
            attributes=_request_attributes(record, route),
        )
        if root.is_recording():
            if record.error_code:
                root.set_attribute("error.type", record.error_code)
                if record.status >= 500 or record.status < 400:  # 4xx is the client's error
                    root.set_status(self._trace.StatusCode.ERROR, record.error_message)
            if record.answer is not None:
                self._create_answer_spans(record.answer, root, wall)
        root.end(wall.ns(wall.latest))

    def close(self) -> None:
        """Export the remaining spans, for a limited time."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _create_answer_spans(self, answer: AnswerRecord, root: Span, wall: _WallClock) -> None:
        """Create the spans of the answer's phases, as children of the request's span."""
        root.set_attributes(_usage_attributes(answer))
        root_context = self._trace.set_span_in_context(root)
        accepted_at = answer.began + answer.accept_seconds
        if answer.accept_seconds:
            self._create_span("intake", root_context, wall, (answer.began, accepted_at))
        for event, ended_at in answer.ends:
            timings, report = event.timings, event.cache_report
            choice = {"holdfast.choice": event.index}
            admitted_at = accepted_at + timings.queue_seconds
            prefilled_at = admitted_at + timings.prefill_seconds
            done_at = prefilled_at + timings.decode_seconds if timings.decode_seconds else ended_at
            queue = self._create_span(
                "queue", root_context, wall, (accepted_at, admitted_at), choice
            )
            lookup = (accepted_at, accepted_at + report.lookup_seconds)
            self._create_span(
                "lookup",
                self._trace.set_span_in_context(queue),
                wall,
                lookup,
                choice | _lookup_attributes(event),
            )
            read_tokens = {"holdfast.read_tokens": event.read_tokens}
            self._create_span(
                "prefill", root_context, wall, (admitted_at, prefilled_at), choice | read_tokens
            )
            if event.completion_tokens:  # otherwise: only prefilled, or failed
                decoded_tokens = {"gen_ai.usage.output_tokens": event.completion_tokens}
                self._create_span(
                    "decode", root_context, wall, (prefilled_at, done_at), choice | decoded_tokens
                )

    def _create_span(
        self,
        name: str,
        context: Context,
        wall: _WallClock,
        times: tuple[float, float],
        attributes: Mapping[str, Any] | None = None,
    ) -> Span:
        """Create a finished span. times: when it began and ended, by the performance counter."""
        span = self._tracer.start_span(
            name, context=context, start_time=wall.ns(times[0]), attributes=attributes
        )
        span.end(wall.ns(max(times)))
        return span


class _WallClock:
    """Converts seconds of the performance counter to nanoseconds since the epoch.

    The result is never later than the end of the request.
    """

    def __init__(self, *, latest: float) -> None:
        self.latest = latest
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    def ns(self, at: float) -> int:
        return self._epoch_ns + int(min(at, self.latest) * 1e9)


class _RareExportErrors(logging.Filter):
    """Limits log lines about a failing collector, which the SDK writes for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self._next_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is logged: not if another one was shortly before it."""
        if record.created < self._next_at:
            return False
        self._next_at = record.created + _EXPORT_ERROR_SECONDS
        return True


def open_traces(version: str) -> Traces:
    """Create the traces, configured by environment variables.

    Raises ConfigError if the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "log.traces requires OpenTelemetry, a package extra; in the clone: pip install -c "
            "constraints.txt '.[otel]'"
        ) from error
    attributes = {"service.version": version}
    if not os.environ.get("OTEL_SERVICE_NAME") and "service.name=" not in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        attributes["service.name"] = "holdfast"
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    export_log = logging.getLogger(OTLPSpanExporter.__module__)
    export_log.setLevel(logging.ERROR)
    export_log.addFilter(_RareExportErrors())
    return Traces(provider)


def _request_attributes(record: RequestRecord, route: str) -> dict[str, Any]:
    """The attributes of a request's span, named as in OpenTelemetry's semantic conventions."""
    attributes = {
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "http.route": "" if route == UNKNOWN_ROUTE else route,
        "url.path": record.path,
        "client.address": record.client,
        "holdfast.request_id": record.request_id,
        "holdfast.aborted": record.is_aborted or None,
        "gen_ai.request.model": record.model,
    }
    if record.generation is not None:
        attributes |= _generation_attributes(record.generation)
    return {name: value for name, value in attributes.items() if value not in (None, "")}


def _generation_attributes(generation: GenerationRequest) -> dict[str, Any]:
    set_sampling = {
        name: getattr(generation.sampling, name)
        for name in ("temperature", "top_p")
        if name not in generation.unset_sampling
    }
    return {
        "gen_ai.operation.name": "chat"
        if isinstance(generation.prompt, ChatPrompt)
        else "text_completion",
        "gen_ai.provider.name": "holdfast",
        "gen_ai.conversation.id": generation.session_id,
        "gen_ai.request.max_tokens": generation.max_tokens,
        "gen_ai.request.choice.count": generation.choices if generation.choices > 1 else None,
        **{f"gen_ai.request.{name}": value for name, value in set_sampling.items()},
    }


def _usage_attributes(answer: AnswerRecord) -> dict[str, Any]:
    """The attributes of a request's span that are known with its answer."""
    attributes: dict[str, Any] = {
        "gen_ai.usage.input_tokens": answer.prompt_tokens,
        "gen_ai.usage.output_tokens": answer.tokens,
        "gen_ai.usage.cache_read.input_tokens": answer.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": answer.counts.reasoning_tokens,
        "gen_ai.response.finish_reasons": [_finish_word(event) for event, _ in answer.ends] or None,
        "holdfast.cached_tokens": answer.cached_tokens,
    }
    if answer.first_text_at is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = answer.first_text_at - answer.began
    return {name: value for name, value in attributes.items() if value is not None}


def _finish_word(event: ChoiceFinished) -> str:
    """Why a choice ended: a finish reason of the protocols, or else `failed` and the like."""
    ended_by_itself = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
    return event.finish_reason if ended_by_itself else event.reason.value


def _lookup_attributes(event: ChoiceFinished) -> dict[str, Any]:
    report = event.cache_report
    return {
        "holdfast.cache.outcome": report.outcome,
        "holdfast.ram_tokens": report.ram_tokens,
        "holdfast.disk_tokens": report.disk_tokens,
    }
