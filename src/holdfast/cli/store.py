"""`holdfast store …`, `holdfast sessions …` and `holdfast state …`: what Holdfast stores.

`store` is the prefix cache on disk, which a running server may use at the same time. `sessions` are
named branches of a running server's prefix cache. `state` lists the store and everything else that
Holdfast keeps on disk for a user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias
from urllib.parse import quote

import typer

from holdfast.cli.output import (
    BAD_INPUT,
    FAILED,
    Json,
    Yes,
    complain,
    count_text,
    new_table,
    plain_errors,
    print_json,
    print_rows,
    print_table,
    size_text,
    time_text,
)
from holdfast.cli.server_client import ServerClient, own_servers, server_command
from holdfast.cli.settings import read_settings
from holdfast.config import Settings, StoreSettings
from holdfast.errors import ConfigError, HoldfastError
from holdfast.wire.sessions import SESSION_OPERATIONS, SESSIONS_PATH, OperationName

if TYPE_CHECKING:
    from holdfast.front.run.running_servers import RunningServer
    from holdfast.store.inspect import ModelHoldings, RemovalReport, StoreSummary

_SECONDS_OF_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_NEVER = "never"
_NAME_KEY = "name"  # key of a session's metadata with the name that the page shows

store = typer.Typer(help="Show and empty the prefix cache on disk.", no_args_is_help=True)
sessions = typer.Typer(help="Show, pin, fork, close and move sessions.", no_args_is_help=True)
state = typer.Typer(help="Show and delete what Holdfast keeps on disk.", no_args_is_help=True)

Folder: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--store", metavar="FOLDER", help="Folder of the store; default: as in your settings."
    ),
]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings file; default: ./holdfast.toml."),
]


@store.command("ls")
def list_models(folder: Folder = None, config: Config = None, as_json: Json = False) -> None:
    """List the models with cached blocks, the largest first."""
    from holdfast.store.inspect import list_store

    with _plain_store_errors():
        path = Path(_store_settings(folder, config).folder)
        models = list_store(path)
    if as_json:
        print_json(models)
        return
    _warn_of_other_store(path)
    if models:
        typer.echo(f"{path}\n")
        _print_models(models)
    else:
        typer.echo(f"nothing is cached in {path}")


@store.command("stat")
def show_store(folder: Folder = None, config: Config = None, as_json: Json = False) -> None:
    """Show the size of the store, its limit, and anything unusual."""
    from holdfast.store.inspect import summarize_store
    from holdfast.store.maintenance import store_limits

    with _plain_store_errors():
        settings = _store_settings(folder, config)
        summary = summarize_store(Path(settings.folder), limits=store_limits(settings))
    if as_json:
        print_json(summary)
        return
    _warn_of_other_store(Path(settings.folder))
    print_rows(_summary_rows(summary))


@store.command("clear")
def clear(
    folder: Folder = None,
    config: Config = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="Only this model: a name or id that `ls` shows."
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """Delete the blocks of all models, or of one model.

    A running server notices that the blocks are gone.
    """
    from holdfast.store.inspect import clear_store, list_store

    with _plain_store_errors():
        path = Path(_store_settings(folder, config).folder)
        chosen_models = [
            holdings
            for holdings in list_store(path)
            if model in (None, holdings.model, holdings.served_as)
        ]
        if model is not None and not chosen_models:
            raise ConfigError(f"no blocks of model {model}; `holdfast store ls` lists the models")
        if not yes:
            blocks = count_text(sum(holdings.blocks for holdings in chosen_models), "block")
            size = size_text(sum(holdings.file_bytes for holdings in chosen_models))
            typer.confirm(f"Delete {blocks} ({size}) in {path}?", abort=True)
        reports = [
            clear_store(path, model=holdings.model)
            for holdings in chosen_models
            if model is not None
        ]
        if model is None:
            reports.append(_clear_all(path))
    deleted = count_text(sum(len(report.keys) for report in reports), "block")
    typer.echo(f"deleted {deleted}, {size_text(sum(report.freed_bytes for report in reports))}")


def _clear_all(folder: Path) -> RemovalReport:
    """Delete everything in a store's folder.

    Known answers are hashed, so their model is unknown, and responses belong to no model: they are
    only deleted together with everything.
    """
    from holdfast.front.records.answer_tokens import clear_answers
    from holdfast.front.records.responses import clear_responses
    from holdfast.store.inspect import clear_store

    report = clear_store(folder)
    clear_answers(folder)
    clear_responses(folder)
    return report


@contextlib.contextmanager
def _plain_store_errors() -> Iterator[None]:
    """Turn errors of files, as well as HoldfastError, into one line and exit code 2."""
    with plain_errors():
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as failure:
            complain(f"the store cannot be used: {failure}")
            raise typer.Exit(BAD_INPUT) from None


def _store_settings(folder: Path | None, config: Path | None) -> StoreSettings:
    """The store's settings, including its folder. Raises ConfigError if the store is off."""
    from holdfast.store.folder import chosen_folder

    flags = {} if folder is None else {"store.folder": str(folder)}
    settings = read_settings(flags, file=config).settings.store
    path = chosen_folder(settings, os.environ)
    if not path:
        raise ConfigError(
            "the store is off: name a folder with --store FOLDER, or as store.folder in the "
            "settings"
        )
    return dataclasses.replace(settings, folder=path)


