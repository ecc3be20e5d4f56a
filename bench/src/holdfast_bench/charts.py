"""Which pictures a run gives: first text over context, throughput over streams, gap histogram,
memory over agents.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast_bench.results import CaseResult, ContenderResult, Results

Point = tuple[float, float]
_BINS_PER_DECADE = 8
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A picture, before anything is drawn."""

    name: str  # of its file
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    kind: Literal["line", "steps"] = "line"
    log_x: bool = False
    log_y: bool = False
    names_values: bool = False  # each point has its value beside it


def charts_of(results: Results) -> list[Chart]:
    """All charts that these results have figures for."""
    by_model: dict[str, list[CaseResult]] = defaultdict(list)
    for case in results.cases:
        by_model[case.model].append(case)
    found: list[Chart] = []
    for model, cases in by_model.items():
        found += [chart for make in _MAKERS for chart in make(model, cases) if chart.lines]
    return found


def _first_token_over_context(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    prefill = [case for case in cases if case.scenario == "prefill"]
    yield Chart(
        name=f"first-token-{model}",
        title=f"Time to the first token over the length of the prompt, cold ({model})",
        x_label="prompt tokens",
        y_label="seconds",
        lines=_over(prefill, "prompt_tokens", lambda each: each.pooled("first_token_seconds")),
        log_x=True,
        log_y=True,
    )
    reuse = [case for case in cases if case.scenario == "reuse"]
    steps = dict.fromkeys(
        name
        for case in reuse
        for name in case.metric_names()
        if name.startswith("first_token_seconds @ ")
    )
    lines: list[Line] = []
    for step in steps:
        found = _over(reuse, "context_tokens", lambda each, step=step: each.pooled(step))  # type: ignore[misc]
        lines += [
            Line(label=f"{line.label}, {step.split(' @ ')[1]}", points=line.points)
            for line in found
        ]
    yield Chart(
        name=f"reuse-{model}",
        title=f"Time to the first token when a context comes back ({model})",
        x_label="context tokens",
        y_label="seconds",
        lines=tuple(lines),
        log_x=True,
        log_y=True,
    )


def _next_turn_over_context(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    for is_chat in (False, True):
        chosen = [
            case
            for case in cases
            if case.scenario == "next-turn" and case.settings.get("is_chat") == is_chat
        ]
        steps = _over(chosen, "context_tokens", lambda each: each.pooled("step_seconds"))
        yield Chart(
            name=f"next-turn-{'chat-' if is_chat else ''}{model}",
            title=f"Time of a next turn over the context behind it{', chat' if is_chat else ''} ({model})",
            x_label="tokens of the context",
            y_label="seconds to the first token",
            lines=(
                *_over(chosen, "context_tokens", lambda each: each.pooled("first_token_seconds")),
                *(
                    Line(label="an engine step over as many new tokens", points=line.points)
                    for line in steps
                ),
            ),
            log_x=True,
        )


def _first_token_after_a_restart(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    reuse = [case for case in cases if case.scenario == "reuse"]
    yield Chart(
        name=f"restart-{model}",
        title=f"Time to the first token of a context that was read before the server was restarted ({model})",
        x_label="tokens of the context",
        y_label="seconds",
        lines=_over(
            reuse,
            "context_tokens",
            lambda each: each.pooled("first_token_seconds @ after a restart"),
        ),
        log_x=True,
        log_y=True,
        names_values=True,
    )


def _throughput_over_streams(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    for kind in ("equal", "ragged"):
        chosen = [
            case
            for case in cases
            if case.scenario == "streams" and case.settings.get("kind") == kind
        ]
        yield Chart(
            name=f"streams-{kind}-{model}",
            title=f"Throughput over streams, {kind} prompts ({model})",
            x_label="streams",
            y_label="tokens per second",
            lines=_over(chosen, "streams", lambda each: each.pooled("tokens_per_second")),
        )


def _gap_histogram(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    for case in cases:
        if case.scenario == "stall":
            lines = [
                Line(
                    label=each.label,
                    points=histogram([gap for sample in each.rounds for gap in sample.gaps]),
                )
                for each in case.contenders
            ]
            slug = case.case.replace(" ", "-")
            yield Chart(
                name=f"gaps-{slug}-{model}",
                title=f"Gaps of a stream: {case.case} arriving ({model})",
                x_label="milliseconds between texts",
                y_label="share of texts",
                lines=tuple(line for line in lines if line.points),
                kind="steps",
                log_x=True,
            )


def _memory_over_agents(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    for case in cases:
        if case.scenario == "memory":
            slug = case.case.replace(",", "").replace(" ", "-")
            lines = [
                Line(label=each.label, points=_kept_by_agents(each)) for each in case.contenders
            ]
            yield Chart(
                name=f"memory-{slug}-{model}",
                title=f"Memory kept over agents: {case.case} ({model})",
                x_label="agents",
                y_label="MiB",
                lines=tuple(line for line in lines if line.points),
            )


def _kept_by_agents(each: ContenderResult) -> tuple[Point, ...]:
    names = dict.fromkeys(
        name
        for sample in each.rounds
        for name in sample.metrics
        if name.startswith("kept_bytes @ ")
    )
    found = [
        (float(name.split(" @ ")[1].split()[0]), statistics.median(each.pooled(name)) / _MEBIBYTE)
        for name in names
    ]
    return tuple(sorted([(0.0, 0.0), *found])) if found else ()


def _disk_over_tokens(model: str, cases: Sequence[CaseResult]) -> Iterator[Chart]:
    growth = [case for case in cases if case.scenario == "growth"]
    lines = [
        Line(label=each.label, points=points)
        for case in growth
        for each in case.contenders
        if (points := _bytes_by_tokens(each))
    ]
    yield Chart(
        name=f"growth-{model}",
        title=f"Bytes on disk over the tokens of one session ({model})",
        x_label="tokens",
        y_label="MiB",
        lines=tuple(lines),
    )


def _bytes_by_tokens(each: ContenderResult) -> tuple[Point, ...]:
    points: list[Point] = [(0.0, 0.0)]
    for sample in each.rounds:
        for name, (tokens,) in sample.metrics.items():
            if name.startswith("context_tokens @ "):
                turn = name.split(" @ ")[1]
                points.append((tokens, sample.metrics[f"disk_bytes @ {turn}"][0] / _MEBIBYTE))
    return tuple(sorted(points)) if len(points) > 1 else ()


_MAKERS: tuple[Callable[[str, Sequence[CaseResult]], Iterator[Chart]], ...] = (
    _first_token_over_context,
    _next_turn_over_context,
    _first_token_after_a_restart,
    _throughput_over_streams,
    _gap_histogram,
    _memory_over_agents,
    _disk_over_tokens,
)


def histogram(seconds: Sequence[float]) -> tuple[Point, ...]:
    """Share of the values in logarithmic bins: (lower bound in ms, share), each bin once, the last
    bound with 0.
    """
    values = [value * 1000 for value in seconds if value > 0]
    if not values:
        return ()
    bins = [math.floor(math.log10(value) * _BINS_PER_DECADE) for value in values]
    first, last = min(bins), max(bins)
    shares = [
        (10 ** (number / _BINS_PER_DECADE), bins.count(number) / len(bins))
        for number in range(first, last + 1)
    ]
    return (*shares, (10 ** ((last + 1) / _BINS_PER_DECADE), 0.0))


def _over(
    cases: Sequence[CaseResult], setting: str, values: Callable[[ContenderResult], list[float]]
) -> tuple[Line, ...]:
    """For each contender the median of its values over a setting of the cases."""
    points: dict[str, list[Point]] = defaultdict(list)
    for case in cases:
        for each in case.contenders:
            found = values(each)
            if found and setting in case.settings:
                points[each.label].append((float(case.settings[setting]), statistics.median(found)))
    return tuple(Line(label=label, points=tuple(sorted(found))) for label, found in points.items())
