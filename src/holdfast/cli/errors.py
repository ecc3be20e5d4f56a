"""How a command ends when something is wrong: one clear line on stderr and an exit code."""

from __future__ import annotations

import contextlib
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


def complain(message: str) -> None:
    """Print one line to stderr, whatever line breaks the message has."""
    typer.echo(f"holdfast: {' '.join(message.split())}", err=True)