def _warn_of_other_store(path: Path) -> None:
    """If no running server uses this folder, name the stores that running servers use."""
    url_of_folder = {
        server.store_folder: server.url for server in own_servers() if server.store_folder
    }
    if str(path) in url_of_folder:
        return
    for folder, url in url_of_folder.items():
        complain(
            f"the server at {url} uses another store; to see it: --store {shlex.quote(folder)}"
        )


def _summary_rows(summary: StoreSummary) -> list[tuple[str, str]]:
    """The rows of `holdfast store stat`: name and value."""
    volume = f"{size_text(summary.volume_free_bytes)} free of {size_text(summary.volume_bytes)}"
    rows = [
        ("folder", str(summary.folder)),
        ("stored", f"{count_text(summary.blocks, 'block')}, {size_text(summary.file_bytes)}"),
        ("limit", size_text(summary.allowed_bytes)),
        ("written today", size_text(summary.written_today_bytes)),
        ("volume", volume),
    ]
    if summary.pinned_blocks:
        rows.append(("pinned", count_text(summary.pinned_blocks, "block")))
    if summary.unreachable_blocks:
        blocks = count_text(summary.unreachable_blocks, "block")
        rows.append(("unreachable", f"{blocks}; evicted first"))
    if summary.quarantined_files:
        files = count_text(summary.quarantined_files, "file")
        rows.append(("quarantine", f"{files}, {size_text(summary.quarantined_bytes)}"))
    return rows


def _print_models(models: Sequence[ModelHoldings]) -> None:
    numbers = ("tokens", "blocks", "states", "size")
    table = new_table("model", "id", *numbers, "last used", right=numbers)
    for holdings in models:
        table.add_row(
            holdings.served_as or "(unknown)",
            holdings.model,
            f"{holdings.tokens:,}",
            f"{holdings.blocks:,}",
            f"{holdings.states:,}",
            size_text(holdings.file_bytes),
            time_text(holdings.last_used),
        )
    print_table(table)


Id: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="Id of the session.")]
Pin: TypeAlias = Annotated[bool, typer.Option("--pin", help="Never evict the session's blocks.")]
Ttl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--ttl",
        metavar="TIME",
        help="Lifetime after the session's last use, such as 12h or 30d, or `never`.",
    ),
]


@sessions.command("ls")
@server_command
def list_sessions(server: ServerClient, as_json: Json = False) -> None:
    """List the sessions, the most recently used first."""
    sessions_of_model = _call_session_operation(server, "list")["data"]
    if as_json:
        print_json(sessions_of_model)
    elif sessions_of_model:
        _print_sessions(sessions_of_model)
    else:
        typer.echo("there are no sessions")


