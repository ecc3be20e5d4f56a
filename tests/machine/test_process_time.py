from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from holdfast.machine.process_time import (
    QueueTimes,
    own_queue_times,
    progress_of,
    share_of_core,
)

LIMIT_SECONDS = 60.0


def test_a_running_process_makes_progress_and_a_stopped_one_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        end = time.monotonic() + LIMIT_SECONDS
        while progress_of(process.pid).processor_seconds < 0.1:
            assert time.monotonic() < end
        os.kill(process.pid, signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < end
        before = progress_of(process.pid)
        assert progress_of(process.pid) == before
    finally:
        process.kill()
        process.wait()


def test_an_ended_process_makes_zero_progress() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert progress_of(process.pid).processor_seconds == 0.0


def test_this_process_has_progress() -> None:
    before = own_queue_times()
    if before.ran_seconds == 0.0:
        pytest.skip("this system does not count how long threads wait for a core")
    end = time.process_time() + 0.05
    while time.process_time() < end:
        continue
    assert own_queue_times().ran_seconds >= before.ran_seconds + 0.04


def test_a_system_without_queue_times_reports_zeros(tmp_path: Path) -> None:
    assert own_queue_times(tmp_path / "missing") == QueueTimes()
    (tmp_path / "12").mkdir()
    assert own_queue_times(tmp_path) == QueueTimes()


@pytest.mark.parametrize(
    ("ran", "waited", "share"),
    [
        (1.0, 0.0, 1.0),  # it has a core for itself
        (0.25, 0.75, 0.25),
        (0.5, 1.5, 0.25),  # two threads
        (0.0, 0.0, 1.0),  # it waits for a device
        (0.001, 0.5, 1.0),  # the time of other threads; the relevant one does not want to run
    ],
)
def test_the_core_share_is_run_time_over_wanted_time(
    ran: float, waited: float, share: float
) -> None:
    before = QueueTimes(10.0, 20.0)
    now = QueueTimes(10.0 + ran, 20.0 + waited)
    assert share_of_core(before, now, elapsed_seconds=1.0) == pytest.approx(share)


def test_ended_threads_do_not_cause_negative_times() -> None:
    assert share_of_core(QueueTimes(9.0, 9.0), QueueTimes(1.0, 1.0), elapsed_seconds=1.0) == 1.0
