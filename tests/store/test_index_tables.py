"""The tables of a new file, created concurrently."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Timer

import pytest

from holdfast.config import ResponsesSettings
from holdfast.front.records.answer_tokens import SECRET_BYTES, AnswerFile
from holdfast.front.records.responses import ResponseFile
from holdfast.store.index import BlockIndex, make_tables, use_write_ahead_log

SERVERS, ATTEMPTS = 6, 20


def test_only_a_new_file_gets_the_tables(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "a", isolation_level=None)
    assert make_tables(database, "CREATE TABLE a (b);", version=3) == 3
    assert make_tables(database, "CREATE TABLE c (d);", version=4) == 3


def test_tables_that_cannot_be_created_are_an_error(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "a", isolation_level=None)
    with pytest.raises(sqlite3.OperationalError):
        make_tables(database, "CREATE TABLE a (b); CREATE TABLE a (b);", version=1)
    assert not database.in_transaction


def responses(folder: Path) -> None:
    file = ResponseFile(folder, ResponsesSettings())
    assert file.totals() == (0, 0)
    file.close()


def index(folder: Path) -> None:
    BlockIndex(folder / "index.sqlite").close()


def answers(folder: Path) -> None:
    file = AnswerFile(folder)
    assert file.find(bytes(SECRET_BYTES)) == ()
    file.close()


STORES = {"responses": responses, "index": index, "answers": answers}
"""How a server opens each file, by the beginning of the file's name."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "answers").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", STORES)
def test_servers_starting_with_a_new_folder_all_find_them(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for attempt in range(ATTEMPTS):
        folder, together = tmp_path / str(attempt), Barrier(SERVERS)
        (folder / "answers").mkdir(parents=True)

        def one(_: int, folder: Path = folder, together: Barrier = together) -> None:
            together.wait()
            STORES[name](folder)

        with ThreadPoolExecutor(SERVERS) as servers:
            list(servers.map(one, range(SERVERS)))
    assert not caplog.records  # losing answers is only logged


@pytest.mark.parametrize("name", STORES)
def test_a_server_waits_while_another_creates_the_file(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    STORES[name](folder)
    (path,) = folder.rglob(f"{name}*.sqlite")
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("PRAGMA journal_mode = DELETE")  # as before it was switched
    other.execute("BEGIN IMMEDIATE")
    ready = Timer(0.01, other.execute, ["COMMIT"])
    ready.start()
    STORES[name](folder)
    ready.join()
    other.close()
    assert not caplog.records


def test_a_file_that_stays_locked_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "a", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    database = sqlite3.connect(tmp_path / "a", isolation_level=None)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        use_write_ahead_log(database, busy_seconds=0.01)
    other.execute("ROLLBACK")
    use_write_ahead_log(database, busy_seconds=0)
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
