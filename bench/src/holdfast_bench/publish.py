"""Writes report and charts of a run, and summarizes it for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast_bench.charts import charts_of, write_charts
from holdfast_bench.comparison import ratio_of
from holdfast_bench.figures import spread
from holdfast_bench.metrics import metric_of, shown
from holdfast_bench.report import machine_lines, markdown
from holdfast_bench.results import CaseResult, Results

REPORT_FILE = "report.md"


def publish(results: Results, folder: Path) -> Path:
    """Write charts and report; returns the report's file."""
    pictures = write_charts(charts_of(results), folder)
    report = folder / REPORT_FILE
    report.write_text(markdown(results, pictures=pictures))
    return report


def summary(results: Results) -> Iterator[str]:
    """Lines for a terminal: the machine, and for each case its metrics, ratios and verdicts."""
    yield from machine_lines(results)
    for case in results.cases:
        yield ""
        yield f"{case.scenario}: {case.case} ({case.model}){_agreement(case)}"
        for name in case.metric_names():
            yield f"  {_metric_name(name):42} {_figures(case, name)}"
        for each in case.contenders:
            yield from (f"  {each.label} FAILED: {error}" for error in each.errors())
        yield from (f"  {note}" for note in case.notes)


def _agreement(case: CaseResult) -> str:
    rates = [
        f"{each.label} {each.agreement.rate:.1%}"
        for each in case.contenders
        if each.agreement is not None
    ]
    return f"; answers agree: {', '.join(rates)}" if rates else ""


def _metric_name(name: str) -> str:
    return name.removesuffix("_seconds").replace("_seconds @", " @").replace("_", " ")


def _figures(case: CaseResult, name: str) -> str:
    metric = metric_of(name)
    parts = []
    for number, each in enumerate(case.contenders):
        found = spread(each.pooled(name))
        value = shown(found.median, metric.unit) if found else "–"
        ratio = ratio_of(case, each, name, better=metric.better) if number else None
        compared = (
            f" ({ratio.spread.median:.2f} ×{', ' + ratio.verdict if ratio.verdict else ''})"
            if ratio
            else ""
        )
        parts.append(f"{each.label} {value}{compared}")
    return "   ".join(parts)
