"""`holdfast state …`: everything that is kept on this machine, in one place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import (
    Json,
    Yes,
    complain,
    new_table,
    plain_errors,
    print_json,
    print_table,
    size_text,
)
from holdfast.cli.store import Config
from holdfast.config import default_file, load_settings
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.cli.state_kinds import StateKind

state = typer.Typer(help="Show and delete what Holdfast keeps on disk.", no_args_is_help=True)
FAILED = 1


class StateInUse(HoldfastError):
    """What should be deleted cannot be."""


@state.command("ls")
def list_state(config: Config = None, as_json: Json = False) -> None:
    """List what is kept: where, how much there is of it, and how much there may be."""
    kinds = _kinds(config)
    rows = [(kind, kind.size_bytes()) for kind in kinds]
    if as_json:
        listed = [
            {
                "name": kind.name,
                "what": kind.what,
                "path": str(kind.place),
                "bytes": size,
                "bound": kind.bound,
            }
            for kind, size in rows
        ]
        print_json(listed)
    else:
        _show(rows)


@state.command("clear")
def clear(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="What to delete, as `ls` names it."),
    ] = None,
    all_kinds: Annotated[bool, typer.Option("--all", help="Everything but API keys.")] = False,
    config: Config = None,
    yes: Yes = False,
) -> None:
    """Delete what is kept. What a running server uses is refused."""
    kinds = _kinds(config)
    with plain_errors():
        chosen = _chosen(kinds, names or [], all_kinds=all_kinds)
    for kind in chosen:
        typer.echo(f"{kind.name:<10} {size_text(kind.size_bytes()):>10}  {kind.place}")
    if not yes:
        typer.confirm("Delete this?", abort=True)
        with plain_errors():  # once more: a server may have been started meanwhile
            _refuse_used(chosen)
    for kind in chosen:
        assert kind.clear is not None, "those that cannot be cleared are not chosen"
        try:
            kind.clear()
        except (OSError, HoldfastError) as error:
            complain(f"{kind.name} could not be deleted whole: {error}")
            raise typer.Exit(FAILED) from None
    typer.echo("deleted")


def _kinds(config: object) -> tuple[StateKind, ...]:
    from pathlib import Path

    from holdfast.cli.state_kinds import state_kinds

    with plain_errors():
        file = config if isinstance(config, Path) else default_file(os.environ)
        settings = load_settings(file=file, environ=os.environ, flags={}).settings
        try:
            return state_kinds(settings, os.environ)
        except (OSError, RuntimeError) as error:
            raise StateInUse(f"what is kept cannot be looked at: {error}") from None


def _chosen(
    kinds: Sequence[StateKind], names: Sequence[str], *, all_kinds: bool
) -> list[StateKind]:
    """The kinds that are to be deleted. Raises StateInUse when one of them cannot be."""
    known = {kind.name: kind for kind in kinds}
    if unknown := [name for name in names if name not in known]:
        raise StateInUse(
            f"nothing that is kept is called {unknown[0]}; there are: {', '.join(known)}"
        )
    if not names and not all_kinds:
        raise StateInUse(f"say what to delete, or --all: {', '.join(known)}")
    chosen = [
        kind for kind in kinds if kind.name in names or (all_kinds and kind.clear is not None)
    ]
    for kind in chosen:
        if kind.clear is None:
            raise StateInUse(f"{kind.name} are not deleted here: {kind.hint}")
    _refuse_used(chosen)
    return chosen


def _refuse_used(chosen: Sequence[StateKind]) -> None:
    from holdfast.front.run.running_servers import running_servers

    for server in running_servers(os.environ):
        for kind in chosen:
            if kind.is_used_by(server):
                raise StateInUse(
                    f"{kind.name} is in use by the server at {server.url}; end it first: holdfast "
                    f"stop {server.pid}"
                )


def _show(rows: Sequence[tuple[StateKind, int]]) -> None:
    table = new_table("name", "size", "at most", "where", right=("size",))
    home = os.path.expanduser("~") + os.sep
    for kind, size in rows:
        place = str(kind.place)
        table.add_row(
            kind.name,
            size_text(size),
            kind.bound,
            f"~/{place.removeprefix(home)}" if place.startswith(home) else place,
        )
    print_table(table)
