"""Charts of a run's results, drawn by matplotlib as SVG."""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast_bench.results import CaseResult, ContenderResult, Results

Point = tuple[float, float]
Lines = dict[str, list[Point]]

_BINS_PER_DECADE = 8
_MEBIBYTE = 1 << 20
_INCHES = (7.2, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a chart shows. name: of its file. lines: points by label."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: Lines
    is_histogram: bool = False
    log_x: bool = False
    log_y: bool = False
    shows_values: bool = False


def charts_of(results: Results) -> list[Chart]:
    """All charts for which the results have figures."""
    by_model: dict[str, list[CaseResult]] = defaultdict(list)
    for case in results.cases:
        by_model[case.model].append(case)
    charts = (
        chart
        for model, cases in by_model.items()
        for charts in (
            _prompt_charts(model, cases),
            _reuse_charts(model, cases),
            _next_turn_charts(model, cases),
            _stream_charts(model, cases),
            _gap_charts(model, cases),
            _memory_charts(model, cases),
            _growth_chart(model, cases),
        )
        for chart in charts
    )
    return [chart for chart in charts if chart.lines]


def write_charts(charts: Sequence[Chart], folder: Path) -> list[str]:
    """Draw the charts; returns the names of their files. Without matplotlib, it draws none."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")  # no display needed
    # Text stays text, and equal results give equal files.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "holdfast"})
    return [_write(chart, folder) for chart in charts]


def _write(chart: Chart, folder: Path) -> str:
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=_INCHES)
    for label, points in chart.lines.items():
        x, y = zip(*points, strict=True)
        if chart.is_histogram:
            axes.step(x, y, where="post", label=label)
        else:
            axes.plot(x, y, marker="o", markersize=3, label=label)
        for point in points if chart.shows_values else ():
            axes.annotate(f"{point[1]:.3g}", point, (0, 5), textcoords="offset points", fontsize=8)
    axes.set_xscale("log" if chart.log_x else "linear")
    axes.set_yscale("log" if chart.log_y else "linear")
    axes.set_title(chart.title, fontsize=10)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.margins(0.08)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    file = folder / f"{chart.name}.svg"
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return file.name


def _prompt_charts(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    yield Chart(
        name=f"first-token-{model}",
        title=f"Time to first token of new prompts ({model})",
        x_label="prompt tokens",
        y_label="seconds",
        lines=_medians(_of(cases, "prefill"), "prompt_tokens", "first_token_seconds"),
        log_x=True,
        log_y=True,
    )


def _reuse_charts(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    reuse = _of(cases, "reuse")
    prefix = "first_token_seconds @ "
    names = dict.fromkeys(
        name for case in reuse for name in case.metric_names() if name.startswith(prefix)
    )
    all_steps = {
        f"{label}, {name.removeprefix(prefix)}": points
        for name in names
        for label, points in _medians(reuse, "context_tokens", name).items()
    }
    restarts = _medians(reuse, "context_tokens", f"{prefix}after a restart")
    for name, title, lines, shows_values in (
        ("reuse", "Time to first token of a context that was sent before", all_steps, False),
        ("restart", "Time to first token after a restart of the server", restarts, True),
    ):
        yield Chart(
            name=f"{name}-{model}",
            title=f"{title} ({model})",
            x_label="context tokens",
            y_label="seconds",
            lines=lines,
            log_x=True,
            log_y=True,
            shows_values=shows_values,
        )


def _next_turn_charts(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    for is_chat in (False, True):
        chosen = _of(cases, "next-turn", is_chat=is_chat)
        steps = _medians(chosen, "context_tokens", "step_seconds")
        lines = _medians(chosen, "context_tokens", "first_token_seconds")
        for points in steps.values():
            lines["a step of the engine over as many new tokens"] = points
        yield Chart(
            name=f"next-turn-{'chat-' if is_chat else ''}{model}",
            title=f"Time to first token of the next turn{' of a chat' if is_chat else ''} ({model})",
            x_label="context tokens",
            y_label="seconds",
            lines=lines,
            log_x=True,
        )


def _stream_charts(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    for kind in ("equal", "ragged"):
        yield Chart(
            name=f"streams-{kind}-{model}",
            title=f"Throughput, {kind} prompts ({model})",
            x_label="streams",
            y_label="tokens per second",
            lines=_medians(_of(cases, "streams", kind=kind), "streams", "tokens_per_second"),
        )


def _gap_charts(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    for case in _of(cases, "stall"):
        yield Chart(
            name=f"gaps-{_file_name(case)}-{model}",
            title=f"Gaps of a stream while {case.case} arrive(s) ({model})",
            x_label="milliseconds between texts",
            y_label="share of texts",
            lines=_lines(
                case, lambda each: histogram([gap for s in each.rounds for gap in s.gaps])
            ),
            is_histogram=True,
            log_x=True,
        )


def _memory_charts(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    for case in _of(cases, "memory"):
        yield Chart(
            name=f"memory-{_file_name(case)}-{model}",
            title=f"Retained memory: {case.case} ({model})",
            x_label="agents",
            y_label="MiB",
            lines=_lines(case, _kept_by_agents),
        )


def _kept_by_agents(each: ContenderResult) -> list[Point]:
    prefix = "kept_bytes @ "
    points = {
        (float(name.removeprefix(prefix).split()[0]), statistics.median(each.pooled(name)))
        for sample in each.rounds
        for name in sample.metrics
        if name.startswith(prefix)
    }
    kept = [(agents, size / _MEBIBYTE) for agents, size in sorted(points)]
    return [(0.0, 0.0), *kept] if kept else []


def _growth_chart(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    lines: Lines = {}
    for case in _of(cases, "growth"):
        lines |= _lines(case, _disk_by_tokens)
    yield Chart(
        name=f"growth-{model}",
        title=f"Disk space of one session ({model})",
        x_label="tokens",
        y_label="MiB",
        lines=lines,
    )


def _disk_by_tokens(each: ContenderResult) -> list[Point]:
    points: list[Point] = []
    for sample in each.rounds:
        for name, (tokens,) in sample.metrics.items():
            if name.startswith("context_tokens @ "):
                disk = sample.metrics[f"disk_bytes @ {name.split(' @ ')[1]}"][0]
                points.append((tokens, disk / _MEBIBYTE))
    return [(0.0, 0.0), *sorted(points)] if points else []


def histogram(seconds: Sequence[float]) -> list[Point]:
    """Shares of the values in logarithmic bins: (lower bound in ms, share), ending with a zero."""
    values = [value * 1000 for value in seconds if value > 0]
    if not values:
        return []
    bins = [math.floor(math.log10(value) * _BINS_PER_DECADE) for value in values]
    return [
        (10 ** (number / _BINS_PER_DECADE), bins.count(number) / len(bins))
        for number in range(min(bins), max(bins) + 2)
    ]


def _of(cases: Sequence[CaseResult], scenario: str, **settings: object) -> list[CaseResult]:
    return [
        case
        for case in cases
        if case.scenario == scenario and settings.items() <= case.settings.items()
    ]


def _lines(case: CaseResult, points_of: Callable[[ContenderResult], list[Point]]) -> Lines:
    found = {each.label: points_of(each) for each in case.contenders}
    return {label: points for label, points in found.items() if points}


def _medians(cases: Sequence[CaseResult], setting: str, metric: str) -> Lines:
    """The median of a metric for each contender, by a setting of the cases."""
    lines: Lines = defaultdict(list)
    for case in cases:
        for each in case.contenders:
            if (values := each.pooled(metric)) and setting in case.settings:
                point = (float(case.settings[setting]), statistics.median(values))
                lines[each.label].append(point)
    return {label: sorted(points) for label, points in lines.items()}


def _file_name(case: CaseResult) -> str:
    return case.case.replace(",", "").replace(" ", "-")
