"""The file of responses, for an event loop."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from holdfast.errors import ResponsesUnavailable
from holdfast.front.records.responses import RecordKey, RecordMissing, ResponseFile, ResponseStore

KEY = RecordKey("us", "resp_1")


async def test_calls_are_executed_in_order_even_if_not_awaited(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path)
    for number in range(20):
        _ = store.call(ResponseFile.put, RecordKey("us", f"resp_{number}"), {})
    assert await store.call(ResponseFile.totals) == (20, 20 * 10)
    with pytest.raises(RecordMissing):
        await store.call(ResponseFile.chain, RecordKey("us", "resp_20"))
    _ = store.call(ResponseFile.delete, RecordKey("us", "resp_3"))
    await store.close()
    again = ResponseStore(tmp_path)
    assert (await again.call(ResponseFile.totals))[0] == 19
    await again.close()


async def test_a_damaged_file_loses_only_its_contents(
    tmp_path: Path,
) -> None:
    (tmp_path / "responses").mkdir()
    (tmp_path / "responses" / "responses-1.sqlite").write_bytes(b"no database" * 1000)
    store = ResponseStore(tmp_path)
    await store.call(ResponseFile.put, KEY, {})
    assert (await store.call(ResponseFile.record, KEY)).body == {}
    await store.close()


async def test_an_unusable_disk_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.front.records.responses._BUSY_SECONDS", 0.0)
    store = ResponseStore(tmp_path)
    await store.call(ResponseFile.put, KEY, {})
    other = sqlite3.connect(tmp_path / "responses" / "responses-1.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ResponsesUnavailable, match="locked"):
        await store.call(ResponseFile.delete, KEY)
    other.close()
    await store.close()
