"""`holdfast logs`: the log of a server that writes one into a file."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TextIO

import typer

from holdfast.cli.output import plain_errors
from holdfast.cli.server_command import Server, chosen_server
from holdfast.errors import HoldfastError

_LOOK_SECONDS = 0.2


class NoLog(HoldfastError):
    """There is no file to be shown."""


def logs(
    server: Server = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")
    ] = 100,
) -> None:
    """Show the log of a server.

    It is that of the server that runs, else the latest. A server that has ended is named by its
    port.
    """
    with plain_errors():
        path = _log_of(server)
        try:
            file = path.open(encoding="utf-8", errors="replace")
            shown = list(_last_lines(path, file, lines))
        except OSError as error:
            raise NoLog(f"the log {path} cannot be read: {error.strerror or error}") from None
    for line in shown:
        typer.echo(line)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):  # that is how one leaves
            for line in followed(path, file):
                typer.echo(line)


def _log_of(number: int | None) -> Path:
    """The log file that is meant. Raises NoLog and NoSuchServer."""
    from holdfast.front.run.running_servers import running_servers
    from holdfast.telemetry.log_file import LOG_SUFFIX
    from holdfast.user_folders import logs_folder

    way_out = "start it with --log-file auto, or set log.file"
    running = [server for server in running_servers(os.environ) if server.log_file]
    kept: list[Path] = []
    with contextlib.suppress(RuntimeError):  # a user without a home
        kept = sorted(logs_folder(os.environ).glob(f"*{LOG_SUFFIX}"), key=_written_at)
    if number is not None or len(running) > 1:
        of_ended = [
            path
            for path in kept
            if re.fullmatch(rf"server-{number}(-\d+)?", path.name.removesuffix(LOG_SUFFIX))
        ]
        if of_ended and not any(
            number in (server.pid, server.port) for server in running_servers(os.environ)
        ):
            return of_ended[-1]
        chosen = chosen_server(number)
        if not chosen.log_file:
            raise NoLog(
                f"the server at {chosen.url} writes its log to its standard error only; {way_out}"
            )
        return Path(chosen.log_file)
    if running:
        return Path(running[0].log_file)
    if not kept:
        raise NoLog(f"no server has written a log file; {way_out}")
    return kept[-1]


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it has just been set aside
        return 0.0


def _last_lines(path: Path, file: TextIO, number: int) -> Iterator[str]:
    """The last lines of a file, which is read to its end; also of those that were set aside, when
    it has too few.
    """
    found = deque(file, maxlen=number)
    for age in range(1, 101):
        if len(found) >= number:
            break
        try:
            with path.with_name(f"{path.name}.{age}").open(
                encoding="utf-8", errors="replace"
            ) as older:
                found.extendleft(reversed(deque(older, maxlen=number - len(found))))
        except FileNotFoundError:
            break
    return (line.rstrip("\n") for line in found)


def followed(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of a file that are written from now on, for ever; goes on with the new one when it
    is set aside.
    """
    begun = ""
    while True:
        if line := file.readline():
            begun += line
            if begun.endswith("\n"):
                yield begun[:-1]
                begun = ""
            continue
        if _is_another(path, file.fileno()):
            if rest := file.readline():  # written between the two looks
                begun += rest
                continue
            file.close()
            file = path.open(encoding="utf-8", errors="replace")
            continue
        time.sleep(_LOOK_SECONDS)


def _is_another(path: Path, descriptor: int) -> bool:
    """Whether the file at this path is not the one that is open."""
    try:
        return not os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:  # between two files
        return False
