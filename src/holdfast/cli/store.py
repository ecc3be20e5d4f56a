"""`holdfast store …` and `holdfast state …`: show and delete what is kept on disk.

`store` is the prefix cache, which a running server may use at the same time. `state` lists the store
with everything else that Holdfast keeps for a user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from holdfast.cli.output import (
    BAD_INPUT,
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
)
from holdfast.cli.settings_command import read_settings
from holdfast.config import Settings, StoreSettings
from holdfast.errors import ConfigError, HoldfastError

if TYPE_CHECKING:
    from holdfast.front.run.running_servers import RunningServer
    from holdfast.store.inspect import ModelHoldings, StoreSummary, VerifyReport

_FAILED = 1

store = typer.Typer(help="Show, check and empty the prefix cache on disk.", no_args_is_help=True)
state = typer.Typer(help="Show and delete what Holdfast keeps on disk.", no_args_is_help=True)

Folder: TypeAlias = Annotated[
    Path | None,
    typer.Option("--store", metavar="FOLDER", help="The store; default: the one in your settings."),
]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings file; default: ./holdfast.toml."),
]


class StateInUse(HoldfastError):
    """Something cannot be deleted."""


@store.command("ls")
def list_models(folder: Folder = None, config: Config = None, as_json: Json = False) -> None:
    """List the models with cached blocks, the largest first."""
    from holdfast.store.inspect import list_store

    with _plain_failures():
        path = Path(_store_settings(folder, config).folder)
        models = list_store(path)
    if as_json:
        print_json([dataclasses.asdict(model) for model in models])
        return
    _warn_of_other_store(path)
    if models:
        typer.echo(f"{path}\n")
        _print_models(models)
    else:
        typer.echo(f"nothing is kept in {path}")


@store.command("stat")
def show_store(folder: Folder = None, config: Config = None, as_json: Json = False) -> None:
    """Show the size of the store, its limit, and anything unusual."""
    from holdfast.store.budget import store_limits
    from holdfast.store.inspect import summarize_store

    with _plain_failures():
        settings = _store_settings(folder, config)
        summary = summarize_store(Path(settings.folder), limits=store_limits(settings))
    if as_json:
        print_json(dataclasses.asdict(summary))
        return
    _warn_of_other_store(Path(settings.folder))
    print_rows(_summary_rows(summary))


@store.command("verify")
def verify(folder: Folder = None, config: Config = None, as_json: Json = False) -> None:
    """Read and check every file. If any is damaged, quarantine it and exit with code 1."""
    from holdfast.store.inspect import verify_store

    with _plain_failures():
        report = verify_store(Path(_store_settings(folder, config).folder))
    if as_json:
        bad = [{"path": path, "reason": reason} for path, reason in report.bad.items()]
        print_json(dataclasses.asdict(report) | {"bad": bad})
    else:
        _print_verified(report)
    if report.bad:
        raise typer.Exit(_FAILED)


@store.command("prune")
def prune(folder: Folder = None, config: Config = None) -> None:
    """Evict blocks until the store is within its limits.

    Unreachable blocks go first, then the least recently used.
    """
    from holdfast.store.budget import store_limits
    from holdfast.store.inspect import prune_store

    with _plain_failures():
        settings = _store_settings(folder, config)
        report = prune_store(Path(settings.folder), limits=store_limits(settings))
    typer.echo(f"removed {count_text(len(report.keys), 'block')}, {size_text(report.freed_bytes)}")
    if report.salvaged_blocks:
        blocks = count_text(report.salvaged_blocks, "block")
        typer.echo(f"finished {blocks} that a crashed server had left incomplete")


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
    """Delete the blocks of all models or of one.

    A running server notices that they are gone.
    """
    from holdfast.store.inspect import clear_store, list_store

    with _plain_failures():
        path = Path(_store_settings(folder, config).folder)
        chosen = [kept for kept in list_store(path) if model in (None, kept.model, kept.served_as)]
        if model is not None and not chosen:
            raise ConfigError(f"no blocks of model {model}; `holdfast store ls` lists the models")
        if not yes:
            blocks = count_text(sum(kept.blocks for kept in chosen), "block")
            size = size_text(sum(kept.file_bytes for kept in chosen))
            typer.confirm(f"Delete {blocks} ({size}) in {path}?", abort=True)
        targets: list[str | None] = [kept.model for kept in chosen]
        if model is None:
            targets = [None]
        reports = [clear_store(path, model=target) for target in targets]
    deleted = count_text(sum(len(report.keys) for report in reports), "block")
    typer.echo(f"deleted {deleted}, {size_text(sum(report.freed_bytes for report in reports))}")


@contextlib.contextmanager
def _plain_failures() -> Iterator[None]:
    with plain_errors():
        try:
            yield
        except OSError as failure:
            complain(f"the store cannot be used: {failure}")
            raise typer.Exit(BAD_INPUT) from None


def _store_settings(folder: Path | None, config: Path | None) -> StoreSettings:
    """The store's settings, with its folder. Raises ConfigError if the store is off."""
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
    """Name the stores of running servers if none of them uses this folder."""
    from holdfast.front.run.running_servers import running_servers

    others = {
        server.store_folder: server.url
        for server in running_servers(os.environ)
        if server.store_folder
    }
    if str(path) in others:
        return
    for folder, url in others.items():
        complain(
            f"the server at {url} uses another store; to see it: --store {shlex.quote(folder)}"
        )


