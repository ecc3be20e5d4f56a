"""Progress bars of a load: only on a terminal, one per stage, gone when the model is ready."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from holdfast.cli.progress import LoadBars, load_progress
from holdfast.config import LogSettings


def bars() -> tuple[LoadBars, Progress]:
    progress = Progress(console=Console(file=io.StringIO(), force_terminal=True), auto_refresh=False, transient=True)
    return LoadBars(progress), progress


def test_each_stage_has_a_bar_that_only_grows_to_its_end() -> None:
    drawing, progress = bars()
    for stage, fraction in (("download", 0.5), ("reading", 0.25), ("download", 1.5), ("reading", -1.0)):
        drawing(stage, fraction)
    assert {task.description: task.completed for task in progress.tasks} == {"download": 1.0, "reading": 0.0}
    drawing.stop()


def test_ready_removes_all_bars_and_a_restart_draws_new_ones() -> None:
    drawing, progress = bars()
    drawing("reading", 1.0)
    drawing("ready", 1.0)
    assert progress.tasks == []
    drawing("reading", 0.5)
    assert [task.completed for task in progress.tasks] == [0.5]
    drawing.stop()
    drawing.stop()
    assert progress.tasks == []


def test_nothing_is_drawn_elsewhere_than_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with load_progress(LogSettings()) as progress:
        progress("reading", 0.5)
    assert capsys.readouterr().err == ""
