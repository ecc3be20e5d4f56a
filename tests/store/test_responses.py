"""What is kept of responses and conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.config import ResponsesSettings
from holdfast.store.responses import Item, RecordMissing, ResponseFile, StoredRecord

ROOMY = ResponsesSettings()


def item(number: int, text: str = "") -> Item:
    return {"id": f"msg_{number}", "type": "message", "role": "user", "content": text}


def record(name: str, *, is_running: bool = False, **body: Any) -> StoredRecord:
    return StoredRecord(id=name, body={"id": name, **body}, is_running=is_running)


def memory(limits: ResponsesSettings = ROOMY, *, now: list[float] | None = None) -> ResponseFile:
    return ResponseFile(None, limits, clock=lambda: 1000.0 if now is None else now[0])


def put(
    file: ResponseFile,
    name: str,
    *items: Item,
    output: Sequence[Item] = (),
    previous: str | None = None,
) -> None:
    file.put("us", record(name, is_running=True), kind="response", previous=previous, items=items)
    ended = StoredRecord(id=name, body={"id": name, "status": "completed"}, output=output)
    assert file.finish("us", ended, events=b"events of " + name.encode())


def test_a_response_is_found_as_it_ended_with_its_items_and_events() -> None:
    file = memory()
    put(file, "resp_1", item(1, "é\0"), item(2), output=[item(3)])
    assert file.record("us", "resp_1", kind="response").output == [item(3)]
    assert file.record("us", "resp_1", kind="response").body == {
        "id": "resp_1",
        "status": "completed",
    }
    assert file.items("us", "resp_1", kind="response") == [item(1, "é\0"), item(2)]
    assert file.events("us", "resp_1") == b"events of resp_1"


def test_nobody_else_finds_it() -> None:
    file = memory()
    put(file, "resp_1", item(1))
    file.put("us", record("conv_1"), kind="conversation", items=[item(2)])
    for tenant, name in (("them", "resp_1"), ("", "resp_1"), ("us", "resp_2"), ("us", "conv_1")):
        with pytest.raises(RecordMissing):
            file.record(tenant, name, kind="response")
        with pytest.raises(RecordMissing):
            file.chain(tenant, name)
        with pytest.raises(RecordMissing):
            file.delete(tenant, name, kind="response")
    assert file.find_items("them", ["msg_1"]) == {}
    assert file.find_items("us", ["msg_1", "msg_2", "msg_3"]) == {
        "msg_1": item(1),
        "msg_2": item(2),
    }


def test_a_chain_is_all_that_went_in_and_came_out_in_order() -> None:
    file = memory()
    put(file, "resp_1", item(1), output=[item(2), item(3)])
    put(file, "resp_2", item(4), output=[item(5)], previous="resp_1")
    put(file, "resp_3", item(6), output=[item(7)], previous="resp_1")
    assert [each["id"] for each in file.chain("us", "resp_2")] == [
        "msg_1",
        "msg_2",
        "msg_3",
        "msg_4",
        "msg_5",
    ]
    assert [each["id"] for each in file.chain("us", "resp_3")] == [
        "msg_1",
        "msg_2",
        "msg_3",
        "msg_6",
        "msg_7",
    ]
    file.delete("us", "resp_1", kind="response")
    with pytest.raises(RecordMissing, match="resp_1"):
        file.chain("us", "resp_2")


def test_using_a_chain_keeps_all_of_it_alive() -> None:
    now = [0.0]
    file = memory(ResponsesSettings(keep_seconds=10), now=now)
    put(file, "resp_1", item(1))
    put(file, "resp_2", item(2), previous="resp_1")
    put(file, "resp_alone", item(3))
    for _ in range(3):
        now[0] += 6
        assert len(file.chain("us", "resp_2")) == 2
    with pytest.raises(RecordMissing):
        file.record("us", "resp_alone", kind="response")
    now[0] += 10
    with pytest.raises(RecordMissing):
        file.chain("us", "resp_2")
    put(file, "resp_4")
    assert file.totals()[0] == 1


def test_what_is_larger_than_the_bound_goes_alone() -> None:
    file = memory(ResponsesSettings(max_bytes=1 << 16))
    put(file, "resp_1", item(1))
    put(file, "resp_2", item(2, "x" * (1 << 16)))
    assert file.record("us", "resp_1", kind="response")
    with pytest.raises(RecordMissing):
        file.record("us", "resp_2", kind="response")


def test_what_runs_is_not_removed_and_can_be_finished() -> None:
    now = [0.0]
    file = memory(ResponsesSettings(max_count=1), now=now)
    file.put("us", record("resp_1", is_running=True), kind="response")
    put(file, "resp_2")
    assert file.record("us", "resp_1", kind="response").is_running
    now[0] += 1
    assert file.finish("us", record("resp_1"))
    assert not file.record("us", "resp_1", kind="response").is_running
    assert file.totals()[0] == 1


def test_what_was_deleted_while_it_ran_does_not_come_back() -> None:
    file = memory()
    file.put("us", record("resp_1", is_running=True), kind="response")
    file.delete("us", "resp_1", kind="response")
    assert not file.finish("us", record("resp_1"))
    assert file.totals() == (0, 0)


def test_items_come_in_pages_of_either_order() -> None:
    file = memory()
    put(file, "resp_1", *map(item, range(5)), output=[item(9)])

    def pages(*, newest_first: bool) -> list[str]:
        after, found = None, []
        while True:
            page = file.page(
                "us", "resp_1", kind="response", limit=2, newest_first=newest_first, after=after
            )
            found += [each["id"] for each in page.items]
            if not page.has_more:
                return found
            after = found[-1]

    assert pages(newest_first=False) == [f"msg_{number}" for number in range(5)]
    assert pages(newest_first=True) == [f"msg_{number}" for number in reversed(range(5))]
    with pytest.raises(RecordMissing) as missing:
        file.page("us", "resp_1", kind="response", limit=2, newest_first=True, after="msg_9")
    assert missing.value.item_id == "msg_9"


def test_a_conversation_grows_shrinks_and_changes() -> None:
    file = memory()
    file.put("us", record("conv_1", title="a"), kind="conversation", items=[item(1)])
    file.append("us", "conv_1", [item(2), item(3)])
    file.delete_item("us", "conv_1", "msg_2")
    file.change("us", record("conv_1", title="b"), kind="conversation")
    assert file.items("us", "conv_1", kind="conversation") == [item(1), item(3)]
    assert file.record("us", "conv_1", kind="conversation").body["title"] == "b"
    with pytest.raises(RecordMissing):
        file.delete_item("us", "conv_1", "msg_2")
    file.delete("us", "conv_1", kind="conversation")
    assert file.totals() == (0, 0)


def test_it_is_there_again_when_the_file_is_opened_again_and_what_ran_is_lost(
    tmp_path: Path,
) -> None:
    first = ResponseFile(tmp_path, ROOMY)
    put(first, "resp_1", item(1), output=[item(2)])
    first.put(
        "us", record("resp_2", is_running=True), kind="response", previous="resp_1", items=[item(3)]
    )
    # another server at the same folder, while the first one lives
    other = ResponseFile(tmp_path, ROOMY)
    assert other.record("us", "resp_2", kind="response").is_running
    first.close()
    other.close()
    again = ResponseFile(tmp_path, ROOMY)
    assert [each["id"] for each in again.chain("us", "resp_1")] == ["msg_1", "msg_2"]
    found = again.record("us", "resp_2", kind="response")
    assert found.is_lost
    assert not found.is_running
    again.close()


class KeptResponses(RuleBasedStateMachine):
    """A file beside a list that keeps the same by the plainest means."""

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
    def go_on(self, which: int) -> None:
        self.now[0] += 1
        name = f"resp_{which}"
        try:
            found = self.file.chain("us", name)
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
            self.file.delete("us", name, kind="response")
            del self.used[name]

    def there(self) -> Mapping[str, StoredRecord]:
        found = {}
        for name in self.used:
            try:
                found[name] = self.file.record("us", name, kind="response")
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
