"""What the device thread is at, and since when: what a heartbeat tells. Pure: no clock, no socket, no lock."""

from __future__ import annotations

import msgspec

from holdfast.messages.events import Heartbeat

PAGING_FAULTS = 16  # pages brought in from disk between two beats, from which on the process is taken to wait for its own memory


_RESTING = Heartbeat(activity="resting", expected_seconds=0.0)


class Pulse:
    """Written by the device thread, read by the thread of the heartbeat: one reference, replaced whole.

    Which heartbeat it is, and not what it says, tells whether the device thread is still at the same thing.
    """

    def __init__(self) -> None:
        self.occupation = Heartbeat(activity="loading")

    def rest(self) -> None:
        """From now on the device thread waits for commands."""
        self.occupation = _RESTING

    def work(self, expected_seconds: float | None = None) -> None:
        """From now on it does something that takes so long at most, as far as was measured; None: nothing like it was."""
        self.occupation = Heartbeat(activity="working", expected_seconds=expected_seconds)


class BeatCounter:
    """Makes the heartbeats of a pulse. Time counts only in beats that are really made.

    A process that was stopped, a machine that slept and one that is too busy to let this thread run make fewer beats, and so
    the work seems shorter, never longer, than it is.
    """

    def __init__(self, pulse: Pulse, *, interval_seconds: float) -> None:
        self._pulse, self._interval_seconds = pulse, interval_seconds
        self._seen = pulse.occupation
        self._lasting_seconds = 0.0

    def beat(self, *, elapsed_seconds: float, page_faults: int) -> Heartbeat:
        """The next heartbeat. elapsed_seconds, page_faults (those that read a disk): since the one before it."""
        occupation = self._pulse.occupation
        if occupation is not self._seen:
            self._seen, self._lasting_seconds = occupation, 0.0
        elif page_faults < PAGING_FAULTS:
            self._lasting_seconds += min(elapsed_seconds, self._interval_seconds)
        return msgspec.structs.replace(occupation, lasting_seconds=self._lasting_seconds)
