"""What the cache keeps, as figures for the front."""

from __future__ import annotations

from holdfast.messages.figures import CacheFigures, StoreFigures
from holdfast.prefix.index import IndexStatistics


def figures_of(index: IndexStatistics, store: StoreFigures | None) -> CacheFigures:
    """What is kept."""
    return CacheFigures(
        kept_tokens=index.tokens,
        tenants=index.tenants,
        ram_bytes=index.ram.resident_bytes,
        ram_budget_bytes=index.ram.budget_bytes,
        ram_evicted_blocks=index.ram.evicted,
        store=store,
    )
