"""One model of the catalog through all its loads: the worker that has it, who uses it, how its last
load went.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from holdfast.config import SchedulerSettings
from holdfast.errors import HoldfastError, ModelLoadError, QueueFull, WorkerUnavailable
from holdfast.front.fleet.budget import Candidate, Phase
from holdfast.front.fleet.catalog import CatalogEntry
from holdfast.front.fleet.own_thread import on_own_thread
from holdfast.front.fleet.supervisor import WorkerSupervisor, backoff_seconds
from holdfast.front.fleet.waiting_room import RETRY_AFTER_SECONDS
from holdfast.front.link.model_client import ModelClient
from holdfast.wire.commands import WorkerSettings
from holdfast.wire.events import LoadProgress, ModelInfo, ResidencyFigures, WorkerStatistics


class Leases:
    """The requests that use one model, and the line of those that wait for it to have a place.

    Loop's thread only.
    """

    def __init__(
        self, *, places: int, numbers: Iterator[int], on_change: Callable[[], None]
    ) -> None:
        """places: most sequences that may wait. numbers: of all arrivals at all models. on_change:
        of what is held or waits.
        """
        self.held = 0
        self.is_open = False  # whoever comes gets one at once
        self._places, self._numbers, self._on_change = places, numbers, on_change
        # number of the arrival, and its sequences
        self._line: dict[asyncio.Future[None], tuple[int, int]] = {}

    @property
    def waiting_since(self) -> int | None:
        """The number of the first that waits; None when nobody does."""
        return min((number for number, _ in self._line.values()), default=None)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._line)

    async def take(self, *, sequences: int, seconds: float) -> None:
        """Take a lease, as soon as leases are given. Each is to be given back.

        Raises TimeoutError, QueueFull when too many wait, and what `turn_away` is given; may be
        cancelled.
        """
        if self.is_open:
            self.held += 1
            return
        waiting = sum(count for _, count in self._line.values())
        if waiting + sequences > self._places:
            raise QueueFull(
                queued=waiting, limit=self._places, retry_after_seconds=RETRY_AFTER_SECONDS
            )
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line[called] = (next(self._numbers), sequences)
        self._on_change()
        try:
            async with asyncio.timeout(seconds):
                await called
        except BaseException:
            if self._line.pop(called, None) is not None:
                self._on_change()
            elif not called.cancelled() and called.exception() is None:
                self.give_back()  # it was given in the very moment in which nobody waited any more
            raise

    def give_back(self) -> None:
        """Somebody needs the model no longer."""
        self.held -= 1
        assert self.held >= 0, "a lease was given back twice"
        self._on_change()

    def open(self) -> None:
        """The model has a place: all who wait have a lease from this moment on, and who comes gets
        one at once.
        """
        self.is_open = True
        line, self._line = self._line, {}
        for called in line:
            if not called.done():
                self.held += 1
                called.set_result(None)

    def close(self) -> None:
        """From now on who comes has to wait."""
        self.is_open = False

    def turn_away(self, error: HoldfastError) -> None:
        """All who wait get this error."""
        line, self._line = self._line, {}
        for called in line:
            if not called.done():
                called.set_exception(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model's files are, and how large its weights are in them."""

    folder: Path
    weight_bytes: int = 0


Fetch: TypeAlias = Callable[[CatalogEntry], ModelFiles]
"""Finds the files of a model; blocks for as long as a download takes.

Any thread. Raises ModelLoadError.
"""


