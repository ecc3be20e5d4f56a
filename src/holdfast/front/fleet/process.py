"""Starts, watches and stops one worker process. `SupervisedWorker` decides whether it is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from holdfast.config import ModelSettings
from holdfast.front.fleet.worker_files import WorkerTemporaries
from holdfast.front.link.worker_link import WorkerLink
from holdfast.machine.clocks import awake_clock, awake_timeout
from holdfast.machine.process_time import LEAST_SHARE, progress_of
from holdfast.wire.commands import SHUT_DOWN, Assignment, WorkerSettings
from holdfast.wire.events import Event, Heartbeat, LoadProgress, WorkerFailed, WorkerReady

# A step counts as hanging after this many times the longest time of similar steps. If none was
# measured, the loading time is multiplied instead.
PATIENCE = 20.0
# the shortest limit for a kind of step that has not been measured yet, and the longest time without
# progress while a model loads, in multiples of `hang_seconds`
LEAST_UNMEASURED = 8.0
GRACE_SECONDS = 10.0  # time between the request to exit and SIGKILL
LOG_SECONDS = 2.0  # how long to wait for the rest of the log after the process has exited
_LONGEST_LOG_LINE_BYTES = 1 << 20
_LINES_KEPT = 80  # of the log; enough for a crash report with the stacks of a few threads
_LONGEST_KEPT_LINE = 500
_LOG_LINE = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<name>[\w.]+): (?P<message>.*)"
)

logger = logging.getLogger("holdfast.front.fleet")
worker_logger = logging.getLogger("holdfast.worker")


class WorkerProcess:
    """A running child process and the link to it. Only use it on the event loop's thread."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        link: WorkerLink,
        *,
        temporaries: WorkerTemporaries,
        settings: WorkerSettings,
    ) -> None:
        self._process = process
        self._temporaries = temporaries
        self.link = link
        self.settings = settings  # the settings that it was started with
        self.hang: str | None = None  # a description of the hang, if the process was killed for one
        self.last_lines: deque[str] = deque(maxlen=_LINES_KEPT)  # the last lines of its log
        self.watchdog = Watchdog(
            heartbeat_seconds=settings.residency.heartbeat_seconds,
            hang_seconds=settings.residency.hang_seconds,
            unmeasured_seconds=settings.model.startup_seconds,
        )
        self._log_task = asyncio.create_task(
            _forward_log(process, self.last_lines), name="worker-log"
        )
        self._exit_task = asyncio.create_task(self._watch_exit(), name="worker-exit")
        self._watch_task = asyncio.create_task(
            self._watch(settings.residency.heartbeat_seconds), name="worker-watch"
        )

    @classmethod
    async def start(
        cls,
        settings: WorkerSettings,
        *,
        on_progress: Callable[[LoadProgress], None],
        on_events: Callable[[Sequence[Event]], None],
    ) -> WorkerProcess:
        """Start the process and send it its settings, from which it then loads its model.

        Raises OSError if the process cannot be started.

        on_progress: called with the progress of the load. on_events: called with the events of each
        message from the worker, in order.
        """
        # `undo` is emptied once the process runs
        async with contextlib.AsyncExitStack() as undo:
            temporaries = WorkerTemporaries(settings.compiled_code)
            undo.callback(temporaries.remove)
            link = WorkerLink(on_progress=on_progress, on_events=on_events)
            undo.push_async_callback(link.close)
            process = await asyncio.create_subprocess_exec(
                *settings.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                limit=_LONGEST_LOG_LINE_BYTES,
                env=_environment(settings.model) | temporaries.environment,
            )
            undo.pop_all()
        worker = cls(process, link, temporaries=temporaries, settings=settings)
        assignment = Assignment(
            settings=settings,
            endpoint=link.endpoint,
            heartbeat_endpoint=link.heartbeat_endpoint,
            parent_pid=os.getpid(),
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(assignment))
        process.stdin.close()
        try:
            # suppressed: the process has died, which `_watch_exit` notices
            with contextlib.suppress(ConnectionError):
                await process.stdin.wait_closed()
        except asyncio.CancelledError:
            await worker.stop()
            raise
        return worker

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process is still running."""
        return self._process.returncode is None

    async def wait_started(self, *, timeout_seconds: float) -> WorkerReady | WorkerFailed:
        """Wait until the model is served, or the worker fails or dies.

        If none of these happens within the timeout, the worker is killed.
        """
        try:
            # not asyncio.wait_for: before Python 3.12 it may swallow a cancellation
            async with awake_timeout(timeout_seconds):
                outcome = await asyncio.shield(self.link.started)
        except TimeoutError:
            await self.stop()
            message = f"the model was not loaded within {timeout_seconds:.0f} s"
            return WorkerFailed(message=message, fatal_input=False)
        if isinstance(outcome, WorkerReady):
            self.watchdog.begin_serving(load_seconds=outcome.model.load_seconds)
            self._temporaries.keep_compiled()
            return outcome
        exit_code = await self.stop()
        if outcome.fatal_input:
            return outcome
        message = f"it died while loading ({describe_exit(exit_code)})"
        if self.hang is not None:
            message = f"while loading, it {self.hang}"
        return WorkerFailed(message=message, fatal_input=False)

    async def wait_lost(self) -> None:
        """Wait until the process has exited or closed the link.

        Either way, it serves no requests any more.
        """
        await asyncio.wait((self._exit_task, self.link.lost), return_when=asyncio.FIRST_COMPLETED)

    async def stop(self) -> int:
        """Ask the process to exit cleanly if it is alive, kill it if that takes too long, and close the
        link.

        Waits for the rest of the log. Returns the exit code, or the negated number of the signal.
        """
        self._watch_task.cancel()
        if not self.link.started.done():
            # While a worker loads its model, only SIGKILL stops it, and there is no state to
            # save yet.
            self._signal(signal.SIGKILL)
        elif self.is_alive:
            self.link.send(SHUT_DOWN)
            self._signal(signal.SIGTERM)
        await asyncio.wait((self._exit_task,), timeout=LOG_SECONDS)
        if self.is_alive:
            await asyncio.wait((self._exit_task,), timeout=GRACE_SECONDS - LOG_SECONDS)
        if self.is_alive:
            logger.warning("worker %d does not exit; killing it", self.pid)
            self._signal(signal.SIGKILL)
        if not self._exit_task.done():
            self._close_log()
        await asyncio.shield(self._exit_task)
        await asyncio.shield(self._log_task)
        await self.link.close()
        return self._process.returncode or 0

    def _close_log(self) -> None:
        """Close the pipe of the log.

        A child of the worker may hold it open, and asyncio waits for all pipes of a process.
        """
        log = self._process._transport.get_pipe_transport(2)  # type: ignore[attr-defined]
        if log is not None:
            log.close()

    async def _watch_exit(self) -> None:
        """Remove the temporary files after the exit, and fail what waits for the worker."""
        exit_code = await self._process.wait()
        if exit_code == 0:
            self._temporaries.keep_compiled()
        self._temporaries.remove()
        self.link.fail(
            f"the worker process of the model died ({describe_exit(exit_code)}); please try again"
        )

    async def _watch(self, interval_seconds: float) -> None:
        """Kill the process when it hangs.

        Uses SIGKILL: a process that is stopped would not receive SIGTERM.
        """
        clock = awake_clock()
        polled_at = clock.time()
        last_progress = progress_of(self.pid)
        while self.hang is None and self.is_alive:
            await asyncio.sleep(interval_seconds)
            now = clock.time()
            heartbeat = self.link.poll_heartbeat()
            progress = progress_of(self.pid)
            self.hang = self.watchdog.judge(
                heartbeat,
                elapsed_seconds=now - polled_at,
                ran_seconds=progress.processor_seconds - last_progress.processor_seconds,
                has_read=progress.read_bytes > last_progress.read_bytes,
            )
            polled_at = now
            last_progress = progress
        if self.hang is not None and self.is_alive:
            self._signal(signal.SIGKILL)
            self.link.fail(
                f"the worker process of the model {self.hang} and is being replaced; please try "
                "again"
            )

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still runs."""
        # Not asyncio's send_signal: it may reap the child without the event loop's knowledge, which
        # loses the exit code.
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):  # the process has just exited
                os.kill(self.pid, number)


