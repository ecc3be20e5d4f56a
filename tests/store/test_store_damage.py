"""Random damage to everything in a store's folder: no wrong block is returned, and no request
fails.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from holdfast.store.block import BadBlock, BlockMissing
from holdfast.store.store import BlockStore
from tests.fakes.stored_blocks import FINGERPRINT, bytes_of, make_block, make_chain

TREE = [
    *make_chain(8, part_bytes=(500, 700)),
    *make_chain(3, first=900, after=make_chain(3, part_bytes=(500, 700))[2], part_bytes=(300,)),
    make_block([], after=make_chain(4, part_bytes=(500, 700))[3], kind="state", part_bytes=(200,)),
]
NEW = make_block([4242])


def damage(folder: Path, dice: random.Random) -> str:
    """Damage one file or folder.

    Not to the memory that SQLite shares: cutting it kills its users.
    """
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".bad", ".sqlite-shm")
    )
    file, other = dice.choice(files), dice.choice(files)
    data = bytearray(file.read_bytes())
    what = dice.choice(
        [
            "flip",
            "flip",
            "flip",
            "cut",
            "grow",
            "zero",
            "delete",
            "swap",
            "copy",
            "index",
            "folder",
            "foreign",
        ]
    )
    if what == "flip" and data:
        for _ in range(dice.choice([1, 1, 8])):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        file.write_bytes(data)
    elif what == "cut":
        os.truncate(file, dice.randrange(len(data) + 1))
    elif what == "grow":
        file.write_bytes(data + dice.randbytes(dice.randrange(1, 300)))
    elif what == "zero":
        at = dice.randrange(len(data) + 1)
        file.write_bytes(data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :])
    elif what == "delete":
        file.unlink()
    elif what == "swap":
        theirs = other.read_bytes()
        other.write_bytes(data)
        file.write_bytes(theirs)
    elif what == "copy":
        (other.with_name(file.name) if dice.random() < 0.5 else other).write_bytes(data)
    elif what == "index":
        shutil.rmtree(folder / "index", ignore_errors=True)
    elif what == "folder":
        shutil.rmtree(dice.choice([path for path in folder.iterdir() if path.is_dir()]))
    elif what == "foreign":
        (
            file.parent
            / dice.choice(["note.txt", "0" * 64 + ".block", "x.sqlite", "9" * 20 + "-2.sqlite"])
        ).write_bytes(data)
    return what


def read_all(store: BlockStore) -> set[bytes]:
    """Request every block; returned ones are right."""
    right: set[bytes] = set()
    for block in TREE:
        try:
            assert bytes_of(store.read(block.key).result(60)) == block
        except (BadBlock, BlockMissing):
            continue
        right.add(block.key)
    return right


def entries_are_right(store: BlockStore) -> None:
    known = {stored.key: stored.block for stored in [*TREE, NEW]}
    for entry in store.entries():
        assert entry.block == known[entry.block.key]


@pytest.fixture(scope="module")
def sound_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "s"
    with BlockStore(folder, fingerprint=FINGERPRINT) as store:
        for block in TREE:
            store.put(block)
        assert store.flush()
    return folder


def check_damaged(sound_store: Path, folder: Path, seed: int) -> None:
    """Damage a copy of the store while closed, then while open; repair it by putting everything
    again.
    """
    shutil.copytree(sound_store, folder)
    dice = random.Random(seed)
    for _ in range(dice.choice([1, 1, 3])):
        damage(folder, dice)
    with BlockStore(folder, fingerprint=FINGERPRINT) as store:
        entries_are_right(store)
        read_all(store)
        store.flush()
        if dice.random() < 0.5:
            damage(folder, dice)
            entries_are_right(store)
            read_all(store)
        store.put(NEW)
        store.flush()
    with BlockStore(folder, fingerprint=FINGERPRINT) as store:
        read_all(store)
        store.flush()
        for block in TREE:
            store.put(block)
        assert store.flush()
        assert read_all(store) == {block.key for block in TREE}
        entries_are_right(store)
        assert {entry.block.key for entry in store.entries()} >= {block.key for block in TREE}
        store.check_invariants()
    shutil.rmtree(folder)


@pytest.mark.parametrize("seed", range(30))
def test_damage_costs_blocks_but_never_correctness(
    sound_store: Path, tmp_path: Path, seed: int
) -> None:
    check_damaged(sound_store, tmp_path / "s", seed)


@pytest.mark.slow
def test_a_thousand_random_damages_give_no_wrong_answer(sound_store: Path, tmp_path: Path) -> None:
    for seed in range(100, 1100):
        check_damaged(sound_store, tmp_path / "s", seed)
