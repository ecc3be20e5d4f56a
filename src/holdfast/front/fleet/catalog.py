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
    # `path` is a folder or a Hub id; the server's own settings where the entry says nothing
    model: ModelSettings
    store: StoreSettings
    origin: str  # the file or folder that it comes from
    aliases: tuple[str, ...] = ()
    # loaded at the start, and never unloaded for want of memory or idleness
    is_pinned: bool = False
    # without a request, until it is unloaded; 0: at once; None: never
    idle_seconds: float | None = None
    # where a request says nothing, before the makers' own
    sampling: Mapping[str, float] = field(default_factory=dict)
    # of the chat template, where a request says nothing
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    # the context window that its config.json names; 0: not looked at, or it names none
    own_context_tokens: int = 0
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
    # names of those that are loaded at the start: the pinned ones, the one named, the only one
    at_start: tuple[str, ...] = ()
    # a model that comes into the Hub's cache is served when the catalog is read again
    takes_found: bool = False

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
        return UnknownModel(
            model=name,
            available=(*names, *(alias for alias in self._by_name if alias not in names)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogChange:
    """What one catalog has that an earlier one has not, and the other way round; by name."""

    added: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()  # now, of those that somebody has written down

    def __str__(self) -> str:
        """One line for the log."""
        parts = (
            ("added", self.added),
            ("gone", self.gone),
            ("changed, from the next load on", self.changed),
        )
        said = [f"{what}: {', '.join(names)}" for what, names in parts if names]
        said += [f"left out: {each.name} ({each.reason})" for each in self.left_out]
        return "; ".join(said) or "nothing has changed"


def change_between(before: Catalog, after: Catalog) -> CatalogChange:
    """What has changed, in the order of the catalogs."""
    old, new = ({entry.name: entry for entry in catalog.entries} for catalog in (before, after))
    return CatalogChange(
        added=tuple(name for name in new if name not in old),
        gone=tuple(name for name in old if name not in new),
        changed=tuple(name for name, entry in new.items() if name in old and entry != old[name]),
        left_out=tuple(
            each for each in after.left_out if each.is_asked_for and each not in before.left_out
        ),
    )
