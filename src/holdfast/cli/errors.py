"""How a command ends when something is wrong: one clear line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import typer

from holdfast.errors import HoldfastError

BAD_INPUT = 2


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turn our own errors into one line and exit code 2. Anything else is a bug and keeps its traceback."""
    try:
        yield
    except HoldfastError as error:
        complain(str(error))
        raise typer.Exit(BAD_INPUT) from None


def require_working_folder() -> None:
    """End with one line where the working folder has been deleted: paths and settings files are looked up from there."""
    try:
        os.getcwd()
    except OSError as error:
        complain(f"the working folder cannot be used ({error.strerror}): change to another one")
        raise typer.Exit(BAD_INPUT) from None


def complain(message: str) -> None:
    """Print one line to stderr, whatever line breaks the message has."""
    typer.echo(f"holdfast: {' '.join(message.split())}", err=True)
