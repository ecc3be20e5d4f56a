from __future__ import annotations

import asyncio
import time

from prometheus_client.parser import text_string_to_metric_families

from holdfast.front.telemetry.metrics import Lag, LoopLag, Metrics, PressureFigures, cumulative
from holdfast.wire.events import (
    CacheFigures,
    ConstraintFigures,
    Histogram,
    StoreFigures,
    WorkerStatistics,
)


def test_two_servers_in_one_process_have_separate_metrics() -> None:
    first, second = Metrics(), Metrics()
    first.http_requests.labels("GET", "/", "200").inc()
    assert (
        second.registry.get_sample_value(
            "holdfast_http_requests_total", {"method": "GET", "path": "/", "status": "200"}
        )
        is None
    )


def test_the_exposition_parses_and_every_family_has_help() -> None:
    numbers = WorkerStatistics(
        steps=4, step_seconds=Histogram(bounds=(1.0,), counts=(1, 2), total=9.0)
    )
    shown = Metrics().exposition(
        {"a": numbers, "b": WorkerStatistics()},
        load_seconds={"a": 1.0},
        restarts={"a": {"died": 1, "hung": 2}},
        resumed={"a": 4},
    )
    text = shown.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(family.documentation for family in families.values())
    steps = {
        sample.labels["model"]: sample.value for sample in families["holdfast_worker_steps"].samples
    }
    assert steps == {"a": 4.0, "b": 0.0}
    restarts = {
        sample.labels["cause"]: sample.value
        for sample in families["holdfast_worker_restarts"].samples
    }
    assert restarts == {"died": 1.0, "hung": 2.0}
    assert [sample.value for sample in families["holdfast_resumed_streams"].samples] == [4.0]
    buckets = [
        sample.value
        for sample in families["holdfast_worker_step_seconds"].samples
        if sample.name.endswith("bucket")
    ]
    assert buckets == [1.0, 3.0]


def test_constrained_sequences_are_shown_as_counters() -> None:
    numbers = WorkerStatistics(
        constraints=ConstraintFigures(sequences=3, masks=40, mask_seconds=0.5, failures=1)
    )
    text = Metrics().exposition({"a": numbers}).decode()
    shown = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    names = ("sequences", "masks", "mask_seconds", "failures")
    assert [shown[f"holdfast_constrained_{name}_total"] for name in names] == [3.0, 40.0, 0.5, 1.0]


def test_the_memory_pressure_is_shown_with_its_watermarks() -> None:
    figures = PressureFigures(
        level="warning",
        footprint_bytes=9,
        first_watermark_bytes=8,
        second_watermark_bytes=10,
        changes={"warning": 2, "normal": 1},
    )
    text = Metrics().exposition({}, pressure=figures).decode()
    lines = [line for line in text.splitlines() if line.startswith(("holdfast_f", "holdfast_pr"))]
    assert lines == [
        "holdfast_footprint_bytes 9.0",
        'holdfast_footprint_watermark_bytes{watermark="first"} 8.0',
        'holdfast_footprint_watermark_bytes{watermark="second"} 10.0',
        'holdfast_pressure{level="normal"} 0.0',
        'holdfast_pressure{level="warning"} 1.0',
        'holdfast_pressure{level="critical"} 0.0',
        'holdfast_pressure_changes_total{level="normal"} 1.0',
        'holdfast_pressure_changes_total{level="warning"} 2.0',
        'holdfast_pressure_changes_total{level="critical"} 0.0',
    ]


def test_numbers_of_a_removed_worker_are_not_shown() -> None:
    metrics = Metrics()
    metrics.exposition({"a": WorkerStatistics(running=1)})
    assert b'holdfast_worker_running{model="a"}' not in metrics.exposition({})


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
    shown = values(m=WorkerStatistics(cache=MEMORY))
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
    shown = values(m=WorkerStatistics(cache=MEMORY))
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
    shown = values(m=WorkerStatistics(cache=MEMORY))
    assert shown["store_writing", ("m",)] == 0
    assert shown["store_stored_bytes", ("m",)] == 70
    assert shown["store_bad_blocks_total", ("m",)] == 2
    assert shown["store_dropped_blocks_total", ("m", "no_room")] == 4
    writing = CacheFigures(store=StoreFigures(model="m", mode="writing"))
    assert values(m=WorkerStatistics(cache=writing))["store_writing", ("m",)] == 1


def test_a_worker_without_cache_or_store_lacks_their_metrics() -> None:
    assert values(m=WorkerStatistics()) == {}
    assert not any(
        name.startswith("store_") for name, _ in values(m=WorkerStatistics(cache=CacheFigures()))
    )


def test_buckets_are_cumulative_and_the_last_is_unbounded() -> None:
    histogram = Histogram(bounds=(0.5, 1.0), counts=(3, 0, 2), total=9.0)
    assert list(cumulative(histogram)) == [("0.5", 3.0), ("1.0", 3.0), ("+Inf", 5.0)]


# The lag of the event loop.

TICK_SECONDS = 0.002
BLOCKED_SECONDS = 0.01  # several ticks are due during it


async def blocked(lag: LoopLag) -> None:
    with lag.watched():
        await asyncio.sleep(0)
        time.sleep(0.01)  # must not be done on an event loop
        await asyncio.sleep(0.002)


async def test_a_blocked_loop_is_reported_once() -> None:
    lag = LoopLag(TICK_SECONDS)
    await blocked(lag)
    assert lag.take_lag().late >= BLOCKED_SECONDS - 2 * TICK_SECONDS
    assert lag.take_lag() == Lag()


async def test_the_loops_own_work_is_distinguished_from_waiting() -> None:
    lag = LoopLag(TICK_SECONDS)
    await blocked(lag)
    waited = lag.take_lag()
    with lag.watched():
        used = time.thread_time()
        while time.thread_time() - used < BLOCKED_SECONDS:
            pass
        await asyncio.sleep(0.002)
    assert lag.take_lag().busy >= BLOCKED_SECONDS > waited.busy


async def test_nothing_ticks_when_no_request_is_served() -> None:
    lag = LoopLag(TICK_SECONDS)
    with lag.watched(), lag.watched():
        await asyncio.sleep(0.002)
    while lag._next_tick is not None:
        await asyncio.sleep(0.002)
    lag.take_lag()
    time.sleep(0.01)
    await asyncio.sleep(0.002)
    assert lag.take_lag() == Lag()
    await blocked(lag)
    assert lag.take_lag().late > 0.0


async def test_the_lag_is_in_the_exposition() -> None:
    metrics = Metrics(loop_tick_seconds=TICK_SECONDS)
    await blocked(metrics.loop_lag)
    shown = [
        line
        for line in metrics.exposition({}).decode().splitlines()
        if line.startswith("holdfast_event_loop_lag_seconds ")
    ]
    assert float(shown[0].split()[1]) >= BLOCKED_SECONDS - 2 * TICK_SECONDS
