"""`holdfast load` and `unload`: have a running server load a model, or let it go."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import quote

import typer

from holdfast.cli.server_command import WHERE, server_command

if TYPE_CHECKING:
    from holdfast.cli.server_client import ServerClient

_command = partial(server_command, options=WHERE)
ModelName: TypeAlias = Annotated[
    str, typer.Argument(metavar="MODEL", help="Its id or alias, as `holdfast models ls` shows it.")
]


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
        f"{_done(server, name, 'pin' if pin else 'load')}{', and stays loaded' if pin else ''}"
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
        _done(server, name, "pin", json={"pinned": False})
    typer.echo(f"{name} is {_done(server, name, 'unload')}")


def _done(server: ServerClient, name: str, what: str, **request: Any) -> str:
    """The state in which the model is then. Raises ServerFailed."""
    return str(server.call("POST", f"/admin/models/{quote(name)}/{what}", **request)["state"])
