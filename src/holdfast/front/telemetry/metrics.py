"""The metrics at /metrics: what the front counts itself, and the statistics of the workers.

Tables of (field, documentation) turn a worker's figures into metric families.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias, TypeVar

import msgspec
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

from holdfast.front.telemetry.history import PerformanceHistory
from holdfast.wire.events import CacheFigures, StoreFigures, WorkerStatistics
from holdfast.wire.events import Histogram as HistogramFigures

# each metric has both names; the second one will be removed in the next release
_PREFIXES = ("holdfast_prefix_cache_", "holdfast_memory_")
_CACHE_GAUGES = (
    ("kept_tokens", "Cached tokens, in RAM or on disk."),
    ("tenants", "Tenants with cached blocks."),
    ("ram_bytes", "RAM used by cached blocks."),
    ("ram_budget_bytes", "RAM budget for cached blocks."),
    (
        "parked_sequences",
        "Finished sequences whose live state is kept to be continued.",
    ),
    ("parked_bytes", "RAM used by parked sequences; shared state counts once."),
    ("waiting", "Requests that wait until another request has prefilled the same prefix."),
)
_CACHE_COUNTERS = (
    ("ram_evicted_blocks", "Blocks evicted from RAM."),
    ("read_ahead_tokens", "Tokens prefilled for next turns while the worker was idle."),
    ("used_ahead_tokens", "Tokens prefilled for next turns that a next turn used."),
    ("waits", "Requests that waited for the prefill of another request."),
)
_CACHE_HISTOGRAMS = (
    ("lookup_seconds", "Lookups of prompts in the cache."),
    ("restore_seconds", "Restores of blocks from disk."),
)
_STORE_GAUGES = (
    ("blocks", "Blocks in the store's folder, of all models."),
    ("stored_bytes", "Size of the store's folder."),
    ("allowed_bytes", "Limit of the size of the store's folder."),
    ("queued_blocks", "Blocks queued for writing."),
    ("queued_bytes", "RAM used by queued blocks."),
    ("written_today_bytes", "Bytes written today (UTC), by all processes."),
)
_STORE_COUNTERS = (
    ("written_bytes", "Bytes written."),
    ("read_bytes", "Bytes read."),
    ("evicted_blocks", "Blocks evicted from disk."),
    ("bad_blocks", "Blocks whose file was damaged; none was used."),
    ("missing_blocks", "Blocks whose file was missing."),
    ("unreadable_blocks", "Reads of blocks that failed; their files are kept and read again."),
    ("outages", "How often the folder became unwritable."),
)
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_SHORT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_LONG_BUCKETS = (
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

_WORKER_GAUGES = (
    ("running", "Running sequences."),
    ("queued", "Sequences queued in the worker."),
    ("kv_reserved_bytes", "KV memory reserved for running sequences."),
    ("kv_budget_bytes", "KV memory budget for running sequences."),
    ("resident_bytes", "Resident memory of the worker process."),
)
_WORKER_COUNTERS = (
    ("steps", "Steps of the engine."),
    ("prompt_tokens", "Prompt tokens prefilled, as counted by the worker."),
    ("generated_tokens", "Tokens sampled."),
    ("drafted_tokens", "Drafted tokens that were verified."),
    ("accepted_tokens", "Drafted tokens that became part of an answer."),
    ("model_drafted_tokens", "Those of drafted_tokens that the draft model drafted."),
    ("model_accepted_tokens", "Those of accepted_tokens that the draft model drafted."),
    ("cached_tokens", "Prompt tokens that needed no prefill."),
    ("preemptions", "Sequences that were preempted."),
    ("finished", "Sequences finished."),
    ("failed", "Sequences failed."),
    ("cancelled", "Sequences cancelled."),
    ("rejected", "Sequences rejected."),
    ("quantized", "Sequences with KV quantized while they ran, because memory was short."),
)
_CONSTRAINT_COUNTERS = (
    ("sequences", "Sequences with a grammar or a reasoning budget."),
    ("masks", "Token masks of grammars, one per sampled token."),
    ("mask_seconds", "Time spent filling masks, in seconds."),
    ("failures", "Sequences that ended because their grammar allowed no token."),
)
_IMAGE_COUNTERS = (
    ("encoded", "Images whose features the vision tower computed."),
    ("encode_seconds", "Time spent in the vision tower, in seconds."),
    ("reused", "Images whose features were kept from earlier."),
)
_REQUEST_TOKENS = (
    ("prompt_tokens", "Prompt tokens of finished choices."),
    ("completion_tokens", "Generated tokens of finished choices."),
    ("cached_tokens", "Prompt tokens that needed no prefill."),
    ("reasoning_tokens", "Reasoning tokens of finished choices."),
    (
        "put_back_tokens",
        "Tokens of earlier answers that later prompts reuse exactly as generated.",
    ),
    ("dropped_tokens", "Tokens of answers that the chat template omitted in a later turn."),
)
_RESIDENCY_GAUGES = (
    ("loaded", "Whether the model is loaded."),
    ("leases", "Requests that use the model."),
    ("waiting", "Requests that wait for memory for the model."),
    ("footprint_bytes", "Memory of the model."),
)
_LEVELS = ("normal", "warning", "critical")  # of memory pressure
_WORKER_HISTOGRAMS = (("step_seconds", "Duration of the engine's steps."),)
# (field of the figures, documentation); the metric's name ends with the field's name
Table: TypeAlias = Iterable[tuple[str, str]]
Label = TypeVar("Label", bound=str)


class ResidencyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is loaded and used, with counters since the server's start."""

    loaded: int = 0  # 0 or 1
    leases: int = 0  # requests that use the model now
    waiting: int = 0  # requests that wait until there is room to load the model
    footprint_bytes: int = 0  # memory of the model, as measured
    # number of loads by result (loaded, failed), and of unloads by cause (room, idle, asked)
    changes: dict[str, int] = {}
    # total waiting time of requests, by the value of their WaitReason (place, load)
    wait_seconds: dict[str, float] = {}


class PressureFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of all workers together, and the level of memory pressure derived from it.

    level: normal; warning, above the first watermark; or critical, above the second one.
    changes: how often each level has begun since the server's start.
    """

    level: Literal["normal", "warning", "critical"] = "normal"
    footprint_bytes: int = 0  # memory of all workers
    limit_bytes: int = 0  # 0 until it was measured
    first_watermark_bytes: int = 0
    second_watermark_bytes: int = 0
    changes: dict[str, int] = {}


@dataclass(slots=True, kw_only=True)
class Lag:
    """The lag of the event loop, in seconds."""

    late: float = 0.0  # the longest delay of a tick
    busy: float = 0.0  # the largest CPU time of the loop's thread between two ticks


class LoopLag:
    """Measures the event loop's lag since the last `take_lag`, every `tick_seconds`.

    Event loop's thread only.
    """

    def __init__(self, tick_seconds: float) -> None:
        self._lag, self._tick_seconds = Lag(), tick_seconds
        self._requests_in_progress = 0  # while there are some, the next tick is scheduled
        self._next_tick: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block, measure the lag, because a request is being served."""
        self._requests_in_progress += 1
        if self._next_tick is None:
            self._schedule_tick(asyncio.get_running_loop())
        try:
            yield
        finally:
            self._requests_in_progress -= 1

    def take_lag(self) -> Lag:
        """Return the lag since the last call, and start measuring again."""
        lag, self._lag = self._lag, Lag()
        return lag

    def _schedule_tick(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + self._tick_seconds
        self._next_tick = loop.call_at(due, self._on_tick, loop, due, time.thread_time())

    def _on_tick(
        self, loop: asyncio.AbstractEventLoop, due: float, used_cpu_seconds: float
    ) -> None:
        """Measure how late a tick is.

        due: when it should have come. used_cpu_seconds: of the thread, when it was scheduled.
        """
        self._lag.late = max(self._lag.late, loop.time() - due)
        self._lag.busy = max(self._lag.busy, time.thread_time() - used_cpu_seconds)
        if self._requests_in_progress:
            self._schedule_tick(loop)
        else:
            self._next_tick = None


class Metrics(Collector):
    """The front's own metrics, and those that the workers report when /metrics is requested.

    history: what the same answers took, over time.
    """

    def __init__(self, *, loop_tick_seconds: float = 0.05) -> None:
        self.history = PerformanceHistory()
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._families: list[Metric] = []  # metrics of models and workers, for the next `collect`
        self.loop_lag = LoopLag(loop_tick_seconds)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self.http_requests = self._counter(
            "http_requests", "HTTP requests answered.", "method", "path", "status"
        )
        self.requests = self._counter("requests", "Finished choices, by reason.", "model", "reason")
        self.tokens = {
            name: self._counter(f"request_{name}", doc, "model") for name, doc in _REQUEST_TOKENS
        }
        self.tool_calls = self._counter("tool_calls", "Complete tool calls.", "model")
        self.tool_call_repairs = self._counter(
            "tool_call_repairs", "Repairs of malformed tool calls.", "model", "repair"
        )
        self.accept_seconds = self._histogram(
            "accept_seconds", "Time to check, tokenize and submit a request.", _SHORT_BUCKETS
        )
        self.queue_seconds = self._histogram(
            "queue_seconds",
            "Time that a request waits in the worker before prefill.",
            _LONG_BUCKETS,
        )
        self.prefill_seconds = self._histogram(
            "prefill_seconds", "Time from admission to the first token.", _LONG_BUCKETS
        )
        self.decode_seconds = self._histogram(
            "decode_seconds", "Time from the first token to the last.", _LONG_BUCKETS
        )
        self.first_token_seconds = self._histogram(
            "first_token_seconds",
            "Time from the request to the first text, including all waiting.",
            _LONG_BUCKETS,
        )
        self.inter_token_seconds = self._histogram(
            "inter_token_seconds", "Time between two pieces of text of one choice.", _SHORT_BUCKETS
        )
        self.request_seconds = self._histogram(
            "request_seconds", "Time from the request to the end of the answer.", _LONG_BUCKETS
        )

    def exposition(
        self,
        statistics: Mapping[str, WorkerStatistics],
        *,
        load_seconds: Mapping[str, float] | None = None,
        restarts: Mapping[str, Mapping[str, int]] | None = None,
        residency: Mapping[str, ResidencyFigures] | None = None,
        resumed: Mapping[str, int] | None = None,
        pressure: PressureFigures | None = None,
    ) -> bytes:
        """All metrics in Prometheus' text format. All mappings are by model id.

        restarts: number of worker restarts by cause.
        resumed: number of streams that another worker continued.
        """
        lag = self.loop_lag.take_lag()
        self._families = [
            GaugeMetricFamily(
                "holdfast_event_loop_lag_seconds",
                "Longest delay of the event loop while requests were served, since the last scrape.",
                value=lag.late,
            ),
            GaugeMetricFamily(
                "holdfast_event_loop_busy_seconds",
                "Largest CPU time of one event loop round, since the last scrape.",
                value=lag.busy,
            ),
            _family_by_model(
                GaugeMetricFamily, "holdfast_load_seconds", "Time to load the model.", load_seconds
            ),
            _family_by_model(
                CounterMetricFamily,
                "holdfast_resumed_streams",
                "Answers that another worker continued after a crash.",
                resumed,
            ),
            _counter_with_label(
                "holdfast_worker_restarts", "Workers that were replaced.", "cause", restarts or {}
            ),
            *_residency_families(residency or {}),
            *_pressure_families(pressure or PressureFigures()),
            *_worker_families(statistics),
        ]
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of the last `exposition`."""
        yield from self._families

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"holdfast_{name}", documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"holdfast_{name}", documentation, ("model",), buckets=buckets, registry=self.registry
        )


def _residency_families(residency: Mapping[str, ResidencyFigures]) -> Iterator[Metric]:
    """Yield metrics about which models are loaded and how long requests waited."""
    yield from _families_of_table(
        GaugeMetricFamily, "holdfast_model_", _RESIDENCY_GAUGES, residency
    )
    yield _counter_with_label(
        "holdfast_model_changes",
        "Loads, failed loads, and unloads by reason.",
        "change",
        {model: figures.changes for model, figures in residency.items()},
    )
    yield _counter_with_label(
        "holdfast_model_wait_seconds",
        "Time that requests waited for memory, or for the load.",
        "for",
        {model: figures.wait_seconds for model, figures in residency.items()},
    )


def _pressure_families(figures: PressureFigures) -> Iterator[Metric]:
    """Yield metrics about the memory of all workers together."""
    yield GaugeMetricFamily(
        "holdfast_footprint_bytes", "Memory of all workers.", value=figures.footprint_bytes
    )
    watermarks = GaugeMetricFamily(
        "holdfast_footprint_watermark_bytes",
        "Memory of all workers above which the pressure is warning (first) or critical (second).",
        labels=["watermark"],
    )
    watermarks.add_metric(["first"], figures.first_watermark_bytes)
    watermarks.add_metric(["second"], figures.second_watermark_bytes)
    yield watermarks
    level = GaugeMetricFamily(
        "holdfast_pressure", "1 for the current level of memory pressure.", labels=["level"]
    )
    changes = CounterMetricFamily(
        "holdfast_pressure_changes", "How often each level has begun.", labels=["level"]
    )
    for name in _LEVELS:
        level.add_metric([name], float(name == figures.level))
        changes.add_metric([name], figures.changes.get(name, 0))
    yield level
    yield changes


def _worker_families(statistics: Mapping[str, WorkerStatistics]) -> Iterator[Metric]:
    """Yield the metrics of all workers: engine and scheduler, prefix cache, store."""
    yield from _families_of_table(GaugeMetricFamily, "holdfast_worker_", _WORKER_GAUGES, statistics)
    yield from _families_of_table(
        CounterMetricFamily, "holdfast_worker_", _WORKER_COUNTERS, statistics
    )
    constraints = {model: numbers.constraints for model, numbers in statistics.items()}
    yield from _families_of_table(
        CounterMetricFamily, "holdfast_constrained_", _CONSTRAINT_COUNTERS, constraints
    )
    images = {model: numbers.images for model, numbers in statistics.items()}
    yield from _families_of_table(CounterMetricFamily, "holdfast_images_", _IMAGE_COUNTERS, images)
    yield from _histograms_of_table("holdfast_worker_", _WORKER_HISTOGRAMS, statistics)
    caches = {
        model: numbers.cache for model, numbers in statistics.items() if numbers.cache is not None
    }
    for prefix in _PREFIXES:
        yield from _cache_families(prefix, caches)
    yield from _store_families(
        {model: cache.store for model, cache in caches.items() if cache.store is not None}
    )


def _cache_families(prefix: str, caches: Mapping[str, CacheFigures]) -> Iterator[Metric]:
    """Yield the metrics of the prefix caches. caches: by model id."""
    tokens_by_tier: dict[str, dict[str, int]] = {}
    ram_tokens_by_way: dict[str, dict[str, int]] = {}
    for model, cache in caches.items():
        moved_tokens, shared_tokens = cache.moved_tokens, cache.shared_tokens
        tokens_by_tier[model] = {"ram": cache.ram_tokens, "disk": cache.disk_tokens}
        ram_tokens_by_way[model] = {
            "moved": moved_tokens,
            "shared": shared_tokens,
            "copied": cache.ram_tokens - moved_tokens - shared_tokens,
        }
    lookups = {model: cache.lookups for model, cache in caches.items()}
    yield from _families_of_table(GaugeMetricFamily, prefix, _CACHE_GAUGES, caches)
    yield _counter_with_label(
        f"{prefix}reused_tokens", "Cached tokens used, by tier.", "tier", tokens_by_tier
    )
    yield _counter_with_label(
        f"{prefix}reused_ram_tokens",
        "Cached tokens used from RAM, by how a request got their KV: moved, shared, copied.",
        "how",
        ram_tokens_by_way,
    )
    yield _counter_with_label(
        f"{prefix}lookups",
        "Requests, by the reason why no more tokens were reused.",
        "outcome",
        lookups,
    )
    yield from _families_of_table(CounterMetricFamily, prefix, _CACHE_COUNTERS, caches)
    yield from _histograms_of_table(prefix, _CACHE_HISTOGRAMS, caches)


def _store_families(stores: Mapping[str, StoreFigures]) -> Iterator[Metric]:
    """Yield the metrics of the store on disk. stores: by model id."""
    yield _family_by_model(
        GaugeMetricFamily,
        "holdfast_store_writing",
        "1: blocks are written to disk; 0: for now, they are only kept in RAM.",
        {model: float(store.mode == "writing") for model, store in stores.items()},
    )
    dropped = {model: store.dropped_blocks for model, store in stores.items()}
    yield _counter_with_label(
        "holdfast_store_dropped_blocks", "Blocks that were not written to disk.", "reason", dropped
    )
    yield from _families_of_table(GaugeMetricFamily, "holdfast_store_", _STORE_GAUGES, stores)
    yield from _families_of_table(CounterMetricFamily, "holdfast_store_", _STORE_COUNTERS, stores)


def _families_of_table(
    family_type: type[GaugeMetricFamily | CounterMetricFamily],
    prefix: str,
    table: Table,
    figures: Mapping[str, object],
) -> Iterator[Metric]:
    """Yield a gauge or a counter for each field of the table.

    figures: by model id.
    """
    for name, documentation in table:
        values = {model: getattr(numbers, name) for model, numbers in figures.items()}
        yield _family_by_model(family_type, prefix + name, documentation, values)


def _family_by_model(
    family_type: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    documentation: str,
    values: Mapping[str, float] | None,
) -> Metric:
    """A gauge or a counter with the label `model`.

    values: by model id.
    """
    family = family_type(name, documentation, labels=["model"])
    for model, value in (values or {}).items():
        family.add_metric([model], value)
    return family


def _counter_with_label(
    name: str, documentation: str, label: str, counts: Mapping[str, Mapping[Label, float]]
) -> Metric:
    """A counter with another label in addition to `model`.

    counts: model id → label value → count.
    """
    counter = CounterMetricFamily(name, documentation, labels=["model", label])
    for model, by_value in counts.items():
        for value, count in sorted(by_value.items()):
            counter.add_metric([model, value], count)
    return counter


def _histograms_of_table(
    prefix: str, table: Table, figures: Mapping[str, object]
) -> Iterator[Metric]:
    """Yield a histogram for each field of the table, for the models that report one."""
    for name, documentation in table:
        family = HistogramMetricFamily(prefix + name, documentation, labels=["model"])
        for model, numbers in figures.items():
            histogram: HistogramFigures | None = getattr(numbers, name)
            if histogram is not None:
                family.add_metric([model], list(cumulative(histogram)), sum_value=histogram.total)
        yield family


def cumulative(histogram: HistogramFigures) -> Iterator[tuple[str, float]]:
    """Yield the buckets: each upper bound as text, and the number of observations up to it."""
    for bound, count in zip(
        (*histogram.bounds, float("inf")), accumulate(histogram.counts), strict=True
    ):
        yield ("+Inf" if bound == float("inf") else str(bound)), float(count)
