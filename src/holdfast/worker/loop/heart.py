"""The thread of a worker process that says that it is alive, and what the device thread is at.

It touches no MLX.
"""

from __future__ import annotations

import resource
import threading
import time

import msgspec
import zmq

from holdfast.worker.loop.pulse import Pulse


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
