"""A library over a Hub's cache, as in a server, without workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.config import CatalogSettings, ResidencySettings, Settings
from holdfast.errors import ModelLoadError
from holdfast.front.fleet.catalog import Catalog, CatalogEntry, catalog_of
from holdfast.front.fleet.library import Library
from holdfast.front.fleet.residency import Residency
from holdfast.front.fleet.slot import ModelFiles
from holdfast.machine.memory_plan import MemoryShare
from holdfast.models.download import demo_folder
from holdfast.wire.commands import WorkerSettings

TWO = f"[models.first]\npath = '{demo_folder()}'\n[models.second]\npath = '{demo_folder()}'\n"


def idle_residency(catalog: Catalog) -> Residency:
    """Models that are never loaded."""

    def fetch(entry: CatalogEntry) -> ModelFiles:
        return ModelFiles(folder=Path(entry.model.path))

    def worker_of(entry: CatalogEntry, files: ModelFiles, share: MemoryShare) -> WorkerSettings:
        raise ModelLoadError("nothing is loaded here")

    return Residency(catalog, ResidencySettings(), fetch=fetch, worker_of=worker_of)


def idle_library(catalog: Catalog) -> Library:
    """Serves only its entries."""

    async def read_again() -> None:
        pass

    return Library(idle_residency(catalog), cache=Path("/no-such-cache"), reload_catalog=read_again)


@dataclass
class HubLibrary:
    """A library with a file of models in `folder`, whose catalog is read like a server's. cache: of
    the Hub.
    """

    folder: Path
    cache: Path
    models: str = TWO
    hub_cache: bool = True

    def __post_init__(self) -> None:
        file = self.folder / "models.toml"
        file.write_text(self.models)
        self._settings = Settings(
            catalog=CatalogSettings(file=str(file), folders=(), hub_cache=self.hub_cache)
        )
        self._environ = {"HF_HUB_CACHE": str(self.cache)}
        self.residency = idle_residency(self._read())
        self.library = Library(
            self.residency,
            cache=self.cache,
            reload_catalog=self.read_again,
        )

    @property
    def names(self) -> list[str]:
        """The served entries."""
        return [entry.name for entry in self.residency.catalog.entries]

    async def read_again(self) -> None:
        await self.residency.replace_catalog(self._read())

    def _read(self) -> Catalog:
        return catalog_of(self._settings, self._environ)
