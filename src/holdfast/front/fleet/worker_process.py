"""One worker as a child process: started, waited for, ended. Knows nothing about restarting."""

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
from holdfast.front.fleet.compiled_code import WorkerTemporaries
from holdfast.front.link.worker_link import WorkerLink
from holdfast.wire.commands import Assignment, WorkerSettings
from holdfast.wire.events import Event, Heartbeat, LoadProgress, WorkerFailed, WorkerReady

# a step hangs when it takes so many times what its like took at most, or, without any, what loading
# took
PATIENCE = 20.0
# times the longest silence: what a step may take at least of which nothing is known
LEAST_UNMEASURED = 8.0
GRACE_SECONDS = 10.0  # between the wish to end and SIGKILL
LOG_SECONDS = 2.0  # that the end of a worker's log is waited for when it has ended
_LONGEST_LOG_LINE_BYTES = 1 << 20
_LINES_KEPT = 80  # for a crash report: the stacks of a few threads
_LONGEST_KEPT_LINE = 500

_LOG_LINE = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<name>[\w.]+): (?P<message>.*)"
)

logger = logging.getLogger("holdfast.front.fleet")
worker_logger = logging.getLogger("holdfast.worker")


class Watchdog:
    """Judges one worker by looks at its heartbeats, every `heartbeat_seconds`.

    Time counts only as far as this process ran itself: of the time between two looks no more than
    one interval does. So a front that was stopped, asleep or too busy to look takes no worker for
    dead that had no better chance to beat.

    hang_seconds: the longest silence, and the least that a step may take. unmeasured_seconds: what
    work may take of which nothing is known. How long loading may take, the time to the first
    heartbeat included, is not decided here: silence is judged from the first heartbeat on, or from
    the moment that the worker serves.
    """

    def __init__(
        self, *, heartbeat_seconds: float, hang_seconds: float, unmeasured_seconds: float
    ) -> None:
        self._heartbeat_seconds, self._hang_seconds = heartbeat_seconds, hang_seconds
        self._unmeasured_seconds = max(unmeasured_seconds, hang_seconds)
        self.expects_heartbeats = False  # whether silence is judged
        self._silent_seconds = 0.0

    def begin_serving(self, *, load_seconds: float) -> None:
        """Judge silence from now on, whether or not a heartbeat has ever come: the worker serves,
        so it beats if it is well.

        load_seconds: what loading took, in which the model was run over several prompts. What work
        of another kind may take that was not measured yet is seen from that.
        """
        self.expects_heartbeats = True
        known = max(LEAST_UNMEASURED * self._hang_seconds, PATIENCE * load_seconds)
        self._unmeasured_seconds = min(self._unmeasured_seconds, known)

    def look(self, beat: Heartbeat | None, *, elapsed_seconds: float) -> str | None:
        """Take in what has come since the last look, `elapsed_seconds` ago: how it hangs, in words;
        None while all is well.
        """
        if beat is not None:
            self.expects_heartbeats, self._silent_seconds = True, 0.0
            return self._judge(beat)
        if self.expects_heartbeats:
            self._silent_seconds += min(elapsed_seconds, self._heartbeat_seconds)
        if self._silent_seconds < self._hang_seconds:
            return None
        return f"has given no sign of life for {self._silent_seconds:.0f} s"

    def _judge(self, beat: Heartbeat) -> str | None:
        if beat.activity != "working" or beat.lasting_seconds < self._limit(beat.expected_seconds):
            return None
        return f"has been in one and the same step for {beat.lasting_seconds:.0f} s"

    def _limit(self, expected_seconds: float | None) -> float:
        if expected_seconds is None:
            return self._unmeasured_seconds
        return max(self._hang_seconds, PATIENCE * expected_seconds)


