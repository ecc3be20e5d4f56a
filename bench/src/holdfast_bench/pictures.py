"""Writes the charts of a run into a folder: SVG always, PNG where matplotlib is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from holdfast_bench.charts import Chart
from holdfast_bench.svg import svg

_INCHES = (7.2, 4.0)
_DOTS_PER_INCH = 150


def write_pictures(charts: Sequence[Chart], folder: Path) -> list[str]:
    """Write all; returns the names of the SVG files."""
    folder.mkdir(parents=True, exist_ok=True)
    has_png = importlib.util.find_spec("matplotlib") is not None
    names = []
    for chart in charts:
        file = folder / f"{chart.name}.svg"
        file.write_text(svg(chart))
        names.append(file.name)
        if has_png:
            _write_png(chart, file.with_suffix(".png"))
    return names


def _write_png(chart: Chart, file: Path) -> None:
    importlib.import_module("matplotlib").use("Agg")  # draws into memory: there may be no screen
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=_INCHES, dpi=_DOTS_PER_INCH)
    for line in chart.lines:
        x, y = [point[0] for point in line.points], [point[1] for point in line.points]
        if chart.kind == "steps":
            axes.step(x, y, where="post", label=line.label)
        else:
            axes.plot(x, y, marker="o", markersize=3, label=line.label)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
    axes.set_title(chart.title, fontsize=10)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
