"""X"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias, TypeVar

import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from holdfast.wire.figures import (
    CacheFigures,
    ResidencyFigures,
    StoreFigures,
    WorkerStatistics,
)
from holdfast.wire.figures import (
    Histogram as HistogramFigures,
)

# the second as they were called before: gone with the next release
_PREFIXES = ("holdfast_prefix_cache_", "holdfast_memory_")
_CACHE_GAUGES = (
    ("kept_tokens", "Tokens that need not be read again, in RAM or on disk."),
    ("tenants", "Tenants of whom something is kept."),
    ("ram_bytes", "RAM that kept blocks take."),
    ("ram_budget_bytes", "RAM that kept blocks may take."),
    (
        "parked_sequences",
        "Sequences that have ended and whose state is kept as it was, for who goes on from it.",
    ),
    ("parked_bytes", "RAM that their states take, what several share once."),
    ("waiting", "Requests that wait until another one has read the same beginning."),
)
_CACHE_COUNTERS = (
    ("ram_evicted_blocks", "Blocks that left RAM."),
    (
        "read_ahead_tokens",
        "Tokens read for next turns before they came, while there was nothing else to do.",
    ),
    ("used_ahead_tokens", "Of these, those that such turns began from."),
    ("waits", "Requests that waited for another one's reading."),
)
_CACHE_SECONDS = (
    ("lookup_seconds", "Finding what of a prompt is kept."),
    ("restore_seconds", "Getting it from disk and together."),
)
_STORE_GAUGES = (
    ("blocks", "Blocks in the store's folder, of all models."),
    ("stored_bytes", "Size of the store's folder."),
    ("allowed_bytes", "Size that it may have."),
    ("queued_blocks", "Blocks that wait to be written."),
    ("queued_bytes", "RAM that they take."),
    ("written_today_bytes", "Bytes written today (UTC), by all processes."),
)
_STORE_COUNTERS = (
    ("written_bytes", "Bytes written."),
    ("read_bytes", "Bytes read."),
    ("evicted_blocks", "Blocks that had to make room on disk."),
    ("bad_blocks", "Blocks whose file was damaged; none was answered from."),
    ("missing_blocks", "Blocks whose file was gone."),
    ("outages", "How often the folder could not be written."),
)
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)

_GAUGES = (
    ("running", "Sequences that are being computed."),
    ("queued", "Sequences that wait in the worker."),
    ("kv_reserved_bytes", "KV memory that is reserved for running sequences."),
    ("kv_budget_bytes", "KV memory that may be reserved."),
    ("resident_bytes", "Resident memory of the worker process."),
)
_COUNTERS = (
    ("steps", "Steps that the engine has made."),
    ("prompt_tokens", "Prompt tokens that were read, by the worker's own count."),
    ("generated_tokens", "Tokens that were drawn."),
    ("cached_tokens", "Prompt tokens that needed no prefill."),
    ("preemptions", "Sequences that had to give up their memory for a while."),
    ("finished", "Sequences that ended."),
    ("failed", "Sequences that ended with an error."),
    ("cancelled", "Sequences that were cancelled."),
    ("rejected", "Sequences that were not accepted."),
)
_CONSTRAINED = (
    ("sequences", "Sequences that were begun with a grammar or a thinking budget."),
    ("masks", "Masks of tokens that a grammar allowed, one for each token that was drawn."),
    ("mask_seconds", "Time that filling masks took."),
    ("failures", "Sequences that ended because their grammar allowed nothing any more."),
)
_RESIDENT = (
    ("loaded", "Whether the model is loaded."),
    ("leases", "Requests that use the model."),
    ("waiting", "Requests that wait until there is room for the model."),
    ("footprint_bytes", "Memory that the model takes."),
)
_SECONDS = (("step_seconds", "How long the engine's steps take."),)
# name of the field, which ends the metric's, and what it says
Table: TypeAlias = Iterable[tuple[str, str]]
Label = TypeVar("Label", bound=str)


def cache_families(statistics: Mapping[str, WorkerStatistics]) -> Iterator[Metric]:
    """The families of all workers' prefix caches and stores, by model id."""
    caches = {
        model: numbers.memory for model, numbers in statistics.items() if numbers.memory is not None
    }
    for prefix in _PREFIXES:
        yield from _cache_families(prefix, caches)
    yield from _store_families(
        {model: cache.store for model, cache in caches.items() if cache.store is not None}
    )


