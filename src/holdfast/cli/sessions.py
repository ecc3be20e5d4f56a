"""`holdfast sessions …`: named branches of a running server's prefix cache."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import quote

import typer

from holdfast.cli.output import Json, count_text, new_table, print_json, print_table, size_text
from holdfast.cli.server_command import server_command
from holdfast.errors import ConfigError
from holdfast.wire.sessions import SESSION_OPERATIONS, SESSIONS_PATH, OperationName

if TYPE_CHECKING:
    from holdfast.cli.server_client import ServerClient

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_NEVER = "never"

sessions = typer.Typer(help="Show, pin, fork, close and move sessions.", no_args_is_help=True)

Id: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="The session.")]
Pin: TypeAlias = Annotated[bool, typer.Option("--pin", help="Never evict its blocks.")]
Ttl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--ttl",
        metavar="TIME",
        help="Lifetime after its last use, such as 12h or 30d, or `never`.",
    ),
]


@sessions.command("ls")
@server_command
def list_sessions(server: ServerClient, as_json: Json = False) -> None:
    """List the sessions, the most recently used first."""
    found = _ask(server, "list")["data"]
    if as_json:
        print_json(found)
    elif found:
        _print_table(found)
    else:
        typer.echo("there are no sessions")


@sessions.command("show")
@server_command
def show(server: ServerClient, session_id: Id, as_json: Json = False) -> None:
    """Show one session."""
    _print(_ask(server, "get", session_id), as_json=as_json)


@sessions.command("open")
@server_command
def open_session(
    server: ServerClient,
    session_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Its name; default: a generated one.")
    ] = None,
    pin: Pin = False,
    ttl: Ttl = None,
    as_json: Json = False,
) -> None:
    """Open a session. A request that names a new session opens it, too."""
    _print(
        _ask(server, "open", json={"pinned": pin} | _named(session_id) | _ttl(ttl)), as_json=as_json
    )


@sessions.command("fork")
@server_command
def fork(
    server: ServerClient,
    session_id: Id,
    new_id: Annotated[
        str | None,
        typer.Argument(metavar="[NEW]", help="Name of the new one; default: a generated one."),
    ] = None,
    pin: Pin = False,
    ttl: Ttl = None,
    as_json: Json = False,
) -> None:
    """Open a session that continues from the current state of another one."""
    _print(
        _ask(server, "fork", session_id, json={"pinned": pin} | _named(new_id) | _ttl(ttl)),
        as_json=as_json,
    )


@sessions.command("pin")
@server_command
def pin_session(server: ServerClient, session_id: Id) -> None:
    """Never evict a session's blocks."""
    _print(_ask(server, "update", session_id, json={"pinned": True}))


@sessions.command("unpin")
@server_command
def unpin_session(server: ServerClient, session_id: Id) -> None:
    """Let a session's blocks be evicted like any others."""
    _print(_ask(server, "update", session_id, json={"pinned": False}))


@sessions.command("close")
@server_command
def close_session(
    server: ServerClient,
    session_id: Id,
    forget: Annotated[
        bool,
        typer.Option("--forget", help="Also delete its blocks, except those that others use."),
    ] = False,
) -> None:
    """Close a session."""
    _ask(server, "close", session_id, params={"forget": "true"} if forget else {})
    typer.echo(f"closed {session_id}")


@sessions.command("export")
@server_command
def export_session(
    server: ServerClient,
    session_id: Id,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a session and its blocks to a file."""
    if file.exists() and not force:
        raise ConfigError(f"{file} already exists; --force replaces it")
    size = server.download(_path("export", session_id), file)
    typer.echo(f"wrote {file}, {size_text(size)}")


@sessions.command("import")
@server_command
def import_session(
    server: ServerClient,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `export`.")],
    session_id: Annotated[
        str | None, typer.Option("--id", help="Its name here; default: as in the file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read a session from a file.

    It has to come from the same model, with the same weights, tokenizer and codec.
    """
    with file.open("rb") as content:
        _print(_ask(server, "import", params=_named(session_id), content=content), as_json=as_json)


def _ask(
    server: ServerClient, operation: OperationName, session_id: str = "", **request: Any
) -> dict[str, Any]:
    return server.call(
        SESSION_OPERATIONS[operation].method, _path(operation, session_id), **request
    )


def _path(operation: OperationName, session_id: str) -> str:
    return SESSIONS_PATH + SESSION_OPERATIONS[operation].path.format(
        session_id=quote(session_id, safe="")
    )


def _named(session_id: str | None) -> dict[str, Any]:
    return {} if session_id is None else {"id": session_id}


def _ttl(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    if text == _NEVER:
        return {"ttl_seconds": None}
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smhd]?)", text)
    if match is None:
        raise ConfigError(f"--ttl {text}: a time such as 90s, 12h or 30d, or {_NEVER}")
    return {"ttl_seconds": float(match[1]) * _SECONDS[match[2] or "s"]}


def _print(session: Mapping[str, Any], *, as_json: bool = False) -> None:
    if as_json:
        print_json(session)
        return
    cached = f"{session['kept_tokens']:,} cached ({session['ram_tokens']:,} in RAM)"
    branches = count_text(session["branches"], "branch", "branches")
    hot = ""
    if session["live_tokens"]:
        hot = f"{session['live_tokens']:,} tokens: the next turn continues without a copy"
    rows = [
        ("session", session["id"]),
        ("model", session["model"]),
        ("tokens", f"{session['tokens']:,}, {cached}"),
        ("hot", hot),
        ("size", f"{size_text(session['kept_bytes'])} in {branches}"),
        ("requests", f"{session['requests']:,}"),
        ("last used", _time(session["last_used_at"])),
        ("ends", _NEVER if session["expires_at"] is None else _time(session["expires_at"])),
        ("pinned", _pinned(session)),
        ("forked from", session["forked_from"]),
        ("metadata", ", ".join(f"{name}={value}" for name, value in session["metadata"].items())),
    ]
    for name, value in rows:
        if value:
            typer.echo(f"{name:<11}  {value}")


def _print_table(found: Sequence[Mapping[str, Any]]) -> None:
    numbers = ("tokens", "cached", "in RAM", "hot", "size", "requests")
    table = new_table("session", *numbers, "last used", "pinned", right=numbers)
    for session in found:
        table.add_row(
            session["id"],
            f"{session['tokens']:,}",
            f"{session['kept_tokens']:,}",
            f"{session['ram_tokens']:,}",
            f"{session['live_tokens']:,}",
            size_text(session["kept_bytes"]),
            f"{session['requests']:,}",
            _time(session["last_used_at"]),
            _pinned(session),
        )
    print_table(table)


def _pinned(session: Mapping[str, Any]) -> str:
    if not session["pinned"]:
        return ""
    return "in part: over the quota" if session["pin_state"] == "over_quota" else "yes"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
