from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast import files
from holdfast.files import LOCK, abandoned, claim, lock_file, sweep, try_lock

PREFIX = "ours."
HOLDS = """
import pathlib, sys
from holdfast.files import claim
print(claim(pathlib.Path(sys.argv[1]), prefix="ours.").folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that holds a claim in `tmp_path`, until it is killed."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )


def test_only_leftovers_of_killed_processes_are_removed(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    (theirs / "session").write_text("in the clear")
    mine = claim(tmp_path, prefix=PREFIX)
    sweep(tmp_path, prefix=PREFIX)
    assert theirs.is_dir()
    other.kill()
    other.wait()
    sweep(tmp_path, prefix=PREFIX)
    assert list(tmp_path.iterdir()) == [mine.folder]
    mine.give_back()
    assert list(tmp_path.iterdir()) == []


def test_a_claimed_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    mine = claim(tmp_path, prefix=PREFIX)
    assert mine.folder.stat().st_mode & 0o777 == 0o700
    assert mine.folder.name.startswith(PREFIX)
    mine.give_back()


def test_only_own_folders_are_swept(tmp_path: Path) -> None:
    (tmp_path / "ours.but a file").write_text("")
    (tmp_path / "theirs.0").mkdir(mode=0o700)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "ours.link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "ours.open").mkdir(mode=0o755)
    (tmp_path / "ours.abandoned before it was locked").mkdir(mode=0o700)
    sweep(tmp_path, prefix=PREFIX)
    assert {path.name for path in tmp_path.iterdir()} == {
        "ours.but a file",
        "theirs.0",
        "elsewhere",
        "ours.link",
        "ours.open",
    }


def test_a_missing_location_contains_nothing(tmp_path: Path) -> None:
    sweep(tmp_path / "nowhere", prefix=PREFIX)
    with pytest.raises(FileNotFoundError):
        claim(tmp_path / "nowhere", prefix=PREFIX)


def test_an_abandoned_folder_cannot_be_taken_by_others(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with (
        abandoned([tmp_path / "a", tmp_path / "gone"]) as first,
        abandoned([tmp_path / "a"]) as second,
    ):
        assert (first, second) == ([tmp_path / "a"], [])
    assert (tmp_path / "a" / LOCK).is_file()


def test_a_recreated_lock_file_is_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"{PREFIX}1"
    folder.mkdir(mode=0o700)
    (folder / LOCK).touch()
    owners: list[int] = []

    def locked_late(file: int) -> bool:
        if not owners:  # the file is open, but not locked yet
            (folder / LOCK).unlink()
            file_of_owner = lock_file(folder)
            assert file_of_owner is not None
            owners.append(file_of_owner)
            assert try_lock(file_of_owner)
        return try_lock(file)

    monkeypatch.setattr(files, "try_lock", locked_late)
    sweep(tmp_path, prefix=PREFIX)
    assert (folder / LOCK).is_file()
    os.close(owners[0])
    sweep(tmp_path, prefix=PREFIX)
    assert not folder.exists()


def test_no_living_claim_is_swept_during_concurrent_claims(tmp_path: Path) -> None:
    ended = threading.Event()

    def sweep_on_and_on() -> None:
        while not ended.is_set():
            sweep(tmp_path, prefix=PREFIX)

    sweepers = [threading.Thread(target=sweep_on_and_on) for _ in range(2)]
    for sweeper in sweepers:
        sweeper.start()
    claims = [claim(tmp_path, prefix=PREFIX) for _ in range(100)]
    ended.set()
    for sweeper in sweepers:
        sweeper.join()
    assert {path for path in tmp_path.iterdir() if (path / LOCK).is_file()} >= {
        mine.folder for mine in claims
    }
    for mine in claims:
        mine.give_back()
