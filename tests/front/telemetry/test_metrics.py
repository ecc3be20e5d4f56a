from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from holdfast.front.telemetry.metrics import Metrics, PressureFigures
from holdfast.wire.events import ConstraintFigures, Histogram, WorkerStatistics


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
