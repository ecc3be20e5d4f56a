from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast.files import crash_reports_folder
from holdfast.front.fleet.crash_reports import (
    MOST_REPORTS,
    MOST_REQUESTS,
    CrashReport,
    RequestAtCrash,
    last_report,
    report_of,
    write_report,
)
from holdfast.wire.events import WorkerStatistics


def a_report(pid: int = 7, *, requests: int = 2) -> CrashReport:
    return report_of(
        "m",
        cause="died",
        how="signal SIGSEGV",
        pid=pid,
        served_seconds=1.5,
        figures=WorkerStatistics(running=2, resident_bytes=3),
        log=("Fatal Python error: Segmentation fault",),
        requests=(RequestAtCrash(prompt_tokens=5, drawn_tokens=1),) * requests,
    )


def test_the_last_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "crashes"
    assert last_report(str(folder)) is None
    write_report(str(folder), a_report())
    last = a_report(pid=8)
    write_report(str(folder), last)
    assert last_report(str(folder)) == last
    assert last.versions["mlx"]


def test_reports_are_bounded_in_number_and_in_what_they_tell(tmp_path: Path) -> None:
    for pid in range(MOST_REPORTS + 5):
        write_report(str(tmp_path), a_report(pid))
    assert len(list(tmp_path.iterdir())) == MOST_REPORTS
    crowded = a_report(requests=100)
    assert (len(crowded.requests), crowded.more_requests) == (MOST_REQUESTS, 100 - MOST_REQUESTS)


def test_a_damaged_report_hides_none_before_it(tmp_path: Path) -> None:
    write_report(str(tmp_path), a_report())
    (tmp_path / "9999.crash.json").write_text("{")
    found = last_report(str(tmp_path))
    assert found is not None
    assert found.pid == 7


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        write_report(str(tmp_path / "file" / "crashes"), a_report())
    assert "could not be kept" in caplog.text
    write_report("", a_report())


def test_they_lie_in_the_state_of_the_user() -> None:
    assert crash_reports_folder({"XDG_STATE_HOME": "/s"}) == "/s/holdfast/crashes"
