"""`holdfast stop`: ask servers to end, and wait until they have."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.errors import plain_errors
from holdfast.cli.server_choice import Server, chosen_server, client_of
from holdfast.cli.sizes import count_text

if TYPE_CHECKING:
    from holdfast.app.running_servers import RunningServer

_LOOK_SECONDS = 0.1
_ASK_SECONDS = 2.0


def stop(
    server: Server = None,
    all_servers: Annotated[bool, typer.Option("--all", help="All of yours on this machine.")] = False,
    now: Annotated[bool, typer.Option("--now", help="Cut running answers off instead of waiting for them.")] = False,
) -> None:
    """End a server: it takes nothing new, answers what runs for `server.shutdown_seconds` at most, and keeps what was read."""
    from holdfast.app.running_servers import running_servers

    with plain_errors():
        chosen = running_servers(os.environ) if all_servers else [chosen_server(server)]
    for each in chosen:
        _signal(each)
    for each in chosen:
        _wait(each, now=now)
    if not chosen:
        typer.echo("no server of yours runs on this machine")


def _signal(server: RunningServer) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(server.pid, signal.SIGTERM)


def _wait(server: RunningServer, *, now: bool) -> None:
    said = ""
    while _lives(server):
        waits_for = _running(server)
        if waits_for and waits_for != said:
            typer.echo(f"{server.url} ends; it waits for {waits_for}")
            said = waits_for
        if now and waits_for:
            _signal(server)
        time.sleep(_LOOK_SECONDS)
    typer.echo(f"{server.url} has ended")


def _lives(server: RunningServer) -> bool:
    """Whether it has not ended; its lock says so, as a process id may be another's by now."""
    from holdfast.app.running_servers import running_servers

    return server in running_servers(os.environ)


def _running(server: RunningServer) -> str:
    """What it still has to do, in words; empty when that is not known or nothing."""
    from holdfast.cli.server_client import ServerFailed

    try:
        with client_of(server) as client:
            health = client.call("GET", "/health", timeout=_ASK_SECONDS)
    except ServerFailed:
        return ""
    models = health.get("models", ())
    number = sum(int(model.get("running", 0)) + int(model.get("queued", 0)) for model in models)
    if health.get("status") != "stopping" or not number:
        return ""
    return count_text(number, "answer")
