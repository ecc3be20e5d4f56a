"""What the device thread is at, and since when: what a heartbeat tells.

Pure: no clock, no socket, no lock.
"""

from __future__ import annotations

import math

import msgspec

from holdfast.wire.events import Heartbeat

# pages brought in from disk between two beats, from which on the process is taken to wait for its
# own memory
PAGING_FAULTS = 16


_RESTING = Heartbeat(activity="resting", expected_seconds=0.0)


class Pulse:
    """Written by the device thread, read by the thread of the heartbeat: one reference, replaced
    whole.

    Which heartbeat it is, and not what it says, tells whether the device thread is still at the
    same thing. Time counts only in beats that are really made: a process that was stopped, a
    machine that slept and one that is too busy to let the heart's thread run make fewer beats, and
    so the work seems shorter, never longer, than it is.
    """

    def __init__(self, *, interval_seconds: float = math.inf) -> None:
        """interval_seconds: from one beat to the next; nobody looks without one."""
        self.interval_seconds = interval_seconds
        self._occupation = self._seen = Heartbeat(activity="loading")
        self._lasting_seconds = 0.0

    def rest(self) -> None:
        """From now on the device thread waits for commands."""
        self._occupation = _RESTING

    def work(self, expected_seconds: float | None = None) -> None:
        """From now on it does something that takes so long at most, as far as was measured; None:
        nothing like it was.
        """
        self._occupation = Heartbeat(activity="working", expected_seconds=expected_seconds)

    def beat(self, *, elapsed_seconds: float, page_faults: int) -> Heartbeat:
        """The next heartbeat.

        Its thread only. elapsed_seconds, page_faults (those that read a disk): since the one before
        it.
        """
        occupation = self._occupation
        if occupation is not self._seen:
            self._seen, self._lasting_seconds = occupation, 0.0
        elif page_faults < PAGING_FAULTS:
            self._lasting_seconds += min(elapsed_seconds, self.interval_seconds)
        return msgspec.structs.replace(occupation, lasting_seconds=self._lasting_seconds)
