"""Which models are loaded: keeps one worker process per model of the catalog, and restarts what dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.link.client import EngineClient
from holdfast.messages.events import LoadProgress, ModelInfo
from holdfast.messages.figures import CacheFigures, WorkerStatistics
from holdfast.residency.catalog import Catalog
from holdfast.residency.supervisor import ModelState, WorkerSupervisor
from holdfast.worker.assignment import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model and how it is doing."""

    id: str
    state: ModelState
    pid: int | None
    layout: str
    running: int
    queued: int
    info: ModelInfo | None
    memory: CacheFigures | None
    created: int
    restarts: Mapping[str, int]  # by cause: died or hung


class Residency:
    """The workers of this server. Loop's thread only."""

    def __init__(
        self,
        catalog: Catalog,
        settings: Mapping[str, WorkerSettings],
        *,
        startup_seconds: float,
        on_progress: Callable[[str, LoadProgress], None] = lambda model, progress: None,
    ) -> None:
        self._catalog = catalog
        self._keepers = {
            model: WorkerSupervisor(model, settings[model], startup_seconds=startup_seconds, on_progress=on_progress)
            for model in catalog.ids()
        }

    async def start(self) -> None:
        """Start all worker processes; they load from now on."""
        await asyncio.gather(*(keeper.start() for keeper in self._keepers.values()))

    async def wait_ready(self) -> None:
        """Wait until every model serves. Raises ModelLoadError when one never will."""
        await asyncio.gather(*(keeper.wait_ready() for keeper in self._keepers.values()))

    async def stop(self) -> None:
        """End all workers in order; open streams end as failed."""
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers.values()))

    async def lease(self, model: str, *, sequences: int = 1) -> EngineClient:
        """The link to the worker of a model, for so many sequences; waits while the model is being loaded.

        Raises UnknownModel; WorkerUnavailable when loading takes too long or has failed; QueueFull when too many wait for it.
        """
        return await self._keepers[self._catalog.find(model).id].lease(sequences=sequences)

    def statuses(self) -> list[ModelStatus]:
        """All models and how they are doing, in the catalog's order."""
        return [self._status(entry.id, entry.created) for entry in self._catalog.entries()]

    async def statistics(self) -> dict[str, WorkerStatistics]:
        """Counters of the workers that answer, by model id."""
        clients = {model: keeper.client for model, keeper in self._keepers.items()}
        answering = {model: client for model, client in clients.items() if client is not None}
        answers = await asyncio.gather(*(client.statistics() for client in answering.values()), return_exceptions=True)
        return {model: answer for model, answer in zip(answering, answers, strict=True) if isinstance(answer, WorkerStatistics)}

    def _status(self, model: str, created: int) -> ModelStatus:
        keeper = self._keepers[model]
        info, load = keeper.info, keeper.last_statistics
        return ModelStatus(
            id=model,
            state=keeper.state,
            pid=keeper.pid,
            layout=info.layout if info is not None else "",
            running=load.running,
            queued=load.queued,
            info=info,
            memory=load.memory,
            created=created,
            restarts=dict(keeper.restarts),
        )