def _summary_rows(summary: StoreSummary) -> list[tuple[str, str]]:
    volume = f"{size_text(summary.volume_free_bytes)} free of {size_text(summary.volume_bytes)}"
    rows = [
        ("folder", str(summary.folder)),
        ("kept", f"{count_text(summary.blocks, 'block')}, {size_text(summary.file_bytes)}"),
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
    for kept in models:
        table.add_row(
            kept.served_as or "(unknown)",
            kept.model,
            f"{kept.tokens:,}",
            f"{kept.blocks:,}",
            f"{kept.states:,}",
            size_text(kept.file_bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.last_used)),
        )
    print_table(table)


def _print_verified(report: VerifyReport) -> None:
    typer.echo(
        f"checked {count_text(report.files, 'file')}, {size_text(report.file_bytes)}, in "
        f"{report.seconds:.1f} s"
    )
    for path, reason in report.bad.items():
        typer.echo(f"damaged: {path}: {reason}")
    typer.echo(
        f"{len(report.bad):,} damaged, now in quarantine" if report.bad else "no damaged files"
    )


@state.command("ls")
def list_state(config: Config = None, as_json: Json = False) -> None:
    """List what is kept, with its place, size and limit."""
    kinds = _state_kinds(config)
    if as_json:
        print_json([kind.as_json() for kind in kinds])
        return
    table = new_table("name", "size", "at most", "where", right=("size",))
    home = os.path.expanduser("~") + os.sep
    for kind in kinds:
        place = str(kind.place)
        if place.startswith(home):
            place = f"~/{place.removeprefix(home)}"
        table.add_row(kind.name, size_text(kind.size_bytes()), kind.bound, place)
    print_table(table)


@state.command("clear")
def clear_state(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="What to delete, as `ls` names it."),
    ] = None,
    all_kinds: Annotated[bool, typer.Option("--all", help="Everything except API keys.")] = False,
    config: Config = None,
    yes: Yes = False,
) -> None:
    """Delete what is kept, unless a running server uses it."""
    kinds = _state_kinds(config)
    with plain_errors():
        chosen = _chosen_kinds(kinds, names or [], all_kinds=all_kinds)
    for kind in chosen:
        typer.echo(f"{kind.name:<10} {size_text(kind.size_bytes()):>10}  {kind.place}")
    if not yes:
        typer.confirm("Delete this?", abort=True)
        with plain_errors():  # again: a server may have started meanwhile
            _refuse_used(chosen)
    for kind in chosen:
        assert kind.clear is not None
        try:
            kind.clear()
        except (OSError, HoldfastError) as error:
            complain(f"{kind.name} could not be deleted completely: {error}")
            raise typer.Exit(_FAILED) from None
    typer.echo("deleted")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKind:
    """One kind of what is kept, in a file or folder."""

    name: str
    what: str
    place: Path
    bound: str  # in words
    clear: Callable[[], object] | None  # None: API keys, which `holdfast keys` removes
    is_used_by: Callable[[RunningServer], bool] = lambda server: True
    other_kinds: tuple[str, ...] = ()  # folders in it that are kinds of their own

    def size_bytes(self) -> int:
        """Its size on disk, without links."""
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

    def as_json(self) -> dict[str, object]:
        """The row of `holdfast state ls --json`."""
        return {
            "name": self.name,
            "what": self.what,
            "path": str(self.place),
            "bytes": self.size_bytes(),
            "bound": self.bound,
        }


def _state_kinds(config: Path | None) -> list[StateKind]:
    """Everything that is kept with these settings."""
    from holdfast.store.folder import chosen_folder

    with plain_errors():
        settings = read_settings(file=config).settings
        try:
            folder = chosen_folder(settings.store, os.environ)
            in_store = _kinds_in_store(Path(folder), settings) if folder else []
            return [*in_store, *_kinds_beside_store(settings)]
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
            raise StateInUse(f"the state cannot be read: {error}") from None


