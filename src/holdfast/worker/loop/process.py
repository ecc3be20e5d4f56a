"""The worker as a process: the main thread handles signals and watches the parent process, the
device thread loads the model and serves it.

Everything that touches MLX happens on the device thread, from the first import to
`mx.clear_streams()`.
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

import msgspec

from holdfast.errors import ConfigError, ModelLoadError, UnusableModel
from holdfast.wire.commands import Assignment, WorkerSettings
from holdfast.wire.events import LoadProgress, ModelInfo, WorkerFailed, WorkerReady
from holdfast.worker.cpu.blas import prepare_blas
from holdfast.worker.loop.inbox import Heart, Inbox, Progress, Pulse, ZmqInbox
from holdfast.worker.loop.loop import WorkerLoop

PROGRESS_SECONDS = 0.1
PARENT_CHECK_SECONDS = 1.0
GRACE_SECONDS = 8.0  # for the step under way and the last messages at shutdown
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger("holdfast.worker")


class WorkerEnd(enum.IntEnum):
    """How a worker ended; the exit code of its process."""

    IN_ORDER = 0
    BROKEN = 1
    BAD_INPUT = 2


LoopBuilder = Callable[[Inbox, Progress], tuple[WorkerLoop, ModelInfo]]
Serve = Callable[[Inbox, WorkerSettings, Pulse], WorkerEnd]


def run_process(serve: Serve) -> int:
    """Read the assignment from standard input and serve it; returns the exit code."""
    # A terminal's Ctrl-C and a service manager's SIGTERM go to the whole process group. The worker
    # ignores them, because the front waits for running answers before it ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wake_reader, wake_writer = os.pipe()
    watch = _Watch(wake_writer)
    faulthandler.enable()  # logs where MLX crashed, so the crash report contains it
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
    # Python restores the default action of handlers at exit, and a late signal would kill us.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return int(ends[0]) if ends else int(WorkerEnd.BROKEN)


def serve_model(inbox: Inbox, settings: WorkerSettings, pulse: Pulse | None = None) -> WorkerEnd:
    """Load the model and serve the inbox until shutdown.

    Call this on a thread that lives as long as the model. pulse: reports what the thread does.
    """
    prepare_blas(settings.model.threads)  # must precede the first import of mlx.core
    was_gc_enabled = gc.isenabled()
    gc.disable()  # looking through what is imported, all of which stays, takes 15 % longer
    try:
        from holdfast.worker.loop import device, serving
    finally:
        if was_gc_enabled:
            gc.enable()
    built: list[tuple[WorkerLoop, ModelInfo]] = []

    def build(inbox: Inbox, progress: Progress) -> tuple[WorkerLoop, ModelInfo]:
        built.append(serving.build_loop(inbox, progress, settings=settings, pulse=pulse or Pulse()))
        return built[0]

    try:
        return live(inbox, build)
    finally:
        device.finish_steps()  # a step may use memory that belongs to the model
        built.clear()
        # free arrays in reference cycles while this thread still can
        gc.collect()
        device.release_device()


def live(inbox: Inbox, build: LoopBuilder) -> WorkerEnd:
    """Build the loop, report to the front, serve until shutdown, and close the inbox.

    Returns how the worker ended.
    """
    end = WorkerEnd.BROKEN
    try:
        loop, info = build(inbox, _throttled_progress(inbox))
        inbox.send([WorkerReady(pid=os.getpid(), model=info)])
        loop.run()
        end = WorkerEnd.IN_ORDER
    except (ModelLoadError, ConfigError) as error:
        is_unusable = isinstance(error, UnusableModel)
        failure = WorkerFailed(message=str(error), fatal_input=True, bad_files=is_unusable)
        inbox.send([failure])
        end = WorkerEnd.BAD_INPUT
    finally:
        if end is WorkerEnd.BROKEN:
            logger.exception("the worker exits because its device thread failed")
        inbox.close()
    return end


def _throttled_progress(inbox: Inbox) -> Progress:
    """Return a function that sends load progress to the front: when a stage begins or ends, and
    otherwise only a few times a second, because progress is reported for every tensor.
    """
    last_stage = ""
    last_at = 0.0

    def progress(stage: str, fraction: float) -> None:
        nonlocal last_stage, last_at
        now = time.monotonic()
        if stage != last_stage or fraction >= 1.0 or now - last_at >= PROGRESS_SECONDS:
            last_stage = stage
            last_at = now
            inbox.send([LoadProgress(stage=stage, fraction=fraction)])

    return progress


class _Watch:
    """Waits for the device thread, and wakes it when the process has to end. Main thread only."""

    def __init__(self, wake_writer: int) -> None:
        self._wake_writer = wake_writer
        self._ends_at: float | None = None

    def handle_sigterm(self, parent_pid: int) -> None:
        """Shut down if the front is gone; otherwise wait for the front's command over the link."""
        if os.getppid() != parent_pid:
            self.ask_to_end()

    def ask_to_end(self) -> None:
        """Wake the device thread so that it shuts down within the grace time."""
        if self._ends_at is None:
            self._ends_at = time.monotonic() + GRACE_SECONDS
            os.write(self._wake_writer, b".")

    def wait_for(self, thread: threading.Thread, *, parent_pid: int) -> None:
        """Wait for the thread, but exit the process when the grace time is over."""
        while thread.is_alive():
            thread.join(PARENT_CHECK_SECONDS)
            if os.getppid() != parent_pid:
                self.ask_to_end()
            if self._ends_at is not None and thread.is_alive() and time.monotonic() > self._ends_at:
                logger.error(
                    "the device did not finish within %.0f s; the worker exits", GRACE_SECONDS
                )
                os._exit(WorkerEnd.BROKEN)


def _die_with_parent() -> None:
    """On Linux, get SIGTERM when the front ends; other systems only poll (`_Watch.wait_for`)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            logger.warning(
                "the kernel refuses to signal the end of the parent process (error %d); the worker "
                "polls instead",
                ctypes.get_errno(),
            )
