"""The file of responses: damage, outages, several servers."""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.config import ResponsesSettings
from holdfast.front.records.responses import (
    FileDamaged,
    RecordKey,
    RecordMissing,
    ResponseFile,
    clear_responses,
    sealed,
    unsealed,
)

LIMITS = ResponsesSettings()


def kept(folder: Path) -> Path:
    return folder / "responses" / "responses-1.sqlite"


def write(folder: Path, *names: str) -> None:
    file = ResponseFile(folder, LIMITS)
    for name in names:
        items = [{"id": "msg_1", "text": "secret"}]
        file.put(RecordKey("us", name), {"id": name}, items=items)
    file.close()


def found(folder: Path, name: str) -> bool:
    """Whether it is found, at the second attempt at the latest."""
    file = ResponseFile(folder, LIMITS)
    try:
        for _ in range(2):
            try:
                file.items(RecordKey("us", name))
            except FileDamaged:
                continue
            except RecordMissing:
                return False
            return file.record(RecordKey("us", name)).body == {"id": name}
        raise AssertionError("damaged twice")
    finally:
        file.close()


def test_only_its_owner_may_read_the_file(tmp_path: Path) -> None:
    write(tmp_path, "resp_1")
    assert kept(tmp_path).stat().st_mode & 0o077 == 0
    assert kept(tmp_path).parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "content", [b"no database" * 1000, b"", b"SQLite format 3\0" + bytes(5000)]
)
def test_a_file_that_is_not_a_database_is_set_aside(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "resp_1")
    kept(tmp_path).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert not found(tmp_path, "resp_1")
    write(tmp_path, "resp_2")
    assert found(tmp_path, "resp_2")
    if content:
        assert [line.message.count("set aside") for line in caplog.records] == [1]
        assert (
            kept(tmp_path).with_name("responses-1.sqlite.damaged").read_bytes()[:16] == content[:16]
        )


@given(place=st.floats(0, 1), change=st.integers(1, 255))
@example(place=0.113333889458378, change=128)  # a text of the schema that is no longer UTF-8
@example(place=0.8570101831573376, change=1)  # an item's record
@example(place=3805 / 28671, change=7)  # the primary key in the schema
@settings(max_examples=30, deadline=None)
def test_a_changed_byte_is_never_returned(
    tmp_path_factory: pytest.TempPathFactory, place: float, change: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    write(folder, "resp_1")
    raw = bytearray(kept(folder).read_bytes())
    at = int(place * (len(raw) - 1))
    raw[at] ^= change
    kept(folder).write_bytes(bytes(raw))
    file = ResponseFile(folder, LIMITS)
    try:
        assert file.items(RecordKey("us", "resp_1")) == [{"id": "msg_1", "text": "secret"}]
        assert file.record(RecordKey("us", "resp_1")).body == {"id": "resp_1"}
    except (RecordMissing, FileDamaged, sqlite3.Error):
        pass
    finally:
        file.close()


@given(content=st.binary(max_size=60), place=st.integers(0, 100), change=st.integers(1, 255))
def test_a_seal_detects_every_change(content: bytes, place: int, change: int) -> None:
    blob = bytearray(sealed(content))
    assert unsealed(bytes(blob)) == content
    blob[place % len(blob)] ^= change
    with pytest.raises(sqlite3.DatabaseError):
        unsealed(bytes(blob))


def test_a_row_of_another_type_is_damage(tmp_path: Path) -> None:
    write(tmp_path, "resp_1")
    with sqlite3.connect(kept(tmp_path)) as database:
        database.execute("UPDATE items SET body = 1.5")
    assert not found(tmp_path, "resp_1")


def test_a_locked_file_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.front.records.responses._BUSY_SECONDS", 0.0)
    write(tmp_path, "resp_1")
    other = sqlite3.connect(kept(tmp_path), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError):
        write(tmp_path, "resp_2")
    other.execute("ROLLBACK")
    other.close()
    assert found(tmp_path, "resp_1")


def test_a_foreign_folder_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "holiday.jpg").touch()
    file = ResponseFile(tmp_path, LIMITS)
    with caplog.at_level(logging.WARNING):
        file.put(RecordKey("us", "resp_1"), {})
    assert file.record(RecordKey("us", "resp_1")).body == {}
    assert os.listdir(tmp_path) == ["holiday.jpg"]
    assert "kept in memory only" in caplog.text


def test_cleared_responses_are_gone_for_a_running_server(tmp_path: Path) -> None:
    file = ResponseFile(tmp_path, LIMITS)
    file.put(RecordKey("us", "resp_1"), {})
    clear_responses(tmp_path)
    with pytest.raises(RecordMissing):
        file.record(RecordKey("us", "resp_1"))
    file.close()
    clear_responses(tmp_path / "nothing")
