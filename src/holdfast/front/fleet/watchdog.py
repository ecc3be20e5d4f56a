"""Decides from a worker's heartbeats whether it hangs. Pure: no clock, no process."""

from __future__ import annotations

from holdfast.wire.events import Heartbeat

# a step hangs when it takes so many times what its like took at most, or, without any, what loading
# took
PATIENCE = 20.0
# times the longest silence: what a step may take at least of which nothing is known
LEAST_UNMEASURED = 8.0


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
