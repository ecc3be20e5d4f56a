"""Which models a server has, and how each is served. Pure: `catalog_file` and `discovery` read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from holdfast.config import ModelSettings, StoreSettings
from holdfast.errors import UnknownModel


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One model: where it is, and how it is loaded and served."""

    name: str  # its id in /v1/models, /health and answers
    model: ModelSettings  # `path` is a folder or a Hub id; the server's own settings where the entry says nothing
    store: StoreSettings
    origin: str  # the file or folder that it comes from
    aliases: tuple[str, ...] = ()
    is_pinned: bool = False  # loaded at the start, and never unloaded for want of memory or idleness
    idle_seconds: float | None = None  # without a request, until it is unloaded; 0: at once; None: never
    sampling: Mapping[str, float] = field(default_factory=dict)  # where a request says nothing, before the makers' own
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # of the chat template, where a request says nothing
    draft: str | None = None  # the model that is to draft for it; not used yet


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A model that is not served, and why."""

    name: str
    origin: str
    reason: str  # fit to be shown to a user
    is_asked_for: bool  # somebody has written it down; else it was found somewhere


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """All models of a server. Names and aliases are each used once."""

    entries: tuple[CatalogEntry, ...]  # the first one is that of requests that name none
    left_out: tuple[LeftOut, ...] = ()
    at_start: tuple[str, ...] = ()  # names of those that are loaded at the start: the pinned ones, the one named, the only one

    @cached_property
    def _by_name(self) -> dict[str, CatalogEntry]:
        by_alias = {alias: entry for entry in self.entries for alias in entry.aliases}
        return by_alias | {entry.name: entry for entry in self.entries}

    def find(self, name: str) -> CatalogEntry | None:
        """The model of that name or alias; None where there is none."""
        return self._by_name.get(name)

    def unknown(self, name: str) -> UnknownModel:
        """The error for a name that is nobody's."""
        names = [entry.name for entry in self.entries]
        return UnknownModel(model=name, available=(*names, *(alias for alias in self._by_name if alias not in names)))
