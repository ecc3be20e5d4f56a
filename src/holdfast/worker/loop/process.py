"""The worker as a process: its main thread handles signals and watches the parent, its device
thread does the work.
"""

from __future__ import annotations

import ctypes
import enum
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec

from holdfast.errors import ConfigError, ModelLoadError
from holdfast.machine import platform
from holdfast.wire.commands import Assignment, WorkerSettings
from holdfast.wire.events import LoadProgress, ModelInfo, WorkerFailed, WorkerReady
from holdfast.worker.loop.inbox import Heart, Inbox, Progress, Pulse, ZmqInbox
from holdfast.worker.loop.loop import WorkerLoop

PROGRESS_SECONDS = 0.1
PARENT_CHECK_SECONDS = 1.0
GRACE_SECONDS = 8.0  # for the step under way and the last messages, once the end is asked for
_PR_SET_PDEATHSIG = 1


class WorkerEnd(enum.IntEnum):
    """How a worker ended; its process's exit code."""

    IN_ORDER = 0
    BROKEN = 1
    BAD_INPUT = 2


Serve = Callable[[Inbox, WorkerSettings, Pulse], WorkerEnd]
logger = logging.getLogger("holdfast.worker")
LoopBuilder = Callable[[Inbox, Progress], tuple[WorkerLoop, ModelInfo]]


def serve_model(inbox: Inbox, settings: WorkerSettings, pulse: Pulse | None = None) -> WorkerEnd:
    """Load the model and serve the inbox until `SHUT_DOWN`.

    Call on a thread that lives as long as the model.

    pulse: where to show what the thread is at; None where nobody looks.
    """
    platform.prepare_blas(settings.model.threads)  # has to come before the first import of mlx.core
    from holdfast.worker.loop import serving

    try:
        return live(inbox, partial(serving.build_loop, settings=settings, pulse=pulse or Pulse()))
    finally:
        # arrays in reference cycles must go while this thread can still let go of them
        gc.collect()
        serving.let_go_of_device()


def run_process(serve: Serve) -> int:
    """Read the assignment from standard input and serve it; returns the exit code."""
    # A terminal's Ctrl-C and a service manager's SIGTERM go to the whole group: the front lets
    # answers end, then its worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wake_reader, wake_writer = os.pipe()
    watch = _Watch(wake_writer)
    # where a fault of the device's library happened is told in the log, and so in the crash report
    faulthandler.enable()
    assignment = msgspec.json.decode(sys.stdin.buffer.read(), type=Assignment)
    settings = assignment.settings
    signal.signal(signal.SIGTERM, lambda signum, frame: watch.handle_sigterm(assignment.parent_pid))
    logging.basicConfig(
        level=settings.log.level.upper(),
        stream=sys.stderr,
        format="%(levelname)s %(name)s: %(message)s",
    )
    _die_with_parent()
    ends: list[WorkerEnd] = []
    pulse = Pulse(interval_seconds=settings.residency.heartbeat_seconds)
    heart = Heart(assignment.heartbeat_endpoint, pulse)
    heart.start()

    def device_thread() -> None:
        ends.append(serve(ZmqInbox(assignment.endpoint, wake_fd=wake_reader), settings, pulse))

    thread = threading.Thread(target=device_thread, name="holdfast-device", daemon=False)
    thread.start()
    watch.wait_for(thread, parent_pid=assignment.parent_pid)
    heart.stop()
    return int(ends[0]) if ends else int(WorkerEnd.BROKEN)


class _Watch:
    """Waits for the device thread and asks it to end when the process should. Main thread only."""

    def __init__(self, wake_writer: int) -> None:
        self._wake_writer = wake_writer
        self._ends_at: float | None = None

    def handle_sigterm(self, parent_pid: int) -> None:
        """End in order if the front is gone; else it is the front that decides, and it says so over
        the link.
        """
        if os.getppid() != parent_pid:
            self.ask_to_end()

    def ask_to_end(self) -> None:
        """Wake the device thread with the wish to end; from then on it has a grace time."""
        if self._ends_at is None:
            self._ends_at = time.monotonic() + GRACE_SECONDS
            os.write(self._wake_writer, b".")

    def wait_for(self, thread: threading.Thread, *, parent_pid: int) -> None:
        """Return when the thread has ended. Ends the process at once when the grace time is over."""
        while thread.is_alive():
            thread.join(PARENT_CHECK_SECONDS)
            if os.getppid() != parent_pid:
                self.ask_to_end()
            if self._ends_at is not None and thread.is_alive() and time.monotonic() > self._ends_at:
                logger.error(
                    "the device did not come to rest in %.0f s; the worker ends without it",
                    GRACE_SECONDS,
                )
                os._exit(WorkerEnd.BROKEN)


def _die_with_parent() -> None:
    """Linux: get SIGTERM the moment the front is gone, however it went.

    Elsewhere the parent check has to do.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            logger.warning(
                "the kernel refuses a death signal (error %d); the parent is polled for",
                ctypes.get_errno(),
            )


def live(inbox: Inbox, build: LoopBuilder) -> WorkerEnd:
    """Build the loop, tell the front, serve until `SHUT_DOWN`, close the inbox.

    The device is still the caller's to let go.
    """

    end = WorkerEnd.BROKEN
    try:
        loop, info = build(
            inbox,
            _seldom(
                lambda stage, fraction: inbox.send([LoadProgress(stage=stage, fraction=fraction)])
            ),
        )
        inbox.send([WorkerReady(pid=os.getpid(), model=info)])
        loop.run()
        end = WorkerEnd.IN_ORDER
    except (ModelLoadError, ConfigError) as error:
        inbox.send([WorkerFailed(message=str(error), fatal_input=True)])
        end = WorkerEnd.BAD_INPUT
    finally:
        if end is WorkerEnd.BROKEN:
            logger.exception("the worker ends: its device thread failed")
        inbox.close()
    return end


def _seldom(emit: Progress) -> Progress:
    """Progress comes per tensor; what is worth a message is a new stage, its end, and a few times a
    second in between.
    """
    last_stage, last_at = "", 0.0

    def progress(stage: str, fraction: float) -> None:
        nonlocal last_stage, last_at
        now = time.monotonic()
        if stage != last_stage or fraction >= 1.0 or now - last_at >= PROGRESS_SECONDS:
            last_stage, last_at = stage, now
            emit(stage, fraction)

    return progress
