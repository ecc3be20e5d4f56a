from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.store.block import StoreRefused, fingerprint_id
from holdfast.store.folder import (
    MARKER,
    Records,
    StoreFolder,
)
from tests.fakes.stored_blocks import FINGERPRINT, make_block, write_file

MODEL = fingerprint_id(FINGERPRINT)


def prepared(path: Path) -> StoreFolder:
    folder = StoreFolder(path)
    folder.prepare()
    return folder


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], bool]:
    """Tells whether a folder or file was synced since the test began."""
    inodes = set()
    fsync = os.fsync

    def recording(file: int) -> None:
        fsync(file)
        inodes.add(os.fstat(file).st_ino)

    monkeypatch.setattr(os, "fsync", recording)
    return lambda path: path.stat().st_ino in inodes


def refuse_sync(monkeypatch: pytest.MonkeyPatch, refused: Callable[[int], bool], code: int) -> None:
    """Let `os.fsync` fail with an error number on files with certain inodes."""
    fsync = os.fsync

    def refusing(file: int) -> None:
        if refused(os.fstat(file).st_ino):
            raise OSError(code, os.strerror(code))
        fsync(file)

    monkeypatch.setattr(os, "fsync", refusing)


def test_the_names_of_all_new_ancestors_are_durable(
    tmp_path: Path, synced: Callable[[Path], bool]
) -> None:
    (tmp_path / "home").mkdir()
    folder = prepared(tmp_path / "home" / "cache" / "holdfast" / "store")
    assert all(map(synced, [folder.path, *folder.path.parents[:3]]))
    assert not synced(tmp_path)


def test_an_ancestor_that_could_not_be_synced_is_synced_at_the_next_attempt(
    tmp_path: Path, synced: Callable[[Path], bool]
) -> None:
    folder = StoreFolder(tmp_path / "cache" / "holdfast" / "store")
    inode = tmp_path.stat().st_ino
    with pytest.MonkeyPatch.context() as patch:
        refuse_sync(patch, lambda refused: refused == inode, errno.EIO)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            folder.prepare()
    folder.prepare()
    assert synced(tmp_path)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EROFS, errno.EACCES])
def test_the_parent_of_the_folder_may_refuse_to_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    inode = tmp_path.stat().st_ino
    refuse_sync(monkeypatch, lambda refused: refused == inode, code)
    assert prepared(tmp_path / "store").exists


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_may_refuse_to_sync_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refuse_sync(monkeypatch, lambda refused: True, code)
    folder = prepared(tmp_path / "store")
    assert folder.make_model_folder(FINGERPRINT).is_dir()


def test_the_name_of_a_models_folder_is_durable_even_if_its_creator_died(
    tmp_path: Path, synced: Callable[[Path], bool]
) -> None:
    folder = prepared(tmp_path / "store")
    for name in ("blocks", "sessions"):
        (folder.path / name / MODEL).mkdir()  # by a process that died before it synced the parent
    folder.make_model_folder(FINGERPRINT)
    Records(folder, model=MODEL).put("0" * 32, b"a record")
    assert synced(folder.path / "blocks")
    assert synced(folder.path / "sessions")


