"""Finds the running server that a command is about, and the options that name it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from holdfast.cli.output import BAD_INPUT, complain, plain_errors
from holdfast.cli.settings_command import (
    option,
    own_parameters,
    read_settings,
    with_parameters,
)
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.cli.server_client import ServerClient
    from holdfast.front.run.running_servers import RunningServer

_PANEL = "Server"
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}

Url: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--url",
        rich_help_panel=_PANEL,
        help="The server; default: the one in your settings, or the only one running.",
    ),
]
ApiKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        rich_help_panel=_PANEL,
        help="Its key; default: HOLDFAST_SERVER_API_KEY, or the one in your settings.",
    ),
]
Model: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="ID",
        rich_help_panel=_PANEL,
        help="The model; default: the server's first.",
    ),
]
Tenant: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        metavar="NAME",
        rich_help_panel=_PANEL,
        help="As in the header X-Holdfast-Tenant.",
    ),
]
Salt: TypeAlias = Annotated[
    str | None,
    typer.Option("--cache-salt", rich_help_panel=_PANEL, help="As in the requests' cache_salt."),
]
Server: TypeAlias = Annotated[
    int | None,
    typer.Argument(
        metavar="PID|PORT",
        show_default=False,
        help="The server; can be omitted if only one is running.",
    ),
]
SERVER_OPTIONS = {"url": Url, "api_key": ApiKey}
SESSION_OPTIONS = {**SERVER_OPTIONS, "model": Model, "tenant": Tenant, "cache_salt": Salt}


class NoSuchServer(HoldfastError):
    """There is no such server, or more than one."""


def server_command(
    command: Callable[..., None], *, options: Mapping[str, Any] = SESSION_OPTIONS
) -> Callable[..., None]:
    """Give a command `(server, **own options)` the options that name the server, and plain errors."""
    # Typer evaluates annotations, and this one would import the HTTP client
    del command.__annotations__["server"]
    own = own_parameters(command)
    added = [option(name, annotation) for name, annotation in options.items()]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        from holdfast.front.server.request import TENANT_HEADER

        named = {name: value for name in options if (value := given.pop(name)) is not None}
        with plain_errors():
            address = address_of(named.pop("url", None), named.pop("api_key", None))
            headers = {TENANT_HEADER: named.pop("tenant")} if "tenant" in named else {}
            with address.client(headers=headers, query=named) as server:
                try:
                    command(server, **given)
                except OSError as error:
                    complain(str(error))
                    raise typer.Exit(BAD_INPUT) from None

    return with_parameters(run, [*own, *added])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """What a client needs to reach a server."""

    url: str
    api_key: str
    certificate: str  # file to trust in addition to the system's; empty: none
    pid: int | None = None  # of the user's own server on this machine

    def client(
        self, *, headers: Mapping[str, str] | None = None, query: Mapping[str, str] | None = None
    ) -> ServerClient:
        """A client for the server. Raises ServerFailed."""
        from holdfast.cli.server_client import ServerClient

        return ServerClient(
            url=self.url,
            api_key=self.api_key,
            headers=headers,
            query=query,
            certificate=self.certificate,
            is_local=self.pid is not None,
        )


def address_of(url: str | None, api_key: str | None) -> ServerAddress:
    """The address of the server at `url`, or by default of the server in the settings.

    If the settings name no port, it is the only server that this user runs, on whatever port.
    Raises NoSuchServer if there are several.
    """
    effective = read_settings()
    settings = effective.settings.server
    key = settings.api_key if api_key is None else api_key
    if url:
        return ServerAddress(url=with_scheme(url), api_key=key, certificate=settings.tls_cert)
    if effective.origins["server.port"] == "default":
        running = _only_server(settings.port)
        if running is not None:
            return address_of_running(running, api_key=key)
    host = _WILDCARDS.get(settings.host, settings.host)
    return ServerAddress(
        url=f"{settings.scheme}://{host}:{settings.port}",
        api_key=key,
        certificate=settings.tls_cert,
    )


def address_of_running(server: RunningServer, *, api_key: str = "") -> ServerAddress:
    """The address of a server of this user on this machine."""
    return ServerAddress(
        url=server.url, api_key=api_key, certificate=server.certificate, pid=server.pid
    )


def with_scheme(url: str) -> str:
    """A URL with its scheme, which people leave out: mymachine:8321."""
    return url if "://" in url else f"http://{url}"


def chosen_server(number: int | None) -> RunningServer:
    """The user's server with that process id or port; without a number, the only one.

    Raises NoSuchServer.
    """
    from holdfast.front.run.running_servers import running_servers

    running = running_servers(os.environ)
    if not running:
        raise NoSuchServer("no server of yours is running on this machine")
    found = [server for server in running if number in (None, server.pid, server.port)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{server.pid} at {server.url}" for server in running)
    if found:
        raise NoSuchServer(
            f"several servers are running: {listed}; choose one by process id or port"
        )
    raise NoSuchServer(
        f"no server of yours has the process id or port {number}; running are: {listed}"
    )


def _only_server(port: int) -> RunningServer | None:
    """The user's server with that port, or else the only one; None if none is running.

    Raises NoSuchServer if there are several.
    """
    from holdfast.front.run.running_servers import running_servers

    running = running_servers(os.environ)
    found = [server for server in running if server.port == port] or running
    if len(found) > 1:
        urls = ", ".join(server.url for server in found)
        raise NoSuchServer(f"several servers are running: {urls}; choose one with --url")
    return next(iter(found), None)
