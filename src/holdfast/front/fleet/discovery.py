"""Finds the models that lie on this machine: in the Hub's cache, and in folders such as LM
Studio's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.config import Settings
from holdfast.errors import ModelLoadError
from holdfast.front.fleet.catalog import CatalogEntry, LeftOut
from holdfast.models.context_window import known_context_tokens
from holdfast.models.download import model_source
from holdfast.models.hub_cache import cached_models, hub_cache_folder
from holdfast.models.loadable import check_loadable

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