def test_a_new_folder_is_marked_and_private(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "deep" / "store")
    assert folder.exists
    assert folder.path.stat().st_mode & 0o777 == 0o700
    prepared(folder.path)
    ours = "answers blocks images incoming index quarantine responses sessions".split()
    assert sorted(path.name for path in folder.path.iterdir()) == [MARKER, *ours]


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "index.html", ".git"])
def test_a_folder_with_other_files_is_refused_unchanged(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(StoreRefused, match="holds other files"):
        prepared(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_empty_folder_with_system_files_is_accepted(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").write_text("")
    assert prepared(tmp_path).exists


def test_other_files_next_to_a_marker_are_tolerated(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "store")
    (folder.path / "readme.txt").write_text("mine")
    folder.check()
    assert (folder.path / "readme.txt").read_text() == "mine"


def test_a_store_without_its_marker_is_recognized_by_its_folders(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    folder.make_model_folder(FINGERPRINT)
    (folder.path / MARKER).unlink()
    assert prepared(tmp_path).exists


def test_folders_that_only_have_our_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "blocks" / "family photos").mkdir(parents=True)
    with pytest.raises(StoreRefused):
        prepared(tmp_path)


def test_other_formats_plain_files_and_inner_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "HOLDFAST-STORE-7").write_text("")
    (tmp_path / "file").write_text("")
    prepared(tmp_path / "linked")
    (tmp_path / "linked" / "blocks").rmdir()
    (tmp_path / "linked" / "blocks").symlink_to(tmp_path)
    for name, reason in (
        ("newer", "another version"),
        ("file", "not a folder"),
        ("linked", "not a plain folder"),
    ):
        with pytest.raises(StoreRefused, match=reason):
            StoreFolder(tmp_path / name).check()


def test_a_damaged_marker_is_accepted_and_left_alone(tmp_path: Path) -> None:
    marker = prepared(tmp_path).path / MARKER
    marker.write_bytes(b"\x00\xff")
    assert prepared(tmp_path).exists
    assert marker.read_bytes() == b"\x00\xff"


def test_a_folder_is_not_recreated_on_another_volume(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "store")
    folder._parent_device = -1  # as if the volume that held it was unmounted
    with pytest.raises(OSError, match="not mounted"):
        folder.prepare()


def test_the_lock_excludes_others_until_released(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    with (
        folder.exclusive(),
        pytest.raises(OSError, match="locked by another"),
        StoreFolder(tmp_path).exclusive(wait_seconds=0.0),
    ):
        pass
    with StoreFolder(tmp_path).exclusive(wait_seconds=0.0):
        pass


def test_the_lock_is_reentrant(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    with folder.exclusive(wait_seconds=0.0):
        with folder.exclusive(wait_seconds=0.0):
            pass
        with (
            pytest.raises(OSError, match="locked by another"),
            StoreFolder(tmp_path).exclusive(wait_seconds=0.0),
        ):
            pass


def test_only_plain_files_with_block_names_are_listed(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    block = make_block([1])
    write_file(folder.make_model_folder(FINGERPRINT) / f"{block.key.hex()}.block", block)
    place = folder.block_path(block.key, model=MODEL)
    (place.parent / f"{'0' * 63}.block").write_text("short name")
    (place.parent / f"{'0' * 64}.txt").write_text("other suffix")
    (place.parent / f"{'A' * 64}.block").write_text("other letters")
    (place.parent / f"{'1' * 64}.block").symlink_to(place)
    (place.parent / f"{'2' * 64}.block").mkdir()
    (folder.path / "blocks" / "foreign").mkdir()
    listed = list(folder.block_files())
    assert [(found.key, found.model, found.path, found.file_bytes) for found in listed] == [
        (block.key, MODEL, place, place.stat().st_size)
    ]
    assert list(folder.block_files(model=MODEL)) == listed
    assert list(folder.block_files(model="0" * 16)) == []


def test_only_files_of_dead_writers_are_abandoned(
    tmp_path: Path,
) -> None:
    living, looking = prepared(tmp_path), prepared(tmp_path)
    dead = prepared(tmp_path)
    for folder in (living, dead):
        (folder.incoming() / "x.part").write_text("")
    left = dead.incoming() / "x.part"
    os.close(dead._claim or 0)  # as a kill does
    with looking.abandoned() as found:
        assert found == [left]
        left.unlink()
    assert not left.parent.exists()
    assert (living.incoming() / "x.part").exists()
    (living.incoming() / "x.part").unlink()
    living.release()
    assert list((tmp_path / "incoming").iterdir()) == []


def test_a_missing_incoming_folder_is_recreated(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    first = folder.incoming()
    (first / "lock").unlink()
    first.rmdir()
    assert folder.incoming().is_dir()
    assert folder.incoming() != first
    folder.release()


def test_the_short_name_of_a_fingerprint_is_stable() -> None:
    assert fingerprint_id("fingerprint") == "899c2000b4172447"


def test_a_new_store_is_excluded_from_time_machine_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, calls = tmp_path / "bin", tmp_path / "calls"
    tools.mkdir()
    tool = tools / "tmutil"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    for _ in range(2):
        StoreFolder(tmp_path / "store").prepare()
    assert calls.read_text().splitlines() == [f"addexclusion {tmp_path / 'store'}"]
