from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.front.fleet import worker_files
from holdfast.front.fleet.worker_files import WorkerTemporaries

LIBRARY = Path("mlx", "0.0.0", "cpu", "libx.so")


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "caches" / "compiled"


class Worker:
    """Use the folder like a worker."""

    def __init__(self, kept: Path | str) -> None:
        self.temporaries = WorkerTemporaries(str(kept))
        self.folder = Path(self.temporaries.environment["TMPDIR"])

    def compile(self, content: str = "compiled") -> None:
        (self.folder / LIBRARY).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / LIBRARY).write_text(content)

    def found(self) -> str:
        return (self.folder / LIBRARY).read_text() if (self.folder / LIBRARY).exists() else ""

    def end(self, *, in_order: bool = True) -> None:
        if in_order:
            self.temporaries.keep_compiled()
        self.temporaries.remove()


@pytest.fixture
def compiled(kept: Path) -> Iterator[Path]:
    """A library compiled by a worker and kept."""
    worker = Worker(kept)
    worker.compile()
    worker.end()
    (library,) = kept.rglob("libx.so")
    return library


def test_a_workers_folder_is_private_and_removed_at_its_end(outside: Path) -> None:
    worker = Worker("")
    worker.compile()
    assert stat.S_IMODE(worker.folder.stat().st_mode) == 0o700
    assert worker.folder.parent == outside
    worker.end()
    assert list(outside.iterdir()) == []


def test_code_compiled_by_one_worker_is_reused_by_the_next(kept: Path, compiled: Path) -> None:
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    second, third = Worker(kept), Worker(kept)
    assert (second.found(), third.found()) == ("compiled", "compiled")
    second.compile("spoiled")  # each worker has a copy, and the kept file is never replaced
    second.end()
    assert third.found() == compiled.read_text() == Worker(kept).found() == "compiled"


def test_a_worker_that_crashed_leaves_nothing(kept: Path) -> None:
    worker = Worker(kept)
    worker.compile("half a libr")
    worker.end(in_order=False)
    assert Worker(kept).found() == ""


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_is_not_used(kept: Path, compiled: Path, mode: int) -> None:
    kept.chmod(mode)
    worker = Worker(kept)
    assert worker.found() == ""
    compiled.unlink()
    worker.compile()
    worker.end()
    assert not compiled.exists()


def test_a_symlink_in_place_of_the_folder_is_not_followed(kept: Path, compiled: Path) -> None:
    kept.rename(kept.with_name("elsewhere"))
    kept.symlink_to(kept.with_name("elsewhere"))
    assert Worker(kept).found() == ""


def test_another_machine_with_the_same_home_has_its_own_folder(
    kept: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_files.platform, "machine", lambda: "riscv128")
    assert Worker(kept).found() == ""


def test_the_longest_unused_machines_folders_are_deleted(kept: Path, compiled: Path) -> None:
    others = [kept / name for name in "abcdef"]
    for age, other in enumerate(others):
        other.mkdir()
        os.utime(other, (1000 - age, 1000 - age))
    Worker(kept).end()
    assert set(kept.iterdir()) == {*others[:3], compiled.parents[2]}


def test_an_unwritable_folder_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    worker = Worker(tmp_path / "file" / "compiled")
    worker.compile()
    worker.end()
    assert (tmp_path / "file").read_text() == ""
