"""The progress bar of a load: only on a terminal, one line, gone when the model is ready."""

from __future__ import annotations

import io
import logging
import sys

import pyte
import pytest
from rich.console import Console
from rich.progress import Progress

from holdfast.cli.output import LoadBar, load_progress
from holdfast.config import LogSettings


def bar() -> tuple[LoadBar, Progress]:
    progress = Progress(
        console=Console(file=io.StringIO(), force_terminal=True), auto_refresh=False, transient=True
    )
    return LoadBar(progress), progress


def shown(progress: Progress) -> list[tuple[str, float]]:
    return [(task.description, task.completed) for task in progress.tasks]


def test_the_line_shows_the_current_stage_within_bounds() -> None:
    drawing, progress = bar()
    drawing("download", 0.5)
    assert shown(progress) == [("download", 0.5)]
    drawing("download", 1.5)
    assert shown(progress) == [("download", 1.0)]
    drawing("reading", -1.0)
    assert shown(progress) == [("reading", 0.0)]
    drawing.stop()


def test_ready_removes_the_line_and_a_restart_restores_it() -> None:
    drawing, progress = bar()
    drawing("reading", 1.0)
    drawing("ready", 1.0)
    assert shown(progress) == []
    drawing("reading", 0.5)
    assert shown(progress) == [("reading", 0.5)]
    drawing.stop()
    drawing.stop()
    assert shown(progress) == []


def test_log_lines_appear_above_the_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = io.StringIO()
    monkeypatch.setattr(sys, "stderr", output)
    console = Console(file=output, force_terminal=True, width=60)
    progress = Progress(
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stderr=False,
        redirect_stdout=False,
    )
    drawing, log = LoadBar(progress), logging.getLogger()
    # the only handler: another test may have left one whose stream is closed
    monkeypatch.setattr(log, "handlers", [logging.StreamHandler(output)])
    drawing("reading", 0.25)
    progress.refresh()
    log.warning("the first, \x1b[33min colour\x1b[0m")
    drawing("reading", 0.5)
    progress.refresh()
    log.warning("the second")
    during = screen(output.getvalue())
    drawing("ready", 1.0)
    log.warning("the third")
    assert during[:2] == ["the first, in colour", "the second"]
    assert during[2].startswith("reading")
    assert screen(output.getvalue()) == ["the first, in colour", "the second", "the third"]


def screen(output: str) -> list[str]:
    """The lines that a terminal shows."""
    terminal = pyte.Screen(60, 10)
    pyte.Stream(terminal).feed(output.replace("\n", "\r\n"))
    return [line.rstrip() for line in terminal.display if line.strip()]


def test_no_bar_is_drawn_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with load_progress(LogSettings()) as progress:
        progress("reading", 0.5)
    assert capsys.readouterr().err == ""
