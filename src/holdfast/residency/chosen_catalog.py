"""The catalog that a server serves: from the settings, the file of models, and what lies on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.config import Settings, config_folders
from holdfast.models.download import served_id
from holdfast.residency.catalog import Catalog, CatalogEntry
from holdfast.residency.catalog_file import FILE_NAME, CatalogFile, read_catalog_file


def catalog_of(settings: Settings, environ: Mapping[str, str]) -> Catalog:
    """What is to be served. Reads files, and asks no Hub.

    `model.path` names a model of the file: that one comes first. It names another model: that one alone, or in front of
    the file's if a file is named too. It is empty: all that there are, or the bundled model.
    Raises ConfigError for a named file that cannot be read, and ModelLoadError for a named model that can be none.
    """
    file = catalog_file_of(settings, environ)
    read = CatalogFile() if file is None else read_catalog_file(file, settings)
    entries = read.entries
    if settings.model.path:
        named = Catalog(entries=entries).find(settings.model.path)
        if named is None and not settings.catalog.file:
            entries = ()
        entries = _in_front(named or _named_by_settings(settings), entries)
    entries = entries or (_named_by_settings(settings),)
    first = entries[:1] if settings.model.path or len(entries) == 1 else ()
    at_start = dict.fromkeys(entry.name for entry in (*first, *(entry for entry in entries if entry.is_pinned)))
    return Catalog(entries=entries, left_out=read.left_out, at_start=tuple(at_start))


def catalog_file_of(settings: Settings, environ: Mapping[str, str]) -> Path | None:
    """The file of models: the one that is named, or the user's own if it is there."""
    if settings.catalog.file:
        return Path(settings.catalog.file).expanduser()
    return next((file for folder in config_folders(environ) if (file := folder / FILE_NAME).is_file()), None)


def _named_by_settings(settings: Settings) -> CatalogEntry:
    """The model that the server's own settings describe: the bundled one if they name none. Raises ModelLoadError."""
    model = replace(settings.model, name=served_id(settings.model))
    return CatalogEntry(
        name=model.name, model=model, store=settings.store, origin="", idle_seconds=settings.residency.idle_seconds
    )


def _in_front(first: CatalogEntry, others: tuple[CatalogEntry, ...]) -> tuple[CatalogEntry, ...]:
    return (first, *(entry for entry in others if entry.name != first.name))
