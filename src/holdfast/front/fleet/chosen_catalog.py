"""The catalog that a server serves: from the settings, the file of models, and what lies on this
machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from holdfast.config import Settings, config_folders
from holdfast.errors import ModelLoadError
from holdfast.front.fleet.catalog import Catalog, CatalogEntry
from holdfast.front.fleet.catalog_file import (
    FILE_NAME,
    CatalogFile,
    check_catalog_file,
    read_catalog_file,
)
from holdfast.front.fleet.discovery import found_models, with_found
from holdfast.models.download import model_source, served_id
from holdfast.nearest import nearest_names


def catalog_of(settings: Settings, environ: Mapping[str, str]) -> Catalog:
    """What is to be served. Reads files, and asks no Hub.

    `model.path` names a model of the file: that one comes first. It names another model: that one
    alone, or in front of the file's if a file is named too. It is empty: all that there are, or the
    bundled model. Raises ConfigError for a named file that cannot be read, and ModelLoadError for a
    named model that can be none.
    """
    file = catalog_file_of(settings, environ)
    read = CatalogFile() if file is None else read_catalog_file(file, settings)
    entries, left_out = read.entries, read.left_out
    if settings.model.path:
        named = Catalog(entries=entries).find(settings.model.path)
        if named is None:
            named = _named_beside(read, settings, environ)
            if not settings.catalog.file:
                return _only(named)
        entries = _in_front(named, entries)
    entries = _also_by_hub_id(entries)
    served, passed_over = with_found(entries, found_models(settings, environ), settings)
    entries, left_out = tuple(served), (*left_out, *passed_over)
    if not entries:
        return replace(
            _only(_named_by_settings(settings)),
            left_out=left_out,
            takes_found=settings.catalog.hub_cache,
        )
    first = entries[:1] if settings.model.path or len(entries) == 1 else ()
    at_start = dict.fromkeys(
        entry.name for entry in (*first, *(entry for entry in entries if entry.is_pinned))
    )
    return Catalog(
        entries=entries,
        left_out=left_out,
        at_start=tuple(at_start),
        takes_found=settings.catalog.hub_cache,
    )


def catalog_again(settings: Settings, environ: Mapping[str, str]) -> Catalog:
    """The same for a server that runs: a file of models that is broken as a whole is to take none
    of them away.

    Raises ConfigError for that file, and as `catalog_of`.
    """
    if (file := catalog_file_of(settings, environ)) is not None:
        check_catalog_file(file)
    return catalog_of(settings, environ)


def catalog_file_of(settings: Settings, environ: Mapping[str, str]) -> Path | None:
    """The file of models: the one that is named, or the user's own if it is there."""
    if settings.catalog.file:
        return Path(os.path.expanduser(settings.catalog.file))
    return next(
        (file for folder in config_folders(environ) if (file := folder / FILE_NAME).is_file()), None
    )


def _named_by_settings(settings: Settings) -> CatalogEntry:
    """The model that the server's own settings describe: the bundled one if they name none.

    Raises ModelLoadError.
    """
    model = replace(settings.model, name=served_id(settings.model))
    return CatalogEntry(
        name=model.name,
        model=model,
        store=settings.store,
        origin="",
        idle_seconds=settings.residency.idle_seconds,
    )


def _named_beside(
    read: CatalogFile, settings: Settings, environ: Mapping[str, str]
) -> CatalogEntry:
    """The named model, none of the file: of a watched folder, or what the settings describe.

    Raises ModelLoadError.
    """
    name = settings.model.path
    if wrong := next((each for each in read.left_out if each.name == name), None):
        raise ModelLoadError(f"model {name} of {wrong.origin} cannot be served: {wrong.reason}")
    watched = replace(settings, catalog=replace(settings.catalog, hub_cache=False))
    found, _ = with_found((), found_models(watched, environ), settings)
    is_elsewhere = os.path.exists(name) or settings.model.revision
    if not is_elsewhere and (entry := Catalog(entries=tuple(found)).find(name)) is not None:
        settings = replace(settings, model=replace(entry.model, name=settings.model.name or name))
    try:
        return _named_by_settings(settings)
    except ModelLoadError as error:
        near = nearest_names(
            name, (known for entry in read.entries for known in (entry.name, *entry.aliases))
        )
        hints = (
            [f"did you mean {' or '.join(near)}?"]
            if near
            else [f"{each.origin}: {each.reason}" for each in read.left_out[:1]]
        )
        raise ModelLoadError("; ".join([str(error), *hints])) from None


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
