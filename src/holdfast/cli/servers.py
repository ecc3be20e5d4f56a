"""The commands that start, list and stop servers, load models into them and show their logs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeAlias
from urllib.parse import quote

import typer

from holdfast.cli.output import (
    Json,
    count_text,
    load_progress,
    new_table,
    plain_errors,
    print_json,
    print_table,
    size_text,
)
from holdfast.cli.server_command import (
    SERVER_OPTIONS,
    NoSuchServer,
    Server,
    address_of_running,
    chosen_server,
    server_command,
)
from holdfast.cli.settings_command import settings_command
from holdfast.config import EffectiveSettings
from holdfast.errors import AddressInUse, ConfigError, HoldfastError

if TYPE_CHECKING:
    from holdfast.cli.server_client import ServerClient
    from holdfast.front.run.running_servers import RunningServer

_REPORT_SECONDS = 5.0  # for the answers that `ps` shows
_ASK_SECONDS = 2.0  # for all others
_POLL_SECONDS = 0.1
_NO_SERVER = "no server of yours is running on this machine"
_LOG_HINT = "start it with --log-file auto, or set log.file"
_REQUEST_FIELDS = (
    "id",
    "path",
    "state",
    "age_seconds",
    "prompt_tokens",
    "prefilled_tokens",
    "answer_tokens",
)

ModelName: TypeAlias = Annotated[
    str, typer.Argument(metavar="MODEL", help="Its id or alias, as `holdfast models ls` shows it.")
]
_command = partial(server_command, options=SERVER_OPTIONS)


class NoLog(HoldfastError):
    """There is no log file to show."""


@settings_command
def serve(
    effective: EffectiveSettings,
    until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)] = False,
) -> None:
    """Serve models over HTTP.

    The server speaks the APIs of OpenAI, Anthropic and Ollama, and serves /health and /metrics.
    docs/reference/configuration.md lists all settings.
    """
    from holdfast.front.run import front

    if until_stdin_closes:
        threading.Thread(target=_stop_when_stdin_closes, name="stdin-watch", daemon=True).start()
    try:
        with load_progress(effective.settings.log) as progress:
            code = front.run(effective, progress=progress)
    except AddressInUse as error:
        raise ConfigError(port_in_use(error)) from None
    raise typer.Exit(code)


def _stop_when_stdin_closes() -> None:
    """Stop this process when the one that started it is gone, however it ended."""
    # not sys.stdin.read: the interpreter could not exit while that holds its lock
    while os.read(sys.stdin.fileno(), 1024):
        continue
    os.kill(os.getpid(), signal.SIGTERM)


def port_in_use(error: AddressInUse) -> str:
    """One line that names the program on the port and what the user can do. Asks that program."""
    port = error.port
    other_port = port + 1 if port < 65535 else port - 1
    hint = f"or use another port: -p {other_port} (-p 0: a free one)"
    models = _served_models(error.url)
    if models is None:
        return f"port {port} on {error.host} is in use by another program; stop it, {hint}"
    served = ", ".join(models) or "no model yet"
    return (
        f"port {port} on {error.host} is in use by another Holdfast, which serves {served} at "
        f"{error.url} (chat with it: holdfast chat --url {error.url}). Stop that server (holdfast "
        f"stop {port}), {hint}"
    )


def _served_models(url: str) -> list[str] | None:
    """The ids of the models that a Holdfast at this address serves; None if it is no Holdfast."""
    from holdfast.cli.server_client import ServerClient, ServerFailed

    try:
        with ServerClient(url=url, is_local=True) as client:
            health = client.health(seconds=_ASK_SECONDS)
    except ServerFailed:
        return None
    models: Any = health.get("models")
    if "version" not in health or not isinstance(models, list):
        return None
    return [str(model["id"]) for model in models if isinstance(model, dict) and "id" in model]


def ps(as_json: Json = False) -> None:
    """List your servers on this machine.

    It shows their addresses, models, memory, and the requests that are running.
    """
    from holdfast.front.run.running_servers import running_servers

    servers = [_server_report(server) for server in running_servers(os.environ)]
    if as_json:
        print_json(servers)
    elif servers:
        _print_servers(servers)
    else:
        typer.echo(_NO_SERVER)


def _server_report(server: RunningServer) -> dict[str, Any]:
    """The server's line of `ps`. memory_bytes: of its front process."""
    health = health_of(server, seconds=_REPORT_SECONDS) or {"status": "does not answer"}
    models = health.get("models", [])
    requests: list[dict[str, Any]] = []
    if any(model.get("running") or model.get("queued") for model in models):
        answer = _asked(server, "/admin/requests", seconds=_REPORT_SECONDS)
        requests = answer.get("requests", [])
    return {
        "pid": server.pid,
        "url": server.url,
        "up_seconds": max(0.0, time.time() - server.started_at),
        "state": health.get("status", ""),
        "memory_bytes": _resident_bytes(server.pid),
        "log_file": server.log_file,
        "models": [_model_report(model, requests) for model in models],
    }


