from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast.files import crash_reports_folder
from holdfast.front.fleet.worker_files import (
    MOST_REPORTS,
    CrashReport,
    RequestAtCrash,
    installed_versions,
    last_report,
    write_report,
)


def a_report(pid: int = 7) -> CrashReport:
    return CrashReport(
        at=f"2026-01-01T00:00:{pid:02}.000+00:00",
        model="m",
        cause="died",
        how="signal SIGSEGV",
        pid=pid,
        served_seconds=1.5,
        running=2,
        resident_bytes=3,
        log=("Fatal Python error: Segmentation fault",),
        requests=(RequestAtCrash(prompt_tokens=5, generated_tokens=1),) * 2,
        versions=installed_versions(),
    )


def test_the_last_report_is_read_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "crashes"
    assert last_report(str(folder)) is None
    write_report(str(folder), a_report())
    last = a_report(pid=8)
    write_report(str(folder), last)
    assert last_report(str(folder)) == last
    assert last.versions["mlx"]


def test_the_oldest_reports_are_deleted(tmp_path: Path) -> None:
    for pid in range(MOST_REPORTS + 5):
        write_report(str(tmp_path), a_report(pid))
    assert len(list(tmp_path.iterdir())) == MOST_REPORTS
    newest = last_report(str(tmp_path))
    assert newest is not None
    assert newest.pid == MOST_REPORTS + 4


def test_a_damaged_report_does_not_hide_earlier_ones(tmp_path: Path) -> None:
    write_report(str(tmp_path), a_report())
    (tmp_path / "9999.crash.json").write_text("{")
    found = last_report(str(tmp_path))
    assert found is not None
    assert found.pid == 7


def test_an_unwritable_folder_costs_only_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        write_report(str(tmp_path / "file" / "crashes"), a_report())
    assert "cannot write the crash report" in caplog.text
    write_report("", a_report())


def test_reports_are_in_the_users_state_folder() -> None:
    assert crash_reports_folder({"XDG_STATE_HOME": "/s"}) == "/s/holdfast/crashes"
