"""Stored responses and conversations."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.config import ResponsesSettings
from holdfast.errors import ResponsesUnavailable
from holdfast.front.records.responses import (
    FileDamaged,
    Item,
    RecordKey,
    RecordMissing,
    ResponseFile,
    ResponseStore,
    StoredRecord,
    clear_responses,
    sealed,
    unsealed,
)

ROOMY = ResponsesSettings()


def item(number: int, text: str = "") -> Item:
    return {"id": f"msg_{number}", "type": "message", "role": "user", "content": text}


def key(name: str, tenant: str = "us") -> RecordKey:
    return RecordKey(tenant, name, "conversation" if name.startswith("conv") else "response")


def memory(limits: ResponsesSettings = ROOMY, *, now: list[float] | None = None) -> ResponseFile:
    return ResponseFile(None, limits, clock=lambda: 1000.0 if now is None else now[0])


def put(
    file: ResponseFile,
    name: str,
    *items: Item,
    output: Sequence[Item] = (),
    previous: str | None = None,
) -> None:
    file.put(key(name), {"id": name}, previous=previous, items=items, is_running=True)
    body = {"id": name, "status": "completed"}
    file.finish(key(name), body, output=output, events=b"events of " + name.encode())


def finish(file: ResponseFile, name: str) -> None:
    file.finish(key(name), {"id": name}, output=(), events=b"")


def test_a_finished_response_is_found_with_items_and_events() -> None:
    file = memory()
    put(file, "resp_1", item(1, "é\0"), item(2), output=[item(3)])
    assert file.record(key("resp_1")).output == [item(3)]
    assert file.record(key("resp_1")).body == {
        "id": "resp_1",
        "status": "completed",
    }
    assert file.items(key("resp_1")) == [item(1, "é\0"), item(2)]
    assert file.events(key("resp_1")) == b"events of resp_1"


def test_other_tenants_do_not_find_it() -> None:
    file = memory()
    put(file, "resp_1", item(1))
    file.put(key("conv_1"), {}, items=[item(2)])
    for tenant, name in (("them", "resp_1"), ("", "resp_1"), ("us", "resp_2"), ("us", "conv_1")):
        unknown = RecordKey(tenant, name)
        with pytest.raises(RecordMissing):
            file.record(unknown)
        with pytest.raises(RecordMissing):
            file.chain(unknown)
        with pytest.raises(RecordMissing):
            file.delete(unknown)
    assert file.find_items("them", ["msg_1"]) == {}
    assert file.find_items("us", ["msg_1", "msg_2", "msg_3"]) == {
        "msg_1": item(1),
        "msg_2": item(2),
    }


def test_a_chain_is_all_inputs_and_outputs_in_order() -> None:
    file = memory()
    put(file, "resp_1", item(1), output=[item(2), item(3)])
    put(file, "resp_2", item(4), output=[item(5)], previous="resp_1")
    put(file, "resp_3", item(6), output=[item(7)], previous="resp_1")
    assert [each["id"] for each in file.chain(key("resp_2"))] == [
        "msg_1",
        "msg_2",
        "msg_3",
        "msg_4",
        "msg_5",
    ]
    assert [each["id"] for each in file.chain(key("resp_3"))] == [
        "msg_1",
        "msg_2",
        "msg_3",
        "msg_6",
        "msg_7",
    ]
    file.delete(key("resp_1"))
    with pytest.raises(RecordMissing, match="resp_1"):
        file.chain(key("resp_2"))


def test_using_a_chain_keeps_its_members_alive() -> None:
    now = [0.0]
    file = memory(ResponsesSettings(keep_seconds=10), now=now)
    put(file, "resp_1", item(1))
    put(file, "resp_2", item(2), previous="resp_1")
    put(file, "resp_alone", item(3))
    for _ in range(3):
        now[0] += 6
        assert len(file.chain(key("resp_2"))) == 2
    with pytest.raises(RecordMissing):
        file.record(key("resp_alone"))
    now[0] += 10
    with pytest.raises(RecordMissing):
        file.chain(key("resp_2"))
    put(file, "resp_4")
    assert file.totals()[0] == 1


def test_a_response_larger_than_the_bound_is_removed_alone() -> None:
    file = memory(ResponsesSettings(max_bytes=1 << 16))
    put(file, "resp_1", item(1))
    put(file, "resp_2", item(2, "x" * (1 << 16)))
    assert file.record(key("resp_1"))
    with pytest.raises(RecordMissing):
        file.record(key("resp_2"))


def test_a_running_response_is_not_removed_and_can_finish() -> None:
    now = [0.0]
    file = memory(ResponsesSettings(max_count=1), now=now)
    file.put(key("resp_1"), {}, is_running=True)
    put(file, "resp_2")
    assert file.record(key("resp_1")).is_running
    now[0] += 1
    finish(file, "resp_1")
    assert not file.record(key("resp_1")).is_running
    assert file.totals()[0] == 1


def test_a_response_deleted_while_running_stays_deleted() -> None:
    file = memory()
    file.put(key("resp_1"), {}, is_running=True)
    file.delete(key("resp_1"))
    with pytest.raises(RecordMissing):
        finish(file, "resp_1")
    assert file.totals() == (0, 0)


def test_a_conversation_grows_shrinks_and_changes() -> None:
    file = memory()
    file.put(key("conv_1"), {"title": "a"}, items=[item(1)])
    file.append(key("conv_1"), [item(2), item(3)])
    assert file.delete_item(key("conv_1"), "msg_2")
    file.change(key("conv_1"), {"title": "b"})
    assert file.items(key("conv_1")) == [item(1), item(3)]
    assert file.record(key("conv_1")).body["title"] == "b"
    assert not file.delete_item(key("conv_1"), "msg_2")
    file.delete(key("conv_1"))
    assert file.totals() == (0, 0)


def test_responses_survive_reopening_and_running_ones_are_lost(tmp_path: Path) -> None:
    first = ResponseFile(tmp_path, ROOMY)
    put(first, "resp_1", item(1), output=[item(2)])
    first.put(key("resp_2"), {}, previous="resp_1", items=[item(3)], is_running=True)
    # another server with the same folder, while the first one runs
    other = ResponseFile(tmp_path, ROOMY)
    assert other.record(key("resp_2")).is_running
    first.close()
    other.close()
    again = ResponseFile(tmp_path, ROOMY)
    assert [each["id"] for each in again.chain(key("resp_1"))] == ["msg_1", "msg_2"]
    found = again.record(key("resp_2"))
    assert found.is_lost
    assert not found.is_running
    again.close()


class KeptResponses(RuleBasedStateMachine):
    """A file compared with a simple list."""

    limits = ResponsesSettings(max_count=4, max_bytes=1 << 16, keep_seconds=50)

    def __init__(self) -> None:
        super().__init__()
        self.now = [1000.0]
        self.file = memory(self.limits, now=self.now)
        self.items: dict[str, list[Item]] = {}
        self.previous: dict[str, str | None] = {}
        self.used: dict[str, float] = {}
        self.made = 0

    def chain_of(self, name: str) -> list[str] | None:
        found: list[str] = []
        at: str | None = name
        while at is not None:
            if at not in self.used:
                return None
            found.append(at)
            at = self.previous[at]
        return found

    @rule(size=st.integers(0, 30_000), parent=st.integers(0, 30))
    def keep(self, size: int, parent: int) -> None:
        self.now[0] += 1
        self.made += 1
        name, previous = (
            f"resp_{self.made}",
            f"resp_{parent}" if f"resp_{parent}" in self.used else None,
        )
        items = [item(self.made * 2, "x" * size), item(self.made * 2 + 1)]
        put(self.file, name, items[0], output=items[1:], previous=previous)
        self.items[name], self.previous[name], self.used[name] = items, previous, self.now[0]

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now[0] += seconds

    @rule(which=st.integers(0, 30))
    def unpause(self, which: int) -> None:
        self.now[0] += 1
        name = f"resp_{which}"
        try:
            found = self.file.chain(key(name))
        except RecordMissing:
            return
        chain = self.chain_of(name)
        assert chain is not None
        assert found == [each for member in reversed(chain) for each in self.items[member]]
        for member in chain:
            self.used[member] = self.now[0]

    @rule(which=st.integers(0, 30))
    def delete(self, which: int) -> None:
        name = f"resp_{which}"
        if name in self.there():
            self.file.delete(key(name))
            del self.used[name]

    def there(self) -> Mapping[str, StoredRecord]:
        found = {}
        for name in self.used:
            try:
                found[name] = self.file.record(key(name))
            except RecordMissing:
                continue
        return found

    @invariant()
    def the_bounds_hold_and_the_latest_are_there(self) -> None:
        number, size = self.file.totals()
        assert number <= self.limits.max_count
        assert size <= self.limits.max_bytes
        there = self.there()
        assert all(self.used[name] > self.now[0] - self.limits.keep_seconds for name in there)
        gone = set(self.used) - set(there)
        if gone and there:
            assert max(self.used[name] for name in gone) <= min(self.used[name] for name in there)
        for name in gone:
            del self.used[name]


TestKeptResponses = KeptResponses.TestCase
TestKeptResponses.settings = hypothesis_settings(
    max_examples=25, stateful_step_count=25, deadline=None
)


def test_a_clock_jumping_ahead_deletes_no_response(tmp_path: Path) -> None:
    wall, steady = [1e9], [0.0]
    limits = ResponsesSettings(keep_seconds=100.0)

    def opened() -> ResponseFile:
        return ResponseFile(tmp_path, limits, clock=lambda: wall[0], steady=lambda: steady[0])

    file = opened()
    file.put(RecordKey("", "a"), {"id": "a"})
    wall[0] += 86_400 * 400
    for _ in range(2):
        file.put(RecordKey("", "b"), {"id": "b"})
        assert file.record(RecordKey("", "a")).body == {"id": "a"}
        file.delete(RecordKey("", "b"))
        file.close()
        file = opened()
    wall[0] -= 86_400 * 400
    assert file.record(RecordKey("", "a")).body == {"id": "a"}
    wall[0] += 101
    with pytest.raises(RecordMissing):
        file.record(RecordKey("", "a"))
    file.close()


def test_using_a_wrong_clock_does_not_make_it_trusted_later(tmp_path: Path) -> None:
    wall, steady = [1e9], [0.0]
    limits = ResponsesSettings(keep_seconds=100.0)

    def opened() -> ResponseFile:
        return ResponseFile(tmp_path, limits, clock=lambda: wall[0], steady=lambda: steady[0])

    file = opened()
    file.put(RecordKey("", "a"), {"id": "a"})
    file.close()
    wall[0] += 86_400 * 400
    for name in ("b", "c", "d"):
        file = opened()
        file.put(RecordKey("", name), {"id": name})
        assert file.record(RecordKey("", "a")).body == {"id": "a"}
        file.close()
        wall[0] += 900
        steady[0] += 900
    wall[0] += 900
    steady[0] += 900
    file = opened()  # an hour after the first use, the clock is the same
    file.put(RecordKey("", "e"), {"id": "e"})
    with pytest.raises(RecordMissing):
        file.record(RecordKey("", "a"))
    file.close()


def test_stamps_of_a_corrected_clock_are_harmless(tmp_path: Path) -> None:
    wall = [1e9]
    limits = ResponsesSettings(keep_seconds=100.0)

    def opened() -> ResponseFile:
        return ResponseFile(tmp_path, limits, clock=lambda: wall[0], steady=lambda: 0.0)

    for name, days in (("a", 0), ("b", 400)):
        wall[0] += 86_400 * days
        file = opened()
        file.put(RecordKey("", name), {"id": name})
        file.close()
    wall[0] -= 86_400 * 400 - 101
    file = opened()
    with pytest.raises(RecordMissing):
        file.record(RecordKey("", "a"))
    assert file.record(RecordKey("", "b")).body == {"id": "b"}
    file.close()


def test_a_response_used_after_a_long_pause_is_not_expired(tmp_path: Path) -> None:
    wall, steady = [1e9], [0.0]
    limits = ResponsesSettings(keep_seconds=3 * 86_400.0)

    def opened() -> ResponseFile:
        return ResponseFile(tmp_path, limits, clock=lambda: wall[0], steady=lambda: steady[0])

    file = opened()
    file.put(RecordKey("", "first"), {})
    file.close()
    wall[0] += 40 * 86_400
    for name in ("second", "third"):  # the server is restarted twice
        file = opened()
        file.put(RecordKey("", name), {"id": name})
        wall[0] += 1800
        steady[0] += 1800
        file.close()
    file = opened()
    for _ in range(3):
        wall[0] += 1800
        steady[0] += 1800
        assert file.record(RecordKey("", "second")).body == {"id": "second"}
        assert file.record(RecordKey("", "third")).body == {"id": "third"}
    with pytest.raises(RecordMissing):
        file.record(RecordKey("", "first"))
    file.close()


# The file of responses: damage, outages, several servers.

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


# The file of responses, for an event loop.

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


async def test_a_damaged_file_loses_only_its_contents(tmp_path: Path) -> None:
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
