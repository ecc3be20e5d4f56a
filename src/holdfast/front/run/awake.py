"""No sleep while requests run: macOS would put a machine that nobody touches to sleep in the middle
of an answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys

PROGRAM = "caffeinate"  # macOS' own
# an agent's next request comes within a moment: one program for a whole conversation
LINGER_SECONDS = 5.0

_log = logging.getLogger("holdfast.front.run")


class Awake:
    """Keeps macOS awake from the first running request to the last, and does nothing elsewhere.

    Loop's thread only.
    """

    def __init__(
        self, *, platform: str = sys.platform, linger_seconds: float = LINGER_SECONDS
    ) -> None:
        self._program = shutil.which(PROGRAM) if platform == "darwin" else None
        self._linger_seconds = linger_seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._end: asyncio.TimerHandle | None = None

    def running(self, requests: int) -> None:
        """So many run from now on."""
        if self._program is None:
            return
        if self._end is not None:
            self._end.cancel()
            self._end = None
        if requests:
            self._begin(self._program)
        elif self._child is not None:
            self._end = asyncio.get_running_loop().call_later(self._linger_seconds, self.close)

    def close(self) -> None:
        """The machine may sleep."""
        if self._child is not None:
            self._child.kill()  # it has nothing to put in order, and is gone at once
            self._child.wait()
            self._child = None

    def _begin(self, program: str) -> None:
        if self._child is not None and self._child.poll() is None:
            return
        try:  # -i: no sleep of an idle system; -w: it ends with this process, however that ends
            self._child = subprocess.Popen(
                [program, "-i", "-w", str(os.getpid())], stdin=subprocess.DEVNULL
            )
        except OSError as error:
            _log.warning("the machine may fall asleep while requests run: %s: %s", program, error)
            self._program = None
