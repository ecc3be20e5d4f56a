"""The report in Markdown: medians, quartiles, ratios, and agreement of answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from holdfast_bench.comparison import ratio_of
from holdfast_bench.figures import Spread, spread
from holdfast_bench.metrics import METRICS, metric_of, shown
from holdfast_bench.results import CaseResult, ContenderResult, Results

_NOTHING = "–"


def markdown(
    results: Results, *, title: str = "Benchmark report", pictures: Sequence[str] = ()
) -> str:
    """The whole report. pictures: image files, relative to the report."""
    lines = [f"# {title}", "", *_head(results), ""]
    for picture in pictures:
        lines += [f"![{picture}]({picture})", ""]
    for scenario in dict.fromkeys(case.scenario for case in results.cases):
        lines += [
            f"## {scenario}",
            "",
            *_scenario([case for case in results.cases if case.scenario == scenario]),
            "",
        ]
    lines += ["## Meaning of the metrics", "", *_meanings(results), ""]
    return "\n".join(lines)


def table(case: CaseResult) -> list[str]:
    """One case as a Markdown table: metrics by contender, with ratios and noise."""
    first, *others = case.contenders
    head = ["metric", first.label]
    for other in others:
        head += [other.label, f"{first.label} / {other.label}"]
    head.append("A / A")
    rows = [_row(case, name) for name in case.metric_names()]
    return [_cells(head), _cells(["---"] * len(head)), *(_cells(row) for row in rows)]


def _head(results: Results) -> Iterator[str]:
    yield (
        f"Made {results.made_at} by Holdfast {results.version} at commit "
        f"{results.commit or 'unknown'}: `{results.command}`"
    )
    yield ""
    yield from machine_lines(results)
    if results.client:
        yield _client_line(results.client)
    yield (
        "- Figures are medians with [quartiles]; ratios are medians over rounds. `A / A`: the "
        "first server compared with itself."
    )
    yield (
        "- *Answers agree*: share of tokens of greedy answers before the first difference from the "
        "first server's."
    )


def machine_lines(results: Results) -> Iterator[str]:
    """The machine, if it is known."""
    machine = results.machine
    if not machine:
        return
    packages = ", ".join(
        f"{name} {version}" for name, version in machine.get("packages", {}).items() if version
    )
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
    yield (f"- Load before the start: {busy:.0%} of all cores were busy, load average {load}")


def _client_line(client: dict[str, Any]) -> str:
    return (
        "- Load generator with a server without a model: "
        f"{shown(client['request_seconds'], 's')} per request, "
        f"{client['events_per_second']:,.0f} events per second, "
        f"{shown(client['cpu_seconds_per_event'], 's')} of CPU time each"
    )


def _scenario(cases: Sequence[CaseResult]) -> Iterator[str]:
    for case in cases:
        yield f"### {case.case}" + (f" ({case.model})" if case.model else "")
        yield ""
        if case.contenders:
            yield from table(case)
            yield ""
        yield from (f"- {line}" for line in _remarks(case))
        yield ""


def _remarks(case: CaseResult) -> Iterator[str]:
    for other in case.contenders[1:]:
        if other.agreement is not None:
            agreed = other.agreement
            yield (
                f"Answers agree with {other.label}: {agreed.rate:.1%} of {agreed.tokens} tokens, "
                f"{agreed.equal_answers} of {agreed.answers} answers are equal."
            )
    for each in case.contenders[1:]:
        noise = {
            name: spread(ratios)
            for name, ratios in each.noise.items()
            if metric_of(name).better != "neither"
        }
        if noise:
            yield f"{each.label} / {each.label}: " + ", ".join(
                f"{_name(n)} {_span(s)}" for n, s in noise.items() if s
            )
    for each in case.contenders:
        yield from (f"{each.label}: {note}" for note in each.notes)
        yield from (f"{each.label} FAILED: {error}" for error in each.errors())
    if case.contenders:
        busiest = max(
            (sample.others_cpu_share for each in case.contenders for sample in each.rounds),
            default=0.0,
        )
        rounds = ", ".join(str(len(each.rounds)) for each in case.contenders)
        yield (
            f"Rounds: {rounds}; {case.seconds:.0f} s; waiting servers used at most "
            f"{busiest:.0%} of one core."
        )
    yield from case.notes


def _row(case: CaseResult, name: str) -> list[str]:
    metric = metric_of(name)
    first, *others = case.contenders
    cells = [_name(name), _value(spread(first.pooled(name)), metric.unit)]
    for other in others:
        cells += [_value(spread(other.pooled(name)), metric.unit), _ratio(case, other, name)]
    noise = spread(case.noise.get(name, []))
    return [*cells, _span(noise) if noise else _NOTHING]


def _ratio(case: CaseResult, other: ContenderResult, name: str) -> str:
    found = ratio_of(case, other, name, better=metric_of(name).better)
    if found is None:
        return _NOTHING
    verdict = f" {found.verdict}" if found.verdict else ""
    return f"{_span(found.spread)}{verdict}"


def _span(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ×" + (
        f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.count > 1 else ""
    )


def _value(found: Spread | None, unit: str) -> str:
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


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
