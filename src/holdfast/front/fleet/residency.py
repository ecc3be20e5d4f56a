"""Which models are loaded: one is loaded when it is asked for, stays while it is used, and makes
room for others.

Who comes and who goes is decided in `budget`. This carries it out, and leads each request to the
worker of its model.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from holdfast.config import LogLevel, ResidencySettings
from holdfast.errors import (
    HoldfastError,
    InvalidRequest,
    ModelLoadError,
    ModelPinned,
    WorkerUnavailable,
)
from holdfast.front.fleet.budget import Candidate, PlaceLimits, Verdict, decide, idle_until
from holdfast.front.fleet.catalog import Catalog, CatalogChange, CatalogEntry, change_between
from holdfast.front.fleet.model_slot import Fetch, ModelFiles, ModelSlot
from holdfast.front.link.model_client import ModelClient
from holdfast.machine import device_memory
from holdfast.machine.device_memory import MemoryShare, memory_report
from holdfast.wire.commands import SchedulerLimits, WorkerSettings
from holdfast.wire.events import (
    CacheFigures,
    LoadProgress,
    ModelInfo,
    ResidencyFigures,
    WorkerStatistics,
)

ModelState: TypeAlias = Literal["unloaded", "loading", "ready", "stopping", "failed"]
WorkerOf: TypeAlias = Callable[[CatalogEntry, ModelFiles, MemoryShare], WorkerSettings]
"""What the worker of a model is told."""

AUTO_MEMORY_SHARE = 0.75  # of the machine's memory, or of a GPU's
HAS_UNIFIED_MEMORY = sys.platform == "darwin"  # GPU and system share it
# memory for KV is shared out by halves where the number of loaded models has no limit
_AUTO_PARTS = 2

logger = logging.getLogger("holdfast.front.fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model and how it is doing. What is told of a model that is not loaded was so when it was."""

    id: str
    state: ModelState  # one that is drained counts as stopping: who comes now has to wait
    pid: int | None
    running: int
    queued: int
    info: ModelInfo | None
    memory: CacheFigures | None
    created: int
    restarts: Mapping[str, int]  # by cause: died or hung
    resumed: int = 0  # streams that have gone on with another worker
    aliases: tuple[str, ...] = ()  # further names of the model
    # known before it is loaded where its entry or config.json names it
    context_tokens: int | None = None
    is_pinned: bool = False
    # the server is not ready without it: it is pinned, was named at the start, or is the only one
    is_awaited: bool = True
    # until it is unloaded if nobody uses it; None: it is not going to be
    idle_seconds_left: float | None = None
    failure: str = ""  # why it could not be loaded
    figures: ResidencyFigures = ResidencyFigures()


