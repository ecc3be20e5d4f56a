"""`holdfast stop`: ask servers to end, and wait until they have."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.errors import plain_errors
from holdfast.cli.server_choice import NoSuchServer, Server, chosen_server, health_of
from holdfast.cli.sizes import count_text

if TYPE_CHECKING:
    from holdfast.front.run.running_servers import RunningServer

_LOOK_SECONDS = 0.1
_ASK_SECONDS = 2.0


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
        _wait(each, now=now)
    if not chosen:
        typer.echo("no server of yours runs on this machine")


def _signal(server: RunningServer) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(server.pid, signal.SIGTERM)


def _wait(server: RunningServer, *, now: bool) -> None:
    said = 0
    while _lives(server):
        requests = _requests(server)
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


def _requests(server: RunningServer) -> int:
    """How many it still answers before it ends; 0 also where that is not known."""
    health = health_of(server, seconds=_ASK_SECONDS) or {}
    return (
        sum(int(model["leases"]) for model in health["models"])
        if health.get("status") == "stopping"
        else 0
    )
