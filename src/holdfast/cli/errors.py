"""How a command ends when something is wrong: one clear line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import typer

from holdfast.errors import HoldfastError

BAD_INPUT = 2


@contextlib.contextmanager
def plain_errors(log_format: str = "text") -> Iterator[None]:
    """Turn our own errors into one line in the form of the log, and exit code 2.

    Anything else is a bug: it keeps its trace.
    """
    try:
        yield
    except HoldfastError as error:
        complain(str(error), log_format=log_format)
        raise typer.Exit(BAD_INPUT) from None


def require_working_folder() -> None:
    """End with one line where the working folder has been deleted: paths and settings files are
    looked up from there.
    """
    try:
        os.getcwd()
    except OSError as error:
        complain(f"the working folder cannot be used ({error.strerror}): change to another one")
        raise typer.Exit(BAD_INPUT) from None


def complain(message: str, *, log_format: str = "text") -> None:
    """Print one line to stderr, whatever line breaks the message has; log_format "json": as a line
    of the log.
    """
    line = " ".join(message.split())
    if log_format == "json":
        from holdfast.telemetry.logs import JsonLines

        typer.echo(
            JsonLines().format(
                logging.LogRecord("holdfast", logging.ERROR, "", 0, line, None, None)
            ),
            err=True,
        )
    else:
        typer.echo(f"holdfast: {line}", err=True)
