"""Models of the Hub, pulled and removed while the server runs; the catalog is read again behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.errors import InvalidRequest, ModelInUse, WorkerUnavailable
from holdfast.front.fleet.catalog import CatalogEntry
from holdfast.front.fleet.residency import Residency
from holdfast.front.fleet.slot import on_own_thread
from holdfast.models.download import ModelSource, PullStage, hub_model_of, pull_model, removal_of
from holdfast.models.model_folder import check_loadable

_LOOK_SECONDS = 0.25  # between two looks at how far it is
_LAST_SECONDS = 2.0  # until what was stopped has put away what it had half of


@dataclass(frozen=True, slots=True, kw_only=True)
class PullStep:
    """How far one stage of a pull is."""

    stage: PullStage
    done_bytes: int
    total_bytes: int


class Pull:
    """One pull, for all who wait for it."""

    def __init__(self) -> None:
        self.followers = 0
        self.is_stopped = False
        self.task: asyncio.Task[None] | None = None
        self._steps: dict[PullStage, PullStep] = {}

    def note(self, stage: PullStage, done_bytes: int, total_bytes: int) -> None:
        """It is so far. Any thread. Raises WorkerUnavailable when nobody waits any more, or the
        server ends.
        """
        if self.is_stopped:
            raise WorkerUnavailable(
                "the pull was stopped; the next one goes on with the files that are missing"
            )
        self._steps[stage] = PullStep(stage=stage, done_bytes=done_bytes, total_bytes=total_bytes)

    @property
    def progress(self) -> tuple[PullStep, ...]:
        """The stages that have begun, and how many bytes of each are done."""
        return tuple(self._steps.values())

    async def steps(self) -> AsyncIterator[PullStep]:
        """What is news of it, until the model is served. Raises ModelLoadError."""
        assert self.task is not None, "a pull is followed once it has begun"
        seen: dict[PullStage, PullStep] = {}
        while True:
            await asyncio.wait((self.task,), timeout=_LOOK_SECONDS)
            for step in tuple(self._steps.values()):
                if seen.get(step.stage) != step:
                    seen[step.stage] = step
                    yield step
            if self.task.done():
                self.task.result()
                return


class Library:
    """The models of the Hub that this server can have and let go of. Loop's thread only."""

    def __init__(
        self,
        residency: Residency,
        *,
        cache: Path,
        with_code: bool = False,
        read_again: Callable[[], Awaitable[None]],
    ) -> None:
        """cache: the Hub's. with_code: whether models may bring code.

        read_again: has the catalog read again and served.
        """
        self._residency, self._cache = residency, cache
        self._with_code, self._read_again = with_code, read_again
        self._pulls: dict[str, Pull] = {}  # under way, by Hub id
        self._tasks: set[asyncio.Task[None]] = set()  # of all pulls, those too that were stopped

    def source_of(self, entry: CatalogEntry) -> ModelSource | None:
        """The model of the Hub that a model of the catalog is; None for one that comes from
        elsewhere.
        """
        return hub_model_of(entry.model, self._cache)

    @contextlib.contextmanager
    def pulled(self, source: ModelSource) -> Iterator[Pull]:
        """Pull a model, one pull for all who want it; it is stopped when the last of them has left.

        Raises InvalidRequest for a model that would not be served, and ModelInUse.
        """
        if not (self._residency.catalog.takes_found or self._names_of(source)):
            message = (
                "this server serves only the models that it was started with, so others are of no "
                "use to it"
            )
            raise InvalidRequest(
                f"{message}; `holdfast serve` without a model serves all that are in the Hub's "
                "cache",
                field="model",
            )
        pull = self._pulls.get(source.name)
        if pull is None:
            pull = self._pulls[source.name] = Pull()
            pull.task = asyncio.create_task(self._pull(source, pull), name=f"pull of {source.name}")
            self._tasks.add(pull.task)
            pull.task.add_done_callback(self._ended)
        pull.followers += 1
        try:
            yield pull
        finally:
            pull.followers -= 1
            if not pull.followers:
                self._stop(source.name, pull)

    def progress(self) -> dict[str, tuple[PullStep, ...]]:
        """The stages of every running pull, by Hub id."""
        return {name: pull.progress for name, pull in self._pulls.items()}

    async def remove(self, source: ModelSource) -> None:
        """Remove a model from the Hub's cache, and from memory if it is loaded and nobody uses it.

        Raises NoSuchModel, ModelPinned and ModelInUse.
        """
        removal = await asyncio.to_thread(removal_of, source.name, self._cache)
        names = self._names_of(source)
        self._refuse_used(source, names)
        for name in names:
            await self._residency.unload(name)
        self._refuse_used(source, names, but=("unloaded", "failed"))
        await asyncio.to_thread(removal.execute)
        await self._serve_anew(source)

    def stop(self) -> None:
        """Stop what is under way, as the server is about to end: it goes on the next time."""
        for name, pull in tuple(self._pulls.items()):
            self._stop(name, pull)

    async def close(self) -> None:
        """Stop what is under way, and give it a moment to put away what it has half of."""
        self.stop()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=_LAST_SECONDS)

    def _stop(self, name: str, pull: Pull) -> None:
        pull.is_stopped = True
        if self._pulls.get(name) is pull:
            # who comes now begins another one, which waits for the files that this one has locked
            del self._pulls[name]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        _ = task.cancelled() or task.exception()  # it may be that nobody waits for it

    async def _pull(self, source: ModelSource, pull: Pull) -> None:
        try:
            work = partial(pull_model, source, with_code=self._with_code, on_step=pull.note)
            pulled = await on_own_thread(work, name="pull")
        finally:
            if self._pulls.get(source.name) is pull:
                del self._pulls[source.name]
        check_loadable(pulled.folder)
        await self._serve_anew(source)

    async def _serve_anew(self, source: ModelSource) -> None:
        for name in self._names_of(source):
            self._residency.forget_files(name)
        await self._read_again()

    def _names_of(self, source: ModelSource) -> list[str]:
        """The models of the catalog that are this one."""
        entries = self._residency.catalog.entries
        return [
            entry.name
            for entry in entries
            if (own := self.source_of(entry)) is not None and own.name == source.name
        ]

    def _refuse_used(
        self,
        source: ModelSource,
        names: list[str],
        *,
        but: tuple[str, ...] = ("unloaded", "failed", "ready"),
    ) -> None:
        if source.name in self._pulls:
            raise ModelInUse(source.name, "is being pulled")
        for model in self._residency.statuses():
            if model.id in names and (
                model.figures.leases or model.figures.waiting or model.state not in but
            ):
                raise ModelInUse(model.id, "is in use")
