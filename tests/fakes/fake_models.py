"""Residencies over workers with a fake engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from holdfast.config import ModelSettings, ResidencySettings
from holdfast.front.fleet.catalog import Catalog, CatalogEntry
from holdfast.front.fleet.memory_watch import MemoryMeter
from holdfast.front.fleet.residency import Residency
from holdfast.front.fleet.slot import ModelFiles
from holdfast.front.link.model_client import ModelClient
from holdfast.machine.memory_plan import MemoryShare
from holdfast.wire.commands import WorkerSettings
from tests.fakes.fake_worker import SETTINGS, fake_settings


def catalog_over(*names: str, at_start: Sequence[str] = (), **facts: Mapping[str, Any]) -> Catalog:
    """A catalog; `facts`: of entries, by name."""
    entries = tuple(
        CatalogEntry(
            name=name,
            origin="",
            **{"model": ModelSettings(path=name), **facts.get(name, {})},
        )
        for name in names
    )
    pinned = tuple(entry.name for entry in entries if entry.is_pinned)
    return Catalog(entries=entries, at_start=tuple(dict.fromkeys((*at_start, *pinned))))


class FakeModels(Residency):
    """Several models. `bytes_of`: the weights of each, by name."""

    def __init__(
        self,
        catalog: Catalog,
        settings: ResidencySettings | None = None,
        meter: MemoryMeter | None = None,
        **bytes_of: int,
    ) -> None:
        settings = settings or ResidencySettings()
        self.shares: dict[str, MemoryShare] = {}
        self.behaviours: dict[str, str] = {}  # if it differs from the default, by name

        def worker_of(entry: CatalogEntry, files: ModelFiles, share: MemoryShare) -> WorkerSettings:
            self.shares[entry.name] = share
            return fake_settings(self.behaviours.get(entry.name, "good"), residency=settings)

        def fetch(entry: CatalogEntry) -> ModelFiles:
            return ModelFiles(folder=Path("/"), weight_bytes=bytes_of.get(entry.name, 1))

        super().__init__(catalog, settings, fetch=fetch, worker_of=worker_of, meter=meter)


class OneModel(Residency):
    """A residency with one model `m`, loaded at the start.

    Its leases are held until the end.
    """

    def __init__(self, worker: WorkerSettings) -> None:
        super().__init__(
            catalog_over("m", at_start=["m"]),
            worker.residency,
            fetch=lambda entry: ModelFiles(folder=Path("/")),
            worker_of=lambda entry, files, share: unshared(worker, share),
            max_waiting_sequences=SETTINGS.max_queued + SETTINGS.max_running,
        )
        self._leases = AsyncExitStack()

    async def client(self, model: str, sequences: int = 1) -> ModelClient:
        """Wait for and return the link to its worker."""
        return await self._leases.enter_async_context(self.lease(model, sequences))

    async def stop(self) -> None:
        await super().stop()
        await self._leases.aclose()


def unshared(worker: WorkerSettings, share: MemoryShare) -> WorkerSettings:
    assert share == MemoryShare(), "one model has all memory"
    return worker
