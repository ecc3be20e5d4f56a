"""Which of the servers on this machine a command is about."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.cli.server_client import ServerClient
    from holdfast.front.run.running_servers import RunningServer

Server: TypeAlias = Annotated[
    int | None,
    typer.Argument(
        metavar="PID|PORT",
        show_default=False,
        help="Which server; may be left out where only one runs.",
    ),
]


class NoSuchServer(HoldfastError):
    """There is no server, or not the one that was asked for, or more than one."""


def chosen_server(number: int | None) -> RunningServer:
    """The server of this user with that process id or port; the only one where none is named.

    Raises NoSuchServer.
    """
    from holdfast.front.run.running_servers import running_servers

    running = running_servers(os.environ)
    if not running:
        raise NoSuchServer("no server of yours runs on this machine")
    found = [server for server in running if number in (None, server.pid, server.port)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{server.pid} at {server.url}" for server in running)
    if found:
        raise NoSuchServer(
            f"several servers run: {listed}; say which one by its process id or port"
        )
    raise NoSuchServer(
        f"no server of yours has the process id or port {number}; these run: {listed}"
    )


def client_of(server: RunningServer, *, api_key: str = "") -> ServerClient:
    """A client for a server on this machine. Raises ServerFailed."""
    from holdfast.cli.server_client import ServerClient

    return ServerClient(
        url=server.url,
        api_key=api_key,
        use_proxies=False,
        certificate=server.certificate,
        any_name=True,
    )


def requests_of(server: RunningServer, *, seconds: float) -> list[dict[str, Any]]:
    """The requests that a server is answering; none where it tells only its administrators, or
    gives no answer in that time.
    """
    from holdfast.cli.server_client import ServerFailed

    try:
        with client_of(server) as client:
            return list(client.call("GET", "/admin/requests", timeout=seconds).get("requests", ()))
    except ServerFailed:
        return []


def health_of(server: RunningServer, *, seconds: float) -> dict[str, Any] | None:
    """A server's account of itself; None where it gives none in that time."""
    from holdfast.cli.server_client import ServerFailed

    try:
        with client_of(server) as client:
            return client.call("GET", "/health", timeout=seconds)
    except ServerFailed:
        return None