def _cache_families(prefix: str, caches: Mapping[str, CacheFigures]) -> Iterator[Metric]:
    yield from plain(GaugeMetricFamily, prefix, _CACHE_GAUGES, caches)
    reused = {
        model: {"ram": cache.ram_tokens, "disk": cache.disk_tokens}
        for model, cache in caches.items()
    }
    yield labelled(f"{prefix}reused_tokens", "Tokens not read again, by tier.", "tier", reused)
    hows = {model: _by_how(cache) for model, cache in caches.items()}
    yield labelled(
        f"{prefix}reused_ram_tokens",
        "Of those in RAM, by how: moved, shared, or copied.",
        "how",
        hows,
    )
    lookups = {model: cache.lookups for model, cache in caches.items()}
    yield labelled(f"{prefix}lookups", "Requests by why no more was reused.", "outcome", lookups)
    yield from plain(CounterMetricFamily, prefix, _CACHE_COUNTERS, caches)
    yield from histograms(prefix, _CACHE_SECONDS, caches)


def _by_how(cache: CacheFigures) -> dict[str, int]:
    copied = cache.ram_tokens - cache.moved_tokens - cache.shared_tokens
    return {"moved": cache.moved_tokens, "shared": cache.shared_tokens, "copied": copied}


def _store_families(stores: Mapping[str, StoreFigures]) -> Iterator[Metric]:
    writing = GaugeMetricFamily(
        "holdfast_store_writing",
        "1: blocks are written; 0: kept in RAM only for now.",
        labels=["model"],
    )
    for model, store in stores.items():
        writing.add_metric([model], float(store.mode == "writing"))
    yield writing
    dropped = {model: store.dropped_blocks for model, store in stores.items()}
    yield labelled(
        "holdfast_store_dropped_blocks", "Blocks that were not written.", "reason", dropped
    )
    yield from plain(GaugeMetricFamily, "holdfast_store_", _STORE_GAUGES, stores)
    yield from plain(CounterMetricFamily, "holdfast_store_", _STORE_COUNTERS, stores)


@dataclass(slots=True, kw_only=True)
class Lag:
    """Of a while, in seconds."""

    late: float = 0.0  # by how much the latest tick came late
    busy: float = 0.0  # processor time that the loop's own thread took between two ticks, the most


