"""The catalog that a server serves: from the settings, the file of models, and what lies on this
machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.config import Settings, config_folders
from holdfast.errors import ModelLoadError, nearest_names
from holdfast.front.fleet.catalog import Catalog, CatalogEntry, LeftOut
from holdfast.front.fleet.catalog_file import (
    FILE_NAME,
    CatalogFile,
    check_catalog_file,
    read_catalog_file,
)
from holdfast.models.context_window import known_context_tokens
from holdfast.models.download import model_source, served_id
from holdfast.models.hub_cache import cached_models, hub_cache_folder
from holdfast.models.model_folder import check_loadable

_SIGNS = ("config.json", ".gguf")  # of a model, as ends of names


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A folder that looks like a model's."""

    name: str  # owner/name where that is known
    folder: Path
    origin: str


def found_models(settings: Settings, environ: Mapping[str, str]) -> Iterator[FoundModel]:
    """All of them: the Hub's cache first, then the watched folders in their order, each by name."""
    if settings.catalog.hub_cache:
        cache = hub_cache_folder(environ)
        for cached in cached_models(cache):
            yield FoundModel(name=cached.hub_id, folder=cached.folder, origin=str(cache))
    for watched in settings.catalog.folders:
        parent = Path(os.path.expanduser(watched))  # which raises nothing for a user without a home
        for folder in _model_folders(parent):
            yield FoundModel(
                name=folder.relative_to(parent).as_posix(), folder=folder, origin=str(parent)
            )


def with_found(
    entries: Iterable[CatalogEntry], found: Iterable[FoundModel], settings: Settings
) -> tuple[list[CatalogEntry], list[LeftOut]]:
    """The entries, then what was found beside them and can be loaded; and what was found and is not
    served, with the reason.
    """
    served, left_out = list(entries), []
    taken = {name: entry for entry in served for name in (entry.name, *entry.aliases)}
    known = {place for entry in served for place in _places(entry)}
    for model in found:
        if {model.name, str(model.folder.resolve())} & known:  # served as one of the file says
            continue
        try:
            config = check_loadable(model.folder)
            if (other := taken.get(model.name)) is not None:
                raise ModelLoadError(f"{other.name} of {other.origin} has that name already")
        except ModelLoadError as error:
            left_out.append(
                LeftOut(name=model.name, origin=model.origin, reason=str(error), is_asked_for=False)
            )
            continue
        own = replace(settings.model, path=str(model.folder), name=model.name, revision="")
        taken[model.name] = CatalogEntry(
            name=model.name,
            model=own,
            store=settings.store,
            origin=model.origin,
            idle_seconds=settings.residency.idle_seconds,
            own_context_tokens=known_context_tokens(config),
        )
        served.append(taken[model.name])
    return served, left_out


def _places(entry: CatalogEntry) -> tuple[str, ...]:
    """By what a found model is known to be this one: its Hub id, or its folder."""
    source = model_source(entry.model.path, revision=entry.model.revision)
    return (str(Path(source.name).resolve()),) if source.kind == "folder" else (source.name,)


def _model_folders(parent: Path) -> Iterator[Path]:
    """Folders of models: in `parent` itself, or one deeper, in the folder of an owner."""
    for folder in _folders(parent):
        if _looks_like_a_model(folder):
            yield folder
        else:
            yield from (inner for inner in _folders(folder) if _looks_like_a_model(inner))


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as found:
            return sorted(
                Path(entry.path)
                for entry in found
                if entry.is_dir() and not entry.name.startswith(".")
            )
    except OSError:
        return []


def _looks_like_a_model(folder: Path) -> bool:
    try:
        return any(name.endswith(_SIGNS) for name in os.listdir(folder))
    except OSError:
        return False


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
