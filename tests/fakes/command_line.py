"""Run the command line like a user: as a process, or half a second faster in this one."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

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
    with contextlib.chdir(cwd):
        done = invoked(
            arguments, input=stdin, env=environ, catch_exceptions=False, prog_name="holdfast"
        )
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def invoked(arguments: Sequence[str], **options: Any) -> Result:
    """Run a command in this process. The log's handlers are restored afterwards, since those of the
    command write to a stream that is closed then.
    """
    log = logging.getLogger()
    handlers, level = log.handlers[:], log.level
    try:
        return CliRunner().invoke(app, arguments, **options)
    finally:
        log.handlers[:] = handlers
        log.setLevel(level)


def only_line(text: str) -> str:
    """The single line of an error."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]