class LoopLag:
    """The lag since somebody asked, to within `tick_seconds`. Loop's thread only."""

    def __init__(self, tick_seconds: float) -> None:
        self._lag, self._tick_seconds = Lag(), tick_seconds
        self._served = 0  # requests, now
        self._tick: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While a request is served."""
        self._served += 1
        if self._tick is None:
            self._set_tick(asyncio.get_running_loop())
        try:
            yield
        finally:
            self._served -= 1

    def take(self) -> Lag:
        """What there was; begins anew."""
        lag, self._lag = self._lag, Lag()
        return lag

    def _set_tick(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + self._tick_seconds
        self._tick = loop.call_at(due, self._on_tick, loop, due, time.thread_time())

    def _on_tick(self, loop: asyncio.AbstractEventLoop, due: float, used: float) -> None:
        self._lag.late = max(self._lag.late, loop.time() - due)
        self._lag.busy = max(self._lag.busy, time.thread_time() - used)
        if self._served:
            self._set_tick(loop)
        else:
            self._tick = None


class Metrics(Collector):
    """Everything that /metrics shows: what the front counts itself, and the workers' statistics at
    the time of asking.
    """

    def __init__(self, *, loop_tick_seconds: float = 0.05) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per series says nothing more
        self.registry = CollectorRegistry()
        self._statistics: Mapping[str, WorkerStatistics] = {}
        self._load_seconds: Mapping[str, float] = {}
        self._restarts: Mapping[str, Mapping[str, int]] = {}
        self._residency: Mapping[str, ResidencyFigures] = {}
        self._resumed: Mapping[str, int] = {}
        self.loop_lag = LoopLag(loop_tick_seconds)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self.http_requests = self._counter(
            "http_requests", "HTTP requests answered.", "method", "path", "status"
        )
        self.requests = self._counter(
            "requests", "Choices that ended, by the reason.", "model", "reason"
        )
        self.prompt_tokens = self._counter(
            "request_prompt_tokens", "Prompt tokens of ended choices.", "model"
        )
        self.completion_tokens = self._counter(
            "request_completion_tokens", "Tokens of ended choices.", "model"
        )
        self.cached_tokens = self._counter(
            "request_cached_tokens", "Prompt tokens that needed no prefill.", "model"
        )
        self.put_back_tokens = self._counter(
            "request_put_back_tokens",
            "Tokens of earlier answers that stand in prompts as they were generated.",
            "model",
        )
        self.dropped_tokens = self._counter(
            "request_dropped_tokens",
            "Tokens of answers that the chat template left out of a later turn.",
            "model",
        )
        self.reasoning_tokens = self._counter(
            "request_reasoning_tokens", "Tokens of thoughts, of ended choices.", "model"
        )
        self.tool_calls = self._counter("tool_calls", "Complete calls of tools.", "model")
        self.tool_call_repairs = self._counter(
            "tool_call_repairs", "What was mended to read calls.", "model", "repair"
        )
        self.accept_seconds = self._histogram(
            "accept_seconds", "Checking, tokenizing and submitting a request.", _SHORT
        )
        self.queue_seconds = self._histogram(
            "queue_seconds", "Waiting in the worker before the prompt was read.", _LONG
        )
        self.prefill_seconds = self._histogram(
            "prefill_seconds", "Admission to first token.", _LONG
        )
        self.decode_seconds = self._histogram("decode_seconds", "First token to last.", _LONG)
        self.first_token_seconds = self._histogram(
            "first_token_seconds", "Request to first text, all waiting included.", _LONG
        )
        self.inter_token_seconds = self._histogram(
            "inter_token_seconds", "Between two pieces of text of one choice.", _SHORT
        )
        self.request_seconds = self._histogram(
            "request_seconds", "Request to the end of the answer.", _LONG
        )

    def exposition(
        self,
        statistics: Mapping[str, WorkerStatistics],
        *,
        load_seconds: Mapping[str, float] | None = None,
        restarts: Mapping[str, Mapping[str, int]] | None = None,
        residency: Mapping[str, ResidencyFigures] | None = None,
        resumed: Mapping[str, int] | None = None,
    ) -> bytes:
        """All metrics in Prometheus' text format, with what is known of these workers now, by model
        id.

        restarts: of the workers, by cause. resumed: streams that have gone on with another worker.
        """
        self._residency = residency or {}
        self._statistics, self._load_seconds = statistics, load_seconds or {}
        self._restarts, self._resumed = restarts or {}, resumed or {}
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The loop's lag, and the families of the workers, as they were told last."""
        lag = self.loop_lag.take()
        for name, documentation, seconds in (
            (
                "lag",
                "By how much the event loop came late at worst while requests were served, since "
                "last asked for.",
                lag.late,
            ),
            (
                "busy",
                "Processor time that the event loop took at most before it came round, since last "
                "asked for.",
                lag.busy,
            ),
        ):
            yield GaugeMetricFamily(
                f"holdfast_event_loop_{name}_seconds", documentation, value=seconds
            )
        load = GaugeMetricFamily(
            "holdfast_load_seconds", "What loading the model took.", labels=["model"]
        )
        for model, seconds in self._load_seconds.items():
            load.add_metric([model], seconds)
        yield load
        resumed = CounterMetricFamily(
            "holdfast_resumed_streams",
            "Answers that went on with another worker when theirs had died.",
            labels=["model"],
        )
        for model, streams in self._resumed.items():
            resumed.add_metric([model], streams)
        yield resumed
        yield labelled(
            "holdfast_worker_restarts", "Workers that were replaced.", "cause", self._restarts
        )
        yield from plain(GaugeMetricFamily, "holdfast_model_", _RESIDENT, self._residency)
        changes = {model: numbers.changes for model, numbers in self._residency.items()}
        yield labelled(
            "holdfast_model_changes",
            "Loads, loads that failed, and unloads by their reason.",
            "change",
            changes,
        )
        waits = {model: numbers.wait_seconds for model, numbers in self._residency.items()}
        yield labelled(
            "holdfast_model_wait_seconds",
            "Time that requests waited for a place, or for the load.",
            "for",
            waits,
        )
        yield from plain(GaugeMetricFamily, "holdfast_worker_", _GAUGES, self._statistics)
        yield from plain(CounterMetricFamily, "holdfast_worker_", _COUNTERS, self._statistics)
        constraints = {model: numbers.constraints for model, numbers in self._statistics.items()}
        yield from plain(CounterMetricFamily, "holdfast_constrained_", _CONSTRAINED, constraints)
        yield from histograms("holdfast_worker_", _SECONDS, self._statistics)
        sent = {
            model: {"new": numbers.link.new_tokens, "known": numbers.link.known_tokens}
            for model, numbers in self._statistics.items()
            if numbers.link is not None
        }
        yield labelled(
            "holdfast_link_prompt_tokens",
            "Prompt tokens sent to the worker, and known to it before.",
            "sent",
            sent,
        )
        yield from cache_families(self._statistics)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"holdfast_{name}", documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"holdfast_{name}", documentation, ("model",), buckets=buckets, registry=self.registry
        )


