"""Charts of a run's results, drawn by matplotlib as SVG."""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast_bench.results import CaseResult, ContenderResult, Results

Point = tuple[float, float]
Lines = dict[str, list[Point]]

_BINS_PER_DECADE = 8
_MEBIBYTE = 1 << 20
_INCHES = (7.2, 4.0)
_FIRST_TOKEN = "first_token_seconds"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Medians:
    """A chart of a metric's median by a setting of a scenario's cases. chosen: settings of these."""

    name: str
    title: str
    scenario: str
    chosen: dict[str, Any] = field(default_factory=dict)
    setting: str
    metric: str = _FIRST_TOKEN
    y_label: str = "seconds"
    log_x: bool = True
    log_y: bool = True
    shows_values: bool = False

    def chart(self, model: str, cases: Sequence[CaseResult]) -> Chart:
        """The chart of a model's cases. A metric that ends with `@ ` stands for all of its steps."""
        found = _of(cases, self.scenario, **self.chosen)
        lines: Lines = {}
        if self.metric.endswith("@ "):
            names = dict.fromkeys(name for case in found for name in case.metric_names())
            for name in (each for each in names if each.startswith(self.metric)):
                for label, points in _medians(found, self.setting, name).items():
                    lines[f"{label}, {name.removeprefix(self.metric)}"] = points
        else:
            lines = _medians(found, self.setting, self.metric)
        for points in _medians(found, self.setting, "step_seconds").values():
            lines["a step of the engine over as many new tokens"] = points
        return Chart(
            name=f"{self.name}-{model}",
            title=f"{self.title} ({model})",
            x_label=self.setting.replace("_", " "),
            y_label=self.y_label,
            lines=lines,
            log_x=self.log_x,
            log_y=self.log_y,
            shows_values=self.shows_values,
        )


_CHARTS = (
    _Medians(
        name="first-token",
        title="Time to first token of new prompts",
        scenario="prefill",
        setting="prompt_tokens",
    ),
    _Medians(
        name="reuse",
        title="Time to first token of a context that was sent before",
        scenario="reuse",
        setting="context_tokens",
        metric=f"{_FIRST_TOKEN} @ ",
    ),
    _Medians(
        name="restart",
        title="Time to first token after a restart of the server",
        scenario="reuse",
        setting="context_tokens",
        metric=f"{_FIRST_TOKEN} @ after a restart",
        shows_values=True,
    ),
    *(
        _Medians(
            name=f"next-turn{'-chat' if is_chat else ''}",
            title=f"Time to first token of the next turn{' of a chat' if is_chat else ''}",
            scenario="next-turn",
            chosen={"is_chat": is_chat},
            setting="context_tokens",
            log_y=False,
        )
        for is_chat in (False, True)
    ),
    *(
        _Medians(
            name=f"streams-{kind}",
            title=f"Throughput, {kind} prompts",
            scenario="streams",
            chosen={"kind": kind},
            setting="streams",
            metric="tokens_per_second",
            y_label="tokens per second",
            log_x=False,
            log_y=False,
        )
        for kind in ("equal", "ragged")
    ),
)


def charts_of(results: Results) -> list[Chart]:
    """All charts for which the results have figures."""
    by_model: dict[str, list[CaseResult]] = defaultdict(list)
    for case in results.cases:
        by_model[case.model].append(case)
    charts = [
        chart
        for model, cases in by_model.items()
        for chart in (
            *(each.chart(model, cases) for each in _CHARTS),
            *_gap_charts(model, cases),
            *_memory_charts(model, cases),
            _growth_chart(model, cases),
        )
    ]
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
    names = {name for sample in each.rounds for name in sample.metrics if name.startswith(prefix)}
    return _from_zero(
        (float(name.removeprefix(prefix).split()[0]), statistics.median(each.pooled(name)))
        for name in names
    )


def _growth_chart(model: str, cases: Sequence[CaseResult]) -> Chart:
    lines: Lines = {}
    for case in _of(cases, "growth"):
        lines |= _lines(case, _disk_by_tokens)
    return Chart(
        name=f"growth-{model}",
        title=f"Disk space of one session ({model})",
        x_label="tokens",
        y_label="MiB",
        lines=lines,
    )


def _disk_by_tokens(each: ContenderResult) -> list[Point]:
    return _from_zero(
        (tokens, sample.metrics[f"disk_bytes @ {name.split(' @ ')[1]}"][0])
        for sample in each.rounds
        for name, (tokens, *_) in sample.metrics.items()
        if name.startswith("context_tokens @ ")
    )


def _from_zero(points: Iterator[Point]) -> list[Point]:
    """The points from left to right, with MiB instead of bytes, after a zero."""
    found = [(x, size / _MEBIBYTE) for x, size in sorted(points)]
    return [(0.0, 0.0), *found] if found else []


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
