"""Measures the progress of a process from outside, to tell a hang from a busy machine.

On a machine with more runnable threads than cores, everything takes longer, so being late does not
mean being broken. A process that hangs uses no processor time and reads nothing.
"""

from __future__ import annotations

import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TASKS = Path("/proc/self/task")
# A process that uses less of a core than this does not progress. Threads that only wait for the
# interpreter lock wake up 200 times a second, which takes 0.2 % of a core for each of them.
LEAST_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Progress:
    """The work that a process has done so far. processor_seconds: of all its threads. read_bytes:
    from disk, including pages read back from swap.
    """

    processor_seconds: float = 0.0
    read_bytes: int = 0


def progress_of(pid: int) -> Progress:
    """The work that a process of the same user has done so far; zeros if it is gone. Any thread."""
    import psutil  # the import takes 10 ms, which a starting server should not spend

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return Progress(times.user + times.system, _read_bytes(process))
    except psutil.Error:
        return Progress()


def _read_bytes(process: Any) -> int:
    """How much a process (psutil's) has read from disk; outside Linux, only its page-ins count."""
    import psutil

    if sys.platform != "linux":
        return int(getattr(process.memory_info(), "pageins", 0)) * mmap.PAGESIZE
    try:
        return int(process.io_counters().read_bytes)
    except psutil.AccessDenied:  # denied by a security module; processor time can still be read
        return 0


@dataclass(frozen=True, slots=True)
class QueueTimes:
    """How long the threads of this process have run, and how long they have waited for a core."""

    ran_seconds: float = 0.0
    waited_seconds: float = 0.0


def own_queue_times(tasks: Path = _TASKS) -> QueueTimes:
    """The times of this process; zeros if the system does not report them. Any thread.

    Source: Documentation/scheduler/sched-stats.rst, /proc/PID/task/TID/schedstat.
    """
    ran_ns = waited_ns = 0
    try:
        threads = os.listdir(tasks)
    except OSError:
        threads = []
    for thread in threads:
        try:
            thread_ran, thread_waited, _ = (tasks / thread / "schedstat").read_text().split()
        except (OSError, ValueError):
            continue  # the thread has ended
        ran_ns += int(thread_ran)
        waited_ns += int(thread_waited)
    return QueueTimes(ran_ns / 1e9, waited_ns / 1e9)


def share_of_core(before: QueueTimes, now: QueueTimes, *, elapsed_seconds: float) -> float:
    """The share of the time since `before` in which a process got a core when it wanted one: 1 if
    its threads never waited for a core, or did not want to run.
    """
    ran_seconds = max(now.ran_seconds - before.ran_seconds, 0.0)
    waited_seconds = max(now.waited_seconds - before.waited_seconds, 0.0)
    if ran_seconds < LEAST_SHARE * elapsed_seconds:
        return 1.0  # it waits for something other than a core
    return ran_seconds / (ran_seconds + waited_seconds)
