"""The progress bar of a load or download, on a terminal; elsewhere the log tells what happens."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from holdfast.config import LogSettings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


@contextlib.contextmanager
def load_progress(log: LogSettings) -> Iterator[Callable[[str, float], None]]:
    """A function `(stage, fraction)` that draws on stderr; the stage "ready" removes what was
    drawn.
    """
    if not sys.stderr.isatty() or log.format == "json":
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    bars = Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    drawing = LoadBar(bars)
    try:
        yield drawing
    finally:
        drawing.stop()


class LoadBar:
    """One line: the stage under way and how far it is; what is logged meanwhile goes above it.

    Called from one thread.
    """

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._logs_above = contextlib.ExitStack()
        self._stage = ""
        self._task: TaskID | None = None

    def __call__(self, stage: str, fraction: float) -> None:
        """Show that a stage is so far; one stage follows the other, and "ready" is the last."""
        if stage == "ready":
            self.stop()
            return
        if self._task is None:
            self._bars.start()
            self._logs_above.enter_context(_logs_above(self._bars.console))
            self._task = self._bars.add_task(stage, total=1.0)
        elif stage != self._stage:
            self._bars.reset(self._task, description=stage)
        self._stage = stage
        self._bars.update(self._task, completed=min(1.0, max(0.0, fraction)))

    def stop(self) -> None:
        """Remove the line. Twice is fine; when a worker is started anew it comes back."""
        if self._task is not None:
            self._logs_above.close()
            self._bars.stop()
            self._bars.remove_task(self._task)
            self._task = None


@contextlib.contextmanager
def _logs_above(console: Console) -> Iterator[None]:
    """While the line is drawn: lines of the log on the same terminal are printed above it, not into
    it.
    """
    from rich.file_proxy import FileProxy

    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    moved = [(handler, handler.stream) for handler in handlers if handler.stream is sys.stderr]
    for handler, stream in moved:
        handler.setStream(FileProxy(console, stream))
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)


def _ignore(stage: str, fraction: float) -> None:
    """Elsewhere than on a terminal the log says what happens."""