def _kinds_beside_store(settings: Settings) -> list[StateKind]:
    from holdfast.files import caches_folder, state_folder
    from holdfast.front.fleet.compiled_code import MOST_KINDS
    from holdfast.front.fleet.crash_reports import MOST_REPORTS
    from holdfast.front.server.access import key_file_of

    def folder_kind(place: Path, what: str, bound: str) -> StateKind:
        return StateKind(
            name=place.name, what=what, place=place, bound=bound, clear=lambda: _remove(place)
        )

    caches = caches_folder(os.environ)
    folder = state_folder(os.environ)
    log_size = size_text(settings.log.file_bytes * (settings.log.old_files + 1))
    logs = folder_kind(folder / "logs", "logs of servers", f"{log_size} for each port")
    crashes = folder_kind(
        folder / "crashes", "reports of crashed workers", f"the latest {MOST_REPORTS}"
    )
    kinds = [
        dataclasses.replace(
            logs,
            is_used_by=lambda server: Path(server.log_file).parent == logs.place,
        ),
        dataclasses.replace(crashes, is_used_by=lambda server: False),
        folder_kind(
            caches / "compiled",
            "code that MLX has compiled",
            f"of {MOST_KINDS} kinds of machines and systems",
        ),
        folder_kind(caches / "hashes", "hashes of model files", "one for each file"),
    ]
    keys = key_file_of(settings.server.keys_file, os.environ)
    if keys is not None:
        kinds.append(
            StateKind(
                name="keys",
                what="hashes of API keys",
                place=keys,
                bound="one for each key",
                clear=None,
            )
        )
    return kinds


def _kinds_in_store(folder: Path, settings: Settings) -> list[StateKind]:
    from holdfast.store.answers import MOST_BYTES, clear_answers
    from holdfast.store.budget import store_limits
    from holdfast.store.inspect import clear_store, summarize_store
    from holdfast.store.responses import clear_responses

    def is_used_by(server: RunningServer) -> bool:
        return server.store_folder == str(folder)

    exists = (folder / "blocks").is_dir()  # the first server creates it
    allowed_bytes = settings.store.disk_bytes
    if exists:
        limits = store_limits(settings.store)
        allowed_bytes = summarize_store(folder, limits=limits).allowed_bytes
    responses = settings.responses
    return [
        StateKind(
            name="store",
            what="the prefix cache and sessions; clearing it also clears responses and answers",
            place=folder,
            bound="a fifth of the volume" if allowed_bytes is None else size_text(allowed_bytes),
            clear=lambda: clear_store(folder) if exists else None,
            is_used_by=is_used_by,
            other_kinds=("responses", "answers"),
        ),
        StateKind(
            name="responses",
            what="responses and conversations",
            place=folder / "responses",
            bound=f"{size_text(responses.max_bytes)}, {responses.max_count:,} of them",
            clear=lambda: clear_responses(folder),
            is_used_by=is_used_by,
        ),
        StateKind(
            name="answers",
            what="answers as they were generated",
            place=folder / "answers",
            bound=size_text(MOST_BYTES),
            clear=lambda: clear_answers(folder),
            is_used_by=is_used_by,
        ),
    ]


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _chosen_kinds(
    kinds: Sequence[StateKind], names: Sequence[str], *, all_kinds: bool
) -> list[StateKind]:
    """The kinds to delete. Raises StateInUse if one cannot be deleted."""
    known = {kind.name: kind for kind in kinds}
    for name in names:
        if name not in known:
            raise StateInUse(f"there is no state called {name}; there are: {', '.join(known)}")
        if known[name].clear is None:
            raise StateInUse(f"{name} are not deleted here: `holdfast keys rm NAME` removes one")
    if not names and not all_kinds:
        raise StateInUse(f"name what to delete, or --all: {', '.join(known)}")
    chosen = [kind for kind in kinds if kind.name in names or (all_kinds and kind.clear)]
    _refuse_used(chosen)
    return chosen


def _refuse_used(chosen: Sequence[StateKind]) -> None:
    from holdfast.front.run.running_servers import running_servers

    for server in running_servers(os.environ):
        for kind in chosen:
            if kind.is_used_by(server):
                raise StateInUse(
                    f"{kind.name} is in use by the server at {server.url}; stop it first: holdfast "
                    f"stop {server.pid}"
                )