@sessions.command("show")
@server_command
def show(server: ServerClient, session_id: Id, as_json: Json = False) -> None:
    """Show one session."""
    _print_session(_call_session_operation(server, "get", session_id), as_json=as_json)


@sessions.command("open")
@server_command
def open_session(
    server: ServerClient,
    session_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Id of the session; default: a generated id."),
    ] = None,
    pin: Pin = False,
    ttl: Ttl = None,
    as_json: Json = False,
) -> None:
    """Open a session. A request with a new session id opens that session, too."""
    _print_session(
        _call_session_operation(
            server, "open", json={"pinned": pin} | _id_field(session_id) | _ttl_field(ttl)
        ),
        as_json=as_json,
    )


@sessions.command("fork")
@server_command
def fork(
    server: ServerClient,
    session_id: Id,
    new_id: Annotated[
        str | None,
        typer.Argument(metavar="[NEW]", help="Id of the new session; default: a generated id."),
    ] = None,
    pin: Pin = False,
    ttl: Ttl = None,
    as_json: Json = False,
) -> None:
    """Open a session that continues from the current state of another one."""
    _print_session(
        _call_session_operation(
            server, "fork", session_id, json={"pinned": pin} | _id_field(new_id) | _ttl_field(ttl)
        ),
        as_json=as_json,
    )


@sessions.command("pin")
@server_command
def pin_session(server: ServerClient, session_id: Id) -> None:
    """Protect a session's blocks from eviction."""
    _print_session(_call_session_operation(server, "update", session_id, json={"pinned": True}))


@sessions.command("unpin")
@server_command
def unpin_session(server: ServerClient, session_id: Id) -> None:
    """Allow eviction of a session's blocks."""
    _print_session(_call_session_operation(server, "update", session_id, json={"pinned": False}))


@sessions.command("close")
@server_command
def close_session(
    server: ServerClient,
    session_id: Id,
    forget: Annotated[
        bool, typer.Option("--forget", help="Also delete its blocks, except those that others use.")
    ] = False,
) -> None:
    """Close a session."""
    _call_session_operation(
        server, "close", session_id, params={"forget": "true"} if forget else {}
    )
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
    size = server.download(_operation_path("export", session_id), file)
    typer.echo(f"wrote {file}, {size_text(size)}")


