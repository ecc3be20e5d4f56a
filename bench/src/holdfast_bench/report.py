"""The report in Markdown: medians, quartiles, ratios, and agreement of answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast_bench.charts import charts_of, write_charts
from holdfast_bench.comparison import Spread, ratio_of, spread
from holdfast_bench.metrics import METRICS, metric_of, shown
from holdfast_bench.results import CaseResult, ContenderResult, Results

REPORT_FILE = "report.md"
_NOTHING = "–"


def publish(results: Results, folder: Path) -> Path:
    """Write charts and report; returns the report's file."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / REPORT_FILE
    report.write_text(markdown(results, pictures=write_charts(charts_of(results), folder)))
    return report


def markdown(
    results: Results, *, title: str = "Benchmark report", pictures: Sequence[str] = ()
) -> str:
    """The whole report. pictures: image files, relative to the report."""
    lines = [f"# {title}", "", *_head(results), ""]
    for picture in pictures:
        lines += [f"![{picture}]({picture})", ""]
    for scenario in dict.fromkeys(case.scenario for case in results.cases):
        lines += [f"## {scenario}", ""]
        for case in results.cases:
            if case.scenario == scenario:
                lines += _case(case)
        lines.append("")
    lines += ["## Meaning of the metrics", "", *_meanings(results), ""]
    return "\n".join(lines)


def _head(results: Results) -> Iterator[str]:
    yield (
        f"Made {results.made_at} by Holdfast {results.version} at commit "
        f"{results.commit or 'unknown'}: `{results.command}`"
    )
    yield ""
    if results.machine:
        yield from _machine(results.machine)
    if client := results.client:
        yield (
            "- Load generator with a server without a model: "
            f"{shown(client['request_seconds'], 's')} per request, "
            f"{client['events_per_second']:,.0f} events per second, "
            f"{shown(client['cpu_seconds_per_event'], 's')} of CPU time each"
        )
    yield (
        "- Figures are medians with [quartiles]; ratios are medians over rounds. `A / A`: the "
        "first server compared with itself."
    )
    yield (
        "- *Answers agree*: share of tokens of greedy answers before the first difference from the "
        "first server's."
    )


def _machine(machine: dict[str, Any]) -> Iterator[str]:
    versions = machine.get("packages", {}).items()
    packages = ", ".join(f"{name} {version}" for name, version in versions if version)
    memory = shown(machine["memory_bytes"], "bytes")
    yield (
        f"- Machine: {machine['processor']}, {machine['cores']} cores, {memory}; "
        f"{machine['system']}"
    )
    yield f"- Software: Python {machine['python']}, {packages}"
    if products := machine.get("matrix_products"):
        yield "- Matrix products: " + "; ".join(f"{who}: {how}" for who, how in products.items())
    if "environment" in machine:
        variables = [f"`{name}={value}`" for name, value in machine["environment"].items()]
        yield f"- Variables for threads, BLAS and kernels: {', '.join(variables) or 'none'}"
    busy, load = machine["busy_before"], machine["load_average"]
    yield f"- Load before the start: {busy:.0%} of all cores were busy, load average {load}"


def _case(case: CaseResult) -> Iterator[str]:
    yield f"### {case.case}" + (f" ({case.model})" if case.model else "")
    yield ""
    if case.contenders:
        yield from table(case)
        yield ""
    yield from (f"- {line}" for line in _remarks(case))
    yield ""


def table(case: CaseResult) -> list[str]:
    """One case as a Markdown table: metrics by contender, with ratios and noise."""
    first, *others = case.contenders
    head = ["metric", first.label]
    for other in others:
        head += [other.label, f"{first.label} / {other.label}"]
    head.append("A / A")
    rows = [head, ["---"] * len(head), *(_row(case, name) for name in case.metric_names())]
    return [f"| {' | '.join(row)} |" for row in rows]


def _remarks(case: CaseResult) -> Iterator[str]:
    for other in case.contenders[1:]:
        if (agreed := other.agreement) is not None:
            yield (
                f"Answers agree with {other.label}: {agreed.rate:.1%} of {agreed.tokens} tokens, "
                f"{agreed.equal_answers} of {agreed.answers} answers are equal."
            )
    for each in case.contenders[1:]:
        noise = [
            f"{_name(name)} {_span(found)}"
            for name, ratios in each.noise.items()
            if metric_of(name).better != "neither" and (found := spread(ratios))
        ]
        if noise:
            yield f"{each.label} / {each.label}: {', '.join(noise)}"
    for each in case.contenders:
        yield from (f"{each.label}: {note}" for note in each.notes)
        yield from (f"{each.label} FAILED: {error}" for error in each.errors())
    if case.contenders:
        shares = [each.others_cpu_share for every in case.contenders for each in every.rounds]
        rounds = ", ".join(str(len(each.rounds)) for each in case.contenders)
        yield (
            f"Rounds: {rounds}; {case.seconds:.0f} s; waiting servers used at most "
            f"{max(shares, default=0.0):.0%} of one core."
        )
    yield from case.notes


def _row(case: CaseResult, name: str) -> list[str]:
    unit = metric_of(name).unit
    first, *others = case.contenders
    cells = [_name(name), _value(first, name, unit)]
    for other in others:
        ratio = ratio_of(case, other, name)
        compared = f"{_span(ratio.spread)} {ratio.verdict}".rstrip() if ratio else _NOTHING
        cells += [_value(other, name, unit), compared]
    noise = spread(case.noise.get(name, []))
    return [*cells, _span(noise) if noise else _NOTHING]


def _span(ratio: Spread) -> str:
    quartiles = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.count > 1 else ""
    return f"{ratio.median:.2f} ×{quartiles}"


def _value(each: ContenderResult, name: str, unit: str) -> str:
    found = spread(each.pooled(name))
    if found is None:
        return _NOTHING
    if found.count == 1 or found.low == found.high:
        return shown(found.median, unit)
    return f"{shown(found.median, unit)} [{shown(found.low, unit)}, {shown(found.high, unit)}]"


def _name(name: str) -> str:
    base, at, step = name.partition(" @ ")
    words = base.removesuffix("_seconds").removesuffix("_bytes").replace("_", " ")
    return f"{words}{', ' if at else ''}{step}"


def _meanings(results: Results) -> Iterator[str]:
    used = {name.split(" @ ")[0] for case in results.cases for name in case.metric_names()}
    for name, metric in METRICS.items():
        if name in used:
            better = "" if metric.better == "neither" else f" ({metric.better} is better)"
            yield f"- *{_name(name)}*: {metric.meaning}{better}"
