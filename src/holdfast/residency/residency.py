"""Which models are loaded: keeps one worker process per model, and restarts what dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.errors import UnknownModel
from holdfast.link.model_client import ModelClient
from holdfast.messages.commands import SchedulerLimits
from holdfast.messages.events import LoadProgress, ModelInfo
from holdfast.messages.figures import CacheFigures, WorkerStatistics
from holdfast.residency.supervisor import ModelState, WorkerSupervisor
from holdfast.worker.assignment import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model and how it is doing."""

    id: str
    state: ModelState
    pid: int | None
    running: int
    queued: int
    info: ModelInfo | None
    memory: CacheFigures | None
    created: int
    restarts: Mapping[str, int]  # by cause: died or hung
    resumed: int  # streams that have gone on with another worker
    aliases: tuple[str, ...] = ()  # further names of the model


class Residency:
    """The workers of this server. Loop's thread only."""

    def __init__(
        self,
        models: Mapping[str, WorkerSettings],
        *,
        on_progress: Callable[[str, LoadProgress], None] = lambda model, progress: None,
    ) -> None:
        """models: what each worker serves, by the id that requests name, in the order in which they are listed."""
        self._supervisors = {
            model: WorkerSupervisor(model, settings, on_progress=on_progress) for model, settings in models.items()
        }

    async def start(self) -> None:
        """Start all worker processes; they load from now on."""
        await asyncio.gather(*(supervisor.start() for supervisor in self._supervisors.values()))

    async def wait_ready(self) -> None:
        """Wait until every model serves. Raises ModelLoadError when one never will."""
        await asyncio.gather(*(supervisor.wait_ready() for supervisor in self._supervisors.values()))

    async def stop(self) -> None:
        """End all workers in order; open streams end as failed."""
        await asyncio.gather(*(supervisor.stop() for supervisor in self._supervisors.values()))

    async def client(self, model: str, sequences: int = 1) -> ModelClient:
        """The link to the worker of a model, for so many sequences; waits while the model is being loaded.

        Raises UnknownModel; WorkerUnavailable when loading takes too long or has failed; QueueFull when too many wait for it.
        """
        if model not in self._supervisors:
            raise UnknownModel(model=model, available=tuple(self._supervisors))
        return await self._supervisors[model].wait_client(sequences=sequences)

    async def set_limits(self, model: str, *, max_running: int | None = None, step_tokens: int | None = None) -> SchedulerLimits:
        """Change how many sequences of a model run at once, and how much a step reads; see `WorkerSupervisor.set_limits`.

        Raises UnknownModel and InvalidRequest.
        """
        if model not in self._supervisors:
            raise UnknownModel(model=model, available=tuple(self._supervisors))
        return await self._supervisors[model].set_limits(max_running=max_running, step_tokens=step_tokens)

    def statuses(self) -> list[ModelStatus]:
        """All models and how they are doing, in their order."""
        return [_status(supervisor) for supervisor in self._supervisors.values()]

    async def statistics(self) -> dict[str, WorkerStatistics]:
        """Counters of the workers that answer, by model id."""
        clients = {model: supervisor.client for model, supervisor in self._supervisors.items()}
        answering = {model: client for model, client in clients.items() if client is not None}
        answers = await asyncio.gather(*(client.statistics() for client in answering.values()), return_exceptions=True)
        return {model: answer for model, answer in zip(answering, answers, strict=True) if isinstance(answer, WorkerStatistics)}


def _status(supervisor: WorkerSupervisor) -> ModelStatus:
    load = supervisor.last_statistics
    return ModelStatus(
        id=supervisor.model,
        state=supervisor.state,
        pid=supervisor.pid,
        running=load.running,
        queued=load.queued,
        info=supervisor.info,
        memory=load.memory,
        created=supervisor.created,
        restarts=dict(supervisor.restarts),
        resumed=supervisor.resumed,
    )
