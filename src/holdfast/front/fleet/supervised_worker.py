"""Keeps the worker of a loaded model running: a worker that dies or hangs is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

import msgspec

from holdfast.config import LogLevel, SchedulerSettings
from holdfast.errors import InvalidRequest, WorkerUnavailable
from holdfast.front.fleet.process import WorkerProcess, describe_exit
from holdfast.front.fleet.worker_files import (
    MOST_REQUESTS,
    CrashReport,
    RequestAtCrash,
    installed_versions,
    write_report,
)
from holdfast.front.link.model_client import Loss, ModelClient
from holdfast.machine.device_memory import Pressure
from holdfast.machine.memory_plan import MemoryShare
from holdfast.wire.commands import (
    LogChange,
    MemoryChange,
    MemoryPressure,
    SchedulerLimits,
    WorkerSettings,
    checked_limits,
)
from holdfast.wire.events import LoadProgress, ModelInfo, WorkerFailed, WorkerStatistics

LONGEST_BACKOFF_SECONDS = 60.0
# after this many failed starts in a row, a first load counts as failed, and open requests no longer
# wait for a worker
FAILED_STARTS = 3
HEALTHY_SECONDS = 60.0  # a worker that has served this long resets the backoff
# As long as answers make progress, this number of restarts a minute happens without delay: finding
# one bad request can take that many.
DEATHS_A_MINUTE = 5

logger = logging.getLogger("holdfast.front.fleet")


class SupervisedWorker:
    """The worker of one model, which is replaced when it ends.

    Only use it on the event loop's thread.
    """

    def __init__(
        self,
        model: str,
        *,
        on_ready: Callable[[], None],
        on_lost: Callable[[], None],
        on_progress: Callable[[str, LoadProgress], None],
    ) -> None:
        """on_ready: called when a worker serves. on_lost: called when a worker that served is
        gone.
        """
        self.info: ModelInfo | None = None  # as the last worker that was ready reported it
        self.weights_read = 0.0  # share of the weights that the last worker has read
        self.restarts = {"died": 0, "hung": 0}  # by cause
        self.resumed = 0  # streams that have continued with another worker
        self.launched = asyncio.Event()  # set once there is, or was, a worker process
        self.process: WorkerProcess | None = None
        self._model = model
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_progress = on_progress
        self._scheduler: SchedulerSettings | None = None  # set by `set_limits`
        self._pressure = Pressure.NORMAL  # the memory pressure that the worker was told
        # while the model is loaded: the settings of the worker, and what sends requests to it
        self._settings: WorkerSettings | None = None
        self._client: ModelClient | None = None

    @property
    def client(self) -> ModelClient | None:
        """The client of the worker; None while no worker serves it."""
        client = self._client
        return client if client is not None and client.is_serving else None

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None without a worker."""
        process = self.process
        return process.pid if process is not None and process.is_alive else None

    @property
    def statistics(self) -> WorkerStatistics:
        """The worker's last report."""
        client = self.client
        return WorkerStatistics() if client is None else client.worker.last_statistics

    async def set_limits(
        self, *, max_running: int | None = None, step_tokens: int | None = None
    ) -> SchedulerLimits:
        """Change the scheduler's limits, now and for workers that replace this one.

        max_running: how many sequences may run concurrently. step_tokens: how many tokens a step
        may have. None leaves a limit unchanged. No stream is lost: sequences beyond a lower limit
        wait again. Returns the new limits; `step_tokens` is 0 if it was never set and no worker can
        be asked. Raises InvalidRequest.
        """
        if self._settings is None:
            message = f"{self._model} is not loaded; only a loaded model's limits can be changed"
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
        """Set how much memory the worker may use, now and after a restart."""
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

    def close(self, reason: str) -> None:
        """End all requests, since the model is no longer loaded."""
        if self._client is not None:
            self._client.close(reason)
        self._client = None
        self._settings = None

    async def run(self, settings: WorkerSettings, *, loaded: asyncio.Future[None]) -> NoReturn:
        """Start a worker, and replace it whenever it ends, until this task is cancelled.

        loaded: completed once the first worker serves. Raises HoldfastError or OSError if the model
        cannot be served.
        """
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
                end = await self._serve_until_end(self._client, loaded)
                failed_starts = failed_starts + 1 if end.served_seconds is None else 0
                message = end.failure.message
                if end.failure.fatal_input:  # another worker would fail as well
                    raise end.failure.error
                if failed_starts >= FAILED_STARTS:
                    if not loaded.done():
                        raise WorkerUnavailable(
                            f"the worker of model {self._model} does not start: {message}"
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
                logger.error("model %s: %s; restarting in %.0f s", self._model, message, delay)
                await self._report_worker_end(end)
                await asyncio.sleep(delay)
        finally:
            if (process := self.process) is not None:
                await process.stop()
                self.process = None

    async def _launch(self, client: ModelClient) -> None:
        """Start a worker process, whose events go to the client. Raises OSError."""
        assert self._settings is not None
        self.weights_read = 0.0
        self.process = await WorkerProcess.start(
            self._settings, on_progress=self._forward_progress, on_events=client.deliver_events
        )
        self.launched.set()

    def _forward_progress(self, progress: LoadProgress) -> None:
        """Pass a worker's progress on, and keep the share of the weights that it has read."""
        if progress.stage == "reading":
            self.weights_read = progress.fraction
        self._on_progress(self._model, progress)

    async def _serve_until_end(
        self, client: ModelClient, loaded: asyncio.Future[None]
    ) -> _WorkerEnd:
        """Start a worker unless one exists, and wait until it has ended."""
        if self.process is None:
            try:
                await self._launch(client)
            except OSError as error:  # out of memory, processes or file descriptors at the moment
                message = f"the worker process cannot be started: {error}"
                return _WorkerEnd(failure=WorkerFailed(message=message, fatal_input=False))
        process = self.process
        assert process is not None
        assert self._settings is not None
        outcome = await process.wait_started(timeout_seconds=self._settings.model.startup_seconds)
        if isinstance(outcome, WorkerFailed):
            self.process = None
            return _WorkerEnd(failure=outcome, process=process)
        await self._begin_serving(client, process, outcome.model, is_first=not loaded.done())
        if not loaded.done():
            loaded.set_result(None)
        began_at = asyncio.get_running_loop().time()
        await process.wait_lost()
        self._on_lost()
        exit_code = await process.stop()
        self.process = None
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
        self, client: ModelClient, process: WorkerProcess, info: ModelInfo, *, is_first: bool
    ) -> None:
        """Give a loaded worker the open requests and the settings that changed during the load."""
        # whether the settings have changed while the worker was loading
        is_outdated = self._settings != process.settings
        if self._pressure is not Pressure.NORMAL:  # before the worker starts any request
            process.link.send(MemoryPressure(pressure=self._pressure))
        resumed = client.use_worker(process.link, info)  # open requests go before new ones
        self.resumed += resumed
        if not is_first:
            continuing = f"; {resumed} open requests continue" if resumed else ""
            logger.info(
                "model %s is ready again (worker %d)%s", self._model, process.pid, continuing
            )
        self._on_ready()
        self._on_progress(self._model, LoadProgress(stage="ready", fraction=1.0))
        settings = self._settings
        if settings is not None and is_outdated:
            process.link.send(LogChange(level=settings.log.level))
            if settings.share.state_bytes is not None:
                process.link.send(MemoryChange(state_bytes=settings.share.state_bytes))
            # this worker has died; the next one gets the new settings
            with contextlib.suppress(WorkerUnavailable):
                await process.link.statistics()  # `set_limits` needs the worker's `step_tokens`
                await self.set_limits()

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
                self._model,
                len(loss.requests),
                sum(tokens > 0 for tokens in loss.generated_tokens),
            )
        for request_id in loss.refused:
            logger.error(
                "model %s: request %s is refused: it was the only request running when the worker "
                "died",
                self._model,
                request_id,
            )
        if end.process is None or self._settings is None:
            return
        folder = self._settings.crash_reports
        try:
            await asyncio.to_thread(
                write_report, folder, _crash_report(self._model, end, end.process)
            )
        except RuntimeError as error:  # no thread can be started
            logger.warning("cannot write the crash report: %s", error)


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

    The delay grows with each successive worker that dies early without having generated a token. It
    also grows if more than DEATHS_A_MINUTE workers die within a minute, so that requests that kill one
    worker after another do not keep the machine busy with loading.
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
