"""What commands print: JSON for programs; tables, numbers, errors and a progress bar for people."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import typer

from holdfast.config import LogSettings
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

_NO_LIMIT = 1 << 16  # width in characters of a table in a pipe, so that no row is wrapped

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
# exit codes
FAILED = 1
BAD_INPUT = 2


def print_json(value: Any) -> None:
    """Print a structure as JSON. Values without a JSON form, such as paths, are printed as text."""
    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=str)
    typer.echo(json.dumps(plain, indent=2, ensure_ascii=False))


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and values, one pair per line. Pairs with an empty value are left out."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        if value:
            typer.echo(f"{name:<{width}}  {value}")


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Create a table without borders. right: names of the columns to align right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in right else "left")
    return table


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal. In a pipe, each row is one line."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _NO_LIMIT
    console.print(table)


@contextlib.contextmanager
def plain_errors(log_format: str = "text") -> Iterator[None]:
    """Turn a HoldfastError into one line in the log's format, and exit with code 2.

    Any other exception is a bug and keeps its traceback.
    """
    try:
        yield
    except HoldfastError as error:
        complain(str(error), log_format=log_format)
        raise typer.Exit(BAD_INPUT) from None


def require_working_folder() -> None:
    """Exit with a message if the working folder was deleted, because settings and paths are
    relative to it.
    """
    try:
        os.getcwd()
    except OSError as error:
        complain(f"the working folder cannot be used ({error.strerror}): change to another one")
        raise typer.Exit(BAD_INPUT) from None


def complain(message: str, *, log_format: str = "text") -> None:
    """Print the message as one line to stderr.

    With log_format "json", the line is JSON as in the log.
    """
    line = " ".join(message.split())
    if log_format == "json":
        from holdfast.front.telemetry.logs import JsonLines

        typer.echo(
            JsonLines().format(
                logging.LogRecord("holdfast", logging.ERROR, "", 0, line, None, None)
            ),
            err=True,
        )
    else:
        typer.echo(f"holdfast: {line}", err=True)


def time_text(seconds: float) -> str:
    """Format a time, in seconds since the epoch, as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def size_text(size: int) -> str:
    """Format a number of bytes in binary units: 1536 is `1.5 KiB`."""
    shown = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if shown < 1024:
            return f"{size} bytes" if unit == "bytes" else f"{shown:.1f} {unit}"
        shown /= 1024
    return f"{shown:,.1f} TiB"


def count_text(number: int, one: str, many: str = "") -> str:
    """Format a count with its noun: `1 block`, `2 blocks`, `1,000 branches`. many: an irregular
    plural.
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


@contextlib.contextmanager
def load_progress(log: LogSettings) -> Iterator[Callable[[str, float], None]]:
    """Yield a function `(stage, fraction)` that draws a progress bar on stderr.

    The stage "ready" removes the bar. If stderr is not a terminal, the bar is not drawn; the log
    has the same information.
    """
    if not sys.stderr.isatty() or log.format == "json":
        yield lambda stage, fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    progress = Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar = LoadBar(progress)
    try:
        yield bar
    finally:
        bar.stop()


class LoadBar:
    """A line with the current stage and its progress. Log lines appear above it.

    Called from one thread only.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._logs_above = contextlib.ExitStack()  # while open, log lines appear above the bar
        self._stage = ""
        self._task: TaskID | None = None  # None: nothing is shown

    def __call__(self, stage: str, fraction: float) -> None:
        """Show the progress of a stage. Stages follow one another; the last one is "ready"."""
        if stage == "ready":
            self.stop()
            return
        if self._task is None:
            self._progress.start()
            self._logs_above.enter_context(_logs_above(self._progress.console))
            self._task = self._progress.add_task(stage, total=1.0)
        elif stage != self._stage:
            self._progress.reset(self._task, description=stage)
        self._stage = stage
        self._progress.update(self._task, completed=min(1.0, max(0.0, fraction)))

    def stop(self) -> None:
        """Remove the line. May be called twice. If a worker restarts, the line comes back."""
        if self._task is not None:
            self._logs_above.close()
            self._progress.stop()
            self._progress.remove_task(self._task)
            self._task = None


@contextlib.contextmanager
def _logs_above(console: Console) -> Iterator[None]:
    """Print log lines above the progress line instead of into it."""
    from rich.file_proxy import FileProxy

    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    handlers_of_stderr = [
        (handler, handler.stream) for handler in handlers if handler.stream is sys.stderr
    ]
    for handler, stream in handlers_of_stderr:
        handler.setStream(FileProxy(console, stream))
    try:
        yield
    finally:
        for handler, stream in handlers_of_stderr:
            handler.setStream(stream)
