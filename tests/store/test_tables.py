"""The tables of a new file, made by several at once."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from holdfast.config import ResponsesSettings
from holdfast.store.index import BlockIndex
from holdfast.store.responses import ResponseFile
from holdfast.store.tables import make_tables

SERVERS = 6


def test_a_new_file_gets_them_and_an_older_one_keeps_its_own(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "a", isolation_level=None)
    assert make_tables(database, "CREATE TABLE a (b);", version=3) == 3
    assert make_tables(database, "CREATE TABLE c (d);", version=4) == 3


def test_what_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "a", isolation_level=None)
    with pytest.raises(sqlite3.OperationalError):
        make_tables(database, "CREATE TABLE a (b); CREATE TABLE a (b);", version=1)
    assert not database.in_transaction


def responses(folder: Path) -> None:
    assert ResponseFile(folder, ResponsesSettings()).totals() == (0, 0)


def index(folder: Path) -> None:
    BlockIndex(folder / "index.sqlite").close()


@pytest.mark.parametrize("begin", [responses, index])
def test_servers_that_begin_with_a_new_folder_at_once_all_find_them(tmp_path: Path, begin: Callable[[Path], None]) -> None:
    for attempt in range(5):
        folder, together = tmp_path / str(attempt), Barrier(SERVERS)
        folder.mkdir()

        def one(_: int, folder: Path = folder, together: Barrier = together) -> None:
            together.wait()
            begin(folder)

        with ThreadPoolExecutor(SERVERS) as servers:
            list(servers.map(one, range(SERVERS)))
