from __future__ import annotations

from pathlib import Path

from holdfast.store.block import BadBlock
from holdfast.store.maintenance import bound_quarantine, quarantine, quarantined_files


def put_aside(folder: Path, count: int, size: int) -> None:
    for number in range(count):
        (folder.parent / "file").write_bytes(bytes(size))
        quarantine(
            folder.parent / "file",
            BadBlock(bytes([number]) * 32, "Payload checksum: of /it"),
            folder=folder,
        )


def test_a_damaged_file_keeps_its_contents_with_the_reason(tmp_path: Path) -> None:
    put_aside(tmp_path / "q", 1, 5)
    (path,) = quarantined_files(tmp_path / "q")
    assert path.read_bytes() == bytes(5)
    assert path.name.split(".")[1:] == ["00" * 32, "payload-checksum-of-it", "bad"]
    assert not (tmp_path / "file").exists()


def test_the_oldest_files_are_deleted_when_they_exceed_the_limits(tmp_path: Path) -> None:
    folder = tmp_path / "q"
    put_aside(folder, 5, 10)
    assert bound_quarantine(folder, most_bytes=1000, most_files=3) == 3
    assert [path.name.split(".")[1][:2] for path in quarantined_files(folder)] == ["02", "03", "04"]
    assert bound_quarantine(folder, most_bytes=15, most_files=3) == 1
    assert [path.name.split(".")[1][:2] for path in quarantined_files(folder)] == ["04"]


def test_other_files_in_quarantine_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "q"
    put_aside(folder, 2, 1)
    (folder / "mine.txt").write_text("mine")
    bound_quarantine(folder, most_bytes=0, most_files=0)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
