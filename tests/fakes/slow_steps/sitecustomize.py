"""Python imports this when it starts: the steps of a worker take long, without processor time, until
a file exists.

So an answer lasts long enough for a test to act, however fast the machine and however busy its
other processes are.
"""

from __future__ import annotations

import os
import sys
import time
from functools import wraps

STEP_SECONDS = 0.05

if "holdfast.worker" in sys.orig_argv:
    from holdfast.worker.loop.loop import WorkerLoop

    collect_step = WorkerLoop._collect_step
    until = os.environ["SLOW_STEPS_UNTIL"]

    @wraps(collect_step)
    def _collect_step(self: WorkerLoop, flight: object) -> None:
        if not os.path.exists(until):
            time.sleep(STEP_SECONDS)
        collect_step(self, flight)  # type: ignore[arg-type]

    WorkerLoop._collect_step = _collect_step  # type: ignore[method-assign]
