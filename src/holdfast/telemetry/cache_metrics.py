"""What the workers' memories and stores look like in /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from holdfast.messages.figures import CacheFigures, Histogram, StoreFigures, WorkerStatistics
from holdfast.telemetry.buckets import cumulative

_MEMORY_GAUGES = (
    ("kept_tokens", "Tokens that need not be read again, in RAM or on disk."),
    ("tenants", "Tenants of whom something is kept."),
    ("ram_bytes", "RAM that kept blocks take."),
    ("ram_budget_bytes", "RAM that kept blocks may take."),
    ("waiting", "Requests that wait until another one has read the same beginning."),
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


def cache_families(statistics: Mapping[str, WorkerStatistics]) -> Iterator[Metric]:
    """The families of all workers' memories, by model id."""
    memories = {model: numbers.memory for model, numbers in statistics.items() if numbers.memory is not None}
    for name, documentation in _MEMORY_GAUGES:
        gauge = GaugeMetricFamily(f"holdfast_memory_{name}", documentation, labels=["model"])
        for model, memory in memories.items():
            gauge.add_metric([model], getattr(memory, name))
        yield gauge
    yield from _memory_counters(memories)
    yield _seconds("lookup_seconds", "Finding what of a prompt is kept.", memories, lambda memory: memory.lookup_seconds)
    yield _seconds("restore_seconds", "Getting it from disk and together.", memories, lambda memory: memory.restore_seconds)
    yield from _store_families({model: memory.store for model, memory in memories.items() if memory.store is not None})


def _memory_counters(memories: Mapping[str, CacheFigures]) -> Iterator[Metric]:
    reused = CounterMetricFamily("holdfast_memory_reused_tokens", "Tokens not read again, by tier.", labels=["model", "tier"])
    lookups = CounterMetricFamily("holdfast_memory_lookups", "Requests by why no more was reused.", labels=["model", "outcome"])
    evicted = CounterMetricFamily("holdfast_memory_ram_evicted_blocks", "Blocks that left RAM.", labels=["model"])
    waits = CounterMetricFamily("holdfast_memory_waits", "Requests that waited for another one's reading.", labels=["model"])
    for model, memory in memories.items():
        reused.add_metric([model, "ram"], memory.ram_tokens)
        reused.add_metric([model, "disk"], memory.disk_tokens)
        for outcome, count in sorted(memory.lookups.items()):
            lookups.add_metric([model, outcome], count)
        evicted.add_metric([model], memory.ram_evicted_blocks)
        waits.add_metric([model], memory.waits)
    yield from (reused, lookups, evicted, waits)


def _store_families(stores: Mapping[str, StoreFigures]) -> Iterator[Metric]:
    writing = GaugeMetricFamily("holdfast_store_writing", "1: blocks are written; 0: kept in RAM only for now.", labels=["model"])
    dropped = CounterMetricFamily("holdfast_store_dropped_blocks", "Blocks that were not written.", labels=["model", "reason"])
    for model, store in stores.items():
        writing.add_metric([model], float(store.mode == "writing"))
        for reason, count in sorted(store.dropped_blocks.items()):
            dropped.add_metric([model, reason], count)
    yield from (writing, dropped)
    for name, documentation in _STORE_GAUGES:
        gauge = GaugeMetricFamily(f"holdfast_store_{name}", documentation, labels=["model"])
        for model, store in stores.items():
            gauge.add_metric([model], getattr(store, name))
        yield gauge
    for name, documentation in _STORE_COUNTERS:
        counter = CounterMetricFamily(f"holdfast_store_{name}", documentation, labels=["model"])
        for model, store in stores.items():
            counter.add_metric([model], getattr(store, name))
        yield counter


def _seconds(
    name: str,
    documentation: str,
    memories: Mapping[str, CacheFigures],
    histogram_of: Callable[[CacheFigures], Histogram | None],
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"holdfast_memory_{name}", documentation, labels=["model"])
    for model, memory in memories.items():
        histogram = histogram_of(memory)
        if histogram is not None:
            family.add_metric([model], list(cumulative(histogram)), sum_value=histogram.total)
    return family