def _model_report(
    model: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The model's line of `ps`.

    memory_bytes: of its worker process.
    written_today_bytes: to its store folder since midnight (UTC), by all models that share it.
    """
    pid = model.get("pid")
    store = (model.get("memory") or {}).get("store") or {}
    return {
        "id": model.get("id"),
        "state": model.get("state"),
        "running": model.get("running", 0),
        "queued": model.get("queued", 0),
        "pid": pid,
        "memory_bytes": 0 if pid is None else _resident_bytes(pid),
        "written_today_bytes": store.get("written_today_bytes", 0),
        "requests": [
            {name: request.get(name, 0) for name in _REQUEST_FIELDS}
            for request in requests
            if request.get("model") == model.get("id")
        ],
    }


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it has just exited."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def health_of(server: RunningServer, *, seconds: float) -> dict[str, Any]:
    """The answer of a server's /health; empty if there is none in time."""
    return _asked(server, "/health", seconds=seconds)


def _asked(server: RunningServer, path: str, *, seconds: float) -> dict[str, Any]:
    """The answer of a path; empty if it is refused, or not there in time."""
    from holdfast.cli.server_client import ServerFailed

    try:
        with address_of_running(server).client() as client:
            return client.call("GET", path, timeout=seconds)
    except ServerFailed:
        return {}


def _print_servers(servers: Sequence[Mapping[str, Any]]) -> None:
    numbers = ("running", "queued", "memory", "written today")
    table = new_table("pid", "where", "up", "state", *numbers, right=numbers)
    for server in servers:
        models = server["models"]
        # models usually share a folder, and each reports what was written to all of it
        written = max((model["written_today_bytes"] for model in models), default=0)
        table.add_row(
            str(server["pid"]),
            server["url"],
            duration_text(server["up_seconds"]),
            server["state"],
            str(sum(model["running"] for model in models)),
            str(sum(model["queued"] for model in models)),
            size_text(server["memory_bytes"]),
            size_text(written) if written else "",
        )
        for model in models:
            table.add_row(
                str(model["pid"] or ""),
                f"  {model['id']}",
                "",
                model["state"],
                str(model["running"]),
                str(model["queued"]),
                size_text(model["memory_bytes"]) if model["memory_bytes"] else "",
            )
            for request in model["requests"]:
                age = duration_text(request["age_seconds"])
                table.add_row("", f"    {request['path']}", age, progress_text(request))
    print_table(table)


def progress_text(request: Mapping[str, Any]) -> str:
    """How far a request is."""
    if request["answer_tokens"]:
        return f"{request['answer_tokens']:,} tokens generated"
    if request["prefilled_tokens"]:
        return f"prefill {request['prefilled_tokens']:,} of {request['prompt_tokens']:,}"
    return str(request["state"])


def duration_text(seconds: float) -> str:
    """A duration in its two largest units: `3 min 20 s`."""
    whole = int(seconds)
    days, hours = divmod(whole // 3600, 24)
    minutes = whole // 60 % 60
    if days:
        return f"{days} d {hours} h" if hours else f"{days} d"
    if hours:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    if minutes:
        return f"{minutes} min {whole % 60} s" if whole % 60 else f"{minutes} min"
    return f"{whole} s"


def stop(
    server: Server = None,
    all_servers: Annotated[
        bool, typer.Option("--all", help="All of yours on this machine.")
    ] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Cut running answers off instead of waiting for them.")
    ] = False,
) -> None:
    """Stop a server.

    It accepts no new requests, finishes running ones (for at most `server.shutdown_seconds`) and
    saves its cache.
    """
    from holdfast.front.run.running_servers import running_servers

    with plain_errors():
        if all_servers and server is not None:
            raise NoSuchServer(f"either {server} or --all")
        chosen = running_servers(os.environ) if all_servers else [chosen_server(server)]
    for each in chosen:
        _terminate(each)
    for each in chosen:
        _wait_until_stopped(each, now=now)
    if not chosen:
        typer.echo(_NO_SERVER)


def _terminate(server: RunningServer) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGTERM)


