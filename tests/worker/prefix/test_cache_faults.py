"""Conversations on disk during read errors: no intact file is lost."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.store.block import BlockUnreadable
from holdfast.wire.commands import SequenceRequest
from tests.fakes.caching_worker import greedy
from tests.fakes.failing_disk import FailingDisk, failing_disk
from tests.fakes.script_inbox import ScriptInbox
from tests.fakes.session_worker import ask, info, prompt, serve, worker
from tests.fakes.stored_blocks import unusable_files

SHARED = prompt("shared", 300)
CHATS = [(*SHARED, *prompt(f"chat {number}", 40 + 90 * number)) for number in range(8)]


def requests(numbers: Sequence[int] = range(8), **more: object) -> list[SequenceRequest]:
    return [greedy(str(number), CHATS[number], **more) for number in numbers]


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "blocks").rglob("*.block")}


def cached(inbox: ScriptInbox, number: int) -> int:
    return inbox.finished(str(number)).cached_tokens


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A store with the eight conversations, and their answers."""
    folder = tmp_path_factory.mktemp("sound") / "s"
    inbox = serve(worker(folder=folder), *requests())
    return folder, [inbox.tokens(str(number)) for number in range(8)]


@pytest.fixture
def folder(sound: tuple[Path, list[list[int]]], tmp_path: Path) -> Path:
    shutil.copytree(sound[0], tmp_path / "s")
    return tmp_path / "s"


def check_all_is_used_again(folder: Path, answers: list[list[int]]) -> None:
    """After a restart, everything comes from the disk again."""
    inbox = serve(worker(folder=folder), *requests())
    for number, chat in enumerate(CHATS):
        assert inbox.tokens(str(number)) == answers[number]
        assert cached(inbox, number) == len(chat) - 1


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("open", errno.EMFILE),
        ("open", errno.ENOENT),
        ("read", errno.EIO),
        ("stat", errno.ENOMEM),
    ],
)
def test_one_failed_read_costs_one_recomputation_and_no_file(
    sound: tuple[Path, list[list[int]]], folder: Path, operation: str, error: int
) -> None:
    before = files(folder)
    with failing_disk(folder) as disk:
        subject = worker(folder=folder)
        disk.fail(operation, error, times=1, only=".block")
        inbox = serve(subject, *requests([0, 1]))
        assert disk.failed == 1
    assert inbox.tokens("1") == sound[1][1]
    assert cached(inbox, 1) == len(CHATS[1]) - 1, "the first request has filled the gap"
    assert files(folder) >= before
    assert not list((folder / "quarantine").iterdir())
    check_all_is_used_again(folder, sound[1])
    assert files(folder) >= before


def test_a_file_that_stays_unreadable_is_replaced(
    sound: tuple[Path, list[list[int]]], folder: Path
) -> None:
    before = files(folder)
    first = min((folder / "blocks").rglob("*.block"), key=lambda path: path.stat().st_mtime)
    old = first.stat().st_ino
    with failing_disk(folder) as disk:
        subject = worker(folder=folder)
        disk.fail("read", errno.EIO, only=first.name)
        inbox = serve(subject, *requests([0]))
        assert disk.failed >= 2, "the store has tried it again before it wrote a new file"
    assert (inbox.tokens("0"), cached(inbox, 0)) == (sound[1][0], 0)
    assert first.stat().st_ino != old
    assert files(folder) >= before
    assert unusable_files(folder) == {}
    check_all_is_used_again(folder, sound[1])


@pytest.mark.parametrize("is_found_at_the_start", [False, True])
def test_a_damaged_block_costs_only_itself(
    sound: tuple[Path, list[list[int]]], folder: Path, is_found_at_the_start: bool
) -> None:
    before = files(folder)
    first = min((folder / "blocks").rglob("*.block"), key=lambda path: path.stat().st_mtime)
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content[:100] if is_found_at_the_start else content)
    inbox = serve(worker(folder=folder), *requests([0, 1]))
    assert [inbox.tokens(str(number)) for number in range(2)] == sound[1][:2]
    assert (cached(inbox, 0), cached(inbox, 1)) == (0, len(CHATS[1]) - 1)
    assert len(list((folder / "quarantine").iterdir())) == 1
    assert files(folder) >= before
    check_all_is_used_again(folder, sound[1])


def test_a_pinned_session_keeps_its_files_and_reports_its_state(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    serve(
        worker(folder=folder),
        greedy("1", CHATS[7], session_id="s"),
        ask("update", pinned=True),
    )
    before = files(folder)
    first = min((folder / "blocks").rglob("*.block"), key=lambda path: path.stat().st_mtime)
    with failing_disk(folder) as disk:
        subject = worker(folder=folder)
        disk.fail("open", errno.EMFILE, times=1, only=".block")
        inbox = serve(subject, greedy("2", CHATS[7]), ask("get", "after"))
        assert disk.failed == 1
    found = info(inbox, "after")
    assert (found.pin_state, found.kept_tokens) == ("kept", found.tokens)
    assert files(folder) >= before
    first.unlink()
    inbox = serve(
        worker(folder=folder),
        ask("get", "damaged"),
        greedy("3", CHATS[7], session_id="s"),
        ask("get", "healed"),
    )
    assert (info(inbox, "damaged").pin_state, info(inbox, "damaged").kept_tokens) == (
        "incomplete", 0
    )  # fmt: skip
    assert info(inbox, "healed").pin_state == "kept"
    assert files(folder) >= before


def test_failed_reads_during_maintenance_delete_and_quarantine_nothing(
    sound: tuple[Path, list[list[int]]], folder: Path
) -> None:
    before = files(folder)
    shutil.rmtree(folder / "index")  # every header must be read
    with failing_disk(folder) as disk:
        for error in (errno.EMFILE, errno.EIO):
            for operation in ("open", "read"):
                disk.fail(operation, error, times=16, only=".block")
                serve(worker(folder=folder))
                assert disk.failed == 16
                disk.fail(operation, error, only=".block")
                failures = unusable_files(folder)
                assert len(failures) == len(before)
                assert all(isinstance(each, BlockUnreadable) for each in failures.values())
                shutil.rmtree(folder / "index")
    assert files(folder) == before
    assert not list((folder / "quarantine").iterdir())
    check_all_is_used_again(folder, sound[1])


def test_the_fake_disk_fails_only_where_told(tmp_path: Path) -> None:
    with failing_disk(tmp_path) as disk:
        disk.fail("open", errno.EIO, times=1)
        with pytest.raises(OSError, match="Input/output"):
            (tmp_path / "file").write_text("x")
        (tmp_path / "file").write_text("x")
        assert isinstance(disk, FailingDisk)
        assert disk.failed == 1
