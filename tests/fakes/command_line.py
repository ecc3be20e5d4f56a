"""Run the command line like a user: as a process, or half a second faster in this one."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from holdfast.cli.main import app

LONGEST_SECONDS = 180


def holdfast(
    *arguments: str, cwd: Path, stdin: str = "", variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `holdfast …` to its end, in a folder without settings."""
    environ = os.environ | {"COLUMNS": "200"} | (variables or {})
    command = [sys.executable, "-m", "holdfast.cli.main", *arguments]
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environ,
        timeout=LONGEST_SECONDS,
        check=False,
    )


def holdfast_here(
    *arguments: str, cwd: Path, stdin: str = "", variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The same in this process, for commands that change nothing in it."""
    environ = {"COLUMNS": "200"} | (variables or {})
    with contextlib.chdir(cwd), kept_log_handlers():
        done = CliRunner().invoke(
            app, arguments, input=stdin, env=environ, catch_exceptions=False, prog_name="holdfast"
        )
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


@contextlib.contextmanager
def kept_log_handlers() -> Iterator[None]:
    """A command in the block may replace the log's handlers, which are restored afterwards, since
    its own ones write to a stream that is closed then.
    """
    log = logging.getLogger()
    handlers, level = log.handlers[:], log.level
    try:
        yield
    finally:
        log.handlers[:] = handlers
        log.setLevel(level)


def only_line(text: str) -> str:
    """The single line of an error."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]