def plain(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    prefix: str,
    table: Table,
    figures: Mapping[str, object],
) -> Iterator[Metric]:
    """A gauge or a counter for each field of the table. `figures`: by model id."""
    for name, documentation in table:
        family = kind(prefix + name, documentation, labels=["model"])
        for model, numbers in figures.items():
            family.add_metric([model], getattr(numbers, name))
        yield family


def labelled(
    name: str, documentation: str, label: str, counts: Mapping[str, Mapping[Label, float]]
) -> Metric:
    """A counter with a label beside the model. `counts`: model id → value of the label → count."""
    counter = CounterMetricFamily(name, documentation, labels=["model", label])
    for model, by_value in counts.items():
        for value, count in sorted(by_value.items()):
            counter.add_metric([model, value], count)
    return counter


def histograms(prefix: str, table: Table, figures: Mapping[str, object]) -> Iterator[Metric]:
    """A histogram for each field of the table, of the models that have one."""
    for name, documentation in table:
        family = HistogramMetricFamily(prefix + name, documentation, labels=["model"])
        for model, numbers in figures.items():
            histogram: HistogramFigures | None = getattr(numbers, name)
            if histogram is not None:
                family.add_metric([model], list(cumulative(histogram)), sum_value=histogram.total)
        yield family


def cumulative(histogram: HistogramFigures) -> Iterator[tuple[str, float]]:
    """The buckets: each bound as a text, with the number of observations up to it."""
    for bound, count in zip(
        (*histogram.bounds, float("inf")), accumulate(histogram.counts), strict=True
    ):
        yield ("+Inf" if bound == float("inf") else str(bound)), float(count)
