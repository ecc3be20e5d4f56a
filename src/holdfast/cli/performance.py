"""`holdfast performance`: how long requests took, from the history of a running server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from holdfast.cli.output import Json, new_table, print_json, print_rows, print_table
from holdfast.cli.server_client import SERVER_OPTIONS, ServerClient, server_command

# field of the server's answer → title of the row
_PHASES = {
    "load": "load",
    "queue": "queue",
    "lookup": "lookup",
    "restore": "restore",
    "prefill": "prefill",
    "first_token": "first token",
    "gap": "gap between tokens",
}


class Range(StrEnum):
    """How far back the history may be shown."""

    QUARTER = "15m"
    HOUR = "1h"
    SIX_HOURS = "6h"
    DAY = "24h"
    WEEK = "7d"


# the columns of `_summary`
_SUMMARY = ("answers", "generated", "first token", "gap", "tokens/s", "from the cache")
_RANGE_TEXTS = {
    Range.QUARTER: "15 minutes",
    Range.HOUR: "hour",
    Range.SIX_HOURS: "6 hours",
    Range.DAY: "24 hours",
    Range.WEEK: "7 days",
}


@partial(server_command, options=SERVER_OPTIONS)
def performance(
    server: ServerClient,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Show only this model.")
    ] = None,
    time_range: Annotated[
        Range, typer.Option("--range", case_sensitive=False, help="How far back to look.")
    ] = Range.HOUR,
    over_time: Annotated[
        bool, typer.Option("--over-time", help="Also show how the figures changed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show how long requests took, by phase: queue, load, restore, prefill, first token, gaps.

    The server keeps a history of seven days, also while it is stopped.
    """
    query = {"range": time_range.value} | ({"model": model} if model else {})
    report = server.call("GET", "/admin/performance", params=query)
    if as_json:
        print_json(report)
        return
    if not report["points"]:
        hint = "" if time_range == Range.WEEK else "; try --range 7d"
        typer.echo(f"no answers in the last {_RANGE_TEXTS[time_range]}{hint}")
        return
    _print_totals(report["total"])
    _print_phases(report["total"])
    if model is None and len(report["models"]) > 1:
        _print_models(report["models"])
    if over_time:
        _print_points(report["points"], has_days=time_range == Range.WEEK)


def _print_totals(total: Mapping[str, Any]) -> None:
    """Print the counts and shares of the whole range."""
    speed = total["speed"]
    print_rows(
        [
            ("answers", f"{total['answers']:,}"),
            ("generated tokens", f"{total['generated_tokens']:,}"),
            ("prompt tokens", f"{total['prompt_tokens']:,}"),
            ("from the cache", share_text(total["cached_tokens"], total["prompt_tokens"])),
            ("tokens per second", speed_text(speed)),
            ("drafts accepted", share_text(total["accepted_tokens"], total["drafted_tokens"])),
        ]
    )
    typer.echo()


def _print_phases(total: Mapping[str, Any]) -> None:
    """Print how long each phase took."""
    numbers = ("median", "p95", "p99", "mean", "count")
    table = new_table("phase", *numbers, right=numbers)
    for name, title in _PHASES.items():
        figures = total[name]
        if figures is not None:
            percentiles = [seconds_text(figures[each]) for each in ("p50", "p95", "p99", "mean")]
            table.add_row(title, *percentiles, f"{figures['count']:,}")
    print_table(table)


def _print_models(models: list[dict[str, Any]]) -> None:
    """Print a row for each model."""
    typer.echo()
    table = new_table("model", *_SUMMARY, right=_SUMMARY)
    for model in models:
        table.add_row(model["model"], *_summary(model["figures"]))
    print_table(table)


def _print_points(points: list[dict[str, Any]], *, has_days: bool) -> None:
    """Print a row for each part of the range. has_days: whether the times need a date."""
    typer.echo()
    table = new_table("time", *_SUMMARY, right=_SUMMARY)
    time_format = "%Y-%m-%d %H:%M" if has_days else "%H:%M"
    for point in points:
        time_text = time.strftime(time_format, time.localtime(point["at"]))
        table.add_row(time_text, *_summary(point["figures"]))
    print_table(table)


def _summary(figures: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells for one model or moment: counts, and medians of what was measured."""
    first_token, gap, speed = (figures[name] for name in ("first_token", "gap", "speed"))
    return (
        f"{figures['answers']:,}",
        f"{figures['generated_tokens']:,}",
        "" if first_token is None else seconds_text(first_token["p50"]),
        "" if gap is None else seconds_text(gap["p50"]),
        "" if speed is None else f"{speed['p50']:.1f}",
        share_text(figures["cached_tokens"], figures["prompt_tokens"]),
    )


def speed_text(speed: Mapping[str, Any] | None) -> str:
    """Describe the speeds of answers; empty if none was measured."""
    if speed is None:
        return ""
    return f"median {speed['p50']:.1f}, 95 % at least {speed['p5']:.1f}"


def share_text(part: int, whole: int) -> str:
    """`part` as a percentage of `whole`; an empty string if `whole` is 0."""
    return f"{100 * part / whole:.0f} %" if whole else ""


def seconds_text(seconds: float) -> str:
    """A duration with three digits: `1.53 s`, `18.2 ms`."""
    scaled, unit = (seconds * 1000, "ms") if seconds < 0.1 else (seconds, "s")
    return f"{scaled:.3g} {unit}" if scaled < 1000 else f"{scaled:,.0f} {unit}"
