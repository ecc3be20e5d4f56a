"""`holdfast load` and `unload`: have a running server load a model, or let it go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias
from urllib.parse import quote

import typer

from holdfast.cli.server_command import server_command

if TYPE_CHECKING:
    from holdfast.cli.server_client import ServerClient

ModelName: TypeAlias = Annotated[str, typer.Argument(metavar="MODEL", help="Its id or alias, as `holdfast models ls` shows it.")]


@server_command
def load(
    server: ServerClient,
    name: ModelName,
    pin: Annotated[bool, typer.Option("--pin", help="And keep it loaded, whoever else needs its place.")] = False,
) -> None:
    """Have a server load a model, and wait until it serves."""
    typer.echo(f"{name} is {_done(server, name, 'pin' if pin else 'load')}{', and stays loaded' if pin else ''}")


@server_command
def unload(server: ServerClient, name: ModelName) -> None:
    """Have a server let a model go when its answers are done. What it has read stays on disk."""
    typer.echo(f"{name} is {_done(server, name, 'unload')}")


def _done(server: ServerClient, name: str, what: str) -> str:
    """The state in which the model is then. Raises ServerFailed."""
    return str(server.call("POST", f"/admin/models/{quote(name)}/{what}")["state"])
