"""The index entries of blocks whose files are gone, and the cost of noticing that."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.store.block import BlockKey, Entry, fingerprint_id
from holdfast.store.index import BlockIndex
from tests.fakes.stored_blocks import make_block, make_chain

MODEL = "model one"
TRUNK = make_chain(4)
BLOCKS = [
    block.block
    for block in (
        *TRUNK,
        *(make_block([first] * 4, after=TRUNK[1]) for first in (50, 60)),
        make_block([], after=TRUNK[1], kind="state"),
        make_block([], after=TRUNK[3], kind="state"),
    )
]
numbers = st.integers(0, len(BLOCKS) - 1)


def entries(blocks: Iterable[int]) -> list[Entry]:
    return [
        Entry(block=BLOCKS[number], model=fingerprint_id(MODEL), file_bytes=9, last_used=1.0)
        for number in blocks
    ]


def filled(path: Path, blocks: Iterable[int] = range(len(BLOCKS))) -> BlockIndex:
    index = BlockIndex(path)
    index.add(entries(blocks), fingerprints={fingerprint_id(MODEL): MODEL})
    return index


def after_a_loss(rows: dict[BlockKey, Entry], lost: set[BlockKey]) -> dict[BlockKey, Entry]:
    """The remaining rows, by another formulation of the rule."""

    def is_needed(key: BlockKey) -> bool:
        return any(
            is_needed(child.block.key) or not (child.is_missing or child.block.key in lost)
            for child in rows.values()
            if child.block.parent_key == key
        )

    kept = {key: row for key, row in rows.items() if key not in lost}
    return kept | {
        key: replace(rows[key], file_bytes=0) for key in lost if key in rows and is_needed(key)
    }


@given(
    stored=st.sets(numbers), losses=st.lists(st.sets(numbers), max_size=3), again=st.sets(numbers)
)
def test_a_lost_block_is_remembered_while_stored_blocks_follow_it(
    stored: set[int], losses: list[set[int]], again: set[int]
) -> None:
    index = filled(Path(":memory:"), stored)
    rows = {entry.block.key: entry for entry in entries(stored)}
    for loss in losses:
        keys = {BLOCKS[number].key for number in loss}
        index.mark_lost(keys)
        rows = after_a_loss(rows, keys)
        assert {entry.block.key: entry for entry in index.entries(0.0)} == rows
        index.check_invariants()
        index.add(entries(again), fingerprints={})
        present = {key: entry for key, entry in rows.items() if not entry.is_missing}
        rows = rows | {entry.block.key: entry for entry in entries(again)} | present
    index.close()


def test_losing_a_block_scans_no_table(tmp_path: Path) -> None:
    index = filled(tmp_path / "i.sqlite")
    statements: list[str] = []
    index._database.set_trace_callback(statements.append)
    index.mark_lost([BLOCKS[1].key, BLOCKS[4].key])
    index._database.set_trace_callback(None)
    plans = [
        row[-1]
        for statement in statements
        if statement.split()[0] in ("SELECT", "DELETE", "WITH", "UPDATE", "INSERT")
        for row in index._database.execute(f"EXPLAIN QUERY PLAN {statement}")
    ]
    assert any("SEARCH" in plan for plan in plans)
    scanned = [plan for plan in plans if plan.startswith("SCAN")]
    assert set(scanned) <= {"SCAN below"}, "the blocks found so far, not the table"
    index.close()


def test_an_index_of_an_earlier_version_is_upgraded(tmp_path: Path) -> None:
    index = filled(tmp_path / "i.sqlite")
    index._database.execute("DROP INDEX IF EXISTS blocks_by_parent")
    index.close()
    index = BlockIndex(tmp_path / "i.sqlite")
    names = {name for (name,) in index._database.execute("SELECT name FROM sqlite_master")}
    assert "blocks_by_parent" in names
    assert len(index.entries(0.0)) == len(BLOCKS)
    index.close()
