"""Keeps track of which models are loaded.

A model is loaded when a request asks for it, stays loaded while it is used, and makes room for
others.

`budget` decides which models to load and to unload. `Residency` carries out these decisions, and
connects each request with the worker of its model. A request holds a *lease* while it uses a model;
`slot` describes the states of a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from holdfast.config import LogLevel, ResidencySettings
from holdfast.errors import HoldfastError, ModelLoadError, ModelPinned, WorkerUnavailable
from holdfast.front.fleet.budget import Phase, PlaceLimits, Verdict, decide, idle_until
from holdfast.front.fleet.catalog import Catalog, CatalogChange, CatalogEntry, change_between
from holdfast.front.fleet.memory_watch import (
    WATCH_SECONDS,
    MemoryMeter,
    MemoryUse,
    MemoryWatch,
    level_name,
)
from holdfast.front.fleet.slot import SHUTTING_DOWN, Fetch, ModelFiles, ModelSlot, State
from holdfast.front.link.event_stream import EventStream, WorkerClient
from holdfast.front.link.worker_link import WorkerLink
from holdfast.front.telemetry.metrics import ResidencyFigures
from holdfast.front.telemetry.request_log import waiting_for
from holdfast.machine import memory_plan
from holdfast.machine.clocks import awake_timeout
from holdfast.machine.device_memory import DeviceMemory, memory_report
from holdfast.machine.memory_plan import MemoryShare
from holdfast.models.adapter_folder import SEPARATOR
from holdfast.models.model_folder import planned_answer_tokens
from holdfast.wire.cache_map import CacheMap, CacheMapQuestion
from holdfast.wire.commands import Question, SchedulerLimits, SequenceRequest, WorkerSettings
from holdfast.wire.events import (
    Answer,
    CacheFigures,
    LoadProgress,
    ModelInfo,
    WaitReason,
    WorkerStatistics,
)
from holdfast.wire.requests import RequestId
from holdfast.wire.sessions import SessionCommand

ModelState: TypeAlias = Literal["unloaded", "loading", "ready", "stopping", "failed"]
WorkerOf: TypeAlias = Callable[[CatalogEntry, ModelFiles, MemoryShare], WorkerSettings]
"""Returns the settings of a model's worker."""

AUTO_MEMORY_SHARE = 0.75  # default for all models together, as a share of machine or GPU memory
HAS_UNIFIED_MEMORY = sys.platform == "darwin"  # whether GPU and system share their memory
# without `max_loaded`, free memory is divided among at most this many models, besides those that
# are loading
_AUTO_PARTS = 2