@sessions.command("import")
@server_command
def import_session(
    server: ServerClient,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `export`.")],
    session_id: Annotated[
        str | None,
        typer.Option("--id", help="Id of the imported session; default: as in the file."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read a session from a file.

    The session must come from the same model, with the same weights and tokenizer.
    """
    with file.open("rb") as content:
        _print_session(
            _call_session_operation(
                server, "import", params=_id_field(session_id), content=content
            ),
            as_json=as_json,
        )


def _call_session_operation(
    server: ServerClient, operation: OperationName, session_id: str = "", **request: Any
) -> dict[str, Any]:
    """Call an operation of the table of session operations. request: further arguments of httpx."""
    return server.call(
        SESSION_OPERATIONS[operation].method, _operation_path(operation, session_id), **request
    )


def _operation_path(operation: OperationName, session_id: str) -> str:
    """The HTTP path of a session operation."""
    return SESSIONS_PATH + SESSION_OPERATIONS[operation].path.format(
        session_id=quote(session_id, safe="")
    )


def _id_field(session_id: str | None) -> dict[str, Any]:
    """The field for the id of a new session; without an id, the server generates one."""
    return {} if session_id is None else {"id": session_id}


def _ttl_field(text: str | None) -> dict[str, Any]:
    """The field for the lifetime of a session, from --ttl. Raises ConfigError."""
    if text is None:
        return {}
    if text == _NEVER:
        return {"ttl_seconds": None}
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smhd]?)", text)
    if match is None:
        raise ConfigError(f"--ttl {text}: must be a time such as 90s, 12h or 30d, or {_NEVER}")
    return {"ttl_seconds": float(match[1]) * _SECONDS_OF_UNIT[match[2] or "s"]}


def _print_session(session: Mapping[str, Any], *, as_json: bool = False) -> None:
    """Print one session, a `SessionObject` of /v1/sessions. "hot" are the tokens whose keys and values
    are still in the engine's buffers: the next turn copies no cached blocks.
    """
    if as_json:
        print_json(session)
        return
    cached_text = f"{session['kept_tokens']:,} cached ({session['ram_tokens']:,} in RAM)"
    branches_text = count_text(session["branches"], "branch", "branches")
    hot_text = ""
    if session["live_tokens"]:
        hot_text = f"{session['live_tokens']:,} tokens: the next turn continues without a copy"
    print_rows(
        [
            ("session", session["id"]),
            ("model", session["model"]),
            ("tokens", f"{session['tokens']:,}, {cached_text}"),
            ("hot", hot_text),
            ("size", f"{size_text(session['kept_bytes'])} in {branches_text}"),
            ("requests", f"{session['requests']:,}"),
            ("last used", time_text(session["last_used_at"])),
            ("ends", _NEVER if session["expires_at"] is None else time_text(session["expires_at"])),
            ("pinned", _pin_text(session)),
            ("forked from", session["forked_from"]),
            (
                "metadata",
                ", ".join(f"{name}={value}" for name, value in session["metadata"].items()),
            ),
        ]
    )


def _print_sessions(sessions: Sequence[Mapping[str, Any]]) -> None:
    numbers = ("tokens", "cached", "in RAM", "hot", "size", "requests")
    table = new_table("session", *numbers, "last used", "pinned", right=numbers)
    for session in sessions:
        table.add_row(
            " ".join(filter(None, (session["id"], session["metadata"].get(_NAME_KEY)))),
            f"{session['tokens']:,}",
            f"{session['kept_tokens']:,}",
            f"{session['ram_tokens']:,}",
            f"{session['live_tokens']:,}",
            size_text(session["kept_bytes"]),
            f"{session['requests']:,}",
            time_text(session["last_used_at"]),
            _pin_text(session),
        )
    print_table(table)


def _pin_text(session: Mapping[str, Any]) -> str:
    """Describe a session's pin; empty if it is not pinned."""
    if not session["pinned"]:
        return ""
    text_of_state = {
        "over_quota": "in part: over the quota",
        "incomplete": "in part: the rest is gone",
    }
    return text_of_state.get(session["pin_state"], "yes")


class StateInUse(HoldfastError):
    """The state cannot be deleted: it is in use, unknown, or deleted by another command."""


def _used_by_every_server(server: RunningServer) -> bool:
    return True


def _used_by_no_server(server: RunningServer) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKind:
    """One kind of state on disk: a file or a folder.

    bound: the limit of its size, in words. clear: deletes the state; None for API keys, which only
    `holdfast keys` removes. is_used_by: whether a running server uses the state, so that it must
    not be deleted. other_kinds: subfolders that are separate kinds.
    """

    name: str
    what: str  # description for users
    place: Path  # file or folder
    bound: str
    clear: Callable[[], object] | None
    is_used_by: Callable[[RunningServer], bool] = _used_by_every_server
    other_kinds: tuple[str, ...] = ()

    @classmethod
    def of_folder(
        cls,
        place: Path,
        *,
        what: str,
        bound: str,
        name: str = "",
        is_used_by: Callable[[RunningServer], bool] = _used_by_every_server,
    ) -> Self:
        """The state in a folder, which is deleted as a whole. name: by default that of the folder."""
        return cls(
            name=name or place.name,
            what=what,
            place=place,
            bound=bound,
            clear=lambda: shutil.rmtree(place) if place.exists() else None,
            is_used_by=is_used_by,
        )

    def size_bytes(self) -> int:
        """Size on disk. Links are not followed."""
        if self.place.is_file():
            return self.place.stat().st_size
        total = 0
        for folder, folders, files in os.walk(self.place):
            if folder == str(self.place):
                folders[:] = [name for name in folders if name not in self.other_kinds]
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(folder, name)).st_size
        return total


@state.command("ls")
def list_state(config: Config = None, as_json: Json = False) -> None:
    """List everything that Holdfast keeps on disk, with its folder, size and limit."""
    table = new_table("name", "size", "at most", "where", right=("size",))
    rows = []
    home = os.path.expanduser("~") + os.sep
    for kind in _state_kinds(config):
        place = str(kind.place)
        size = kind.size_bytes()
        rows.append(
            {
                "name": kind.name,
                "what": kind.what,
                "path": place,
                "bytes": size,
                "bound": kind.bound,
            }
        )
        if place.startswith(home):
            place = f"~/{place.removeprefix(home)}"
        table.add_row(kind.name, size_text(size), kind.bound, place)
    if as_json:
        print_json(rows)
    else:
        print_table(table)


@state.command("clear")
def clear_state(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="What to delete: a name that `ls` shows."),
    ] = None,
    all_kinds: Annotated[bool, typer.Option("--all", help="Everything except API keys.")] = False,
    config: Config = None,
    yes: Yes = False,
) -> None:
    """Delete some or all files that Holdfast keeps on disk, unless a running server uses them."""
    kinds = {kind.name: kind for kind in _state_kinds(config)}
    if all_kinds:
        names = [name for name, kind in kinds.items() if kind.clear is not None]
    with plain_errors():
        chosen = _chosen_kinds(kinds, names or [])
    for kind in chosen:
        typer.echo(f"{kind.name:<11} {size_text(kind.size_bytes()):>10}  {kind.place}")
    if not yes:
        typer.confirm("Delete this?", abort=True)
        with plain_errors():  # check again, because a server may have started since then
            _check_unused(chosen)
    for kind in chosen:
        assert kind.clear is not None
        try:
            kind.clear()
        except (OSError, HoldfastError) as error:
            complain(f"{kind.name} could not be deleted completely: {error}")
            raise typer.Exit(FAILED) from None
    typer.echo("deleted")