class Residency:
    """The models of this server and their workers. Loop's thread only."""

    def __init__(
        self,
        catalog: Catalog,
        settings: ResidencySettings,
        *,
        fetch: Fetch,
        worker_of: WorkerOf,
        places: int = 288,
        on_progress: Callable[[str, LoadProgress], None] = lambda model, progress: None,
    ) -> None:
        """places: most sequences that wait for one model."""
        self._slot_of = partial(
            ModelSlot, fetch=fetch, places=places, numbers=itertools.count(), on_change=self._look
        )
        self._slots = {entry.name: self._slot_of(entry) for entry in catalog.entries}
        # what was read by its entry is to be read again
        self.on_changed_entry: Callable[[str], None] = lambda model: None
        self._catalog, self._settings, self._worker_of, self._on_progress = (
            catalog,
            settings,
            worker_of,
            on_progress,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._first_loads: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._made_room: dict[str, str] = {}  # models that went, and for whom
        self._machine_bytes: float = math.inf
        self._is_looking = self._has_stopped = False

    @property
    def catalog(self) -> Catalog:
        """The models of now."""
        return self._catalog

    def entry(self, model: str) -> CatalogEntry:
        """By what a model is loaded, or will be if it is not. Raises UnknownModel."""
        return self._slot(model).entry

    async def take_catalog(self, catalog: Catalog) -> CatalogChange:
        """Serve the models of another catalog from now on; returns what that changes.

        Models that are gone are unloaded when those who use them are served; who waits for a place
        gets UnknownModel. Changed entries count from the next load on. What is new among those to
        be there from the start is loaded.
        """
        if len(catalog.entries) > 1 and math.isinf(self._machine_bytes):
            self._machine_bytes = (await asyncio.to_thread(memory_report)).total_bytes
            for name in [name for name, slot in self._slots.items() if slot.phase != "unloaded"]:
                logger.info(
                    "model %s keeps the memory that it was given as the only one until it is "
                    "loaded again",
                    name,
                )
        change, at_start_before = change_between(self._catalog, catalog), self._catalog.at_start
        self._catalog, before = catalog, self._slots
        self._slots = {
            entry.name: before.get(entry.name) or self._slot_of(entry) for entry in catalog.entries
        }
        for entry in catalog.entries:
            if self._slots[entry.name].change(entry):
                self.on_changed_entry(entry.name)
        for name, slot in before.items():
            if name not in self._slots:
                self._slots[name] = slot
                slot.is_gone, slot.is_pinned = True, False
                slot.leases.turn_away(catalog.unknown(name))
        for name in catalog.at_start:
            if name not in at_start_before:
                self._begin(self._load_or_tell(name), name=f"load of {name}")
        self._look()
        return change

    async def start(self) -> None:
        """Begin to load what is to be there from the start; returns when the processes for that are
        there.
        """
        if len(self._slots) > 1:
            self._machine_bytes = (await asyncio.to_thread(memory_report)).total_bytes
        self._first_loads = {
            name: self._begin(self.load(name), name=f"first load of {name}")
            for name in self._catalog.at_start
        }
        for name, task in self._first_loads.items():
            launched = asyncio.create_task(self._slots[name].is_launched.wait())
            await asyncio.wait((task, launched), return_when=asyncio.FIRST_COMPLETED)
            launched.cancel()

    async def wait_ready(self) -> None:
        """Wait until all that is to be there from the start serves, or has failed.

        Raises ModelLoadError or WorkerUnavailable when one has failed that somebody has named, or
        that is the only one.
        """
        for name, task in self._first_loads.items():
            try:
                await asyncio.shield(task)
            except HoldfastError as error:
                if len(self._slots) == 1 or not (
                    (slot := self._slots.get(name)) and slot.entry.is_pinned
                ):
                    raise
                logger.error("the pinned model %s is not there: %s", name, error)

    async def stop(self) -> None:
        """End all workers in order; open streams end as failed."""
        self._has_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(slot.stop() for slot in self._slots.values()))
        self._changed.set()

    @contextlib.asynccontextmanager
    async def lease(self, model: str, sequences: int = 1) -> AsyncIterator[ModelClient]:
        """The link to the worker of a model, for so many sequences; it is not unloaded until the
        lease ends.

        A model that is not loaded is, and waited for: until there is room for it, and until it
        serves. Raises UnknownModel; WorkerUnavailable when that takes too long or has failed;
        QueueFull when too many wait for it.
        """
        slot = self._slot(model)
        await self._take(slot, sequences)
        try:
            yield await self._client(slot, sequences)
        finally:
            slot.used_at = asyncio.get_running_loop().time()
            slot.leases.give_back()

    async def load(self, model: str) -> None:
        """Load a model and wait until it serves, however long that takes once there is room for it.

        Raises as `lease` does, and ModelLoadError.
        """
        slot = self._slot(model)
        with contextlib.suppress(ModelLoadError):  # which is told below
            await slot.files()
        await self._take(slot, 0)
        try:
            await slot.wait_ready()
        finally:
            slot.leases.give_back()

    async def unload(self, model: str) -> None:
        """Unload a model and wait until it is gone: when those who use it are served.

        Who comes then has it loaded again.

        Raises UnknownModel and ModelPinned.
        """
        slot = self._slot(model)
        if slot.is_pinned:
            raise ModelPinned(slot.entry.name)
        load = slot.loads
        try:
            while slot.phase != "unloaded" and slot.loads == load:
                slot.is_to_go = True
                self._look()
                await self._changed.wait()
        finally:
            if slot.loads == load and slot.phase in ("loading", "ready"):
                slot.is_to_go = False
                self._look()

    def let_go(self, model: str) -> None:
        """Have a model unloaded when those who use it are served; who comes then has it loaded
        again.

        Nothing happens to one that is pinned or not loaded. Raises UnknownModel.
        """
        slot = self._slot(model)
        if slot.phase in ("loading", "ready") and not slot.is_pinned:
            slot.is_to_go = True
            self._look()

    async def pin(self, model: str, *, pinned: bool) -> None:
        """Have a model loaded and kept so, or let it go when another one needs its place.

        Raises as `load` does; then it is not pinned.
        """
        slot = self._slot(model)
        was_pinned, slot.is_pinned = slot.is_pinned, pinned
        self._look()
        if pinned:
            slot.is_to_go = False
            try:
                await self.load(model)
            except HoldfastError:
                slot.is_pinned = was_pinned
                raise

    async def set_limits(
        self, model: str, *, max_running: int | None = None, step_tokens: int | None = None
    ) -> SchedulerLimits:
        """Change how many sequences of a model run at once, and how much a step reads; see
        `WorkerSupervisor.set_limits`.

        They count until the server ends, also when the model is loaded anew. Raises UnknownModel
        and InvalidRequest.
        """
        slot = self._slot(model)
        if (supervisor := slot.supervisor) is None:
            raise InvalidRequest(
                f"{slot.entry.name} is not loaded; limits can be changed of a model that is",
                field="id",
            )
        try:
            return await supervisor.set_limits(max_running=max_running, step_tokens=step_tokens)
        finally:
            slot.scheduler = supervisor.scheduler

    def set_log_level(self, level: LogLevel) -> None:
        """Have the workers that are there log what is so severe."""
        for slot in self._slots.values():
            if slot.supervisor is not None:
                slot.supervisor.set_log_level(level)

    def statuses(self) -> list[ModelStatus]:
        """All models and how they are doing, in their order."""
        return [self._status(slot) for slot in self._slots.values()]

    async def statistics(self) -> dict[str, WorkerStatistics]:
        """Counters of the workers that answer, by model id."""
        supervisors = {
            name: slot.supervisor
            for name, slot in self._slots.items()
            if slot.supervisor is not None
        }
        clients = {
            name: client
            for name, supervisor in supervisors.items()
            if (client := supervisor.client) is not None
        }
        answers = await asyncio.gather(
            *(client.statistics() for client in clients.values()), return_exceptions=True
        )
        return {
            model: answer
            for model, answer in zip(clients, answers, strict=True)
            if isinstance(answer, WorkerStatistics)
        }

    def forget_files(self, model: str) -> None:
        """The files of a model were fetched anew, or removed: its next load looks for them again.

        Raises UnknownModel.
        """
        slot = self._slot(model)
        if slot.forget_files():
            self.on_changed_entry(slot.entry.name)

    async def files(self, model: str) -> ModelFiles:
        """Where the files of a model are; fetches them if need be.

        Raises UnknownModel and ModelLoadError.
        """
        return await self._slot(model).files()

    # -- one request

    def _slot(self, model: str) -> ModelSlot:
        if (entry := self._catalog.find(model)) is not None:
            return self._slots[entry.name]
        raise self._catalog.unknown(model)

    async def _take(self, slot: ModelSlot, sequences: int) -> None:
        """Take a lease: when this returns, the model has a place."""
        if slot.leases.is_open:
            await slot.leases.take(sequences=sequences, seconds=0.0)
            return
        loop = asyncio.get_running_loop()
        if self._has_stopped:
            raise WorkerUnavailable("the server is shutting down")
        if slot.retry_at > loop.time():
            raise slot.cannot_be_served()
        began = loop.time()
        try:
            await self._fetch(slot)
            if slot.is_gone:
                raise self._catalog.unknown(slot.entry.name)
            seconds = self._settings.place_seconds
            await slot.leases.take(sequences=sequences, seconds=seconds)
        except TimeoutError:
            in_use = ", ".join(
                name
                for name, other in self._slots.items()
                if other.phase != "unloaded" and other is not slot
            )
            reason = (
                f"there was no room for model {slot.entry.name!r} within {seconds:.0f} s, as "
                f"others are in use ({in_use})"
            )
            raise WorkerUnavailable(f"{reason}; please try again") from None
        finally:
            slot.wait_seconds["place"] += loop.time() - began

    async def _fetch(self, slot: ModelSlot) -> None:
        seconds = self._settings.load_seconds
        try:
            async with asyncio.timeout(seconds):
                await slot.files()
        except TimeoutError:
            message = (
                f"model {slot.entry.name!r} is still being fetched after {seconds:.0f} s; please "
                "try again"
            )
            raise WorkerUnavailable(message) from None
        except HoldfastError:
            raise slot.cannot_be_served() from None

    async def _client(self, slot: ModelSlot, sequences: int) -> ModelClient:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await slot.client(sequences=sequences)
        except WorkerUnavailable:
            if (
                slot.phase == "ready"
                and slot.supervisor is not None
                and slot.supervisor.state == "failed"
            ):
                slot.begin_end(
                    "its worker cannot be started again; the server's log has the details"
                )
                self._begin(self._end(slot), name=f"end of {slot.entry.name}")
            raise
        finally:
            slot.wait_seconds["load"] += loop.time() - began

    # -- what is decided

    def _look(self) -> None:
        """Have decided who comes and who goes, and see to it."""
        if self._is_looking or self._has_stopped:
            return
        self._is_looking = True
        try:
            self._part_from_gone()
            while self._obey(
                verdict := decide(
                    self._candidates(), self._limits(), now=asyncio.get_running_loop().time()
                )
            ):
                continue
        finally:
            self._is_looking = False
        if self._timer is not None:
            self._timer.cancel()
        at = verdict.look_again_at
        self._timer = None if math.isinf(at) else asyncio.get_running_loop().call_at(at, self._look)
        self._changed.set()
        self._changed = asyncio.Event()

    def _part_from_gone(self) -> None:
        for slot in [slot for slot in self._slots.values() if slot.is_gone]:
            slot.is_to_go = slot.phase in ("loading", "ready")
            if slot.phase == "unloaded":
                del self._slots[slot.entry.name]
                self.on_changed_entry(slot.entry.name)

    def _candidates(self) -> list[Candidate]:
        return [
            slot.candidate()
            for slot in self._slots.values()
            if slot.phase != "unloaded" or slot.leases.waiting
        ]

    def _obey(self, verdict: Verdict) -> bool:
        """Do what was decided; returns whether that may change what is decided next."""
        for name in verdict.blocked:
            pinned = ", ".join(
                other
                for other, slot in self._slots.items()
                if slot.is_pinned and slot.phase != "unloaded"
            )
            message = (
                f"model {name!r} cannot be loaded: those that are pinned ({pinned}) leave no room "
                "for it"
            )
            self._slots[name].leases.turn_away(WorkerUnavailable(message))
        for name in verdict.unload:
            slot = self._slots[name]
            if name in verdict.makes_room:
                self._made_room[name] = verdict.makes_room[name]
            reason = "room" if name in verdict.makes_room else "asked" if slot.is_to_go else "idle"
            slot.begin_unload(reason=reason)
            logger.info(
                "model %s is unloaded: %s", name, _why(reason, self._made_room.get(name, ""))
            )
            self._begin(self._end(slot), name=f"end of {name}")
        for name in verdict.load:
            self._slots[name].begin_load()
            self._begin(self._load(self._slots[name]), name=f"load of {name}")
        for name, slot in self._slots.items():
            if slot.phase == "ready" and slot.is_drained != (name in verdict.drain):
                slot.is_drained = not slot.is_drained
                (slot.leases.close if slot.is_drained else slot.leases.open)()
        return bool(verdict.blocked or verdict.unload or verdict.load)

    async def _load(self, slot: ModelSlot) -> None:
        name = slot.entry.name
        self._share_out()  # those that are loaded make room first
        first = self._first_loads.get(name)
        is_first = first is not None and not first.done()
        failure = await slot.load(
            lambda files: self._worker_of(slot.entry, files, self._share(slot)),
            on_progress=self._on_progress,
        )
        self._share_out()
        self._take_entry(slot)  # it is not loaded if that has failed
        for gone in [gone for gone, for_whom in self._made_room.items() if for_whom == name]:
            del self._made_room[gone]
            if (
                failure is not None
                and gone in self._slots
                and self._slots[gone].phase == "unloaded"
            ):
                logger.info(
                    "model %s is loaded again, as the one that it made room for could not be", gone
                )
                self._begin(self._load_or_tell(gone), name=f"load of {gone} again")
        if failure is not None and not is_first:  # else `wait_ready` tells
            logger.error("model %s could not be loaded: %s", name, failure)
        self._look()

    async def _load_or_tell(self, name: str) -> None:
        try:
            await self.load(name)
        except HoldfastError as error:
            logger.error("model %s is not there: %s", name, error)

    async def _end(self, slot: ModelSlot) -> None:
        await slot.end_worker()
        self._share_out()
        self._take_entry(slot)
        self._look()

    def _take_entry(self, slot: ModelSlot) -> None:
        if slot.phase == "unloaded" and slot.take_entry():
            self.on_changed_entry(slot.entry.name)

    def _begin(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _limits(self) -> PlaceLimits:
        if len(self._slots) == 1:
            return PlaceLimits(turn_seconds=self._settings.turn_seconds)
        device_bytes = max(
            (
                slot.info.device_memory_bytes
                for slot in self._slots.values()
                if slot.info is not None
            ),
            default=0,
        )
        auto_bytes: float = AUTO_MEMORY_SHARE * (device_bytes or self._machine_bytes)
        return PlaceLimits(
            max_loaded=self._settings.max_loaded or math.inf,
            memory_bytes=auto_bytes
            if self._settings.memory_bytes is None
            else float(self._settings.memory_bytes),
            turn_seconds=self._settings.turn_seconds,
        )

    def _share(self, slot: ModelSlot) -> MemoryShare:
        """What a worker that begins now may take: an equal part of what is left, with those that
        load too or may yet come.

        Without a limit it is not known how many may come: then all of them together count as one.
        """
        others = [
            other
            for other in self._slots.values()
            if other is not slot and other.phase != "unloaded"
        ]
        beginning = sum(other.phase == "loading" for other in others)
        if HAS_UNIFIED_MEMORY:
            return MemoryShare(
                parts=1 + beginning,
                wired_bytes=sum(other.wired_bytes for other in others),
                state_bytes=self._state_bytes((slot, *others)),
            )
        most = self._settings.max_loaded or len(self._slots)
        free_places = min(most, len(self._slots)) - len(others)
        if self._settings.max_loaded is None:
            free_places = min(free_places, _AUTO_PARTS)
        return MemoryShare(
            parts=max(free_places, 1) + beginning,
            promised_bytes=sum(other.promised_bytes for other in others),
            taken_bytes=sum(other.footprint_bytes for other in others),
        )

    def _state_bytes(self, loaded: Sequence[ModelSlot]) -> int | None:
        """What each of these may take for KV and blocks; None while no worker has told the size of
        the working set.
        """
        working_set_bytes = max(
            (slot.info.device_memory_bytes for slot in loaded if slot.info is not None), default=0
        )
        if not working_set_bytes:
            return None
        return device_memory.state_bytes(
            working_set_bytes, taken_bytes=[slot.fixed_bytes for slot in loaded]
        )

    def _share_out(self) -> None:
        """Where GPU and system share their memory, divide it anew among the models that are loaded
        now.
        """
        if not HAS_UNIFIED_MEMORY:
            return
        for slot in self._slots.values():
            if slot.phase == "ready" and slot.supervisor is not None:
                slot.supervisor.share_memory(self._share(slot))

    def _status(self, slot: ModelSlot) -> ModelStatus:
        figures, supervisor = slot.statistics, slot.supervisor
        candidate = slot.candidate()
        ends_at = idle_until(candidate)
        is_unused = slot.phase == "ready" and not (
            slot.is_pinned or slot.leases.held or math.isinf(ends_at)
        )
        return ModelStatus(
            id=slot.entry.name,
            state=_state(slot),
            pid=None if supervisor is None else supervisor.pid,
            running=figures.running,
            queued=figures.queued,
            info=slot.info,
            memory=figures.memory,
            created=slot.created,
            restarts=slot.restarts,
            resumed=slot.resumed,
            context_tokens=slot.context_tokens,
            aliases=entry.aliases
            if (entry := self._catalog.find(slot.entry.name)) is not None
            else (),
            is_pinned=slot.is_pinned,
            is_awaited=slot.is_pinned or slot.entry.name in self._catalog.at_start,
            idle_seconds_left=max(ends_at - asyncio.get_running_loop().time(), 0.0)
            if is_unused
            else None,
            failure=slot.failure,
            figures=slot.figures(),
        )


def _state(slot: ModelSlot) -> ModelState:
    match slot.phase:
        case "unloaded":
            return "loading" if slot.is_fetching else "failed" if slot.failure else "unloaded"
        case "ready":
            if slot.is_drained or slot.is_gone:
                return "stopping"
            state = "failed" if slot.supervisor is None else slot.supervisor.state
            return "ready" if state == "ready" else "failed" if state == "failed" else "loading"
        case phase:
            return phase


def _why(reason: str, for_whom: str) -> str:
    return {"room": f"{for_whom} needs its place", "asked": "as was asked for"}.get(
        reason, "nobody has used it for long enough"
    )
