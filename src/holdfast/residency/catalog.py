"""Which models this server has: served id to local folder."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import UnknownModel


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One model that can be served."""

    id: str
    folder: Path
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time


class Catalog:
    """The models of this server by the id that requests name."""

    def __init__(self, entries: Iterable[CatalogEntry]) -> None:
        self._entries = {entry.id: entry for entry in entries}

    def ids(self) -> tuple[str, ...]:
        """All served ids, in order."""
        return tuple(self._entries)

    def entries(self) -> tuple[CatalogEntry, ...]:
        """All models, in order."""
        return tuple(self._entries.values())

    def find(self, model: str) -> CatalogEntry:
        """The model of that id. Raises UnknownModel."""
        entry = self._entries.get(model)
        if entry is None:
            raise UnknownModel(model=model, available=self.ids())
        return entry
