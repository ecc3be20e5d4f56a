"""One model of the catalog and its worker: a state machine.

`Residency` decides which models are loaded. A slot loads and unloads one model, and makes sure that
a loaded model has a worker: a worker that dies or hangs is replaced, and its requests continue with
the next worker (`ModelClient`).

- UNLOADED, FAILED: there is no worker. After a failure, requests are refused until `retry_at`.
- LOADING: the first worker of this load is starting. Requests get leases and wait for the worker.
- READY: the worker serves.
- RESTARTING: the worker is gone and the next one is starting. Requests get leases and wait for it.
- DRAINING: requests that hold a lease finish, even if their worker dies. New requests wait for
  another load.
- STOPPING: the worker writes its cache to the store and exits.

A *lease* entitles a request to use the model: while requests hold leases, the model is not
unloaded. A loaded model has a *place*, a share of the limits that `budget` enforces.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import enum
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias, TypeVar

import msgspec

from holdfast.config import LogLevel, SchedulerSettings
from holdfast.errors import (
    HoldfastError,
    InvalidRequest,
    ModelLoadError,
    NoSuchModel,
    QueueFull,
    UnusableModel,
    WorkerUnavailable,
)
from holdfast.front.fleet.budget import Candidate, Phase
from holdfast.front.fleet.catalog import CatalogEntry
from holdfast.front.fleet.process import WorkerProcess, describe_exit
from holdfast.front.fleet.worker_files import (
    MOST_REQUESTS,
    CrashReport,
    RequestAtCrash,
    installed_versions,
    write_report,
)
from holdfast.front.link.model_client import Loss, ModelClient
from holdfast.front.telemetry.metrics import ResidencyFigures
from holdfast.machine.clocks import awake_timeout
from holdfast.machine.device_memory import Pressure
from holdfast.machine.memory_plan import MemoryShare
from holdfast.models.draft_pairs import LocalModel
from holdfast.models.tokenizer_files import default_sampling
from holdfast.wire.commands import (
    LogChange,
    MemoryChange,
    MemoryPressure,
    SchedulerLimits,
    WorkerSettings,
    checked_limits,
)
from holdfast.wire.events import LoadProgress, ModelInfo, WaitReason, WorkerFailed, WorkerStatistics


class State(enum.Enum):
    """The states of a model and its worker; the top of this file describes them."""

    UNLOADED = "unloaded"
    FAILED = "failed"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPING = "stopping"

    @property
    def phase(self) -> Phase:
        """The state, as one of the phases that `budget.decide` distinguishes."""
        return _PHASES[self]


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.UNLOADED: frozenset({State.LOADING, State.FAILED}),  # to FAILED: its files are missing
    # to UNLOADED: its entry has changed
    State.FAILED: frozenset({State.LOADING, State.FAILED, State.UNLOADED}),
    State.LOADING: frozenset({State.READY, State.FAILED, State.STOPPING}),
    State.READY: frozenset({State.RESTARTING, State.DRAINING, State.FAILED, State.STOPPING}),
    State.RESTARTING: frozenset({State.READY, State.DRAINING, State.FAILED, State.STOPPING}),
    State.DRAINING: frozenset({State.READY, State.RESTARTING, State.FAILED, State.STOPPING}),
    State.STOPPING: frozenset({State.UNLOADED}),
}
_PHASES: Mapping[State, Phase] = {
    State.UNLOADED: "unloaded",
    State.FAILED: "unloaded",
    State.LOADING: "loading",
    State.READY: "ready",
    State.RESTARTING: "ready",
    State.DRAINING: "ready",
    State.STOPPING: "stopping",
}
_TAKES_REQUESTS = frozenset({State.LOADING, State.READY, State.RESTARTING})

LONGEST_BACKOFF_SECONDS = 60.0
# after this many failed starts in a row, a first load counts as failed, and open requests no longer
# wait for a worker
FAILED_STARTS = 3
HEALTHY_SECONDS = 60.0  # a worker that has served this long resets the backoff
# As long as answers make progress, this number of restarts a minute happens without delay: finding
# one bad request can take that many.
DEATHS_A_MINUTE = 5
RETRY_AFTER_SECONDS = 5.0  # for a full queue, since nobody knows how long the load takes
SHUTTING_DOWN = "the server is shutting down"

T = TypeVar("T")
logger = logging.getLogger("holdfast.front.fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model's files are, and what the front needs to know from them."""

    folder: Path
    weight_bytes: int = 0  # with adapters and draft model; 0: not measured
    sampling: Mapping[str, float] = field(default_factory=dict)  # as the model recommends
    draft: LocalModel | None = None  # None: no draft model
    can_chat: bool = True  # whether the model has a chat template


