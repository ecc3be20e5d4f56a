from __future__ import annotations

import sqlite3
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from holdfast.store.block import Entry, fingerprint_id
from holdfast.store.index import BlockIndex
from tests.fakes.stored_blocks import make_block, make_chain

BLOCKS = [
    *make_chain(4), *make_chain(2, first=100), make_block([], after=make_chain(2)[1], kind="state"),
    *make_chain(3, fingerprint="model two"),
]  # fmt: skip
MODEL_OF = {
    block.key: "model two" if number >= 7 else "model one" for number, block in enumerate(BLOCKS)
}
FINGERPRINTS = {fingerprint_id(name): name for name in ("model one", "model two")}
numbers = st.integers(0, len(BLOCKS) - 1)


def entry(number: int, *, file_bytes: int = 100, used: float = 1.0) -> Entry:
    block = BLOCKS[number].block
    return Entry(
        block=block,
        model=fingerprint_id(MODEL_OF[block.key]),
        file_bytes=file_bytes,
        last_used=used,
    )


class IndexAgainstADictionary(RuleBasedStateMachine):
    """The index behaves like a few dictionaries, even if closed and reopened between any two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "index.sqlite"
        self.index = BlockIndex(self.path)
        self.rows: dict[bytes, Entry] = {}
        self.pins: dict[tuple[bytes, str], float] = {}
        self.written: dict[str, int] = {}

    def teardown(self) -> None:
        self.index.close()
        self.folder.cleanup()

    @rule(
        chosen=st.lists(numbers, max_size=4),
        size=st.integers(1, 1000),
        used=st.floats(0, 100),
        day=st.sampled_from("ab"),
    )
    def add(self, chosen: list[int], size: int, used: float, day: str) -> None:
        entries = [entry(number, file_bytes=size, used=used) for number in chosen]
        self.index.add(entries, fingerprints=FINGERPRINTS)
        self.index.count_written(size, day=day)
        self.written[day] = self.written.get(day, 0) + size
        for added in entries:
            self.rows.setdefault(added.block.key, added)

    @rule(chosen=st.lists(numbers, max_size=4))
    def remove(self, chosen: list[int]) -> None:
        keys = {BLOCKS[number].key for number in chosen}
        self.index.remove(keys)
        for key in keys:
            self.rows.pop(key, None)
            self.pins = {pin: until for pin, until in self.pins.items() if pin[0] != key}

    @rule(chosen=st.lists(numbers, max_size=4))
    def remove_rows(self, chosen: list[int]) -> None:
        keys = {BLOCKS[number].key for number in chosen}
        self.index.remove_rows(keys)
        self.rows = {key: kept for key, kept in self.rows.items() if key not in keys}

    @rule(number=numbers, at=st.floats(0, 100))
    def touch(self, number: int, at: float) -> None:
        key = BLOCKS[number].key
        self.index.touch({key: at})
        if key in self.rows:
            self.rows[key] = replace(self.rows[key], last_used=max(self.rows[key].last_used, at))

    @rule(number=numbers, holder=st.sampled_from(["", "session"]), until=st.floats(0, 100))
    def pin(self, number: int, holder: str, until: float) -> None:
        self.index.pin([BLOCKS[number].key], holder=holder, until=until)
        self.pins[BLOCKS[number].key, holder] = until

    @rule(number=numbers, holder=st.sampled_from(["", "session"]))
    def unpin(self, number: int, holder: str) -> None:
        self.index.unpin([BLOCKS[number].key], holder=holder)
        self.pins.pop((BLOCKS[number].key, holder), None)

    @rule(now=st.floats(0, 100))
    def drop_old_pins(self, now: float) -> None:
        self.index.drop_old_pins(now)
        self.pins = {pin: until for pin, until in self.pins.items() if until > now}

    @rule()
    def reopen(self) -> None:
        self.index.close()
        self.index = BlockIndex(self.path)

    @invariant()
    def agrees(self) -> None:
        self.index.check_invariants()
        assert self.index.block_count() == len(self.rows)
        assert self.index.stored_bytes() == sum(kept.file_bytes for kept in self.rows.values())
        for now in (0.0, 50.0):
            pinned = {key for (key, _), until in self.pins.items() if until > now}
            for model in (None, *FINGERPRINTS):
                found = self.index.entries(now, model=model)
                expected = [
                    replace(kept, pinned=key in pinned)
                    for key, kept in self.rows.items()
                    if model in (None, kept.model)
                ]
                assert {kept.block.key: kept for kept in found} == {
                    kept.block.key: kept for kept in expected
                }
                assert [kept.block.start for kept in found] == sorted(
                    kept.block.start for kept in found
                )
        assert all(self.index.written_bytes(day) == self.written.get(day, 0) for day in "abc")
        assert self.index.places() == {
            key: (kept.model, kept.file_bytes) for key, kept in self.rows.items()
        }


TestIndexAgainstADictionary = IndexAgainstADictionary.TestCase
TestIndexAgainstADictionary.settings = settings(max_examples=30, stateful_step_count=25)


def test_an_in_memory_index_behaves_the_same() -> None:
    index = BlockIndex(Path(":memory:"))
    index.add([entry(0)], fingerprints=FINGERPRINTS)
    assert index.block_count() == 1
    index.check_invariants()


def test_models_are_identified_by_their_fingerprints(tmp_path: Path) -> None:
    index = BlockIndex(tmp_path / "i.sqlite")
    index.add([entry(0), entry(7)], fingerprints=FINGERPRINTS)
    assert index.fingerprints() == FINGERPRINTS


@pytest.mark.parametrize(
    "damage",
    ["start = start + 1", "parent_tokens = 7", "file_bytes = 0", "kind = 'state'", "kind = 'other'", "parent = zeroblob(32)",
     "seal = 0", "last_used = 'yesterday'", "start = -1", "parent = 'text'", "packed_tokens = x'00112233'", "model = 'other'"],
)  # fmt: skip
def test_a_row_changed_by_others_is_damage(tmp_path: Path, damage: str) -> None:
    index = BlockIndex(tmp_path / "i.sqlite")
    index.add([entry(0), entry(1)], fingerprints=FINGERPRINTS)
    assert [kept.block for kept in index.entries(0.0)] == [BLOCKS[0].block, BLOCKS[1].block]
    with sqlite3.connect(tmp_path / "i.sqlite") as other:
        other.execute(f"UPDATE blocks SET {damage} WHERE key = ?", (BLOCKS[1].key,))
    with pytest.raises(sqlite3.DatabaseError, match="a row"):
        index.entries(0.0)


def test_missing_totals_are_damage(tmp_path: Path) -> None:
    index = BlockIndex(tmp_path / "i.sqlite")
    with sqlite3.connect(tmp_path / "i.sqlite") as other:
        other.execute("DELETE FROM totals")
    with pytest.raises(sqlite3.DatabaseError):
        index.stored_bytes()
    index.recount()
    assert index.block_count() == 0


def test_foreign_files_and_formats_are_damage(tmp_path: Path) -> None:
    BlockIndex(tmp_path / "i.sqlite").close()
    with sqlite3.connect(tmp_path / "i.sqlite") as other:
        other.execute("PRAGMA user_version = 99")
    (tmp_path / "text.sqlite").write_text("this is no database" * 100)
    for name in ("i.sqlite", "text.sqlite"):
        with pytest.raises(sqlite3.DatabaseError):
            BlockIndex(tmp_path / name)
