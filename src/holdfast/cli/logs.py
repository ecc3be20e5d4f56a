"""`holdfast logs`: the log of a server, from its file or from the running server."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from holdfast.cli.output import complain, plain_errors
from holdfast.cli.server_client import ApiKey, Server, chosen_server, client_of_own, own_servers
from holdfast.cli.settings import read_settings
from holdfast.errors import HoldfastError

_POLL_SECONDS = 0.1
_ASK_AGAIN_SECONDS = 0.5  # for new lines of a running server
_LOG_HINT = (
    "start the server with --log-file auto, or set log.file; `holdfast logs --level info` shows the "
    "latest lines of a running server"
)


class Level(StrEnum):
    """The levels that a line may have, the lowest first."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class LogUnavailable(HoldfastError):
    """There is no log file, or it cannot be read."""


def logs(
    server: Server = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep showing new lines as they are written.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="How many of the last lines to show.")
    ] = 100,
    level: Annotated[
        Level | None,
        typer.Option("--level", case_sensitive=False, help="Only lines of this level or above."),
    ] = None,
    request: Annotated[
        str | None, typer.Option("--request", metavar="ID", help="Only lines of this request.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option("--text", help="Only lines that contain this text (case-insensitive)."),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Show the log of a server.

    Without an argument, this is the log of the running server, or else the latest log. Use the port
    for a server that has stopped. With --level, --request or --text, a running server is asked for
    the lines; it keeps the latest 2,000, also without a log file.
    """
    conditions = {"level": level and level.value, "request_id": request, "text": text}
    filters = {name: value for name, value in conditions.items() if value is not None}
    if filters:
        with plain_errors(), contextlib.suppress(KeyboardInterrupt):
            for line in _lines_of_server(server, filters, lines, follows=follow, api_key=api_key):
                typer.echo(line)
        return
    with plain_errors():
        path = _log_file_of(server)
        try:
            file = path.open(encoding="utf-8", errors="replace")
            shown_lines = list(last_lines(path, file, lines))
        except OSError as error:
            raise LogUnavailable(
                f"the log {path} cannot be read: {error.strerror or error}"
            ) from None
    for line in shown_lines:
        typer.echo(line)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            for line in followed(path, file):
                typer.echo(line)


def _lines_of_server(
    pid_or_port: int | None,
    filters: Mapping[str, str],
    most_lines: int,
    *,
    follows: bool,
    api_key: str | None,
) -> Iterator[str]:
    """Yield the last lines that a running server keeps in memory; then, if `follows`, new ones.

    Raises NoSuchServer, ServerFailed.
    """
    from holdfast.front.telemetry.log_ring import MOST_LINES

    if api_key is None:
        api_key = read_settings().settings.server.api_key
    last_number = 0
    with client_of_own(chosen_server(pid_or_port), api_key=api_key) as client:
        while True:
            query = {**filters, "after": str(last_number)}
            new_lines = client.call("GET", "/admin/logs", params=query)["lines"]
            for line in new_lines[max(0, len(new_lines) - most_lines) :]:
                yield line_text(line)
            if not follows:
                if not new_lines:
                    complain(f"no line matches among the latest {MOST_LINES:,} of {client.url}")
                return
            last_number = max([last_number, *(line["number"] for line in new_lines)])
            most_lines = MOST_LINES  # from now on, every new line
            time.sleep(_ASK_AGAIN_SECONDS)


def line_text(line: Mapping[str, Any]) -> str:
    """Format a line of /admin/logs as the log file has it."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["time"]))
    text = str(line["text"]).replace("\n", "\n    ")
    if not line["logger"].endswith("request_log"):
        text = f"{line['logger']}: {text}"
    return f"{at} {line['level'].upper():7} {text}"


def _log_file_of(pid_or_port: int | None) -> Path:
    """Return the log of the server with this process id or port.

    Raises LogUnavailable, NoSuchServer.
    """
    from holdfast.files import logs_folder
    from holdfast.front.telemetry.logs import LOG_SUFFIX

    running = own_servers()
    servers_with_log = [server for server in running if server.log_file]
    log_files: list[Path] = []
    with contextlib.suppress(RuntimeError):  # the user lacks a home folder
        log_files = sorted(logs_folder(os.environ).glob(f"*{LOG_SUFFIX}"), key=_modified_at)
    if pid_or_port is None and len(servers_with_log) == 1:
        return Path(servers_with_log[0].log_file)
    if pid_or_port is None and not servers_with_log:
        if not log_files:
            raise LogUnavailable(f"no server has written a log file; {_LOG_HINT}")
        return log_files[-1]
    if not any(pid_or_port in (server.pid, server.port) for server in running):
        name = re.compile(rf"server-{pid_or_port}(-\d+)?{re.escape(LOG_SUFFIX)}")
        logs_of_port = [path for path in log_files if name.fullmatch(path.name)]
        if logs_of_port:
            return logs_of_port[-1]
    server = chosen_server(pid_or_port)
    if not server.log_file:
        raise LogUnavailable(
            f"the server at {server.url} logs to its standard error only; {_LOG_HINT}"
        )
    return Path(server.log_file)


def _modified_at(path: Path) -> float:
    """When the file was last written, in seconds since the epoch."""
    try:
        return path.stat().st_mtime
    except OSError:  # the file was just rotated
        return 0.0


def last_lines(path: Path, file: TextIO, number: int) -> Iterator[str]:
    """Yield the last lines of an open log.

    If it has too few, includes lines of its rotated files.
    """
    lines = deque(file, maxlen=number)
    for age in range(1, 101):
        if len(lines) >= number:
            break
        rotated = path.with_name(f"{path.name}.{age}")
        try:
            with rotated.open(encoding="utf-8", errors="replace") as older_file:
                lines.extendleft(reversed(deque(older_file, maxlen=number - len(lines))))
        except FileNotFoundError:
            break
    return (line.rstrip("\n") for line in lines)


def followed(path: Path, file: TextIO) -> Iterator[str]:
    """Yield new lines of an open log, forever. After a rotation, continues with the new file."""
    partial_line = ""
    while True:
        is_rotated = _is_rotated(path, file)  # checked before the read, so that no line is missed
        if text := file.readline():
            partial_line += text
            if partial_line.endswith("\n"):
                yield partial_line[:-1]
                partial_line = ""
        elif is_rotated:
            file.close()
            file = path.open(encoding="utf-8", errors="replace")
        else:
            time.sleep(_POLL_SECONDS)


def _is_rotated(path: Path, file: TextIO) -> bool:
    """Whether `path` is now another file than the open one."""
    try:
        return not os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:  # the new file does not exist yet
        return False
