"""Draws a chart as SVG, by hand: two axes, a few ticks, lines and a legend need no library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from holdfast_bench.charts import Chart, Line, Point

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 44, 52
_COLOURS = ("#0b6e99", "#d1495b", "#7a8b2a", "#8a5aa8", "#c78a1b", "#4b5563", "#2a9d6f", "#b0413e")
_DASHES = ("", "6 3", "2 3", "9 3 2 3")
_LEGEND_LINE = 15


def svg(chart: Chart) -> str:
    """The chart as an SVG document."""
    points = [point for line in chart.lines for point in line.points]
    x_axis = _Axis(
        [x for x, _ in points], low=_LEFT, high=_WIDTH - _RIGHT, is_log=chart.log_x, from_zero=False
    )
    height = _HEIGHT + max(0, len(chart.lines) - 3) * _LEGEND_LINE
    legend = len(chart.lines) * _LEGEND_LINE
    floor = height - _BOTTOM
    y_axis = _Axis(
        [y for _, y in points],
        low=floor,
        high=_TOP + legend,
        is_log=chart.log_y,
        from_zero=not chart.log_y,
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(chart.title)}</text>',
        *_frame(chart, x_axis, y_axis, floor),
    ]
    for number, line in enumerate(chart.lines):
        colour, dash = (
            _COLOURS[number % len(_COLOURS)],
            _DASHES[number // len(_COLOURS) % len(_DASHES)],
        )
        placed = [(x_axis.place(x), y_axis.place(y)) for x, y in _outline(chart, line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        if chart.kind == "line":
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed
            ]
        if chart.names_values:
            parts += _named(placed, [value for _, value in line.points])
        y = 36 + number * _LEGEND_LINE
        parts.append(
            f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + 22}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{_LEFT + 28}" y="{y + 4}">{escape(line.label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    """Places values between two pixels, linearly or by their logarithm."""

    def __init__(
        self, values: Sequence[float], *, low: float, high: float, is_log: bool, from_zero: bool
    ) -> None:
        self._low, self._high = low, high
        self.is_log = is_log and all(value > 0 for value in values)
        least, most = min(values, default=0.0), max(values, default=1.0)
        if not self.is_log and from_zero:
            least, most = min(least, 0.0), max(most, 0.0)
        if least == most:
            least, most = (least / 2, most * 2) if self.is_log else (least - 0.5, most + 0.5)
        self.least, self.most = least, most

    def place(self, value: float) -> float:
        least, most, value = (
            math.log10(v) if self.is_log else v for v in (self.least, self.most, value)
        )
        return self._low + (value - least) / (most - least) * (self._high - self._low)

    def ticks(self) -> list[float]:
        if self.is_log:
            decades = range(
                math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1
            )
            found = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
            return [tick for tick in found if self.least * 0.999 <= tick <= self.most * 1.001]
        rough = (self.most - self.least) / 5
        step = min(
            (factor * 10.0 ** math.floor(math.log10(rough)) for factor in (1, 2, 5, 10)),
            key=lambda s: abs(s - rough),
        )
        first = math.ceil(self.least / step)
        return [number * step for number in range(first, math.floor(self.most / step) + 1)]


def _frame(chart: Chart, x_axis: _Axis, y_axis: _Axis, floor: float) -> Iterator[str]:
    right = _WIDTH - _RIGHT
    for tick in y_axis.ticks():
        y = y_axis.place(tick)
        yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e5e7eb"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
    for tick in x_axis.ticks():
        x = x_axis.place(tick)
        yield f'<line x1="{x:.1f}" y1="{floor}" x2="{x:.1f}" y2="{floor + 5}" stroke="#6b7280"/>'
        yield f'<text x="{x:.1f}" y="{floor + 18}" text-anchor="middle">{_number(tick)}</text>'
    yield f'<line x1="{_LEFT}" y1="{floor}" x2="{right}" y2="{floor}" stroke="#6b7280"/>'
    yield f'<text x="{(_LEFT + right) / 2}" y="{floor + 38}" text-anchor="middle">{escape(chart.x_label)}</text>'
    yield f'<text transform="translate(16 {floor / 2 + 20}) rotate(-90)" text-anchor="middle">{escape(chart.y_label)}</text>'


def _named(placed: Sequence[Point], values: Sequence[float]) -> Iterator[str]:
    """The values beside their points; those at the edges lean inwards."""
    anchors = ["start", *["middle"] * (len(placed) - 2), "end"]
    for (x, y), value, anchor in zip(placed, values, anchors, strict=False):
        yield f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="{anchor}">{_number(value)}</text>'


def _outline(chart: Chart, line: Line) -> list[Point]:
    if chart.kind == "line":
        return list(line.points)
    stairs: list[Point] = []
    height = 0.0
    for x, y in line.points:
        stairs += [(x, height), (x, y)]
        height = y
    return stairs


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.3g}"
