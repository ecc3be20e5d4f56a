"""The commands for servers that run: `holdfast ps` lists them, `stop` ends them, `load` and `unload`
change which models they hold.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import quote

import typer

from holdfast.cli.output import (
    Json,
    count_text,
    new_table,
    plain_errors,
    print_json,
    print_table,
    size_text,
)
from holdfast.cli.server_command import (
    WHERE,
    NoSuchServer,
    Server,
    chosen_server,
    health_of,
    requests_of,
    server_command,
)

if TYPE_CHECKING:
    from holdfast.cli.server_client import ServerClient
    from holdfast.front.run.running_servers import RunningServer

_PS_ASK_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_STOP_ASK_SECONDS = 2.0
_command = partial(server_command, options=WHERE)
ModelName: TypeAlias = Annotated[
    str, typer.Argument(metavar="MODEL", help="Its id or alias, as `holdfast models ls` shows it.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAtWork:
    """A request that a model is answering.

    `prefilled_tokens`: how much of a prompt that takes long is read.
    """

    id: str
    path: str
    state: str
    age_seconds: float
    prompt_tokens: int
    prefilled_tokens: int
    answer_tokens: int

    @property
    def progress(self) -> str:
        """How far it is, in words."""
        if self.answer_tokens:
            return f"{self.answer_tokens:,} tokens written"
        if self.prefilled_tokens:
            return f"prefill {self.prefilled_tokens:,} of {self.prompt_tokens:,}"
        return self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model of a server.

    memory_bytes: resident in its process, 0 where it has none.
    written_today_bytes: to its store's folder since midnight (UTC), by all models that share it.
    """

    id: str
    state: str
    running: int
    queued: int
    pid: int | None
    memory_bytes: int
    written_today_bytes: int
    requests: tuple[RequestAtWork, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAtWork:
    """A server and what it says of itself. `memory_bytes`: of its front process alone."""

    pid: int
    url: str
    up_seconds: float
    state: str
    memory_bytes: int
    log_file: str
    models: tuple[ServedModel, ...]


def ps(as_json: Json = False) -> None:
    """List your servers on this machine.

    It shows where they listen, their models, what runs and how far it is, and the memory they take.
    """
    from holdfast.front.run.running_servers import running_servers

    servers = [_looked_at(server) for server in running_servers(os.environ)]
    if as_json:
        print_json([asdict(server) for server in servers])
    elif servers:
        _show(servers)
    else:
        typer.echo("no server of yours runs on this machine")


def _looked_at(server: Any) -> ServerAtWork:
    health = health_of(server, seconds=_PS_ASK_SECONDS) or {"status": "does not answer"}
    models = health.get("models", ())
    is_busy = any(model.get("running") or model.get("queued") for model in models)
    requests = requests_of(server, seconds=_PS_ASK_SECONDS) if is_busy else []
    return ServerAtWork(
        pid=server.pid,
        url=server.url,
        up_seconds=max(0.0, time.time() - server.started_at),
        state=str(health.get("status", "")),
        memory_bytes=_resident(server.pid),
        log_file=server.log_file,
        models=tuple(_model(model, requests) for model in models),
    )


def _model(model: dict[str, Any], requests: Sequence[dict[str, Any]]) -> ServedModel:
    pid = model.get("pid")
    store = (model.get("memory") or {}).get("store") or {}
    own = [request for request in requests if request.get("model") == model.get("id")]
    return ServedModel(
        id=str(model.get("id")),
        state=str(model.get("state")),
        running=int(model.get("running", 0)),
        queued=int(model.get("queued", 0)),
        pid=pid,
        memory_bytes=0 if pid is None else _resident(pid),
        written_today_bytes=int(store.get("written_today_bytes", 0)),
        requests=tuple(_request(request) for request in own),
    )


def _request(request: dict[str, Any]) -> RequestAtWork:
    return RequestAtWork(
        id=str(request.get("id", "")),
        path=str(request.get("path", "")),
        state=str(request.get("state", "")),
        age_seconds=float(request.get("age_seconds", 0.0)),
        prompt_tokens=int(request.get("prompt_tokens", 0)),
        prefilled_tokens=int(request.get("prefilled_tokens", 0)),
        answer_tokens=int(request.get("answer_tokens", 0)),
    )


def _resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 when it has just ended."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _show(servers: Sequence[ServerAtWork]) -> None:
    numbers = ("running", "queued", "memory", "written today")
    table = new_table("pid", "where", "up", "state", *numbers, right=numbers)
    for server in servers:
        counts = [
            sum(getattr(model, name) for model in server.models) for name in ("running", "queued")
        ]
        up = duration_text(server.up_seconds)
        # Models usually share one folder, and each says what was written to all of it.
        written = _size_or_nothing(
            max((model.written_today_bytes for model in server.models), default=0)
        )
        table.add_row(
            str(server.pid),
            server.url,
            up,
            server.state,
            *map(str, counts),
            size_text(server.memory_bytes),
            written,
        )
        for model in server.models:
            memory = _size_or_nothing(model.memory_bytes)
            pid = "" if model.pid is None else str(model.pid)
            table.add_row(
                pid,
                f"  {model.id}",
                "",
                model.state,
                str(model.running),
                str(model.queued),
                memory,
                "",
            )
            for request in model.requests:
                table.add_row(
                    "",
                    f"    {request.path}",
                    duration_text(request.age_seconds),
                    request.progress,
                    "",
                    "",
                    "",
                )
    print_table(table)


def _size_or_nothing(size_bytes: int) -> str:
    return size_text(size_bytes) if size_bytes else ""


def duration_text(seconds: float) -> str:
    """How long something lasts, for people, in its two largest units: `3 min 20 s`."""
    whole = int(seconds)
    parts = [
        (whole // 86400, "d"),
        (whole // 3600 % 24, "h"),
        (whole // 60 % 60, "min"),
        (whole % 60, "s"),
    ]
    begin = next((place for place, (count, _) in enumerate(parts) if count), 3)
    return " ".join(
        f"{count} {unit}" for count, unit in parts[begin : begin + 2] if count or begin == 3
    )


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

    It accepts no new requests, finishes those that run (for `server.shutdown_seconds` at most), and
    keeps what was read.
    """
    from holdfast.front.run.running_servers import running_servers

    with plain_errors():
        if all_servers and server is not None:
            raise NoSuchServer(f"either {server} or --all")
        chosen = running_servers(os.environ) if all_servers else [chosen_server(server)]
    for each in chosen:
        _signal(each)
    for each in chosen:
        _wait_until_ended(each, now=now)
    if not chosen:
        typer.echo("no server of yours runs on this machine")


def _signal(server: RunningServer) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(server.pid, signal.SIGTERM)


def _wait_until_ended(server: RunningServer, *, now: bool) -> None:
    said = 0
    while _lives(server):
        requests = _unfinished_requests(server)
        if requests and now:
            _signal(server)
            # once: one that comes when they have been cut off would also end what writes down what
            # was read
            now = False
        elif requests and requests != said:
            typer.echo(f"{server.url} ends; it waits for {count_text(requests, 'request')}")
            said = requests
        time.sleep(_LOOK_SECONDS)
    typer.echo(f"stopped {server.url} (pid {server.pid})")


def _lives(server: RunningServer) -> bool:
    """Whether it has not ended; its lock says so, as a process id may be another's by now."""
    from holdfast.front.run.running_servers import running_servers

    return server in running_servers(os.environ)


def _unfinished_requests(server: RunningServer) -> int:
    """How many it still answers before it ends; 0 also where that is not known."""
    health = health_of(server, seconds=_STOP_ASK_SECONDS) or {}
    return (
        sum(int(model["leases"]) for model in health["models"])
        if health.get("status") == "stopping"
        else 0
    )


@_command
def load(
    server: ServerClient,
    name: ModelName,
    pin: Annotated[
        bool, typer.Option("--pin", help="And keep it loaded, whoever else needs its place.")
    ] = False,
) -> None:
    """Load a model into a running server.

    It waits until the model is ready.
    """
    typer.echo(
        f"{name} is "
        f"{_model_state_after(server, name, 'pin' if pin else 'load')}{', and stays loaded' if pin else ''}"
    )


@_command
def unload(
    server: ServerClient,
    name: ModelName,
    unpin: Annotated[
        bool, typer.Option("--unpin", help="Also one that is pinned, which it is no longer then.")
    ] = False,
) -> None:
    """Unload a model from a running server.

    The server finishes its answers first. What the model has read stays on disk.
    """
    if unpin:
        _model_state_after(server, name, "pin", json={"pinned": False})
    typer.echo(f"{name} is {_model_state_after(server, name, 'unload')}")


def _model_state_after(server: ServerClient, name: str, what: str, **request: Any) -> str:
    """The state in which the model is then. Raises ServerFailed."""
    return str(server.call("POST", f"/admin/models/{quote(name)}/{what}", **request)["state"])
