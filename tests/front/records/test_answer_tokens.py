"""Generated answers stored next to the blocks."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.records.answer_tokens import (
    SECRET_BYTES,
    AnswerFile,
    StoredAnswer,
    _sealed,
    _unsealed,
    clear_answers,
)


def secret(name: str) -> bytes:
    return name.encode().ljust(SECRET_BYTES, b".")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "answers").mkdir()
    return tmp_path


def kept(folder: Path) -> Path:
    (path,) = (folder / "answers").glob("*.sqlite")
    return path


def write(folder: Path, *answers: tuple[str, bytes], most_bytes: int = 1 << 20) -> None:
    file = AnswerFile(folder, max_bytes=most_bytes)
    for name, body in answers:
        file.put(secret(name), StoredAnswer(b"tag", body))
    file.close()


def find(folder: Path, name: str) -> tuple[StoredAnswer, ...]:
    file = AnswerFile(folder)
    found = file.find(secret(name))
    file.close()
    return found


def test_answers_survive_their_writer(folder: Path) -> None:
    write(folder, ("one", b"first"), ("two", b"second"))
    assert find(folder, "one") == (StoredAnswer(b"tag", b"first"),)
    assert find(folder, "three") == ()


@pytest.mark.parametrize("version", [1, 2])
def test_answers_of_an_older_format_are_deleted_unread(folder: Path, version: int) -> None:
    write(folder, ("one", b"first"))
    older = kept(folder).with_name(f"answers-{version}.sqlite")
    kept(folder).rename(older)
    assert find(folder, "one") == ()
    assert kept(folder) != older


def test_answers_of_one_secret_have_tags_and_the_latest_wins(folder: Path) -> None:
    file = AnswerFile(folder)
    for tag, body in ((b"a", b"1"), (b"b", b"2"), (b"a", b"3")):
        file.put(secret("one"), StoredAnswer(tag, body))
    file.close()
    assert set(find(folder, "one")) == {StoredAnswer(b"a", b"3"), StoredAnswer(b"b", b"2")}


def test_answers_are_not_written_without_an_existing_store(tmp_path: Path) -> None:
    write(tmp_path / "store", ("one", b"first"))
    assert find(tmp_path / "store", "one") == ()
    assert list(tmp_path.iterdir()) == []


def test_answers_are_readable_only_with_their_secret(folder: Path) -> None:
    body = b"a body that would be seen " * 4
    write(folder, ("a secret that would be seen", body))
    path = kept(folder)
    assert path.stat().st_mode & 0o077 == 0
    content = b"".join(each.read_bytes() for each in path.parent.iterdir())
    assert b"would be seen" not in content
    assert secret("a secret that would be seen")[16:] not in content


@given(body=st.binary(min_size=1, max_size=200), place=st.integers(0, 300))
def test_a_damaged_answer_is_ignored(body: bytes, place: int) -> None:
    sealed = _sealed(body, secret=secret("s"), tag=b"t")
    assert _unsealed(sealed, secret=secret("s"), tag=b"t") == body
    assert _unsealed(sealed, secret=secret("other"), tag=b"t") is None
    place %= len(sealed)
    assert (
        _unsealed(
            sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :],
            secret=secret("s"),
            tag=b"t",
        )
        is None
    )
    assert _unsealed(sealed[:place], secret=secret("s"), tag=b"t") is None


def test_a_file_that_is_not_a_database_is_recreated(folder: Path) -> None:
    write(folder, ("one", b"first"))
    kept(folder).write_bytes(b"no database" * 1000)
    assert find(folder, "one") == ()
    write(folder, ("two", b"second"))
    assert find(folder, "two") == (StoredAnswer(b"tag", b"second"),)


@pytest.mark.parametrize("column", ["tag", "body"])
def test_a_row_of_wrong_types_loses_only_answers(folder: Path, column: str) -> None:
    write(folder, ("one", b"first"))
    with sqlite3.connect(kept(folder)) as database:
        database.execute(f"UPDATE answers SET {column} = 1.5")
    assert find(folder, "one") == ()
    write(folder, ("one", b"again"))
    assert find(folder, "one") == (StoredAnswer(b"tag", b"again"),)


def test_a_locked_file_loses_only_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.front.records.answer_tokens._BUSY_SECONDS", 0.0)
    write(folder, ("one", b"first"))
    other = sqlite3.connect(kept(folder), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    write(folder, ("two", b"second"))
    other.execute("ROLLBACK")
    other.close()
    assert find(folder, "two") == ()
    assert find(folder, "one") == (StoredAnswer(b"tag", b"first"),)


def test_the_least_recently_used_answers_make_room(folder: Path) -> None:
    file = AnswerFile(folder, max_bytes=1000)
    for number in range(10):
        file.put(secret(f"{number}"), StoredAnswer(b"tag", bytes(180)))
    file.close()
    there = [number for number in range(10) if find(folder, f"{number}")]
    assert there == list(range(10 - len(there), 10))
    assert 1 <= len(there) <= 5


def test_answers_put_after_closing_are_dropped(folder: Path) -> None:
    file = AnswerFile(folder)
    file.close()
    file.put(secret("one"), StoredAnswer(b"tag", b"first"))
    file.close()
    assert find(folder, "one") == ()


def test_all_answers_can_be_deleted_while_a_server_runs(folder: Path) -> None:
    write(folder, ("one", b"first"))
    server = AnswerFile(folder)
    assert server.find(secret("one"))
    clear_answers(folder)
    assert server.find(secret("one")) == ()
    server.put(secret("two"), StoredAnswer(b"tag", b"second"))
    server.close()
    assert find(folder, "two") == (StoredAnswer(b"tag", b"second"),)
    kept(folder).write_bytes(b"no database" * 1000)
    clear_answers(folder)
    clear_answers(folder)
    assert list((folder / "answers").glob("*.sqlite")) == []