class ModelSlot:
    """One model. It loads and unloads when it is told to; when that is, is decided elsewhere.
    Loop's thread only.
    """

    def __init__(
        self,
        entry: CatalogEntry,
        *,
        fetch: Fetch,
        places: int,
        numbers: Iterator[int],
        on_change: Callable[[], None],
    ) -> None:
        """places, numbers, on_change: see `Leases`."""
        self.entry = self._next_entry = entry
        # it is in the catalog no longer, and is unloaded as soon as nobody uses it
        self.is_gone = False
        self.phase: Phase = "unloaded"
        self.leases = Leases(places=places, numbers=numbers, on_change=on_change)
        self.is_pinned, self.is_to_go, self.is_drained = entry.is_pinned, False, False
        self.used_at = self.ready_at = self.retry_at = 0.0
        self.supervisor: WorkerSupervisor | None = None
        self.info: ModelInfo | None = None  # of the last worker that was ready
        self.created = int(time.time())  # Unix time
        self.failure = ""  # of the last load; empty: none
        self.failures_in_a_row = 0
        self.changes: Counter[str] = Counter()  # loads, failed loads, and unloads by their reason
        self.wait_seconds = {"place": 0.0, "load": 0.0}  # of requests, by what they waited for
        # as somebody has changed it while it was loaded; else the server's own
        self.scheduler: SchedulerSettings | None = None
        self._earlier_restarts: Counter[str] = Counter()  # of workers before the last load
        self._earlier_resumed = 0
        self._fetch = fetch
        self.loads = 0  # that were begun
        self.is_launched = asyncio.Event()  # a worker's process is there, or one could not be had
        self._files: asyncio.Future[ModelFiles] | None = None
        self._are_files_old = False
        self._launched: asyncio.Future[WorkerSupervisor] | None = None

    @property
    def statistics(self) -> WorkerStatistics:
        """What the worker reported last, unasked."""
        return (
            self.supervisor.last_statistics if self.supervisor is not None else WorkerStatistics()
        )

    @property
    def restarts(self) -> dict[str, int]:
        """How often a worker was replaced, by cause."""
        now = {"died": 0, "hung": 0} if self.supervisor is None else self.supervisor.restarts
        return {cause: self._earlier_restarts[cause] + count for cause, count in now.items()}

    @property
    def resumed(self) -> int:
        """Streams that have gone on with another worker."""
        return self._earlier_resumed + (0 if self.supervisor is None else self.supervisor.resumed)

    @property
    def footprint_bytes(self) -> int:
        """Memory of the model as its worker measures it; without one that of the weights, as was
        told or as their files say.
        """
        figures = self.statistics
        measured = max(figures.device_bytes, figures.resident_bytes)
        if measured or self.info is not None:
            return measured or (self.info.weight_bytes if self.info is not None else 0)
        return (
            0 if self._files is None or not self._has_files() else self._files.result().weight_bytes
        )

    @property
    def fixed_bytes(self) -> int:
        """Memory of its weights and its steps, whatever it has read."""
        if self.info is not None:
            return self.info.weight_bytes + self.info.reserve_bytes
        return self.footprint_bytes

    @property
    def wired_bytes(self) -> int:
        """Memory that its worker has wired, or may wire once it is loaded."""
        return self.footprint_bytes if self.info is None else self.info.wired_bytes

    @property
    def promised_bytes(self) -> int:
        """Memory that its worker may yet take for what it reads."""
        figures, kept = self.statistics, self.statistics.memory
        if self.phase != "ready" or self.info is None:
            return 0
        used = figures.kv_reserved_bytes + (
            0 if kept is None else kept.ram_bytes + kept.parked_bytes
        )
        promised = self.info.kv_budget_bytes + (0 if kept is None else kept.ram_budget_bytes) - used
        if not figures.running:  # else what steps take is in what is measured
            promised += self.info.reserve_bytes
        return max(promised, 0)

    @property
    def context_tokens(self) -> int | None:
        """Its context window: of the last worker, or as its entry or its config.json says; None
        where nobody has looked yet.
        """
        if self.info is not None:
            return self.info.context_tokens
        return self.entry.model.context_tokens or self.entry.own_context_tokens or None

    @property
    def is_fetching(self) -> bool:
        """Whether its files are on their way."""
        return self._files is not None and not self._files.done()

    def candidate(self) -> Candidate:
        """The model, as far as it matters who is loaded."""
        return Candidate(
            name=self.entry.name,
            phase=self.phase,
            footprint_bytes=self.footprint_bytes,
            leases=self.leases.held,
            is_pinned=self.is_pinned,
            is_to_go=self.is_to_go,
            idle_seconds=self._next_entry.idle_seconds,
            used_at=self.used_at,
            ready_at=self.ready_at,
            waiting_since=self.leases.waiting_since,
        )

    def figures(self) -> ResidencyFigures:
        """What metrics tell of it."""
        return ResidencyFigures(
            loaded=int(self.phase == "ready"),
            leases=self.leases.held,
            waiting=self.leases.waiting,
            footprint_bytes=self.footprint_bytes if self.phase != "unloaded" else 0,
            changes=dict(self.changes),
            wait_seconds=dict(self.wait_seconds),
        )

    async def files(self) -> ModelFiles:
        """Where its files are; the first to ask has them fetched. Raises ModelLoadError."""
        files = self._files
        is_known = files is not None and (
            not files.done() or (self._has_files() and files.result().folder.is_dir())
        )
        if files is None or not is_known:  # `holdfast models rm` may have removed them
            files = self._files = on_own_thread(
                partial(self._fetch, self.entry), name="model-files"
            )
            files.add_done_callback(self._note_files)
        return await asyncio.shield(files)

    def forget_files(self) -> bool:
        """They were fetched anew or removed: the next load looks for them again.

        Returns whether that counts at once.
        """
        self._are_files_old = True
        return self.phase == "unloaded" and self.take_entry()

    def change(self, entry: CatalogEntry) -> bool:
        """Have it loaded by another entry the next time; what a worker need not know counts at
        once.

        Returns whether the entry counts as a whole already, for there is no worker.
        """
        if entry.is_pinned != self._next_entry.is_pinned:
            self.is_pinned = entry.is_pinned
        if self.is_gone:
            self.is_gone = self.is_to_go = False
        self._next_entry = entry
        return self.phase == "unloaded" and self.take_entry()

    def take_entry(self) -> bool:
        """Now that it is not loaded, go by the entry and the files of now; returns whether those
        are others.
        """
        assert self.phase == "unloaded", "a worker has been told the entry"
        before, self.entry = self.entry, self._next_entry
        are_files_old, self._are_files_old = self._are_files_old, False
        is_other = before != self.entry or are_files_old
        if before.model != self.entry.model or are_files_old:
            self._files = self.info = None
        if is_other:
            self.retry_at, self.failure, self.failures_in_a_row = 0.0, "", 0
        return is_other

    def begin_load(self) -> None:
        """From now on it has a place, and requests get leases."""
        assert self.phase == "unloaded", "one load at a time"
        self.phase, self.failure, self.loads = "loading", "", self.loads + 1
        self._launched = asyncio.get_running_loop().create_future()
        self.leases.open()

    async def load(
        self,
        settings_of: Callable[[ModelFiles], WorkerSettings],
        *,
        on_progress: Callable[[str, LoadProgress], None],
    ) -> HoldfastError | None:
        """Load it; returns why that failed, once the worker is gone again."""
        assert self._launched is not None, "begin_load() comes first"
        try:
            settings = settings_of(await self.files())
            if self.scheduler is not None:
                settings = msgspec.structs.replace(settings, scheduler=self.scheduler)
            self.supervisor = WorkerSupervisor(self.entry.name, settings, on_progress=on_progress)
            await self.supervisor.start()
            self._launched.set_result(self.supervisor)
            self.is_launched.set()
            await self.supervisor.wait_ready()
        except (HoldfastError, OSError) as error:
            failure = (
                error
                if isinstance(error, HoldfastError)
                else ModelLoadError(f"the worker cannot be started: {error}")
            )
            self.phase = "stopping"
            self.leases.close()
            self.refuse_for_a_while(failure)
            self.is_launched.set()
            if not self._launched.done():
                self._launched.set_exception(self.cannot_be_served())
                self._launched.exception()  # it may be that nobody waits for it
            await self.end_worker()
            return failure
        self.phase, self.failures_in_a_row = "ready", 0
        self.used_at = self.ready_at = asyncio.get_running_loop().time()
        self.info = self.supervisor.info
        self.changes["loaded"] += 1
        return None

    def begin_unload(self, *, reason: str) -> None:
        """From now on it has no place but until its worker has ended; who comes waits for another
        one.
        """
        assert (self.phase, self.leases.held) == ("ready", 0), (
            "nothing is unloaded that somebody uses"
        )
        self.phase = "stopping"
        self.leases.close()
        self.changes[reason] += 1

    def begin_end(self, failure: str) -> None:
        """Its worker is gone and will not come again: as after a load that failed."""
        self.phase = "stopping"
        self.leases.close()
        self.refuse_for_a_while(ModelLoadError(failure))

    async def end_worker(self) -> None:
        """End its worker in order: what it has read is in its store then."""
        supervisor = self.supervisor
        if supervisor is not None:
            await supervisor.stop()
            self._earlier_restarts += Counter(supervisor.restarts)
            self._earlier_resumed += supervisor.resumed
        self.supervisor, self.phase, self.is_to_go, self.is_drained = None, "unloaded", False, False

    async def wait_ready(self) -> None:
        """Wait until the load under way has ended, for one who has a lease.

        Raises what it failed by.
        """
        assert self._launched is not None, "no lease without a load"
        supervisor = await asyncio.shield(self._launched)
        await supervisor.wait_ready()

    async def client(self, *, sequences: int) -> ModelClient:
        """The link to its worker, for one who has a lease. Raises WorkerUnavailable, QueueFull."""
        assert self._launched is not None, "no lease without a load"
        supervisor = await asyncio.shield(self._launched)
        return await supervisor.wait_client(sequences=sequences)

    def cannot_be_served(self) -> WorkerUnavailable:
        """What requests are told when it could not be loaded."""
        later = max(self.retry_at - asyncio.get_running_loop().time(), 0.0)
        return WorkerUnavailable(
            f"model {self.entry.name!r} cannot be served: {self.failure}", retry_after_seconds=later
        )

    def refuse_for_a_while(self, failure: HoldfastError) -> None:
        """It could not be loaded: requests are told so until it may be tried again, in 1, 2, 4 …
        seconds.
        """
        self.failure, self.failures_in_a_row = str(failure), self.failures_in_a_row + 1
        self.changes["failed"] += 1
        self.retry_at = asyncio.get_running_loop().time() + backoff_seconds(
            self.failures_in_a_row + 1
        )
        self.leases.turn_away(self.cannot_be_served())

    async def stop(self) -> None:
        """End its worker, as the server ends."""
        end = WorkerUnavailable("the server is shutting down")
        self.leases.close()
        self.leases.turn_away(end)
        if self._launched is not None and not self._launched.done():
            self._launched.set_exception(end)
            self._launched.exception()  # it may be that nobody waits for it
        await self.end_worker()

    def _has_files(self) -> bool:
        return self._files is not None and self._files.done() and self._files.exception() is None

    def _note_files(self, files: asyncio.Future[ModelFiles]) -> None:
        failure = None if files.cancelled() else files.exception()
        if isinstance(failure, HoldfastError) and files is self._files:
            self.refuse_for_a_while(failure)
