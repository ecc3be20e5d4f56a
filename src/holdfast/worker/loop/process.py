"""The worker as a process: its main thread handles signals and watches the parent, its device
thread does the work.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from holdfast.wire.commands import Assignment, WorkerSettings
from holdfast.worker.loop.inbox import Inbox, ZmqInbox
from holdfast.worker.loop.lifecycle import WorkerEnd
from holdfast.worker.loop.pulse import Pulse

PARENT_CHECK_SECONDS = 1.0
GRACE_SECONDS = 8.0  # for the step under way and the last messages, once the end is asked for
_PR_SET_PDEATHSIG = 1

Serve = Callable[[Inbox, WorkerSettings, Pulse], WorkerEnd]
logger = logging.getLogger("holdfast.worker")


class Heart:
    """Sends a heartbeat at once and then at every interval of the pulse, until it is stopped.

    Only the last one is kept on the way (CONFLATE), so a front that does not read them makes
    nothing pile up.
    """

    def __init__(self, endpoint: str, pulse: Pulse) -> None:
        self._endpoint, self._pulse = endpoint, pulse
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-heart", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Beat no more; waits for the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            for option, value in ((zmq.CONFLATE, 1), (zmq.LINGER, 0)):
                socket.setsockopt(option, value)
            socket.connect(self._endpoint)
            self._beat(socket)

    def _beat(self, socket: zmq.Socket[bytes]) -> None:
        encoder = msgspec.msgpack.Encoder()
        beaten_at, faults = time.monotonic(), _page_faults()
        while True:
            now, faults_now = time.monotonic(), _page_faults()
            beat = self._pulse.beat(
                elapsed_seconds=now - beaten_at, page_faults=faults_now - faults
            )
            beaten_at, faults = now, faults_now
            socket.send(encoder.encode(beat))  # never blocks: a newer one replaces an older one
            if self._stopped.wait(self._pulse.interval_seconds):
                return


def _page_faults() -> int:
    """Pages of this process that had to be read from a disk so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


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
