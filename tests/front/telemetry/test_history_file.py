from __future__ import annotations

import asyncio
import logging
import os
import stat
from pathlib import Path

import pytest

from holdfast.front.telemetry import history_file
from holdfast.front.telemetry.history import Cell, PerformanceHistory
from holdfast.front.telemetry.history_file import HistoryFile


def opened(path: Path) -> tuple[PerformanceHistory, HistoryFile]:
    history = PerformanceHistory()
    file = HistoryFile(history, path)
    file.open()
    return history, file


def answers(history: PerformanceHistory) -> int:
    return history.report("7d").total.answers


async def filled(path: Path, *, times: int = 1) -> None:
    history, file = opened(path)
    for _ in range(times):
        history.add("m", Cell(answers=1))
    await file.close()


async def test_the_history_continues_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "performance" / "server-1.history"
    await filled(path)
    await filled(path, times=2)
    history, file = opened(path)
    assert answers(history) == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await file.close()


async def test_a_server_without_requests_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "server-1.history"
    await filled(path, times=0)
    assert not path.exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "replaced", "emptied", "too long"])
async def test_a_damaged_file_is_an_empty_history_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "server-1.history"
    await filled(path)
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-1],
            "flipped": content[:20] + bytes([content[20] ^ 1]) + content[21:],
            "replaced": b"something else",
            "emptied": b"",
            "too long": content + b"\x00" * (20 << 20),
        }[damage]
    )
    with caplog.at_level(logging.WARNING):
        history, file = opened(path)
    assert answers(history) == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    history.add("m", Cell(answers=1))
    await file.close()
    history, file = opened(path)
    assert answers(history) == 1
    await file.close()


async def test_only_one_server_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "server-1.history"
    first, first_file = opened(path)
    second, second_file = opened(path)
    first.add("m", Cell(answers=1))
    second.add("m", Cell(answers=5))
    await second_file.close()
    assert not path.exists()
    await first_file.close()
    history, file = opened(path)
    assert answers(history) == 1
    await file.close()


async def test_a_folder_that_cannot_be_created_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    history, file = opened(tmp_path / "file" / "server-1.history")
    history.add("m", Cell(answers=1))
    await file.close()
    assert answers(history) == 1
    assert ["history of the performance" in record.message for record in caplog.records] == [True]


async def test_a_failed_save_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "server-1.history"
    await filled(path)

    def refuse(*arguments: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        await filled(path)
    assert "is not saved: no space" in caplog.text
    history, file = opened(path)
    assert answers(history) == 1
    await file.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        ".server-1.history.lock",
        "server-1.history",
    ]


async def test_changes_are_saved_after_a_while_without_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_file, "SAVE_SECONDS", 0.0)
    path = tmp_path / "server-1.history"
    history, file = opened(path)
    for _ in range(2):
        history.add("m", Cell(answers=1))
        while not path.exists():
            await asyncio.sleep(0)
        path.unlink()
    await file.close()
    assert not path.exists()  # nothing has changed since
