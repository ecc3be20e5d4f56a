"""Pulls and removes models of the Hub while the server runs.

The catalog is reloaded afterwards. Several clients may wait for one pull of a model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.errors import InvalidRequest, ModelInUse, WorkerUnavailable
from holdfast.front.fleet.catalog import CatalogEntry
from holdfast.front.fleet.residency import ModelState, Residency
from holdfast.front.fleet.slot import on_own_thread
from holdfast.models.download import PullStage, hub_model_of, pull_model, removal_of
from holdfast.models.hub import ModelSource
from holdfast.models.loadable import check_loadable

_POLL_SECONDS = 0.25  # time between two progress reports
_LAST_SECONDS = 2.0  # time for stopped pulls to save partial files


@dataclass(frozen=True, slots=True, kw_only=True)
class PullStep:
    """Progress of one stage of a pull."""

    stage: PullStage
    done_bytes: int
    total_bytes: int  # of the whole stage


class Pull:
    """One pull, shared by all clients that wait for it."""

    def __init__(self) -> None:
        self.waiting_clients = 0  # clients that wait for it
        self.is_stopped = False  # no client waits any more: the download ends
        self.task: asyncio.Task[None] | None = None  # None until it has begun
        self._steps: dict[PullStage, PullStep] = {}

    def record_progress(self, stage: PullStage, done_bytes: int, total_bytes: int) -> None:
        """Record progress. Thread-safe. Raises WorkerUnavailable if the pull was stopped."""
        if self.is_stopped:
            raise WorkerUnavailable(
                "the pull was stopped; the next one continues with the missing files"
            )
        self._steps[stage] = PullStep(stage=stage, done_bytes=done_bytes, total_bytes=total_bytes)

    @property
    def progress(self) -> tuple[PullStep, ...]:
        """The stages that have begun, oldest first."""
        return tuple(self._steps.values())

    async def steps(self) -> AsyncIterator[PullStep]:
        """Report progress until the model is served. Raises ModelLoadError if the pull fails."""
        assert self.task is not None
        reported: dict[PullStage, PullStep] = {}
        while True:
            await asyncio.wait((self.task,), timeout=_POLL_SECONDS)
            for step in self.progress:
                if reported.get(step.stage) != step:
                    reported[step.stage] = step
                    yield step
            if self.task.done():
                self.task.result()
                return


class Library:
    """Pulls models from the Hub and removes them. Only use it on the event loop's thread."""

    def __init__(
        self,
        residency: Residency,
        *,
        cache: Path,
        with_code: bool = False,
        reload_catalog: Callable[[], Awaitable[None]],
    ) -> None:
        """cache: folder of the Hub's cache. with_code: whether models that contain Python
        code may be pulled.

        reload_catalog: reads the catalog again and serves the result.
        """
        self._residency = residency
        self._cache = cache
        self._allows_code = with_code
        self._reload_catalog = reload_catalog
        self._pulls: dict[str, Pull] = {}  # running ones, by Hub id
        self._tasks: set[asyncio.Task[None]] = set()  # includes the tasks of stopped pulls

    def source_of(self, entry: CatalogEntry) -> ModelSource | None:
        """Return the Hub model of a catalog entry; None if the entry's model does not come from the
        Hub.
        """
        return hub_model_of(entry.model, self._cache)

    @contextlib.contextmanager
    def pulled(self, source: ModelSource) -> Iterator[Pull]:
        """Pull a model.

        All clients that ask for the same model share one pull; it stops when the last client has
        left. Raises InvalidRequest if this server would not serve the model.
        """
        if not (self._residency.catalog.serves_pulled_models or self._names_of(source)):
            raise InvalidRequest(
                "this server serves only the models that it was started with; `holdfast serve` "
                "without a model serves all models in the Hub's cache",
                field="model",
            )
        pull = self._pulls.get(source.name)
        if pull is None:
            pull = Pull()
            self._pulls[source.name] = pull
            pull.task = asyncio.create_task(self._pull(source, pull), name=f"pull of {source.name}")
            self._tasks.add(pull.task)
            pull.task.add_done_callback(self._on_pull_end)
        pull.waiting_clients += 1
        try:
            yield pull
        finally:
            pull.waiting_clients -= 1
            if not pull.waiting_clients:
                self._stop_pull(source.name, pull)

    def progress(self) -> dict[str, tuple[PullStep, ...]]:
        """Return the stages of every running pull, by Hub id."""
        return {name: pull.progress for name, pull in self._pulls.items()}

    async def remove(self, source: ModelSource) -> None:
        """Remove a model from the Hub's cache, and unload it. Nothing may be using the model.

        Raises NoSuchModel, ModelPinned and ModelInUse.
        """
        removal = await asyncio.to_thread(removal_of, source.name, self._cache)
        names = self._names_of(source)
        self._check_unused(source, names)
        for name in names:
            await self._residency.unload(name)
        self._check_unused(source, names, allowed=("unloaded", "failed"))
        await asyncio.to_thread(removal.execute)
        await self._reload_models(source)

    def stop(self) -> None:
        """Stop all pulls, because the server stops.

        The next pull of a model continues with the missing files.
        """
        for name, pull in tuple(self._pulls.items()):
            self._stop_pull(name, pull)

    async def close(self) -> None:
        """Stop all pulls and give them a moment to save partial files."""
        self.stop()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=_LAST_SECONDS)

    def _stop_pull(self, name: str, pull: Pull) -> None:
        """End the download at its next progress report. Its task goes on until then."""
        pull.is_stopped = True
        if self._pulls.get(name) is pull:
            # the next client starts another pull, which waits for the files that this one still
            # locks
            del self._pulls[name]

    def _on_pull_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved, since nobody may wait for it

    async def _pull(self, source: ModelSource, pull: Pull) -> None:
        """Download a model on a thread, check it, and serve it."""
        try:
            work = partial(
                pull_model, source, with_code=self._allows_code, on_step=pull.record_progress
            )
            pulled = await on_own_thread(work, name="pull")
        finally:
            if self._pulls.get(source.name) is pull:
                del self._pulls[source.name]
        check_loadable(pulled.folder)
        await self._reload_models(source)

    async def _reload_models(self, source: ModelSource) -> None:
        """Serve new or removed files: look for them at the next load, and reload the catalog."""
        for name in self._names_of(source):
            self._residency.forget_files(name)
        await self._reload_catalog()

    def _names_of(self, source: ModelSource) -> list[str]:
        """Return the names under which the catalog has a Hub model."""
        entries = self._residency.catalog.entries
        return [
            entry.name
            for entry in entries
            if (entry_source := self.source_of(entry)) is not None
            and entry_source.name == source.name
        ]

    def _check_unused(
        self,
        source: ModelSource,
        names: list[str],
        *,
        allowed: tuple[ModelState, ...] = ("unloaded", "failed", "ready"),
    ) -> None:
        """Raise ModelInUse if the source is being pulled, or one of the named models has requests
        or is in a state that is not allowed.
        """
        if source.name in self._pulls:
            raise ModelInUse(source.name, "is being pulled")
        for model in self._residency.statuses():
            is_used = model.figures.leases or model.figures.waiting or model.state not in allowed
            if model.id in names and is_used:
                raise ModelInUse(model.id, "is in use")