def _wait_until_stopped(server: RunningServer, *, now: bool) -> None:
    from holdfast.front.run.running_servers import running_servers

    printed = 0
    # running servers hold a lock; the process id may already belong to another process
    while server in running_servers(os.environ):
        requests = _unfinished_requests(server)
        if requests and now:
            _terminate(server)
            now = False  # another signal would also end the workers that save their cache
        elif requests and requests != printed:
            typer.echo(f"{server.url} waits for {count_text(requests, 'request')}")
            printed = requests
        time.sleep(_POLL_SECONDS)
    typer.echo(f"stopped {server.url} (pid {server.pid})")


def _unfinished_requests(server: RunningServer) -> int:
    """How many requests a stopping server still answers; 0 if that is unknown."""
    health = health_of(server, seconds=_ASK_SECONDS)
    if health.get("status") != "stopping":
        return 0
    return sum(int(model["leases"]) for model in health["models"])


@_command
def load(
    server: ServerClient,
    name: ModelName,
    pin: Annotated[
        bool, typer.Option("--pin", help="Also keep it loaded when other models need memory.")
    ] = False,
) -> None:
    """Load a model into a running server, and wait until it is ready."""
    state = _change_model(server, name, "pin" if pin else "load")
    typer.echo(f"{name} is {state}{', and stays loaded' if pin else ''}")


@_command
def unload(
    server: ServerClient,
    name: ModelName,
    unpin: Annotated[bool, typer.Option("--unpin", help="Unpin it first if it is pinned.")] = False,
) -> None:
    """Unload a model from a running server.

    The server finishes its answers first. The model's cache stays on disk.
    """
    if unpin:
        _change_model(server, name, "pin", json={"pinned": False})
    typer.echo(f"{name} is {_change_model(server, name, 'unload')}")


def _change_model(server: ServerClient, name: str, action: str, **request: Any) -> str:
    """Returns the new state of the model. Raises ServerFailed."""
    return str(server.call("POST", f"/admin/models/{quote(name)}/{action}", **request)["state"])


def logs(
    server: Server = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new lines as they are written.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of last lines to show.")
    ] = 100,
) -> None:
    """Show the log of a server.

    By default it is that of the running server, or else the latest. A server that has stopped is
    named by its port.
    """
    with plain_errors():
        path = _log_of(server)
        try:
            file = path.open(encoding="utf-8", errors="replace")
            shown = list(last_lines(path, file, lines))
        except OSError as error:
            raise NoLog(f"the log {path} cannot be read: {error.strerror or error}") from None
    for line in shown:
        typer.echo(line)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            for line in followed(path, file):
                typer.echo(line)


def _log_of(number: int | None) -> Path:
    """The log file of the server with that process id or port. Raises NoLog and NoSuchServer."""
    from holdfast.files import logs_folder
    from holdfast.front.run.running_servers import running_servers
    from holdfast.telemetry.logs import LOG_SUFFIX

    running = running_servers(os.environ)
    with_log = [server for server in running if server.log_file]
    files: list[Path] = []
    with contextlib.suppress(RuntimeError):  # the user has no home
        files = sorted(logs_folder(os.environ).glob(f"*{LOG_SUFFIX}"), key=_modified_at)
    if number is None and len(with_log) == 1:
        return Path(with_log[0].log_file)
    if number is None and not with_log:
        if not files:
            raise NoLog(f"no server has written a log file; {_LOG_HINT}")
        return files[-1]
    if not any(number in (server.pid, server.port) for server in running):
        name = re.compile(rf"server-{number}(-\d+)?{re.escape(LOG_SUFFIX)}")
        stopped = [path for path in files if name.fullmatch(path.name)]
        if stopped:
            return stopped[-1]
    chosen = chosen_server(number)
    if not chosen.log_file:
        raise NoLog(f"the server at {chosen.url} logs to its standard error only; {_LOG_HINT}")
    return Path(chosen.log_file)


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it was just rotated
        return 0.0


def last_lines(path: Path, file: TextIO, number: int) -> Iterator[str]:
    """The last lines of an open log, also from its rotated files if it has too few."""
    found = deque(file, maxlen=number)
    for age in range(1, 101):
        if len(found) >= number:
            break
        rotated = path.with_name(f"{path.name}.{age}")
        try:
            with rotated.open(encoding="utf-8", errors="replace") as older:
                found.extendleft(reversed(deque(older, maxlen=number - len(found))))
        except FileNotFoundError:
            break
    return (line.rstrip("\n") for line in found)


def followed(path: Path, file: TextIO) -> Iterator[str]:
    """New lines of an open log, for ever; continues with the new file after a rotation."""
    partial_line = ""
    while True:
        is_rotated = _is_rotated(path, file)  # before the read, so that no line is missed
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
    try:
        return not os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:  # the new file does not exist yet
        return False
