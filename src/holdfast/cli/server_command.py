"""Finding the running server that a command is about, and the options that name it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from holdfast.cli.output import BAD_INPUT, complain, plain_errors
from holdfast.cli.settings_command import option, own_parameters, with_parameters
from holdfast.config import default_file, load_settings
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
        help="Its key; else HOLDFAST_SERVER_API_KEY or the settings'.",
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
    typer.Option("--cache-salt", rich_help_panel=_PANEL, help="As the requests' cache_salt."),
]
WHERE = {"url": Url, "api_key": ApiKey}
WHERE_AND_WHOSE = {**WHERE, "model": Model, "tenant": Tenant, "cache_salt": Salt}
Server: TypeAlias = Annotated[
    int | None,
    typer.Argument(
        metavar="PID|PORT",
        show_default=False,
        help="Which server; may be left out where only one runs.",
    ),
]


def server_command(
    command: Callable[..., None], *, options: Mapping[str, Any] = WHERE_AND_WHOSE
) -> Callable[..., None]:
    """Give a command `(server, **own options)` the options that name the server, and plain errors."""
    # so that its type, which brings a web client along, is imported when it runs
    del command.__annotations__["server"]
    own = own_parameters(command)
    added = [option(name, annotation) for name, annotation in options.items()]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        from holdfast.front.server.request import TENANT_HEADER

        named = {name: given.pop(name) for name in options}
        with plain_errors():
            address = address_of(named["url"], named["api_key"])
            headers = {} if named.get("tenant") is None else {TENANT_HEADER: named["tenant"]}
            query = {
                name: named[name] for name in ("model", "cache_salt") if named.get(name) is not None
            }
            with address.client(headers=headers, query=query) as server:
                try:
                    command(server, **given)
                except OSError as error:
                    complain(str(error))
                    raise typer.Exit(BAD_INPUT) from None

    return with_parameters(run, [*own, *added])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where a server is, and what has to be known to speak to it."""

    url: str
    api_key: str
    certificate: str  # file of the one that is trusted beside the system's; empty: none
    pid: int | None = None
    """Of a server of this user that runs on this machine: whatever name stands in its certificate,
    it is trusted.
    """

    def client(self, **options: Any) -> ServerClient:
        """A client for it. Raises ServerFailed."""
        from holdfast.cli.server_client import ServerClient

        is_ours = self.pid is not None
        trust = {"certificate": self.certificate, "use_proxies": not is_ours, "any_name": is_ours}
        return ServerClient(url=self.url, api_key=self.api_key, **trust, **options)  # type: ignore[arg-type]


def address_of(url: str | None, api_key: str | None) -> ServerAddress:
    """The server's address: the given URL; without one, the address in the settings.

    If the settings name no port, the only server that this user runs is used, on whatever port.
    Raises NoSuchServer for several.
    """
    effective = load_settings(file=default_file(os.environ), environ=os.environ, flags={})
    settings = effective.settings.server
    key = settings.api_key if api_key is None else api_key
    if (
        not url
        and effective.origins["server.port"] == "default"
        and (running := _running(settings.port))
    ):
        return ServerAddress(
            url=running.url, api_key=key, certificate=running.certificate, pid=running.pid
        )
    host = _WILDCARDS.get(settings.host, settings.host)
    return ServerAddress(
        url=with_scheme(url) if url else f"{settings.scheme}://{host}:{settings.port}",
        api_key=key,
        certificate=settings.tls_cert,
    )


def _running(port: int) -> RunningServer | None:
    """This user's server with that port, or else the only one; None where none runs.

    Raises NoSuchServer for several.
    """
    from holdfast.front.run.running_servers import running_servers

    running = running_servers(os.environ)
    found = [server for server in running if server.port == port] or running
    if len(found) > 1:
        raise NoSuchServer(
            f"several servers run: {', '.join(server.url for server in found)}; say which one by "
            "--url"
        )
    return next(iter(found), None)


def with_scheme(url: str) -> str:
    """A URL as people write it, such as mymachine:8321."""
    return url if "://" in url else f"http://{url}"


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