Fetch: TypeAlias = Callable[[CatalogEntry], ModelFiles]
"""Finds the files of a model. Blocks as long as a download takes.

Any thread. Raises ModelLoadError.
"""


class ModelSlot:
    """One model of the catalog and, while it is loaded, its worker.

    Only use it on the event loop's thread.
    """

    def __init__(
        self,
        entry: CatalogEntry,
        *,
        fetch: Fetch,
        settings_of: Callable[[ModelSlot, ModelFiles], WorkerSettings],
        max_waiting_sequences: int,
        arrival_numbers: Iterator[int],
        on_change: Callable[[], None],
        on_progress: Callable[[str, LoadProgress], None],
    ) -> None:
        """settings_of: called at each load; returns the settings of the worker.

        max_waiting_sequences: how many sequences may wait for the model.
        arrival_numbers: yields the arrival numbers of requests, shared by all slots.
        on_change: called after each change of the state or of the leases.
        """
        self.entry = entry
        self._next_entry = entry  # takes effect at the next load
        # False: the model was removed from the catalog, and is unloaded once nobody uses it
        self.is_listed = True
        self.is_pinned = entry.is_pinned
        self.is_unload_requested = False  # unload it when possible
        self.state = State.UNLOADED
        self.leases = Leases(
            max_waiting_sequences=max_waiting_sequences,
            arrival_numbers=arrival_numbers,
            on_change=on_change,
        )
        self.used_at = 0.0  # time of the last use
        self.ready_at = 0.0  # time at which the model became ready
        self.retry_at = 0.0  # after a failure, requests are refused until then
        self.weights_read = 0.0  # share of the weights that the last worker has read
        self.info: ModelInfo | None = None  # as the last worker that was ready reported it
        self.created = int(time.time())  # Unix time
        self.loads = 0  # how often it was loaded
        self.changes: Counter[str] = Counter()  # loads, failures, and unloads by reason
        # total waiting time of requests
        self.wait_seconds = {WaitReason.PLACE.value: 0.0, WaitReason.LOAD.value: 0.0}
        self.restarts = {"died": 0, "hung": 0}  # of the worker, by cause
        self.resumed = 0  # streams that have continued with another worker
        self.launched = asyncio.Event()  # set once there is, or was, a worker process
        self._fetch = fetch
        self._settings_of = settings_of
        self._on_change = on_change
        self._on_progress = on_progress
        self._failures_in_a_row = 0  # failed loads; each one lengthens the next wait
        # the result of `fetch`; None: not fetched
        self._files: asyncio.Future[ModelFiles] | None = None
        self._are_files_old = False  # fetch the files again before the next load
        self._scheduler: SchedulerSettings | None = None  # set by `set_limits`
        self._pressure = Pressure.NORMAL  # the memory pressure that the worker was told
        self._waiting_sequences = 0  # sequences with a lease that wait for the worker
        self._changed = asyncio.Event()  # set and replaced after each change
        # the following fields are about the current load
        self._task: asyncio.Task[NoReturn] | None = None
        # completes when the load ends; fails with its error
        self._loaded: asyncio.Future[None] | None = None
        self._settings: WorkerSettings | None = None  # of the worker
        self._client: ModelClient | None = None  # sends requests to the worker
        self._process: WorkerProcess | None = None
        # the error for requests with a lease after the load has ended
        self._refusal: HoldfastError | None = None
        self._load_error: HoldfastError | None = None  # why the load failed; None if it did not

    # -- state

    def _enter(self, state: State) -> None:
        """Change the state. In some states, new requests get leases; in the others, they wait."""
        assert state in TRANSITIONS[self.state], f"no transition from {self.state} to {state}"
        self.state = state
        if state in _TAKES_REQUESTS:
            self.leases.open()
        else:
            self.leases.close()
        self._notify()

    def _notify(self) -> None:
        """Wake up the requests that wait for a worker, and tell Residency."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts of the state contradict each other."""
        assert self.leases.is_open == (self.state in _TAKES_REQUESTS), f"is_open in {self.state}"
        assert not (self.leases.is_open and self.leases.waiting), "requests wait for a free lease"
        assert bool(self.failure) == (self.state is State.FAILED), f"wrong failure in {self.state}"
        assert self.is_resident == (self._task is not None), f"wrong _task in {self.state}"
        if not self.is_resident:
            assert self._process is None, f"a process exists in {self.state}"
            assert not self.is_unload_requested, f"unload requested in {self.state}"

    @property
    def is_resident(self) -> bool:
        """Whether the model takes up memory, or is about to."""
        return self.state.phase != "unloaded"

    @property
    def failure(self) -> str:
        """Why the load has failed; empty in all other states."""
        return "" if self._load_error is None else str(self._load_error)

    @property
    def client(self) -> ModelClient | None:
        """The link to the model; None while no worker serves it."""
        client = self._client
        return client if client is not None and client.is_serving else None

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None without a worker."""
        process = self._process
        return process.pid if process is not None and process.is_alive else None

    @property
    def is_fetching(self) -> bool:
        """Whether the model's files are being fetched."""
        return self._files is not None and not self._files.done()

    def candidate(self) -> Candidate:
        """What `budget.decide` needs to know about the model."""
        return Candidate(
            name=self.entry.name,
            phase=self.state.phase,
            footprint_bytes=self.footprint_bytes,
            leases=self.leases.held,
            is_pinned=self.is_pinned,
            is_unload_requested=self.is_unload_requested or not self.is_listed,
            idle_seconds=self._next_entry.idle_seconds,
            used_at=self.used_at,
            ready_at=self.ready_at,
            waiting_since=self.leases.waiting_since,
        )

    # -- what Residency decides

    def begin_load(self) -> None:
        """Start a worker. From now on, requests get leases."""
        self._load_error = None
        self._refusal = None
        self.loads += 1
        self._loaded = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(
            self._supervise_worker(), name=f"worker of {self.entry.name}"
        )
        self._task.add_done_callback(self._on_task_end)
        self._enter(State.LOADING)

    def drain(self, *, is_wanted: bool) -> None:
        """Drain the model: new requests wait while those that hold a lease finish.

        is_wanted: if false, stop draining: new requests get leases again.
        """
        if is_wanted and self.state in _TAKES_REQUESTS:
            self._enter(State.DRAINING)
        elif not is_wanted and self.state is State.DRAINING:
            self._enter(State.RESTARTING if self.client is None else State.READY)

    def begin_unload(self, *, reason: str) -> None:
        """Begin to stop the worker, so that its place becomes free; `unload` waits for the end.

        reason: `room`, `idle` or `asked`; counted in `changes`.
        """
        assert not self.leases.held, "the model is in use"
        self.changes[reason] += 1
        self._end_worker()

    async def unload(self) -> None:
        """Wait until the worker has exited cleanly.

        By then, everything in the worker's prefix cache has been written to its store.
        """
        assert self._task is not None
        await asyncio.wait([self._task])
        if self._client is not None:
            self._client.close(SHUTTING_DOWN)
        self._end_load(State.UNLOADED)

    async def stop(self) -> None:
        """Refuse all waiting requests and stop the worker, because the server stops."""
        self._refusal = WorkerUnavailable(SHUTTING_DOWN)
        self.leases.refuse_waiting(self._refusal)
        if self._loaded is not None:
            _fail_future(self._loaded, self._refusal)
        if self.is_resident:
            if self.state is not State.STOPPING:
                self._end_worker()
            await self.unload()

    def _end_worker(self) -> None:
        """End the task that keeps a worker running, which then stops the worker."""
        assert self._task is not None
        self._enter(State.STOPPING)
        self._task.cancel()  # cancel immediately: the task must not leave STOPPING

    def _end_load(self, state: State) -> None:
        """Forget everything about the current load, and enter UNLOADED or FAILED."""
        if self._loaded is not None and not self._loaded.done():
            # the model was unloaded while the new worker was being told its settings
            self._loaded.set_result(None)
        self._task = None
        self._client = None
        self._settings = None
        self.is_unload_requested = False
        self._enter(state)

    # -- its entry and files

    def change(self, entry: CatalogEntry) -> None:
        """Use another catalog entry.

        Changes of `is_pinned` and `idle_seconds` apply immediately, all others at the next load.
        """
        if entry.is_pinned != self._next_entry.is_pinned:
            self.is_pinned = entry.is_pinned
        self.is_listed = True
        self._next_entry = entry

    def delist(self, error: HoldfastError) -> None:
        """Record that the model is no longer in the catalog. It is removed once nobody uses it."""
        self.is_listed = False
        self.is_pinned = False
        self.leases.refuse_waiting(error)

    def forget_files(self) -> None:
        """Record that the files were pulled again or removed.

        The next load looks for them again.
        """
        self._are_files_old = True

    def apply_changes(self) -> bool:
        """Adopt the latest entry and files, unless the model is loaded.

        Returns whether they are new.
        """
        if self.is_resident or (self.entry == self._next_entry and not self._are_files_old):
            return False
        if self._are_files_old or self.entry.model != self._next_entry.model:
            self._files = None
            self.info = None
        self.entry = self._next_entry
        self._are_files_old = False
        self._failures_in_a_row = 0
        self._load_error = None
        self.retry_at = 0.0
        if self.state is State.FAILED:
            self._enter(State.UNLOADED)
        return True

    async def files(self) -> ModelFiles:
        """Return where the model's files are. Fetches them if necessary. Raises ModelLoadError."""
        files = self._files
        if files is not None and files.done():
            is_failed = files.exception() is not None
            # fetch again after a failure, or if `holdfast models rm` has removed the folder
            if is_failed or not files.result().folder.is_dir():
                files = None
        if files is None:
            files = on_own_thread(partial(self._fetch, self.entry), name="model-files")
            files.add_done_callback(self._on_files_fetched)
            self._files = files
        return await asyncio.shield(files)

    def _on_files_fetched(self, files: asyncio.Future[ModelFiles]) -> None:
        """Refuse requests for a while if the fetch has failed."""
        error = files.exception()
        if isinstance(error, HoldfastError) and files is self._files and not self.is_resident:
            self._mark_failed(error)

    # -- for requests

    async def wait_loaded(self) -> None:
        """Wait until the current load has ended. If the load fails, raises its error."""
        assert self._loaded is not None
        await asyncio.shield(self._loaded)

    async def wait_client(self, *, sequences: int, seconds: float) -> ModelClient:
        """Return the client of the model's worker for the holder of a lease. Waits while a worker starts.

        Raises WorkerUnavailable if the start fails or takes too long, UnusableModel if it fails
        because of the model's files, and QueueFull if too many sequences wait.
        """
        if (client := self.client) is not None:
            return client
        self.leases.check_queue_room(self._waiting_sequences, sequences)
        self._waiting_sequences += sequences
        try:
            async with awake_timeout(seconds):
                while (client := self.client) is None:
                    if self._refusal is not None:
                        raise self._refusal
                    await self._changed.wait()
        except TimeoutError:
            waited = f" after {seconds:.0f} s" if seconds else ""
            doing = "loading" if self.state is State.LOADING else "restarting"
            raise WorkerUnavailable(
                f"model {self.entry.name!r} is still {doing}{waited}; please try again"
            ) from None
        finally:
            self._waiting_sequences -= sequences
        return client

    def unavailable_error(self) -> HoldfastError:
        """The error for requests while the model is in the state FAILED."""
        if isinstance(self._load_error, UnusableModel | NoSuchModel):  # waiting does not help
            return type(self._load_error)(
                f"model {self.entry.name!r} cannot be served: {self.failure}"
            )
        retry_after_seconds = max(self.retry_at - asyncio.get_running_loop().time(), 0.0)
        return WorkerUnavailable(
            f"model {self.entry.name!r} cannot be served: {self.failure}",
            retry_after_seconds=retry_after_seconds,
        )

    # -- its worker

    async def set_limits(
        self, *, max_running: int | None = None, step_tokens: int | None = None
    ) -> SchedulerLimits:
        """Change the scheduler's limits for this worker and all later ones.

        max_running: how many sequences may run concurrently. step_tokens: how many tokens a step
        may have. None leaves a limit unchanged. No stream is lost: sequences beyond a lower limit
        wait again. Returns the new limits; `step_tokens` is 0 if it was never set and no worker can
        be asked. Raises InvalidRequest.
        """
        if self._settings is None:
            message = (
                f"{self.entry.name} is not loaded; only a loaded model's limits can be changed"
            )
            raise InvalidRequest(message, field="id")
        current = self._settings.scheduler
        is_step_tokens_set = step_tokens is not None or current.step_tokens is not None
        new_max_running = current.max_running if max_running is None else max_running
        known_step_tokens = step_tokens or current.step_tokens or self.statistics.step_tokens
        # if step_tokens was never set, it grows with max_running, as in the worker itself
        new_step_tokens = (
            known_step_tokens
            if is_step_tokens_set
            else max(known_step_tokens, new_max_running, current.min_chunk_tokens)
        )
        new_scheduler = checked_limits(
            current, max_running=new_max_running, step_tokens=new_step_tokens
        )
        self._scheduler = replace(
            new_scheduler, step_tokens=new_step_tokens if is_step_tokens_set else None
        )
        self._settings = msgspec.structs.replace(self._settings, scheduler=self._scheduler)
        limits = SchedulerLimits(
            max_running=new_max_running, step_tokens=new_step_tokens if known_step_tokens else 0
        )
        if known_step_tokens and (client := self.client) is not None:
            client.worker.send(limits)
            await client.worker.statistics()
        return limits

    def set_log_level(self, level: LogLevel) -> None:
        """Change the log level of this worker and of those that replace it."""
        if self._settings is None:
            return
        log = replace(self._settings.log, level=level)
        self._settings = msgspec.structs.replace(self._settings, log=log)
        if (client := self.client) is not None:
            client.worker.send(LogChange(level=level))

    def share_memory(self, share: MemoryShare) -> None:
        """Change how much memory this worker and those that replace it may use."""
        if self._settings is None or self._settings.share == share:
            return
        self._settings = msgspec.structs.replace(self._settings, share=share)
        if share.state_bytes is not None and (client := self.client) is not None:
            client.worker.send(MemoryChange(state_bytes=share.state_bytes))

    def set_pressure(self, pressure: Pressure) -> None:
        """Tell this worker, and those that replace it, the memory pressure of all workers."""
        self._pressure = pressure
        if (client := self.client) is not None:
            client.worker.send(MemoryPressure(pressure=pressure))

    async def _supervise_worker(self) -> NoReturn:
        """Start a worker, and replace it whenever it ends, until `begin_unload` cancels this task.

        Raises HoldfastError or OSError if the model cannot be served.
        """
        settings = self._settings_of(self, await self.files())
        if self._scheduler is not None:
            settings = msgspec.structs.replace(settings, scheduler=self._scheduler)
        self._settings = settings
        self._client = ModelClient(
            unread_bytes=settings.residency.unread_bytes, on_info=self._on_info
        )
        restart_delay = RestartDelay()
        failed_starts = 0
        await self._launch(self._client)
        try:
            while True:
                end = await self._serve_until_end(self._client)
                failed_starts = failed_starts + 1 if end.served_seconds is None else 0
                message = end.failure.message
                if end.failure.fatal_input:  # another worker would fail as well
                    raise end.failure.error
                if failed_starts >= FAILED_STARTS:
                    if self.state is State.LOADING:
                        name = self.entry.name
                        raise WorkerUnavailable(
                            f"the worker of model {name} does not start: {message}"
                        )
                    self._client.end_all(
                        "the worker process of the model has died and cannot be started again: "
                        f"{message}"
                    )
                self.restarts[end.cause] += 1
                delay = restart_delay.worker_ended(
                    now=asyncio.get_running_loop().time(),
                    served_seconds=end.served_seconds or 0.0,
                    had_progress=end.loss.had_progress,
                )
                logger.error("model %s: %s; restarting in %.0f s", self.entry.name, message, delay)
                await self._report_worker_end(end)
                await asyncio.sleep(delay)
        finally:
            if (process := self._process) is not None:
                await process.stop()
                self._process = None

    async def _launch(self, client: ModelClient) -> None:
        """Start a worker process, whose events go to the client. Raises OSError."""
        assert self._settings is not None
        self.weights_read = 0.0
        self._process = await WorkerProcess.start(
            self._settings, on_progress=self._forward_progress, on_events=client.deliver_events
        )
        self.launched.set()

    def _forward_progress(self, progress: LoadProgress) -> None:
        """Pass a worker's progress on, and keep the share of the weights that it has read."""
        if progress.stage == "reading":
            self.weights_read = progress.fraction
        self._on_progress(self.entry.name, progress)

    async def _serve_until_end(self, client: ModelClient) -> _WorkerEnd:
        """Start a worker unless one exists, and wait until it has ended."""
        if self._process is None:
            try:
                await self._launch(client)
            except OSError as error:  # out of memory, processes or file descriptors at the moment
                message = f"the worker process cannot be started: {error}"
                return _WorkerEnd(failure=WorkerFailed(message=message, fatal_input=False))
        process = self._process
        assert process is not None
        assert self._settings is not None
        outcome = await process.wait_started(timeout_seconds=self._settings.model.startup_seconds)
        if isinstance(outcome, WorkerFailed):
            self._process = None
            return _WorkerEnd(failure=outcome, process=process)
        await self._begin_serving(client, process, outcome.model)
        began_at = asyncio.get_running_loop().time()
        await process.wait_lost()
        if self.state is State.READY:
            self._enter(State.RESTARTING)
        exit_code = await process.stop()
        self._process = None
        end_text = f"ended unexpectedly ({describe_exit(exit_code)})"
        if process.hang is not None:
            end_text = f"{process.hang} and was killed"
        return _WorkerEnd(
            failure=WorkerFailed(message=f"the worker process {end_text}", fatal_input=False),
            process=process,
            served_seconds=asyncio.get_running_loop().time() - began_at,
            loss=client.worker_lost(),
        )

    async def _begin_serving(
        self, client: ModelClient, process: WorkerProcess, info: ModelInfo
    ) -> None:
        """Give a loaded worker the open requests and the settings that changed during the load.

        Then, unless the model is draining, let the waiting requests in.
        """
        # whether the settings have changed while the worker was loading
        is_outdated = self._settings != process.settings
        if self._pressure is not Pressure.NORMAL:  # before the worker starts any request
            process.link.send(MemoryPressure(pressure=self._pressure))
        resumed = client.use_worker(process.link, info)  # open requests go before new ones
        self.resumed += resumed
        if self.state is State.LOADING:
            self._failures_in_a_row = 0
            self.ready_at = asyncio.get_running_loop().time()
            self.used_at = self.ready_at
            self.changes["loaded"] += 1
        else:
            continuing = f"; {resumed} open requests continue" if resumed else ""
            logger.info(
                "model %s is ready again (worker %d)%s", self.entry.name, process.pid, continuing
            )
        if self.state is State.DRAINING:
            self._notify()
        else:
            self._enter(State.READY)
        self._on_progress(self.entry.name, LoadProgress(stage="ready", fraction=1.0))
        settings = self._settings
        if settings is not None and is_outdated:
            process.link.send(LogChange(level=settings.log.level))
            if settings.share.state_bytes is not None:
                process.link.send(MemoryChange(state_bytes=settings.share.state_bytes))
            # this worker has died; the next one gets the new settings
            with contextlib.suppress(WorkerUnavailable):
                await process.link.statistics()  # `set_limits` needs the worker's `step_tokens`
                await self.set_limits()
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(None)

    def _on_info(self, info: ModelInfo) -> None:
        """Keep what a worker reports about the model after a load or a change of its KV budget."""
        self.info = info

    async def _report_worker_end(self, end: _WorkerEnd) -> None:
        """Log which requests the death of a worker interrupted, and write the crash report."""
        loss = end.loss
        if loss.requests:
            logger.warning(
                "model %s: the worker ended with %d open requests (%d mid-answer); those that are "
                "not refused continue on the next worker",
                self.entry.name,
                len(loss.requests),
                sum(tokens > 0 for tokens in loss.generated_tokens),
            )
        for request_id in loss.refused:
            logger.error(
                "model %s: request %s is refused: it was the only request running when the worker "
                "died",
                self.entry.name,
                request_id,
            )
        if end.process is None or self._settings is None:
            return
        folder = self._settings.crash_reports
        try:
            await asyncio.to_thread(
                write_report, folder, _crash_report(self.entry.name, end, end.process)
            )
        except RuntimeError as error:  # no thread can be started
            logger.warning("cannot write the crash report: %s", error)

    def _on_task_end(self, task: asyncio.Task[NoReturn]) -> None:
        """Fail the model if the task that supervises its worker has failed."""
        error = None if task.cancelled() else task.exception()
        if error is None or self.state is State.STOPPING:
            return
        if isinstance(error, OSError):
            error = ModelLoadError(f"the worker cannot be started: {error}")
        # a bug in Holdfast; no request may wait forever for this reason
        elif not isinstance(error, HoldfastError):
            logger.critical(
                "the task that supervises model %s failed", self.entry.name, exc_info=error
            )
            error = WorkerUnavailable(f"its worker is no longer supervised ({error!r})")
        if self.state is not State.LOADING:  # otherwise the caller of the load reports the error
            logger.error("model %s cannot be served any more: %s", self.entry.name, error)
        self._mark_failed(error)

    def _mark_failed(self, error: HoldfastError) -> None:
        """Refuse requests until the next attempt is allowed, after 1, 2, 4 … seconds."""
        self._load_error = error
        self._failures_in_a_row += 1
        self.changes["failed"] += 1
        backoff = backoff_seconds(self._failures_in_a_row + 1)
        self.retry_at = asyncio.get_running_loop().time() + backoff
        self._refusal = self.unavailable_error()
        if self._client is not None:
            self._client.close(str(self._refusal))
        if self._loaded is not None:
            _fail_future(self._loaded, error)
        self.leases.refuse_waiting(self._refusal)
        self._end_load(State.FAILED)

    # -- figures

    @property
    def statistics(self) -> WorkerStatistics:
        """The worker's last report."""
        client = self.client
        return WorkerStatistics() if client is None else client.worker.last_statistics

    def figures(self) -> ResidencyFigures:
        """The model's figures for the metrics."""
        return ResidencyFigures(
            loaded=int(self.state.phase == "ready"),
            leases=self.leases.held,
            waiting=self.leases.waiting,
            footprint_bytes=self.footprint_bytes if self.is_resident else 0,
            changes=dict(self.changes),
            wait_seconds=dict(self.wait_seconds),
        )

    @property
    def footprint_bytes(self) -> int:
        """Memory of the model: the worker's measurement, or else the size of the weights."""
        figures = self.statistics
        if measured := max(figures.device_bytes, figures.resident_bytes):
            return measured
        if self.info is not None:
            return self.info.weight_bytes + self.info.draft_weight_bytes
        files = self._files
        if files is None or not files.done() or files.exception() is not None:
            return 0
        return files.result().weight_bytes

    def state_footprint(self, measured_bytes: int, *, is_discrete: bool) -> int:
        """The worker's memory in bytes, as it counts towards memory pressure (`memory_watch`).

        measured_bytes: the current memory of its process. is_discrete: whether it uses a GPU with
        its own memory. That memory cannot be measured from outside, so it is added up from the
        worker's reports, without the free buffers that the worker keeps there.
        """
        figures = self.statistics
        if not is_discrete or self.info is None:
            return max(measured_bytes, figures.device_bytes)
        cache = figures.cache
        cached_bytes = 0 if cache is None else cache.ram_bytes + cache.parked_bytes
        return self.fixed_bytes + figures.kv_reserved_bytes + cached_bytes

    @property
    def fixed_bytes(self) -> int:
        """Memory for weights and steps, without KV and cache."""
        if self.info is None:
            return self.footprint_bytes
        return self.info.weight_bytes + self.info.draft_weight_bytes + self.info.reserve_bytes

    @property
    def wired_bytes(self) -> int:
        """Memory that the worker has wired, or may wire once it has loaded the model."""
        return self.footprint_bytes if self.info is None else self.info.wired_bytes

    @property
    def promised_bytes(self) -> int:
        """Memory that the worker may still allocate for KV and cache."""
        if self.state.phase != "ready" or self.info is None:
            return 0
        figures = self.statistics
        promised = self.info.kv_budget_bytes - figures.kv_reserved_bytes
        if (cache := figures.cache) is not None:
            promised += cache.ram_budget_bytes - cache.ram_bytes - cache.parked_bytes
        if not figures.running:  # while sequences run, the measured memory includes what steps need
            promised += self.info.reserve_bytes
        return max(promised, 0)

    @property
    def context_tokens(self) -> int | None:
        """The context that fits the memory; before the load, the context window. None: unknown."""
        if self.info is not None:
            return self.info.context_tokens
        return self.entry.model.context_tokens or self.entry.own_context_tokens or None

    @property
    def can_see(self) -> bool:
        """Whether the model can be given images; before the load, whether that is likely."""
        if self.info is None:
            return self.entry.can_see
        return self.info.vision is not None and not self.info.vision.refused

    @property
    def sampling(self) -> Mapping[str, float] | None:
        """The sampling parameters of requests that set none; None until the model's files are
        there.
        """
        if (files := self._known_files) is None:
            return None
        return default_sampling({**files.sampling, **self.entry.sampling})

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template; true if its files are not here yet."""
        return (self._known_files or self.entry).can_chat

    @property
    def _known_files(self) -> ModelFiles | None:
        """The fetched files; None if they are not fetched yet, or could not be."""
        files = self._files
        if files is None or not files.done() or files.exception() is not None:
            return None
        return files.result()

    @property
    def own_context_tokens(self) -> int | None:
        """The context that the model was trained for; None if it is unknown."""
        reported_tokens = 0 if self.info is None else self.info.own_context_tokens
        return reported_tokens or self.entry.own_context_tokens or None


class Leases:
    """Counts the requests that use one model, and queues those that wait for a place for it.

    Only use it on the event loop's thread.
    """

    def __init__(
        self,
        *,
        max_waiting_sequences: int,
        arrival_numbers: Iterator[int],
        on_change: Callable[[], None],
    ) -> None:
        """The arguments are those of `ModelSlot`."""
        self.held = 0  # leases that requests hold now
        self.is_open = False  # whether new requests get a lease immediately
        self._max_waiting_sequences = max_waiting_sequences
        self._arrival_numbers = arrival_numbers
        self._on_change = on_change
        # each waiting request's arrival number and number of sequences
        self._queue: dict[asyncio.Future[None], tuple[int, int]] = {}

    @property
    def waiting_since(self) -> int | None:
        """The arrival number of the first waiting request; None if none waits."""
        return min((number for number, _ in self._queue.values()), default=None)

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._queue)

    async def acquire(self, *, sequences: int, seconds: float) -> None:
        """Take a lease, or wait for one. The caller must give it back.

        Raises TimeoutError, QueueFull, or the error passed to `refuse_waiting`.
        """
        if self.is_open:
            self.held += 1
            return
        waiting_sequences = sum(count for _, count in self._queue.values())
        self.check_queue_room(waiting_sequences, sequences)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue[granted] = (next(self._arrival_numbers), sequences)
        self._on_change()
        try:
            async with awake_timeout(seconds):
                await granted
        except BaseException:
            if self._queue.pop(granted, None) is not None:
                self._on_change()
            elif not granted.cancelled() and granted.exception() is None:
                self.release()  # the lease was granted at the very moment at which the wait ended
            raise

    def check_queue_room(self, waiting_sequences: int, sequences: int) -> None:
        """Raise QueueFull if `sequences` more may not wait besides the `waiting_sequences`."""
        if waiting_sequences + sequences > self._max_waiting_sequences:
            raise QueueFull(
                queued=waiting_sequences,
                limit=self._max_waiting_sequences,
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    def release(self) -> None:
        """End a lease."""
        self.held -= 1
        assert self.held >= 0, "a lease was given back twice"
        self._on_change()

    def open(self) -> None:
        """Grant leases to all waiting requests, and to new ones immediately."""
        self.is_open = True
        queue, self._queue = self._queue, {}
        for granted in queue:
            if not granted.done():
                self.held += 1
                granted.set_result(None)

    def close(self) -> None:
        """Make new requests wait from now on."""
        self.is_open = False

    def refuse_waiting(self, error: HoldfastError) -> None:
        """Fail all waiting requests with this error."""
        queue, self._queue = self._queue, {}
        for granted in queue:
            if not granted.done():
                granted.set_exception(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkerEnd:
    """How a worker ended, or why it could not be started."""

    failure: WorkerFailed  # what the worker reported, or its end in words
    process: WorkerProcess | None = None  # None: the process could not be started
    served_seconds: float | None = None  # None: the worker never became ready
    loss: Loss = Loss()  # the requests that the worker had

    @property
    def cause(self) -> Literal["died", "hung"]:
        return "died" if self.process is None or self.process.hang is None else "hung"


def _crash_report(model: str, end: _WorkerEnd, process: WorkerProcess) -> CrashReport:
    """What is known about the end of a worker; without any content of requests."""
    requests = [
        RequestAtCrash(
            prompt_tokens=len(request.prompt_token_ids),
            generated_tokens=generated_tokens,
            is_constrained=bool(request.grammar) or request.thinking_budget is not None,
        )
        for request, generated_tokens in zip(
            end.loss.requests, end.loss.generated_tokens, strict=True
        )
    ]
    figures = process.link.last_statistics
    served_seconds = end.served_seconds
    return CrashReport(
        at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        model=model,
        cause=end.cause,
        how=end.failure.message,
        pid=process.pid,
        served_seconds=None if served_seconds is None else round(served_seconds, 3),
        requests=tuple(requests[:MOST_REQUESTS]),
        more_requests=len(requests[MOST_REQUESTS:]),
        refused=end.loss.refused,
        running=figures.running,
        queued=figures.queued,
        steps=figures.steps,
        resident_bytes=figures.resident_bytes,
        kv_reserved_bytes=figures.kv_reserved_bytes,
        log=tuple(process.last_lines),
        versions=installed_versions(),
    )


def backoff_seconds(failures_in_a_row: int) -> float:
    """The delay before the next start: 0, 0, 1, 2, 4 … seconds."""
    if failures_in_a_row <= 1:
        return 0.0
    return min(2.0 ** min(failures_in_a_row - 2, 16), LONGEST_BACKOFF_SECONDS)


class RestartDelay:
    """Decides how long to wait before the next worker starts. No clock: the caller passes the time.

    Workers that died without a new token are counted in a row. Workers that made progress are
    counted per minute, so that requests that kill one worker after another do not keep the machine
    busy with loading.
    """

    def __init__(self) -> None:
        self._failures_in_a_row = 0
        self._deaths_at: deque[float] = deque()  # times of the deaths within the last minute

    def worker_ended(self, *, now: float, served_seconds: float, had_progress: bool) -> float:
        """Record the end of a worker. Returns how many seconds to wait before the next start.

        served_seconds: 0 for a worker that never became ready.
        """
        is_healthy = had_progress or served_seconds >= HEALTHY_SECONDS
        self._failures_in_a_row = 0 if is_healthy else self._failures_in_a_row + 1
        self._deaths_at.append(now)
        while self._deaths_at[0] <= now - 60.0:
            self._deaths_at.popleft()
        excess_deaths = len(self._deaths_at) - DEATHS_A_MINUTE
        return backoff_seconds(max(self._failures_in_a_row, excess_deaths + 1))


def on_own_thread(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Run blocking work that may take hours on a daemon thread.

    The future gets the result or the HoldfastError.

    The event loop's executor would be wrong: at shutdown, the server would wait for a download.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(results: list[T], failure: HoldfastError) -> None:
        """Complete the future, on the event loop's thread."""
        if not results:
            _fail_future(future, failure)
        elif not future.done():
            future.set_result(results[0])

    def run() -> None:
        """Do the work, on the new thread."""
        results: list[T] = []
        failure: HoldfastError = ModelLoadError(
            "its files cannot be read; the server's log has the details"
        )
        try:
            results.append(work())
        except (HoldfastError, OSError) as error:
            failure = error if isinstance(error, HoldfastError) else ModelLoadError(str(error))
        finally:
            with contextlib.suppress(RuntimeError):  # the event loop is already closed
                loop.call_soon_threadsafe(settle, results, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _fail_future(future: asyncio.Future[T], error: HoldfastError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # marks the exception as retrieved, since nobody may wait for it