T = TypeVar("T")
logger = logging.getLogger("holdfast.front.fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """The status of one model. For an unloaded model, the last known values."""

    id: str
    state: ModelState  # a draining model counts as stopping, because new requests have to wait
    pid: int | None  # of its worker; None: it has none
    running: int  # sequences in the worker
    queued: int  # sequences that wait
    # for each sequence that waits in the worker, the reason for its wait
    waits: Mapping[RequestId, WaitReason]
    info: ModelInfo | None  # None: never loaded
    cache: CacheFigures | None  # of its prefix cache; None: it has none, or unknown
    created: int  # Unix time
    restarts: Mapping[str, int]  # of its worker, by cause: died or hung
    resumed: int = 0  # streams that have continued with another worker
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()  # names of its LoRA adapters
    parent: str = ""  # if this is an adapter: the id of its model
    # before the model is loaded: from its entry or config.json
    context_tokens: int | None = None
    own_context_tokens: int | None = None  # the context that the model was trained for
    can_see: bool = False  # whether it can be given images; before the load, whether that is likely
    can_chat: bool = True  # whether it has a chat template; true if its files are not here yet
    # sampling parameters of requests that set none; None: unknown until the load
    sampling: Mapping[str, float] | None = None
    is_pinned: bool = False
    # whether the server is ready only once this model is: it is pinned, was named at the start, or
    # is the only one
    is_awaited: bool = True
    # time until it is unloaded if nobody uses it; None: it stays loaded
    idle_seconds_left: float | None = None
    failure: str = ""  # why it could not be loaded
    weights_read: float | None = None  # share of its weights read; None unless it is being loaded
    figures: ResidencyFigures = ResidencyFigures()
    draft_model: str = ""  # the model that drafts for this one; empty: none, or it has failed

    @property
    def answer_tokens(self) -> int | None:
        """The answer length that agents should plan for; None while the context is unknown."""
        return None if self.context_tokens is None else planned_answer_tokens(self.context_tokens)

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """What the model takes: `text`, and `image` if it can be given images."""
        return ("text", "image") if self.can_see else ("text",)

    def variants(self) -> list[ModelStatus]:
        """This model, followed by the model with each of its adapters, as requests name them."""
        return [self, *map(self._with_adapter, self.adapters)]

    def _with_adapter(self, adapter: str) -> ModelStatus:
        return replace(
            self,
            id=f"{self.id}{SEPARATOR}{adapter}",
            aliases=tuple(f"{alias}{SEPARATOR}{adapter}" for alias in self.aliases),
            adapters=(),
            parent=self.id,
        )


class Residency:
    """The models of this server and their workers. Only use it on the event loop's thread."""

    def __init__(
        self,
        catalog: Catalog,
        settings: ResidencySettings,
        *,
        fetch: Fetch,
        worker_of: WorkerOf,
        max_waiting_sequences: int = 288,
        on_progress: Callable[[str, LoadProgress], None] = lambda model, progress: None,
        meter: MemoryMeter | None = None,
    ) -> None:
        """worker_of: returns the settings of a worker that starts. meter: measures the memory of
        the workers. max_waiting_sequences: how many sequences may wait for one model.
        """
        self._new_slot = partial(
            ModelSlot,
            fetch=fetch,
            settings_of=lambda slot, files: worker_of(slot.entry, files, self._memory_share(slot)),
            max_waiting_sequences=max_waiting_sequences,
            arrival_numbers=itertools.count(),
            on_change=self._rebalance,
            on_progress=on_progress,
        )
        self._slots = {entry.name: self._new_slot(entry) for entry in catalog.entries}
        # called with a model whose entry or files have changed, to drop what was read from them
        self.on_changed_entry: Callable[[str], None] = lambda model: None
        self._catalog = catalog
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()  # loads and other tasks under way
        self._first_loads: dict[str, asyncio.Task[None]] = {}  # loads at the start, by model
        self._timer: asyncio.TimerHandle | None = None  # for the next check
        self._changed = asyncio.Event()  # set and replaced after each change
        # model that was unloaded -> model that needed the place
        self._made_room: dict[str, str] = {}
        self._machine_bytes: float = math.inf  # the machine's memory; infinite: not measured yet
        # of the loaded models, when the memory was last divided among them
        self._phases_at_division: dict[str, Phase] = {}
        self._is_rebalancing = False  # `_rebalance` is running and must not start again
        self._has_stopped = False
        self._meter = meter or MemoryMeter()
        self.memory = MemoryWatch()  # memory pressure of all workers together
        self._watch_failure = ""  # the last one, until the watch has succeeded again

    @property
    def catalog(self) -> Catalog:
        """The models that are served now."""
        return self._catalog

    def entry(self, model: str) -> CatalogEntry:
        """The catalog entry with which a model is loaded, or will be. Raises UnknownModel."""
        return self._slot(model).entry

    async def replace_catalog(self, catalog: Catalog) -> CatalogChange:
        """Serve the models of another catalog from now on. Returns the difference.

        Removed models are unloaded once nobody uses them; requests that wait for a place for such a
        model get UnknownModel. Changed entries take effect at the next load. New models to load at
        the start are loaded now.
        """
        # The memory of the machine is measured only if several models must share it.
        if len(catalog.entries) > 1 and math.isinf(self._machine_bytes):
            self._machine_bytes = (await asyncio.to_thread(memory_report)).total_bytes
            for name in [name for name, slot in self._slots.items() if slot.is_resident]:
                logger.info("model %s may use all memory until it is loaded again", name)
        change = change_between(self._catalog, catalog)
        new_at_start = [name for name in catalog.at_start if name not in self._catalog.at_start]
        self._catalog = catalog
        old_slots = self._slots
        self._slots = {
            entry.name: old_slots.get(entry.name) or self._new_slot(entry)
            for entry in catalog.entries
        }
        for entry in catalog.entries:
            self._slots[entry.name].change(entry)
            self._slots[entry.name].worker.set_pressure(self.memory.pressure)
        for name, slot in old_slots.items():
            if name not in self._slots:
                self._slots[name] = slot
                slot.delist(catalog.unknown(name))
        for name in new_at_start:
            self._spawn(self._load_or_log(name), name=f"load of {name}")
        self._rebalance()
        return change

    async def start(self) -> None:
        """Begin to load the models that the server loads at its start.

        Returns once their worker processes run.
        """
        if len(self._slots) > 1:
            self._machine_bytes = (await asyncio.to_thread(memory_report)).total_bytes
        self._begin_memory_watch()
        self._first_loads = {
            name: self._spawn(self.load(name), name=f"first load of {name}")
            for name in self._catalog.at_start
        }
        for name, task in self._first_loads.items():
            launched = asyncio.create_task(self._slots[name].worker.launched.wait())
            await asyncio.wait((task, launched), return_when=asyncio.FIRST_COMPLETED)
            launched.cancel()

    async def wait_ready(self) -> None:
        """Wait until each model that the server loads at its start is served or has failed.

        Raises ModelLoadError or WorkerUnavailable if the failed model is the only one, or the one
        that the user named.
        """
        for name, task in self._first_loads.items():
            try:
                await asyncio.shield(task)
            except HoldfastError as error:
                slot = self._slots.get(name)
                if len(self._slots) == 1 or slot is None or not slot.entry.is_pinned:
                    raise
                logger.error("the pinned model %s is not available: %s", name, error)

    async def stop(self) -> None:
        """Stop all workers; they exit cleanly. Open streams end as failed."""
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
    async def lease(self, model: str, sequences: int = 1) -> AsyncIterator[WorkerClient]:
        """Lease a model for `sequences` sequences, and yield the client of its worker. If the name
        includes an adapter, all requests of the client are for that adapter.

        The model is not unloaded before the lease ends.

        If the model is not loaded, waits for room and then for the load. Raises UnknownModel,
        WorkerUnavailable if the load fails or takes too long, and QueueFull if too many sequences
        wait for the model.
        """
        slot = self._slot(model)
        named = self._catalog.named(model)
        adapter = "" if named is None else named.adapter
        await self._acquire_lease(slot, sequences)
        loop = asyncio.get_running_loop()
        try:
            began = loop.time()
            try:
                with waiting_for(WaitReason.LOAD):
                    client = await slot.wait_client(
                        sequences=sequences, seconds=self._settings.load_seconds
                    )
            finally:
                slot.wait_seconds[WaitReason.LOAD.value] += loop.time() - began
            yield _AdaptedClient(client, adapter) if adapter else client
        finally:
            slot.used_at = loop.time()
            slot.leases.release()

    async def load(self, model: str) -> None:
        """Load a model and wait until it is served.

        The wait for room has a time limit, but loading has none. Raises what `lease` raises, and
        ModelLoadError.
        """
        slot = self._slot(model)
        with contextlib.suppress(ModelLoadError):  # `_acquire_lease` raises it with another message
            await slot.files()
        await self._acquire_lease(slot, 0)
        try:
            await slot.wait_loaded()
        finally:
            slot.leases.release()

    async def unload(self, model: str) -> None:
        """Unload a model once the requests that use it have finished, and wait until it is
        unloaded.

        New requests load it again. Raises UnknownModel and ModelPinned.
        """
        slot = self._slot(model)
        if slot.is_pinned:
            raise ModelPinned(slot.entry.name)
        load_number = slot.loads
        try:
            while slot.is_resident and slot.loads == load_number:
                slot.is_unload_requested = True
                self._rebalance()
                await self._changed.wait()
        finally:
            if slot.is_resident and slot.loads == load_number:
                slot.is_unload_requested = False
                self._rebalance()

    def unload_when_unused(self, model: str) -> None:
        """Unload a model once the requests that use it have finished, without waiting.

        New requests load it again. Does nothing if the model is pinned or not loaded. Raises
        UnknownModel.
        """
        slot = self._slot(model)
        if slot.state.phase in ("loading", "ready") and not slot.is_pinned:
            slot.is_unload_requested = True
            self._rebalance()

    async def pin(self, model: str, *, pinned: bool) -> None:
        """Load a model and keep it loaded; or, if `pinned` is false, allow that it is unloaded.

        Raises what `load` raises. If the load fails, the model is not pinned.
        """
        slot = self._slot(model)
        was_pinned = slot.is_pinned
        slot.is_pinned = pinned
        self._rebalance()
        if pinned:
            slot.is_unload_requested = False
            try:
                await self.load(model)
            except HoldfastError:
                slot.is_pinned = was_pinned
                raise

    async def set_limits(
        self, model: str, *, max_running: int | None = None, step_tokens: int | None = None
    ) -> SchedulerLimits:
        """Change the scheduler's limits for a model until the server stops; see
        `SupervisedWorker.set_limits`.

        Raises UnknownModel and InvalidRequest.
        """
        worker = self._slot(model).worker
        return await worker.set_limits(max_running=max_running, step_tokens=step_tokens)

    def set_log_level(self, level: LogLevel) -> None:
        """Change the log level of all workers."""
        for slot in self._slots.values():
            slot.worker.set_log_level(level)

    def statuses(self) -> list[ModelStatus]:
        """The status of all models, in the order of the catalog."""
        return [self._status(slot) for slot in self._slots.values()]

    async def statistics(self) -> dict[str, WorkerStatistics]:
        """Return the current figures of the workers that answer, by model."""
        return await self._ask_workers(lambda worker: worker.statistics())

    async def cache_maps(self, question: CacheMapQuestion) -> dict[str, CacheMap]:
        """Return what the prefix caches of the workers that answer contain, by model."""
        return await self._ask_workers(lambda worker: worker.cache_map(question))

    async def _ask_workers(self, ask: Callable[[WorkerLink], Awaitable[T]]) -> dict[str, T]:
        """Ask all workers at once. Those that fail to answer are left out."""
        workers = {
            name: client.worker
            for name, slot in self._slots.items()
            if (client := slot.worker.client) is not None
        }
        answers = await asyncio.gather(*map(ask, workers.values()), return_exceptions=True)
        return {
            model: answer
            for model, answer in zip(workers, answers, strict=True)
            if not isinstance(answer, BaseException)
        }

    def forget_files(self, model: str) -> None:
        """Record that the files of a model were pulled again or removed.

        The model's next load looks for them again. Raises UnknownModel.
        """
        self._slot(model).forget_files()
        self._rebalance()

    async def files(self, model: str) -> ModelFiles:
        """Return where the files of a model are. Fetches them if necessary.

        Raises UnknownModel and ModelLoadError.
        """
        return await self._slot(model).files()

    # -- one request

    def _slot(self, model: str) -> ModelSlot:
        """The slot of a model, by a name that requests may use. Raises UnknownModel."""
        if (named := self._catalog.named(model)) is not None:
            return self._slots[named.entry.name]
        raise self._catalog.unknown(model)

    async def _acquire_lease(self, slot: ModelSlot, sequences: int) -> None:
        """Take a lease. When this returns, the model has a place (see `budget`)."""
        if slot.leases.is_open:
            await slot.leases.acquire(sequences=sequences, seconds=0.0)
            return
        loop = asyncio.get_running_loop()
        if self._has_stopped:
            raise WorkerUnavailable(SHUTTING_DOWN)
        if slot.retry_at > loop.time():
            raise slot.unavailable_error()
        began = loop.time()
        seconds = self._settings.place_seconds
        try:
            with waiting_for(WaitReason.PLACE):
                await self._fetch_files(slot)
                if not slot.is_listed:
                    raise self._catalog.unknown(slot.entry.name)
                await slot.leases.acquire(sequences=sequences, seconds=seconds)
        except TimeoutError:
            loaded = (name for name, other in self._slots.items() if other.is_resident)
            in_use = ", ".join(name for name in loaded if name != slot.entry.name)
            raise WorkerUnavailable(
                f"there was no room for model {slot.entry.name!r} within {seconds:.0f} s, as "
                f"others are in use ({in_use}); please try again"
            ) from None
        finally:
            slot.wait_seconds[WaitReason.PLACE.value] += loop.time() - began

    async def _fetch_files(self, slot: ModelSlot) -> None:
        """Wait until the model's files are there, at most `load_seconds`. A download goes on then.

        Raises WorkerUnavailable, UnusableModel or NoSuchModel.
        """
        seconds = self._settings.load_seconds
        try:
            async with awake_timeout(seconds):
                await slot.files()
        except TimeoutError:
            raise WorkerUnavailable(
                f"model {slot.entry.name!r} is still loading after {seconds:.0f} s: its files are "
                "being downloaded or read; please try again"
            ) from None
        except HoldfastError:
            raise slot.unavailable_error() from None

    # -- decisions

    def _rebalance(self) -> None:
        """Decide which models to load and unload, then load and unload them."""
        if self._is_rebalancing or self._has_stopped:
            return
        self._is_rebalancing = True
        try:
            while True:
                self._adopt_changes()
                verdict = decide(
                    [
                        slot.candidate()
                        for slot in self._slots.values()
                        if slot.is_resident or slot.leases.waiting
                    ],
                    self._place_limits(),
                    now=asyncio.get_running_loop().time(),
                )
                if not self._carry_out(verdict):
                    break
        finally:
            self._is_rebalancing = False
        self._divide_memory()
        if self._timer is not None:
            self._timer.cancel()
        at = verdict.next_check_at
        self._timer = (
            None if math.isinf(at) else asyncio.get_running_loop().call_at(at, self._rebalance)
        )
        self._changed.set()
        self._changed = asyncio.Event()

    def _adopt_changes(self) -> None:
        """Remove unloaded models that left the catalog, and use the changed entries of others."""
        for name, slot in tuple(self._slots.items()):
            if not slot.is_listed and not slot.is_resident:
                del self._slots[name]
                self.on_changed_entry(name)
            elif slot.apply_changes():
                self.on_changed_entry(name)

    def _carry_out(self, verdict: Verdict) -> bool:
        """Carry out a decision. Returns whether that may change the next decision."""
        for name in verdict.blocked:
            pinned = ", ".join(
                other for other, slot in self._slots.items() if slot.is_pinned and slot.is_resident
            )
            message = (
                f"model {name!r} cannot be loaded: pinned models ({pinned}) leave no room for it; "
                "unpin one of them"
            )
            self._slots[name].leases.refuse_waiting(WorkerUnavailable(message))
        for name in verdict.unload:
            self._unload(self._slots[name], makes_room_for=verdict.makes_room.get(name, ""))
        for name in verdict.load:
            self._slots[name].begin_load()
            self._spawn(self._watch_load(self._slots[name]), name=f"load of {name}")
        for name, slot in self._slots.items():
            if slot.state.phase == "ready":
                slot.drain(is_wanted=name in verdict.drain)
        return bool(verdict.blocked or verdict.unload or verdict.load)

    def _unload(self, slot: ModelSlot, *, makes_room_for: str) -> None:
        """Begin to unload a model, and log why. makes_room_for: the model that needs the place;
        empty: none does.
        """
        name = slot.entry.name
        if makes_room_for:
            self._made_room[name] = makes_room_for
            reason = "room"
            why = f"{makes_room_for} needs the room"
        elif slot.is_unload_requested or not slot.is_listed:
            reason = "asked"
            why = "as requested"
        else:
            reason = "idle"
            why = "it was idle"
        logger.info("model %s is unloaded: %s", name, why)
        slot.begin_unload(reason=reason)
        self._spawn(slot.unload(), name=f"end of {name}")

    async def _watch_load(self, slot: ModelSlot) -> None:
        """Wait for the end of a load. If it fails, load the models again that made room for it."""
        name = slot.entry.name
        first_load = self._first_loads.get(name)
        is_first = first_load is not None and not first_load.done()
        failure: HoldfastError | None = None
        try:
            await slot.wait_loaded()
        except HoldfastError as error:
            failure = error
        for victim in [victim for victim, winner in self._made_room.items() if winner == name]:
            del self._made_room[victim]
            if failure is None or victim not in self._slots or self._slots[victim].is_resident:
                continue
            logger.info("model %s is loaded again, as the load of %s has failed", victim, name)
            self._spawn(self._load_or_log(victim), name=f"load of {victim} again")
        if failure is not None and not is_first:  # otherwise `wait_ready` reports it
            logger.error("model %s could not be loaded: %s", name, failure)

    async def _load_or_log(self, name: str) -> None:
        """Load a model for which no request waits, so that an error can only be logged."""
        try:
            await self.load(name)
        except HoldfastError as error:
            logger.error("model %s is not available: %s", name, error)

    def _spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run work as a task, which `stop` cancels."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- memory

    def _place_limits(self) -> PlaceLimits:
        """The limits for `decide`. A server with one model has none for number and memory."""
        if len(self._slots) == 1:
            return PlaceLimits(turn_seconds=self._settings.turn_seconds)
        memory_bytes: float | None = self._settings.memory_bytes
        if memory_bytes is None:
            total_bytes = self._device_memory_bytes() or self._machine_bytes
            memory_bytes = AUTO_MEMORY_SHARE * total_bytes
        return PlaceLimits(
            max_loaded=self._settings.max_loaded or math.inf,
            memory_bytes=memory_bytes,
            turn_seconds=self._settings.turn_seconds,
        )

    def _device_memory_bytes(self) -> int:
        """Memory of the GPU, as the workers report it; 0 if there is no GPU or no worker has
        reported one.
        """
        infos = (slot.worker.info for slot in self._slots.values())
        return max((info.device_memory_bytes for info in infos if info is not None), default=0)

    def _memory_share(self, slot: ModelSlot) -> MemoryShare:
        """The memory for a worker that starts now: an equal part of what the other workers leave.

        The other parts are for the models that are loading or may still be loaded.
        """
        others = [
            other for other in self._slots.values() if other is not slot and other.is_resident
        ]
        loading = sum(other.state is State.LOADING for other in others)
        if HAS_UNIFIED_MEMORY:
            taken_bytes = [each.memory.fixed_bytes for each in (slot, *others)]
            device_bytes = self._device_memory_bytes()
            state_bytes = None  # no worker has reported the size of the GPU's memory yet
            if device_bytes:
                state_bytes = memory_plan.state_bytes(device_bytes, taken_bytes=taken_bytes)
            return MemoryShare(
                parts=1 + loading,
                wired_bytes=sum(other.memory.wired_bytes for other in others),
                state_bytes=state_bytes,
            )
        most_loaded = self._settings.max_loaded or len(self._slots)
        free_places = min(most_loaded, len(self._slots)) - len(others)
        if self._settings.max_loaded is None:
            free_places = min(free_places, _AUTO_PARTS)
        return MemoryShare(
            parts=max(free_places, 1) + loading,
            promised_bytes=sum(
                other.memory.promised_bytes for other in others if other.state.phase == "ready"
            ),
            taken_bytes=sum(other.memory.footprint_bytes for other in others),
        )

    def _divide_memory(self) -> None:
        """Divide the memory again after a model came or went, if GPU and system share it."""
        if not HAS_UNIFIED_MEMORY:
            return
        phases = {name: slot.state.phase for name, slot in self._slots.items() if slot.is_resident}
        if phases == self._phases_at_division:
            return
        self._phases_at_division = phases
        for name, phase in phases.items():
            if phase == "ready":
                self._slots[name].worker.share_memory(self._memory_share(self._slots[name]))

    def _begin_memory_watch(self) -> None:
        watch = self._spawn(self._watch_memory(), name="memory watch")
        watch.add_done_callback(self._restart_memory_watch)

    async def _watch_memory(self) -> None:
        """Measure the memory of all workers in a loop, and tell them when the pressure changes."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            pids = {name: pid for name, slot in self._slots.items() if (pid := slot.worker.pid)}
            try:
                measured, machine = await asyncio.to_thread(self._meter.read, pids.values())
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                logger.warning("the memory of the workers cannot be measured: %s", error)
                continue
            self.update_pressure({name: measured[pid] for name, pid in pids.items()}, machine)
            self._watch_failure = ""

    def _restart_memory_watch(self, watch: asyncio.Task[None]) -> None:
        """Begin the memory watch again after an unexpected failure, which is a bug in Holdfast. A
        failure that lasts is logged once.
        """
        if self._has_stopped or watch.cancelled():
            return
        failure = repr(watch.exception())
        if failure != self._watch_failure:
            logger.critical("the memory watch failed", exc_info=watch.exception())
        self._watch_failure = failure
        self._begin_memory_watch()

    def update_pressure(self, measured: Mapping[str, int], machine: DeviceMemory) -> None:
        """Tell all workers the memory pressure, if it has changed.

        measured: memory of the worker processes, by model.
        """
        watch = self.memory
        last_pressure = watch.pressure
        if not watch.update(
            self._memory_use(measured, machine), now=asyncio.get_running_loop().time()
        ):
            return
        logger.log(
            logging.WARNING if watch.pressure > last_pressure else logging.INFO,
            "memory pressure of all workers: now %s, before %s: %s",
            level_name(watch.pressure),
            level_name(last_pressure),
            watch.reason,
        )
        for slot in self._slots.values():
            slot.worker.set_pressure(watch.pressure)

    def _memory_use(self, measured: Mapping[str, int], machine: DeviceMemory) -> MemoryUse:
        """The memory of all workers, from the measurements and their reports. measured: bytes by
        model.
        """
        slots = {name: self._slots[name] for name in measured if name in self._slots}
        device_bytes = self._device_memory_bytes()
        is_discrete = device_bytes > 0 and not HAS_UNIFIED_MEMORY
        workers = {
            name: slot.memory.state_footprint(measured[name], is_discrete=is_discrete)
            for name, slot in slots.items()
        }
        limit_bytes = device_bytes or min(
            machine.total_bytes, sum(workers.values()) + machine.available_bytes
        )
        if self._settings.memory_bytes is not None:
            limit_bytes = min(limit_bytes, self._settings.memory_bytes)
        return MemoryUse(
            workers=workers,
            # all that a worker takes while it loads is for its weights
            fixed_bytes=sum(
                workers[name] if slot.worker.info is None else slot.memory.fixed_bytes
                for name, slot in slots.items()
            ),
            limit_bytes=limit_bytes,
        )

    # -- status

    def _status(self, slot: ModelSlot) -> ModelStatus:
        """The status of one model, for lists and answers."""
        figures = slot.worker.statistics
        ends_at = idle_until(slot.candidate())
        idle_seconds_left = None
        is_unused = slot.state.phase == "ready" and not slot.is_pinned and not slot.leases.held
        if is_unused and math.isfinite(ends_at):
            idle_seconds_left = max(ends_at - asyncio.get_running_loop().time(), 0.0)
        entry = self._catalog.find(slot.entry.name)
        state = _status_of(slot)
        return ModelStatus(
            id=slot.entry.name,
            state=state,
            pid=slot.worker.pid,
            running=figures.running,
            queued=figures.queued,
            waits=figures.waits,
            draft_model=figures.draft_model,
            info=slot.worker.info,
            cache=figures.cache,
            created=slot.created,
            restarts=dict(slot.worker.restarts),
            resumed=slot.worker.resumed,
            context_tokens=slot.context_tokens,
            own_context_tokens=slot.own_context_tokens,
            can_see=slot.can_see,
            can_chat=slot.can_chat,
            sampling=slot.sampling,
            aliases=() if entry is None else entry.aliases,
            adapters=() if entry is None else entry.adapters,
            is_pinned=slot.is_pinned,
            is_awaited=slot.is_pinned or slot.entry.name in self._catalog.at_start,
            idle_seconds_left=idle_seconds_left,
            failure=slot.failure,
            weights_read=slot.worker.weights_read if state == "loading" else None,
            figures=slot.figures(),
        )


def _status_of(slot: ModelSlot) -> ModelState:
    """The state as users see it: it also covers the download and the replacement of a worker."""
    if slot.state.phase == "ready":
        if slot.state is State.DRAINING or not slot.is_listed:
            return "stopping"
        return "loading" if slot.worker.client is None else "ready"
    if slot.is_fetching and not slot.is_resident:
        return "loading"
    if slot.state is State.FAILED:
        return "failed"
    return slot.state.phase


class _AdaptedClient:
    """Sends all requests of a lease to one LoRA adapter."""

    def __init__(self, client: WorkerClient, adapter: str) -> None:
        self._client = client
        self._adapter = adapter

    @property
    def info(self) -> ModelInfo:
        return self._client.info

    def submit(self, request: SequenceRequest) -> EventStream:
        return self._client.submit(msgspec.structs.replace(request, adapter=self._adapter))

    async def call(self, command: Question) -> Answer:
        if isinstance(command, SessionCommand):
            command = msgspec.structs.replace(command, adapter=self._adapter)
        return await self._client.call(command)
