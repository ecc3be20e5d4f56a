"""One model of the catalog and its worker: a state machine.

`Residency` decides which models are loaded. A slot loads and unloads one model. While it is loaded,
`SupervisedWorker` replaces a worker that dies or hangs, and its requests continue with the next
worker (`ModelClient`).

- UNLOADED, FAILED: there is no worker. After a failure, requests are refused until `retry_at`.
- LOADING: the first worker of this load is starting. Requests get leases and wait for the worker.
- READY: the worker serves.
- RESTARTING: the worker is gone and the next one is starting. Requests get leases and wait for it.
- DRAINING: requests that hold a lease finish, even if their worker dies. New requests wait for
  another load.
- STOPPING: the worker writes its cache to the store and exits.

A loaded model has a *place*, a share of the limits that `budget` enforces.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeAlias, TypeVar

from holdfast.errors import (
    HoldfastError,
    ModelLoadError,
    NoSuchModel,
    UnusableModel,
    WorkerUnavailable,
)
from holdfast.front.fleet.budget import Candidate, Phase
from holdfast.front.fleet.catalog import CatalogEntry
from holdfast.front.fleet.leases import Leases
from holdfast.front.fleet.supervised_worker import SupervisedWorker, backoff_seconds
from holdfast.front.link.model_client import ModelClient
from holdfast.front.telemetry.metrics import ResidencyFigures
from holdfast.machine.clocks import awake_timeout
from holdfast.models.draft_pairs import LocalModel
from holdfast.models.tokenizer_files import default_sampling
from holdfast.wire.commands import WorkerSettings
from holdfast.wire.events import LoadProgress, ModelInfo, WaitReason, WorkerStatistics


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

SHUTTING_DOWN = "the server is shutting down"

T = TypeVar("T")
logger = logging.getLogger("holdfast.front.fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model's files are, and what the front needs to know from them."""

    folder: Path
    weight_bytes: int = 0  # of all that is loaded with it; 0: not measured
    sampling: Mapping[str, float] = field(default_factory=dict)  # as the model recommends
    draft: LocalModel | None = None  # None: no draft model
    can_chat: bool = True  # whether the model has a chat template


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """The memory of one model and its worker."""

    info: ModelInfo | None  # as the last worker reported it; None: there was none
    figures: WorkerStatistics  # the worker's last report
    weight_bytes: int  # of its files; 0: not measured

    @property
    def footprint_bytes(self) -> int:
        """Memory of the model: the worker's measurement, or else the size of the weights."""
        if measured := max(self.figures.device_bytes, self.figures.resident_bytes):
            return measured
        if self.info is not None:
            return self.info.weight_bytes + self.info.draft_weight_bytes
        return self.weight_bytes

    def state_footprint(self, measured_bytes: int, *, is_discrete: bool) -> int:
        """The worker's memory in bytes, as it counts towards memory pressure (`memory_watch`).

        measured_bytes: the current memory of its process. is_discrete: whether it uses a GPU with
        its own memory. That memory cannot be measured from outside, so it is added up from the
        worker's reports, without the free buffers that the worker keeps there.
        """
        figures = self.figures
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
        if self.info is None:
            return 0
        figures = self.figures
        promised = self.info.kv_budget_bytes - figures.kv_reserved_bytes
        if (cache := figures.cache) is not None:
            promised += cache.ram_budget_bytes - cache.ram_bytes - cache.parked_bytes
        if not figures.running:  # while sequences run, the measured memory includes what steps need
            promised += self.info.reserve_bytes
        return max(promised, 0)


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
        # in the event loop's time: the last use, and when the model became ready
        self.used_at = 0.0
        self.ready_at = 0.0
        self.retry_at = 0.0  # after a failure, requests are refused until then
        self.created = int(time.time())  # Unix time
        self.loads = 0  # loads begun
        self.changes: Counter[str] = Counter()  # loads, failures, and unloads by reason
        # total waiting time of requests
        self.wait_seconds = {WaitReason.PLACE.value: 0.0, WaitReason.LOAD.value: 0.0}
        self.worker = SupervisedWorker(
            entry.name,
            on_ready=self._on_worker_ready,
            on_lost=self._on_worker_lost,
            on_progress=on_progress,
        )
        self._fetch = fetch
        self._settings_of = settings_of
        self._on_change = on_change
        self._failures_in_a_row = 0  # failed loads; each one lengthens the next wait
        # the result of `fetch`; None: not fetched
        self._files: asyncio.Future[ModelFiles] | None = None
        self._are_files_old = False  # fetch the files again before the next load
        self._waiting_sequences = 0  # sequences with a lease that wait for the worker
        self._changed = asyncio.Event()  # set and replaced after each change
        # keeps a worker running; None: the model is not loaded
        self._task: asyncio.Task[NoReturn] | None = None
        # completes when the first worker is ready; fails with the error of the load
        self._loaded: asyncio.Future[None] | None = None
        # the error for requests with a lease once no worker will come
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
            assert self.worker.process is None, f"a process exists in {self.state}"
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
    def is_fetching(self) -> bool:
        """Whether the model's files are being fetched."""
        return self._files is not None and not self._files.done()

    def candidate(self) -> Candidate:
        """What `budget.decide` needs to know about the model."""
        return Candidate(
            name=self.entry.name,
            phase=self.state.phase,
            footprint_bytes=self.memory.footprint_bytes,
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
            self._run_worker(self._loaded), name=f"worker of {self.entry.name}"
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
            self._enter(State.RESTARTING if self.worker.client is None else State.READY)

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
        self.worker.close(SHUTTING_DOWN)
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
            self.worker.info = None
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
        known = self._known_files
        # fetch again after a failure, or if `holdfast models rm` has removed the folder
        if files is None or (files.done() and (known is None or not known.folder.is_dir())):
            files = self._files = on_own_thread(
                partial(self._fetch, self.entry), name="model-files"
            )
            files.add_done_callback(self._on_files_fetched)
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
        """Return the client of the model's worker for the holder of a lease. Waits while a worker
        starts.

        Raises WorkerUnavailable if the start fails or takes too long, UnusableModel if it fails
        because of the model's files, and QueueFull if too many sequences wait.
        """
        if (client := self.worker.client) is not None:
            return client
        self.leases.check_queue_room(self._waiting_sequences, sequences)
        self._waiting_sequences += sequences
        try:
            async with awake_timeout(seconds):
                while (client := self.worker.client) is None:
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

    async def _run_worker(self, loaded: asyncio.Future[None]) -> NoReturn:
        await self.worker.run(self._settings_of(self, await self.files()), loaded=loaded)

    def _on_worker_ready(self) -> None:
        """Let the waiting requests in, unless the model is draining."""
        if self.state is State.LOADING:
            self._failures_in_a_row = 0
            self.ready_at = asyncio.get_running_loop().time()
            self.used_at = self.ready_at
            self.changes["loaded"] += 1
        if self.state is State.DRAINING:
            self._notify()
        else:
            self._enter(State.READY)

    def _on_worker_lost(self) -> None:
        if self.state is State.READY:
            self._enter(State.RESTARTING)

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
        self.worker.close(str(self._refusal))
        if self._loaded is not None:
            _fail_future(self._loaded, error)
        self.leases.refuse_waiting(self._refusal)
        self._end_load(State.FAILED)

    # -- figures

    def figures(self) -> ResidencyFigures:
        """The model's figures for the metrics."""
        return ResidencyFigures(
            loaded=int(self.state.phase == "ready"),
            leases=self.leases.held,
            waiting=self.leases.waiting,
            footprint_bytes=self.memory.footprint_bytes if self.is_resident else 0,
            changes=dict(self.changes),
            wait_seconds=dict(self.wait_seconds),
        )

    @property
    def memory(self) -> ModelMemory:
        """What is known of its memory now."""
        files = self._known_files
        return ModelMemory(
            info=self.worker.info,
            figures=self.worker.statistics,
            weight_bytes=0 if files is None else files.weight_bytes,
        )

    @property
    def context_tokens(self) -> int | None:
        """The context that fits the memory; before the load, the context window. None: unknown."""
        if self.worker.info is not None:
            return self.worker.info.context_tokens
        return self.entry.model.context_tokens or self.entry.own_context_tokens or None

    @property
    def can_see(self) -> bool:
        """Whether the model can be given images; before the load, whether that is likely."""
        if self.worker.info is None:
            return self.entry.can_see
        return self.worker.info.vision is not None and not self.worker.info.vision.refused

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
        reported_tokens = 0 if self.worker.info is None else self.worker.info.own_context_tokens
        return reported_tokens or self.entry.own_context_tokens or None


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
