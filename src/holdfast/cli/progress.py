"""Progress bars of a load or download, on a terminal; one line per stage elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from holdfast.config import LogSettings

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextlib.contextmanager
def load_progress(log: LogSettings) -> Iterator[Callable[[str, float], None]]:
    """A function `(stage, fraction)` that draws on stderr. Stages may come in any order; "ready" removes the bars."""
    if not sys.stderr.isatty() or log.format == "json":
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False)
    drawing = LoadBars(bars)
    try:
        yield drawing
    finally:
        drawing.stop()


class LoadBars:
    """One bar per stage. Called from one thread."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, fraction: float) -> None:
        """Show that a stage is so far; 1.0 is its end."""
        if stage == "ready":
            self.stop()
            return
        if not self._tasks:
            self._bars.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=1.0)
        self._bars.update(self._tasks[stage], completed=min(1.0, max(0.0, fraction)))

    def stop(self) -> None:
        """Remove all bars. Twice is fine; a restart of the worker draws new ones."""
        if self._tasks:
            self._bars.stop()
            for task in self._tasks.values():
                self._bars.remove_task(task)
            self._tasks.clear()


def _ignore(stage: str, fraction: float) -> None:
    """Elsewhere than on a terminal the log says what happens."""
