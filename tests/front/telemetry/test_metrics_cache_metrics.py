from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from holdfast.front.telemetry.metrics import Metrics
from holdfast.wire.events import CacheFigures, Histogram, StoreFigures, WorkerStatistics

STORE = StoreFigures(
    model="m",
    mode="memory-only",
    stored_bytes=70,
    bad_blocks=2,
    dropped_blocks={"no_room": 4, "queue_full": 0},
)
MEMORY = CacheFigures(
    ram_bytes=5,
    parked_sequences=2,
    parked_bytes=700,
    ram_tokens=11,
    moved_tokens=6,
    shared_tokens=4,
    disk_tokens=13,
    read_ahead_tokens=20,
    used_ahead_tokens=15,
    lookups={"diverged": 3, "complete": 1},
    waits=6,
    restore_seconds=Histogram(bounds=(1.0,), counts=(1, 2), total=9.0),
    store=STORE,
)


def values(**statistics: WorkerStatistics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Name and label values → value, of all metrics about caches and stores."""
    text = Metrics().exposition(statistics).decode()
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    return {
        (
            sample.name.removeprefix("holdfast_"),
            tuple(value for _, value in sorted(sample.labels.items())),
        ): sample.value
        for sample in samples
        if sample.name.startswith(("holdfast_prefix_cache_", "holdfast_memory_", "holdfast_store_"))
    }


def test_reuse_is_counted_by_tier_and_lookups_by_outcome() -> None:
    shown = values(m=WorkerStatistics(memory=MEMORY))
    assert shown["prefix_cache_reused_tokens_total", ("m", "ram")] == 11
    assert shown["prefix_cache_reused_tokens_total", ("m", "disk")] == 13
    by_how = {
        how: shown["prefix_cache_reused_ram_tokens_total", (how, "m")]
        for how in ("moved", "shared", "copied")
    }
    assert by_how == {"moved": 6, "shared": 4, "copied": 1}
    assert shown["prefix_cache_read_ahead_tokens_total", ("m",)] == 20
    assert shown["prefix_cache_used_ahead_tokens_total", ("m",)] == 15
    assert shown["prefix_cache_parked_sequences", ("m",)] == 2
    assert shown["prefix_cache_parked_bytes", ("m",)] == 700
    assert shown["prefix_cache_lookups_total", ("m", "diverged")] == 3
    assert shown["prefix_cache_lookups_total", ("m", "complete")] == 1
    assert shown["prefix_cache_waits_total", ("m",)] == 6
    assert shown["prefix_cache_restore_seconds_bucket", ("+Inf", "m")] == 3
    assert shown["prefix_cache_restore_seconds_sum", ("m",)] == 9


def test_each_cache_metric_keeps_its_old_name_for_one_release() -> None:
    shown = values(m=WorkerStatistics(memory=MEMORY))
    new = {
        (name.removeprefix("prefix_cache_"), labels): value
        for (name, labels), value in shown.items()
        if "cache" in name
    }
    old = {
        (name.removeprefix("memory_"), labels): value
        for (name, labels), value in shown.items()
        if "memory" in name
    }
    assert new == old
    assert len(new) > 10


def test_an_unwritable_store_is_reported_with_its_dropped_blocks() -> None:
    shown = values(m=WorkerStatistics(memory=MEMORY))
    assert shown["store_writing", ("m",)] == 0
    assert shown["store_stored_bytes", ("m",)] == 70
    assert shown["store_bad_blocks_total", ("m",)] == 2
    assert shown["store_dropped_blocks_total", ("m", "no_room")] == 4
    writing = CacheFigures(store=StoreFigures(model="m", mode="writing"))
    assert values(m=WorkerStatistics(memory=writing))["store_writing", ("m",)] == 1


def test_a_worker_without_cache_or_store_lacks_their_metrics() -> None:
    assert values(m=WorkerStatistics()) == {}
    assert not any(
        name.startswith("store_") for name, _ in values(m=WorkerStatistics(memory=CacheFigures()))
    )
