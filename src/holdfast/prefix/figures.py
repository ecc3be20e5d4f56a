"""What the cache keeps, as figures for the front."""

from __future__ import annotations

from holdfast.messages.figures import CacheFigures, StoreFigures
from holdfast.prefix.index import IndexStatistics
from holdfast.store.statistics import StoreStatistics


def figures_of(index: IndexStatistics, store: StoreStatistics | None) -> CacheFigures:
    """What is kept."""
    return CacheFigures(
        kept_tokens=index.tokens,
        tenants=index.tenants,
        ram_bytes=index.ram.resident_bytes,
        ram_budget_bytes=index.ram.budget_bytes,
        ram_evicted_blocks=index.ram.evicted,
        store=None if store is None else _store_figures(store),
    )


def _store_figures(store: StoreStatistics) -> StoreFigures:
    return StoreFigures(
        model=store.model,
        mode=store.mode,
        blocks=store.blocks,
        stored_bytes=store.stored_bytes,
        allowed_bytes=store.allowed_bytes,
        written_today_bytes=store.written_today_bytes,
        queued_blocks=store.queued_blocks,
        queued_bytes=store.queued_bytes,
        written_bytes=store.written_bytes,
        read_bytes=store.read_bytes,
        evicted_blocks=store.evicted_blocks,
        bad_blocks=store.bad_blocks,
        missing_blocks=store.missing_blocks,
        outages=store.outages,
        dropped_blocks={
            "queue_full": store.dropped_queue_full,
            "memory_only": store.dropped_memory_only,
            "daily_budget": store.dropped_daily_budget,
            "no_room": store.dropped_no_room,
        },
    )
