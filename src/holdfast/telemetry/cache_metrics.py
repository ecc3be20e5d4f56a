"""What the workers' prefix caches and stores look like in /metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from holdfast.telemetry.families import histograms, labelled, plain
from holdfast.wire.figures import CacheFigures, StoreFigures, WorkerStatistics

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
