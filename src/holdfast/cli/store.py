"""`holdfast store …`: what is kept on disk of what models have read.

A server may have the folder open at the same time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import time
from collections.abc import Iterator, Sequence
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
from holdfast.config import StoreSettings, default_file, load_settings
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.store.inspect import ModelHoldings, StoreSummary, VerifyReport

DAMAGE_FOUND = 1

store = typer.Typer(help="Show, check and empty the prefix cache on disk.", no_args_is_help=True)

Folder: TypeAlias = Annotated[
    Path | None,
    typer.Option("--store", metavar="FOLDER", help="The store; default: the one in your settings."),
]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings file; else ./holdfast.toml."),
]


@store.command("ls")
def list_models(folder: Folder = None, config: Config = None, as_json: Json = False) -> None:
    """List the models of which something is kept, the largest first."""
    from holdfast.store.inspect import list_store

    with _plain_failures():
        path = Path(_settings(folder, config).folder)
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
    """Show how much is kept, how much may be, and what is odd."""
    from holdfast.store.budget import store_limits
    from holdfast.store.inspect import summarize_store

    with _plain_failures():
        settings = _settings(folder, config)
        summary = summarize_store(Path(settings.folder), limits=store_limits(settings))
    if as_json:
        print_json(dataclasses.asdict(summary))
        return
    _warn_of_other_store(Path(settings.folder))
    print_rows(_summary_rows(summary))


@store.command("verify")
def verify(folder: Folder = None, config: Config = None, as_json: Json = False) -> None:
    """Read and check every file. Damaged ones are put into quarantine, and the exit code is 1."""
    from holdfast.store.inspect import verify_store

    with _plain_failures():
        report = verify_store(Path(_settings(folder, config).folder))
    if as_json:
        bad = [{"path": path, "reason": reason} for path, reason in report.bad.items()]
        print_json(dataclasses.asdict(report) | {"bad": bad})
    else:
        _print_verified(report)
    if report.bad:
        raise typer.Exit(DAMAGE_FOUND)


@store.command("prune")
def prune(folder: Folder = None, config: Config = None) -> None:
    """Bring the folder within its limits: what nothing leads to goes first, then what was not used
    for longest.
    """
    from holdfast.store.budget import store_limits
    from holdfast.store.inspect import prune_store

    with _plain_failures():
        settings = _settings(folder, config)
        report = prune_store(Path(settings.folder), limits=store_limits(settings))
    typer.echo(f"removed {count_text(len(report.keys), 'block')}, {size_text(report.freed_bytes)}")
    if report.salvaged_blocks:
        typer.echo(
            f"finished {count_text(report.salvaged_blocks, 'block')} that a dead server had left "
            "half done"
        )


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
    """Delete what is kept, of all models or of one.

    A running server forgets it as it finds it gone.
    """
    from holdfast.store.inspect import clear_store, list_store

    with _plain_failures():
        path = Path(_settings(folder, config).folder)
        concerned = [
            kept for kept in list_store(path) if model in (None, kept.model, kept.served_as)
        ]
        if model is not None and not concerned:
            raise ConfigError(
                f"nothing is kept of a model {model}; `holdfast store ls` shows the models"
            )
        blocks, size = (
            sum(kept.blocks for kept in concerned),
            sum(kept.file_bytes for kept in concerned),
        )
        if not yes:
            typer.confirm(
                f"Delete {count_text(blocks, 'block')} ({size_text(size)}) in {path}?", abort=True
            )
        reports = [
            clear_store(path, model=each)
            for each in ([None] if model is None else [kept.model for kept in concerned])
        ]
    deleted, freed_bytes = (
        sum(len(report.keys) for report in reports),
        sum(report.freed_bytes for report in reports),
    )
    typer.echo(f"deleted {count_text(deleted, 'block')}, {size_text(freed_bytes)}")


@contextlib.contextmanager
def _plain_failures() -> Iterator[None]:
    with plain_errors():
        try:
            yield
        except OSError as failure:
            complain(f"the store cannot be used: {failure}")
            raise typer.Exit(BAD_INPUT) from None


def _settings(folder: Path | None, config: Path | None) -> StoreSettings:
    """The store's settings; its folder is set. Raises ConfigError."""
    from holdfast.store.folder import chosen_folder

    flags = {} if folder is None else {"store.folder": str(folder)}
    settings = load_settings(
        file=config or default_file(os.environ), environ=os.environ, flags=flags
    ).settings.store
    path = chosen_folder(settings, os.environ)
    if not path:
        raise ConfigError(
            "the store is off: name a folder with --store FOLDER, or as store.folder in the "
            "settings"
        )
    return dataclasses.replace(settings, folder=path)


def _warn_of_other_store(path: Path) -> None:
    """Name the stores of running servers where none of these servers uses the folder that is shown."""
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
    rows = [
        ("folder", str(summary.folder)),
        ("kept", f"{count_text(summary.blocks, 'block')}, {size_text(summary.file_bytes)}"),
        ("may be kept", size_text(summary.allowed_bytes)),
        ("written today", size_text(summary.written_today_bytes)),
        (
            "volume",
            f"{size_text(summary.volume_free_bytes)} free of {size_text(summary.volume_bytes)}",
        ),
    ]
    odd = [
        ("pinned", summary.pinned_blocks, count_text(summary.pinned_blocks, "block")),
        (
            "unreachable",
            summary.unreachable_blocks,
            f"{count_text(summary.unreachable_blocks, 'block')}; first to go",
        ),
        (
            "quarantine",
            summary.quarantined_files,
            f"{count_text(summary.quarantined_files, 'file')}, "
            f"{size_text(summary.quarantined_bytes)}",
        ),
    ]
    return rows + [(name, text) for name, count, text in odd if count]


def _print_models(models: Sequence[ModelHoldings]) -> None:
    numbers = ("tokens", "blocks", "states", "size")
    table = new_table("model", "id", *numbers, "last used", right=numbers)
    for kept in models:
        counts = (
            f"{kept.tokens:,}",
            f"{kept.blocks:,}",
            f"{kept.states:,}",
            size_text(kept.file_bytes),
        )
        table.add_row(
            kept.served_as or "(unknown)",
            kept.model,
            *counts,
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