def _chosen_kinds(kinds: Mapping[str, StateKind], names: Sequence[str]) -> list[StateKind]:
    """Return the kinds to delete. Raises StateInUse if a kind cannot be deleted."""
    for name in names:
        if name not in kinds:
            raise StateInUse(f"there is no state called {name}; there are: {', '.join(kinds)}")
        if kinds[name].clear is None:
            raise StateInUse(f"{name} are not deleted here: `holdfast keys rm NAME` removes one")
    if not names:
        raise StateInUse(f"name what to delete, or --all: {', '.join(kinds)}")
    chosen = [kind for name, kind in kinds.items() if name in names]
    _check_unused(chosen)
    return chosen


def _check_unused(kinds: Sequence[StateKind]) -> None:
    """Raise StateInUse if a running server uses the state."""
    for server in own_servers():
        for kind in kinds:
            if kind.is_used_by(server):
                raise StateInUse(
                    f"{kind.name} is in use by the server at {server.url}; stop it first: holdfast "
                    f"stop {server.pid}"
                )


def _state_kinds(config: Path | None) -> list[StateKind]:
    """Return all kinds of state on disk, according to the settings in `config`."""
    from holdfast.store.folder import chosen_folder

    with plain_errors():
        settings = read_settings(file=config).settings
        try:
            folder = chosen_folder(settings.store, os.environ)
            store_kinds = _kinds_in_store(Path(folder), settings) if folder else []
            other_kinds = [*_log_kinds(settings), *_cache_kinds(), *_key_kinds(settings)]
            return store_kinds + other_kinds
        except (OSError, RuntimeError) as error:  # RuntimeError: the user lacks a home folder
            raise StateInUse(f"the state cannot be read: {error}") from None