class WorkerProcess:
    """A running child process and the link to it. Loop's thread only."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        link: WorkerLink,
        *,
        temporary: WorkerTemporaries,
        watchdog: Watchdog,
    ) -> None:
        self._process, self._temporary = process, temporary
        self.link = link
        self.hang: str | None = None  # why it was killed, in words; None: it was not
        self.watchdog = watchdog
        self.last_lines: deque[str] = deque(maxlen=_LINES_KEPT)  # of its log
        self._log_task = asyncio.create_task(
            _pass_log_on(process, self.last_lines), name="worker-log"
        )
        self._exit_task = asyncio.create_task(self._watch_exit(), name="worker-exit")
        self._watch_task: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        settings: WorkerSettings,
        *,
        on_progress: Callable[[LoadProgress], None],
        deliver: Callable[[Sequence[Event]], None],
    ) -> WorkerProcess:
        """Start the process and give it its assignment; it loads its model from now on.

        `deliver`: see `WorkerLink`.
        """
        async with contextlib.AsyncExitStack() as undo:
            temporary = WorkerTemporaries(settings.compiled_code)
            undo.callback(temporary.remove)
            link = WorkerLink(on_progress=on_progress, deliver=deliver)
            undo.push_async_callback(link.close)
            process = await asyncio.create_subprocess_exec(
                *settings.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                limit=_LONGEST_LOG_LINE_BYTES,
                env=_environment(settings.model) | temporary.environment,
            )
            undo.pop_all()
        watchdog = Watchdog(
            heartbeat_seconds=settings.residency.heartbeat_seconds,
            hang_seconds=settings.residency.hang_seconds,
            unmeasured_seconds=settings.model.startup_seconds,
        )
        worker = cls(process, link, temporary=temporary, watchdog=watchdog)
        worker._watch_task = asyncio.create_task(
            worker._watch(settings.residency.heartbeat_seconds), name="worker-watch"
        )
        assignment = Assignment(
            settings=settings,
            endpoint=link.endpoint,
            heartbeat_endpoint=link.heartbeat_endpoint,
            parent_pid=os.getpid(),
        )
        try:
            await worker._hand_over(msgspec.json.encode(assignment))
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
        """Whether the process has not ended."""
        return self._process.returncode is None

    async def wait_started(self, *, timeout_seconds: float) -> WorkerReady | WorkerFailed:
        """Wait until the model serves, or the worker has said why not, or has died; it is killed
        when the time is over.
        """
        try:
            # not wait_for: before Python 3.12 it may swallow a cancellation
            async with asyncio.timeout(timeout_seconds):
                outcome = await asyncio.shield(self.link.started)
        except TimeoutError:
            await self.stop()
            return WorkerFailed(
                message=f"the model was not loaded within {timeout_seconds:.0f} s",
                fatal_input=False,
            )
        if isinstance(outcome, WorkerFailed):
            await self.stop()
            # it could not say anything itself; only now is it known how it ended
            if not outcome.fatal_input:
                code = await self.wait_exit()
                message = (
                    f"it died while loading ({describe_exit(code)})"
                    if self.hang is None
                    else f"while loading it {self.hang}"
                )
                return WorkerFailed(message=message, fatal_input=False)
        else:
            self.watchdog.begin_serving(load_seconds=outcome.model.load_seconds)
            self._temporary.keep_compiled()
        return outcome

    async def wait_exit(self) -> int:
        """Wait until the process has ended and its log is read; returns its exit code (negative:
        the signal).
        """
        await asyncio.shield(self._exit_task)
        await asyncio.shield(self._log_task)
        return self._process.returncode or 0

    async def wait_death(self) -> int:
        """Wait until the worker is gone, to be seen by its process or by its end of the link;
        returns the exit code.
        """
        await asyncio.wait((self._exit_task, self.link.lost), return_when=asyncio.FIRST_COMPLETED)
        # a process that has let go of the link serves nobody, whatever it still does
        await self.stop()
        return await self.wait_exit()

    async def stop(self) -> None:
        """End the process in order, with force when it takes too long, and close the link."""
        if self._watch_task is not None:
            self._watch_task.cancel()
        if not self.link.started.done():
            # it only loads: nothing to be lost, and a load cannot be interrupted otherwise
            self._kill()
        elif self.is_alive:
            self.link.shut_down_worker()
            self._signal(signal.SIGTERM)
        await asyncio.wait((self._exit_task,), timeout=LOG_SECONDS)
        if self.is_alive:
            await asyncio.wait((self._exit_task,), timeout=GRACE_SECONDS - LOG_SECONDS)
        if self.is_alive:
            logger.warning("worker %d does not end; killing it", self.pid)
            self._kill()
        if not self._exit_task.done():
            self._let_go_of_log()
        await self.wait_exit()
        await self.link.close()

    def _let_go_of_log(self) -> None:
        """What the worker has started may hold its log open, and to asyncio no process has ended
        whose pipes have not.
        """
        log = self._process._transport.get_pipe_transport(2)  # type: ignore[attr-defined]
        if log is not None:
            log.close()

    async def _hand_over(self, assignment: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(assignment)
        self._process.stdin.close()
        # a worker that is gone already shows by its exit
        with contextlib.suppress(ConnectionError):
            # from here on it needs nothing of this loop to load
            await self._process.stdin.wait_closed()

    async def _watch_exit(self) -> None:
        code = await self._process.wait()
        if code == 0:
            self._temporary.keep_compiled()
        self._temporary.remove()
        self.link.fail(
            f"the worker process of the model died ({describe_exit(code)}); please try again"
        )

    async def _watch(self, interval_seconds: float) -> None:
        """Kill the process when it hangs; what follows is as with any death.

        Not SIGTERM: a stopped process would not get it.
        """
        loop = asyncio.get_running_loop()
        looked_at = loop.time()
        while self.hang is None and self.is_alive:
            await asyncio.sleep(interval_seconds)
            now = loop.time()
            self.hang = self.watchdog.look(
                self.link.poll_heartbeat(), elapsed_seconds=now - looked_at
            )
            looked_at = now
        if self.hang is not None and self.is_alive:
            self._kill()
            self.link.fail(
                f"the worker process of the model {self.hang} and is being replaced; please try "
                "again"
            )

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Not the process object's own send_signal: it may reap the child behind the loop's back,
        # and its exit code is lost.
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):  # it has ended in this very moment
                os.kill(self.pid, number)


def describe_exit(code: int) -> str:
    """How a process ended, in words; a negative code is a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _environment(model: ModelSettings) -> dict[str, str]:
    """The worker's environment: ours; the number of BLAS threads only when it is set.

    Threads of OpenBLAS that have nothing to do sleep after 2^16 cycles (25 µs), not after 2^26:
    between two steps they would keep turning on cores that the front, and the other BLAS of the
    two, are waiting for (docs/lab-log.md).
    """
    environment = {"OPENBLAS_THREAD_TIMEOUT": "16"} | os.environ
    if model.threads is not None:
        environment["OPENBLAS_NUM_THREADS"] = environment["OMP_NUM_THREADS"] = str(model.threads)
    return environment


async def _pass_log_on(process: asyncio.subprocess.Process, last_lines: deque[str]) -> None:
    """Log what the worker writes to its standard error: as its loggers said it, tracebacks as the
    line before.
    """
    assert process.stderr is not None
    level, name = logging.WARNING, worker_logger.name
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:
            continue  # a line beyond the limit, which the reader has dropped
        if not line:
            return
        text = line.decode("utf-8", errors="replace").rstrip()
        last_lines.append(text[:_LONGEST_KEPT_LINE])
        if said := _LOG_LINE.fullmatch(text):
            level, name, text = (
                logging.getLevelNamesMapping()[said["level"]],
                said["name"],
                said["message"],
            )
        logging.getLogger(name).log(level, "%s", text)
