"""The catalog that a server serves: from the settings, the file of models, and what lies on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.config import Settings, config_folders
from holdfast.models.download import model_source, served_id
from holdfast.residency.catalog import Catalog, CatalogEntry
from holdfast.residency.catalog_file import FILE_NAME, CatalogFile, check_catalog_file, read_catalog_file
from holdfast.residency.discovery import found_models, with_found


def catalog_of(settings: Settings, environ: Mapping[str, str]) -> Catalog:
    """What is to be served. Reads files, and asks no Hub.

    `model.path` names a model of the file: that one comes first. It names another model: that one alone, or in front of
    the file's if a file is named too. It is empty: all that there are, or the bundled model.
    Raises ConfigError for a named file that cannot be read, and ModelLoadError for a named model that can be none.
    """
    file = catalog_file_of(settings, environ)
    read = CatalogFile() if file is None else read_catalog_file(file, settings)
    entries, left_out = read.entries, read.left_out
    if settings.model.path:
        named = Catalog(entries=entries).find(settings.model.path)
        if named is None and not settings.catalog.file:
            return _only(_named_by_settings(settings))
        entries = _in_front(named or _named_by_settings(settings), entries)
    entries = _also_by_hub_id(entries)
    served, passed_over = with_found(entries, found_models(settings, environ), settings)
    entries, left_out = tuple(served), (*left_out, *passed_over)
    if not entries:
        return replace(_only(_named_by_settings(settings)), left_out=left_out, takes_found=settings.catalog.hub_cache)
    first = entries[:1] if settings.model.path or len(entries) == 1 else ()
    at_start = dict.fromkeys(entry.name for entry in (*first, *(entry for entry in entries if entry.is_pinned)))
    return Catalog(entries=entries, left_out=left_out, at_start=tuple(at_start), takes_found=settings.catalog.hub_cache)


def catalog_again(settings: Settings, environ: Mapping[str, str]) -> Catalog:
    """The same for a server that runs: a file of models that is broken as a whole is to take none of them away.

    Raises ConfigError for that file, and as `catalog_of`.
    """
    if (file := catalog_file_of(settings, environ)) is not None:
        check_catalog_file(file)
    return catalog_of(settings, environ)


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


def _only(entry: CatalogEntry) -> Catalog:
    return Catalog(entries=(entry,), at_start=(entry.name,))


def _also_by_hub_id(entries: tuple[CatalogEntry, ...]) -> tuple[CatalogEntry, ...]:
    """The entries, each with its Hub id for an alias: of several with one id the first has it."""
    taken = {name for entry in entries for name in (entry.name, *entry.aliases)}
    named = []
    for entry in entries:
        source = model_source(entry.model.path, revision=entry.model.revision)
        if source.kind == "hub" and source.name not in taken:
            taken.add(source.name)
            entry = replace(entry, aliases=(*entry.aliases, source.name))
        named.append(entry)
    return tuple(named)


def _in_front(first: CatalogEntry, others: tuple[CatalogEntry, ...]) -> tuple[CatalogEntry, ...]:
    return (first, *(entry for entry in others if entry.name != first.name))
