"""Keeps one model's worker alive: the states it goes through, and how long to wait before a
restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

import msgspec

from holdfast.config import LogLevel, SchedulerSettings
from holdfast.errors import ModelLoadError, WorkerUnavailable
from holdfast.front.fleet.crash_reports import RequestAtCrash, report_of, write_report
from holdfast.front.fleet.waiting_room import WaitingRoom
from holdfast.front.fleet.worker_process import WorkerProcess, describe_exit
from holdfast.front.link.model_client import Loss, ModelClient
from holdfast.machine.device_memory import MemoryShare
from holdfast.wire.commands import SchedulerLimits, SequenceRequest, WorkerSettings, checked_limits
from holdfast.wire.events import LoadProgress, ModelInfo, WorkerFailed, WorkerStatistics

WorkerState: TypeAlias = Literal["loading", "ready", "restarting", "failed", "stopped"]

LONGEST_BACKOFF_SECONDS = 60.0
# in a row: a first worker never will come up then, and who waits for another one waits no longer
FAILED_STARTS = 3
HEALTHY_SECONDS = 60.0  # a worker that served this long starts the backoff anew
# that are met with an immediate restart while answers make progress: what finding one bad request
# takes
DEATHS_A_MINUTE = 5

logger = logging.getLogger("holdfast.front.fleet")


def backoff_seconds(failures_in_a_row: int) -> float:
    """How long to wait before the next start, after so many workers without a new token: 0, 0, 1,
    2, 4 … seconds.
    """
    return (
        0.0
        if failures_in_a_row <= 1
        else min(2.0 ** min(failures_in_a_row - 2, 16), LONGEST_BACKOFF_SECONDS)
    )


class RestartDelay:
    """How long to wait before a model's next worker starts.

    Pure: the caller tells the time, in seconds.

    Workers without a new token count in a row. Those that made progress count by the minute, so
    that requests that kill one worker after another keep no machine busy with loading.
    """

    def __init__(self) -> None:
        self._failures_in_a_row = 0
        self._deaths_at: deque[float] = deque()  # within the last minute

    def worker_ended(self, *, now: float, served_seconds: float, had_progress: bool) -> float:
        """Seconds to wait after a worker that served for so long; 0 for one that did not get ready."""
        is_healthy = had_progress or served_seconds >= HEALTHY_SECONDS
        self._failures_in_a_row = 0 if is_healthy else self._failures_in_a_row + 1
        self._deaths_at.append(now)
        while self._deaths_at[0] <= now - 60.0:
            self._deaths_at.popleft()
        too_many = len(self._deaths_at) - DEATHS_A_MINUTE
        return backoff_seconds(max(self._failures_in_a_row, too_many + 1))


class WorkerSupervisor:
    """One model's worker through all its restarts. Loop's thread only."""

    def __init__(
        self,
        model: str,
        settings: WorkerSettings,
        *,
        on_progress: Callable[[str, LoadProgress], None],
    ) -> None:
        self.model = model
        self._state: WorkerState = "loading"
        self.info: ModelInfo | None = None
        self.restarts: dict[str, int] = {"died": 0, "hung": 0}  # by cause
        self._settings, self._on_progress = settings, on_progress
        self._worker: WorkerProcess | None = None
        self._ended: WorkerProcess | None = None  # the last one that has
        self._launched_with = settings  # what the worker of now was told
        self._task: asyncio.Task[None] | None = None
        self._first_start: asyncio.Future[None] | None = None
        self._client = ModelClient(unread_bytes=settings.residency.unread_bytes)
        self._room = WaitingRoom(
            places=settings.scheduler.max_queued + settings.scheduler.max_running
        )

    @property
    def state(self) -> WorkerState:
        """How the model is doing. A worker that is gone is one to be restarted from that moment on."""
        return "restarting" if self._state == "ready" and self.client is None else self._state

    @property
    def client(self) -> ModelClient | None:
        """The link while the model serves, else None. It outlives the worker that serves."""
        worker = self._worker if self._state == "ready" else None
        return (
            self._client if worker is not None and worker.is_alive and worker.link.is_open else None
        )

    async def wait_client(self, *, sequences: int) -> ModelClient:
        """The link, as soon as the model serves; it is waited for while it is being loaded, for the
        first time or again.

        Raises WorkerUnavailable when that takes too long or will never be, QueueFull when as many
        wait as may.
        """
        loop = asyncio.get_running_loop()
        seconds = self._settings.residency.load_seconds
        give_up_at = loop.time() + seconds
        while (client := self.client) is None:
            if self._state in ("failed", "stopped"):
                raise WorkerUnavailable(f"model {self.model!r} has {self._state}")
            if loop.time() >= give_up_at:
                waited = f" after {seconds:.0f} s" if seconds else ""
                raise WorkerUnavailable(
                    f"model {self.model!r} is still {self.state}{waited}; please try again"
                )
            with contextlib.suppress(TimeoutError):
                await self._room.wait(sequences=sequences, seconds=give_up_at - loop.time())
        return client

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None when there is no process."""
        return self._worker.pid if self._worker is not None and self._worker.is_alive else None

    @property
    def last_statistics(self) -> WorkerStatistics:
        """What the worker reported last, unasked."""
        client = self.client
        return client.worker.last_statistics if client is not None else WorkerStatistics()

    @property
    def scheduler(self) -> SchedulerSettings:
        """How its workers schedule, as somebody has changed it last."""
        return self._settings.scheduler

    async def set_limits(
        self, *, max_running: int | None = None, step_tokens: int | None = None
    ) -> SchedulerLimits:
        """Change how many sequences of the model run at once and how much a step reads, for this
        worker and all that follow it.

        None: as it is. No stream is lost: what runs beyond a lower limit waits again. Returns what
        counts from now on; `step_tokens` is 0 where nobody has said how many and no worker is there
        to ask. Raises InvalidRequest.
        """
        before = self._settings.scheduler
        is_chosen = step_tokens is not None or before.step_tokens is not None
        most = before.max_running if max_running is None else max_running
        known = step_tokens or before.step_tokens or self.last_statistics.step_tokens
        # as the worker itself would choose it
        tokens = known if is_chosen else max(known, most, before.min_chunk_tokens)
        after = checked_limits(before, max_running=most, step_tokens=tokens)
        scheduler = replace(after, step_tokens=tokens if is_chosen else None)
        self._settings = msgspec.structs.replace(self._settings, scheduler=scheduler)
        limits = SchedulerLimits(max_running=most, step_tokens=tokens if known else 0)
        if known and (client := self.client) is not None:
            await client.worker.set_limits(limits)
        return limits

    def set_log_level(self, level: LogLevel) -> None:
        """Have this worker and all that follow it log what is so severe."""
        self._settings = msgspec.structs.replace(
            self._settings, log=replace(self._settings.log, level=level)
        )
        if (client := self.client) is not None:
            client.worker.set_log_level(level)

    def share_memory(self, share: MemoryShare) -> None:
        """Have this worker and all that follow it take another part of the memory."""
        self._settings = msgspec.structs.replace(self._settings, share=share)
        if share.state_bytes is not None and (client := self.client) is not None:
            client.worker.share_memory(share.state_bytes)

    @property
    def resumed(self) -> int:
        """Streams that have gone on with another worker, so far."""
        return self._client.resumed

    async def start(self) -> None:
        """Start the worker process, which loads its model by itself, and keep it alive from now on."""
        self._first_start = asyncio.get_running_loop().create_future()
        self._worker = await self._launch()
        self._task = asyncio.create_task(
            self._supervise(self._first_start), name=f"supervisor-{self.model}"
        )
        self._task.add_done_callback(
            functools.partial(self._look_why_it_ended, first_start=self._first_start)
        )

    async def wait_ready(self) -> None:
        """Wait for the first start.

        Raises ModelLoadError when model or settings are at fault, WorkerUnavailable otherwise.
        """
        assert self._first_start is not None, "start() comes first"
        await asyncio.shield(self._first_start)

    async def stop(self) -> None:
        """End the worker in order and keep it no longer; streams that are still open end."""
        self._state = "stopped"
        self._room.turn_away(WorkerUnavailable("the server is shutting down"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._first_start is not None and not self._first_start.done():
            self._first_start.set_exception(WorkerUnavailable("the server is shutting down"))
            self._first_start.exception()  # it may be that nobody waits for it
        if self._worker is not None:
            await self._worker.stop()
        self._client.close("the server is shutting down")

    async def _supervise(self, first_start: asyncio.Future[None]) -> None:
        restart_delay = RestartDelay()
        failed_starts = 0
        while True:
            failure = await self._wait_started()
            loss = Loss()
            served_seconds: float | None = None
            if failure is None:
                failed_starts = 0
                if not first_start.done():
                    first_start.set_result(None)
                failure, served_seconds = await self._wait_for_death()
                loss = self._client.lose_worker()
            else:
                failed_starts += 1
            if failure.fatal_input or (not first_start.done() and failed_starts >= FAILED_STARTS):
                self._give_up(failure, first_start)
                return
            self.restarts[self._cause] += 1
            self._state = "restarting"
            delay = restart_delay.worker_ended(
                now=asyncio.get_running_loop().time(),
                served_seconds=served_seconds or 0.0,
                had_progress=loss.had_progress,
            )
            logger.error("model %s: %s; restarting in %.0f s", self.model, failure.message, delay)
            if failed_starts >= FAILED_STARTS:
                self._client.end_all(
                    "the worker process of the model has died and cannot be started again: "
                    f"{failure.message}"
                )
            await self._report(failure, loss, served_seconds)
            await asyncio.sleep(delay)

    @property
    def _cause(self) -> Literal["died", "hung"]:
        return "died" if self._ended is None or self._ended.hang is None else "hung"

    async def _report(
        self, failure: WorkerFailed, loss: Loss, served_seconds: float | None
    ) -> None:
        """Tell what the death of a worker met, in the log and in a file."""
        if loss.requests:
            logger.warning(
                "model %s: the worker had %d requests, %d in mid-answer; they go on with the next "
                "one",
                self.model,
                len(loss.requests),
                sum(drawn > 0 for drawn in loss.drawn_tokens),
            )
        for request_id in loss.refused:
            logger.error(
                "model %s: request %s is refused: the worker died while it ran alone",
                self.model,
                request_id,
            )
        if self._ended is None:  # there was no process
            return
        report = report_of(
            self.model,
            cause=self._cause,
            how=failure.message,
            pid=self._ended.pid,
            served_seconds=served_seconds,
            figures=self._ended.link.last_statistics,
            log=tuple(self._ended.last_lines),
            requests=tuple(map(_at_crash, loss.requests, loss.drawn_tokens)),
            refused=loss.refused,
        )
        try:
            await asyncio.to_thread(write_report, self._settings.crash_reports, report)
        except RuntimeError as error:  # there is no thread to be had
            logger.warning("the crash report could not be kept: %s", error)

    def _look_why_it_ended(
        self, task: asyncio.Task[None], *, first_start: asyncio.Future[None]
    ) -> None:
        """A fault of ours in the supervision is not to leave anybody waiting for a worker that
        nobody will start.
        """
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the supervision of model %s has ended", self.model, exc_info=error)
            failure = WorkerFailed(
                message=f"its worker is not looked after any more ({error!r})", fatal_input=False
            )
            self._give_up(failure, first_start)

    def _give_up(self, failure: WorkerFailed, first_start: asyncio.Future[None]) -> None:
        self._state = "failed"
        message = f"model {self.model!r} cannot be served: {failure.message}"
        self._room.turn_away(WorkerUnavailable(message))
        self._client.close(message)
        if first_start.done():
            logger.error("model %s cannot be served any more: %s", self.model, failure.message)
        elif failure.fatal_input:
            first_start.set_exception(ModelLoadError(failure.message))
        else:
            first_start.set_exception(
                WorkerUnavailable(
                    f"the worker of model {self.model} does not start: {failure.message}"
                )
            )

    async def _launch(self) -> WorkerProcess:
        self._launched_with = self._settings
        return await WorkerProcess.start(
            self._settings,
            on_progress=lambda event: self._on_progress(self.model, event),
            deliver=self._client.deliver,
        )

    async def _wait_started(self) -> WorkerFailed | None:
        if self._worker is None:
            try:
                self._worker = await self._launch()
            except OSError as error:
                # no memory, no process or no descriptor to be had at this moment
                self._ended = None
                return WorkerFailed(
                    message=f"the worker process cannot be started: {error}", fatal_input=False
                )
        outcome = await self._worker.wait_started(
            timeout_seconds=self._settings.model.startup_seconds
        )
        if isinstance(outcome, WorkerFailed):
            self._ended, self._worker = self._worker, None
            return outcome
        self.info, self._state = outcome.model, "ready"
        resumed = self._client.begin_with(self._worker.link)  # before anybody who comes now
        self._room.admit_all()
        self._on_progress(self.model, LoadProgress(stage="ready", fraction=1.0))
        if self._settings != self._launched_with:  # changed while it was loading
            self._worker.link.set_log_level(self._settings.log.level)
            if self._settings.share.state_bytes is not None:
                self._worker.link.share_memory(self._settings.share.state_bytes)
            # it has died again; the next one is told them
            with contextlib.suppress(WorkerUnavailable):
                await self._worker.link.statistics()
                await self.set_limits()
        if any(self.restarts.values()):
            goes_on = f"; {resumed} running requests go on with it" if resumed else ""
            logger.info("model %s is ready again (worker %d)%s", self.model, outcome.pid, goes_on)
        return None

    async def _wait_for_death(self) -> tuple[WorkerFailed, float]:
        """How the worker ended, and how many seconds it had served."""
        assert self._worker is not None
        started_at = asyncio.get_running_loop().time()
        code = await self._worker.wait_death()
        self._ended, self._worker = self._worker, None
        hang = self._ended.hang
        how = (
            f"ended unexpectedly ({describe_exit(code)})"
            if hang is None
            else f"{hang} and was killed"
        )
        failure = WorkerFailed(message=f"the worker process {how}", fatal_input=False)
        return failure, asyncio.get_running_loop().time() - started_at


def _at_crash(request: SequenceRequest, drawn_tokens: int) -> RequestAtCrash:
    return RequestAtCrash(
        prompt_tokens=len(request.prompt_token_ids),
        drawn_tokens=drawn_tokens,
        is_constrained=bool(request.grammar) or request.thinking_budget is not None,
    )