class Watchdog:
    """Detects from a worker's heartbeats and its progress that the worker hangs; polled every
    `heartbeat_seconds`.

    A worker that sends no heartbeats is judged by its progress, because a native call may hold the
    interpreter lock for a long time, and on a busy machine many times longer. A process that uses
    no processor time and reads nothing hangs. One that does gets the processor time of a
    step that has not been measured.

    The time since the last poll counts as at most one interval. So the worker never seems to hang
    only because the front was suspended or too busy to poll.
    """

    def __init__(
        self, *, heartbeat_seconds: float, hang_seconds: float, unmeasured_seconds: float
    ) -> None:
        """hang_seconds: the longest silence without progress that is allowed, and the shortest
        limit for any step.

        unmeasured_seconds: the limit for kinds of work that were not measured yet.
        """
        self._heartbeat_seconds = heartbeat_seconds
        self._hang_seconds = hang_seconds
        self._unmeasured_seconds = max(unmeasured_seconds, hang_seconds)
        # True from the first heartbeat, or once the worker serves
        self.expects_heartbeats = False
        self._is_serving = False  # the worker has loaded its model
        # for each poll since the last heartbeat: its duration, and the processor time used in it
        self._silent_polls: list[tuple[float, float]] = []
        self._ran_silently_seconds = 0.0  # processor time used since the last heartbeat

    def begin_serving(self, *, load_seconds: float) -> None:
        """Expect heartbeats from now on, because the worker serves.

        Allow unmeasured work a multiple of the loading time, which includes runs over several
        prompts.
        """
        self.expects_heartbeats = True
        self._is_serving = True
        limit_seconds = max(LEAST_UNMEASURED * self._hang_seconds, PATIENCE * load_seconds)
        self._unmeasured_seconds = min(self._unmeasured_seconds, limit_seconds)

    def judge(
        self,
        heartbeat: Heartbeat | None,
        *,
        elapsed_seconds: float,
        ran_seconds: float = 0.0,
        has_read: bool = False,
    ) -> str | None:
        """Judge the worker after a poll. Returns a description of the hang; None if there is none.

        heartbeat: the one that arrived since the last poll; None if none arrived.
        elapsed_seconds: the time since the last poll. ran_seconds: the processor time that the
        process used since then. has_read: whether it read from disk.
        """
        if heartbeat is not None:
            self.expects_heartbeats = True
            self._silent_polls.clear()
            self._ran_silently_seconds = 0.0
            return self._judge_heartbeat(heartbeat)
        if not self.expects_heartbeats:
            return None
        counted_seconds = min(elapsed_seconds, self._heartbeat_seconds)
        counted_ran_seconds = counted_seconds if has_read else min(ran_seconds, counted_seconds)
        self._silent_polls.append((counted_seconds, counted_ran_seconds))
        self._ran_silently_seconds += counted_ran_seconds
        return self._judge_silence()

    def _judge_silence(self) -> str | None:
        """Describe the hang if a silent worker made no progress, or ran for too long; else None."""
        limit = self._hang_seconds if self._is_serving else LEAST_UNMEASURED * self._hang_seconds
        seconds = 0.0
        ran_seconds = 0.0
        for poll_seconds, poll_ran_seconds in reversed(self._silent_polls):
            seconds += poll_seconds
            ran_seconds += poll_ran_seconds
            if seconds >= limit:
                break
        # a process that uses less than LEAST_SHARE of a core only waits
        if seconds >= limit and ran_seconds < LEAST_SHARE * seconds:
            return f"has sent no heartbeat and made no progress for {seconds:.0f} s"
        # while loading, `model.startup_seconds` limits it
        if self._is_serving and self._ran_silently_seconds >= self._unmeasured_seconds:
            return f"has sent no heartbeat while it ran for {self._ran_silently_seconds:.0f} s"
        return None

    def _judge_heartbeat(self, heartbeat: Heartbeat) -> str | None:
        """Describe the hang if the current step has lasted too long for its kind; else None."""
        if heartbeat.expected_seconds is None:
            limit = self._unmeasured_seconds
        else:
            limit = max(self._hang_seconds, PATIENCE * heartbeat.expected_seconds)
        if heartbeat.activity != "working" or heartbeat.lasting_seconds < limit:
            return None
        return f"has been in the same step for {heartbeat.lasting_seconds:.0f} s"