def _kinds_in_store(folder: Path, settings: Settings) -> list[StateKind]:
    """The kinds of state in the store's folder."""
    from holdfast.front.records.answer_tokens import MOST_BYTES, clear_answers
    from holdfast.front.records.responses import clear_responses
    from holdfast.store.inspect import summarize_store
    from holdfast.store.maintenance import store_limits

    def is_used_by(server: RunningServer) -> bool:
        return server.store_folder == str(folder)

    exists = (folder / "blocks").is_dir()  # created when a server first uses the store
    allowed_bytes = settings.store.disk_bytes
    if exists:
        limits = store_limits(settings.store)
        allowed_bytes = summarize_store(folder, limits=limits).allowed_bytes
    responses = settings.responses
    return [
        StateKind(
            name="store",
            what="the prefix cache and sessions; clearing it also clears all of the following",
            place=folder,
            bound="a fifth of the volume" if allowed_bytes is None else size_text(allowed_bytes),
            clear=lambda: _clear_all(folder) if exists else None,
            is_used_by=is_used_by,
            other_kinds=("responses", "answers", "images"),
        ),
        StateKind(
            name="responses",
            what="responses and conversations",
            place=folder / "responses",
            bound=f"{size_text(responses.max_bytes)}, {responses.max_count:,} records",
            clear=lambda: clear_responses(folder),
            is_used_by=is_used_by,
        ),
        StateKind(
            name="answers",
            what="exact tokens of generated answers",
            place=folder / "answers",
            bound=size_text(MOST_BYTES),
            clear=lambda: clear_answers(folder),
            is_used_by=is_used_by,
        ),
        StateKind.of_folder(
            folder / "images",
            what="images of prompts, and what models computed of them",
            bound=f"{size_text(settings.images.disk_bytes)} of images",
            is_used_by=is_used_by,
        ),
    ]


def _log_kinds(settings: Settings) -> list[StateKind]:
    """Logs, crash reports and histories, which are in Holdfast's state folder."""
    from holdfast.files import performance_folder, state_folder
    from holdfast.front.fleet.worker_files import MOST_REPORTS
    from holdfast.front.telemetry.history import MOST_BYTES

    logs = state_folder(os.environ) / "logs"
    log_size = size_text(settings.log.file_bytes * (settings.log.old_files + 1))
    return [
        StateKind.of_folder(
            logs,
            what="logs of servers",
            bound=f"{log_size} for each port",
            is_used_by=lambda server: Path(server.log_file).parent == logs,
        ),
        StateKind.of_folder(
            logs.with_name("crashes"),
            what="reports of crashed workers",
            bound=f"the latest {MOST_REPORTS}",
            is_used_by=_used_by_no_server,
        ),
        StateKind.of_folder(
            performance_folder(os.environ),
            what="histories of how long requests took",
            bound=f"{size_text(MOST_BYTES)} for each port",
        ),
    ]


def _cache_kinds() -> list[StateKind]:
    """What can be computed again: compiled code, hashes, measurements."""
    from holdfast.files import caches_folder
    from holdfast.front.fleet.worker_files import MOST_KINDS
    from holdfast.models.quality import MOST_RESULTS
    from holdfast.worker.cpu.kernels.build import MOST_VERSIONS, kept_elsewhere

    caches = caches_folder(os.environ)
    kernel_folders = {"kernels": caches / "kernels"}
    for folder in kept_elsewhere():  # `kernels-var-tmp`
        kernel_folders["-".join(("kernels", *folder.parent.parts[1:]))] = folder
    kernels = [
        StateKind.of_folder(
            folder,
            name=name,
            what="kernels of Holdfast, compiled for this machine",
            bound=f"{MOST_VERSIONS} versions of each",
            is_used_by=_used_by_no_server,
        )
        for name, folder in kernel_folders.items()
    ]
    return [
        StateKind.of_folder(
            caches / "compiled",
            what="code that MLX has compiled",
            bound=f"for {MOST_KINDS} kinds of machines and systems",
        ),
        *kernels,
        StateKind.of_folder(
            caches / "hashes", what="hashes of model files", bound="one for each file"
        ),
        StateKind.of_folder(
            caches / "quality",
            what="results of `holdfast quality`",
            bound=f"the latest {MOST_RESULTS}",
            is_used_by=_used_by_no_server,
        ),
    ]


def _key_kinds(settings: Settings) -> list[StateKind]:
    """The file of API keys, if there is one."""
    from holdfast.front.server.access import key_file_of

    keys = key_file_of(settings.server.keys_file, os.environ)
    if keys is None:
        return []
    what = "hashes of API keys"
    return [StateKind(name="keys", what=what, place=keys, bound="one for each key", clear=None)]
