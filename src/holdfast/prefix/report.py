"""What the memory found and what it keeps, as messages for the front."""

from __future__ import annotations

import functools
from typing import assert_never

from holdfast.messages.events import CacheOutcome, CacheReport, Divergence
from holdfast.messages.figures import CacheFigures, StoreFigures
from holdfast.prefix.evicted import Evicted, EvictionCause
from holdfast.prefix.index import IndexStatistics
from holdfast.prefix.reuse import NewTokens, NoBoundary, NothingStored, ReusePlan
from holdfast.prefix.tree import Diverged
from holdfast.store.statistics import StoreStatistics

_OF_A_LOSS = {
    EvictionCause.EVICTED: CacheOutcome.EVICTED,
    EvictionCause.UNREADABLE: CacheOutcome.UNREADABLE,
    EvictionCause.UNTRUSTED: CacheOutcome.UNREADABLE,
    EvictionCause.FORGOTTEN: CacheOutcome.FORGOTTEN,
}


def report_of(plan: ReusePlan, *, lookup_seconds: float, waited_seconds: float, restore_seconds: float) -> CacheReport:
    """What a request begins from, why it is not more, and what it took."""
    diverged = plan.shortfall if isinstance(plan.shortfall, Diverged) else plan.diverged
    report = functools.partial(
        CacheReport,
        ram_tokens=plan.ram_tokens,
        disk_tokens=plan.disk_tokens,
        divergence=None if diverged is None else _divergence(diverged),
        waited_for_another=waited_seconds > 0,
        waited_seconds=waited_seconds,
        lookup_seconds=lookup_seconds,
        restore_seconds=restore_seconds,
    )
    match plan.shortfall:
        case None:
            return report(outcome=CacheOutcome.COMPLETE)
        case NewTokens():
            return report(outcome=CacheOutcome.NEW_TOKENS)
        case NothingStored():
            return report(outcome=CacheOutcome.NOTHING_STORED)
        case Diverged():
            return report(outcome=CacheOutcome.DIVERGED)
        case NoBoundary(matched=matched, boundary=boundary):
            return report(outcome=CacheOutcome.NO_BOUNDARY, unused_tokens=matched - boundary)
        case Evicted(tokens=tokens, cause=cause):
            return report(outcome=_OF_A_LOSS[cause], unused_tokens=tokens)
        case other:
            assert_never(other)


def _divergence(diverged: Diverged) -> Divergence:
    return Divergence(position=diverged.position, stored_token_id=diverged.expected, prompt_token_id=diverged.found)


def figures_of(library: IndexStatistics, store: StoreStatistics | None) -> CacheFigures:
    """What is kept."""
    return CacheFigures(
        kept_tokens=library.tokens,
        tenants=library.tenants,
        ram_bytes=library.ram.resident_bytes,
        ram_budget_bytes=library.ram.budget_bytes,
        ram_evicted_blocks=library.ram.evicted,
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