def describe_exit(exit_code: int) -> str:
    """Describe an exit code in words. A negative code is a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"signal {-exit_code}"


def _environment(model: ModelSettings) -> dict[str, str]:
    """The worker's environment: that of this process, and the number of BLAS threads if it is set.

    Idle OpenBLAS threads sleep after 2^16 cycles (25 µs) instead of 2^26. Otherwise they would spin
    between two steps on cores that the front and the kernels need (docs/lab-log.md).

    On CUDA, MLX keeps compiled attention for each length of keys and each capacity, and counts
    those that it had to compile. After 512, every further one would raise an error, in the belief
    that its cache is too small (ml-explore/mlx#2600); a server that runs for days meets more.
    """
    defaults = {"OPENBLAS_THREAD_TIMEOUT": "16", "MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}
    environment = defaults | os.environ
    if model.threads is not None:
        environment["OPENBLAS_NUM_THREADS"] = str(model.threads)
        environment["OMP_NUM_THREADS"] = str(model.threads)
    return environment


async def _forward_log(process: asyncio.subprocess.Process, last_lines: deque[str]) -> None:
    """Write the worker's standard error to the log, with the loggers and levels that the worker
    used.

    A line without logger and level, such as one in a traceback, gets those of the line before.
    """
    assert process.stderr is not None
    level = logging.WARNING
    name = worker_logger.name
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:
            continue  # a line beyond the limit; the stream reader has dropped it
        if not line:
            return
        text = line.decode("utf-8", errors="replace").rstrip()
        last_lines.append(text[:_LONGEST_KEPT_LINE])
        if match := _LOG_LINE.fullmatch(text):
            level = logging.getLevelNamesMapping()[match["level"]]
            name = match["name"]
            text = match["message"]
        logging.getLogger(name).log(level, "%s", text)
