"""The SQLite file of responses: opened when it is needed, checked, set aside and begun anew when it
is damaged.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import xxhash

from holdfast.files import Claim, claim, sweep
from holdfast.store.block import StoreRefused
from holdfast.store.folder import StoreFolder
from holdfast.store.tables import DAMAGE_SIGNS, make_tables, use_write_ahead_log

_FOLDER: Final = "responses"
_FORMAT: Final = 1
_RUN: Final = "run-"
_DAMAGED: Final = ".damaged"
_BUSY_SECONDS = 2.0
_CHECK_BYTES = 8
_TABLES = {"records", "items", "totals"}
_SCHEMA = """
CREATE TABLE records (
    number INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id TEXT NOT NULL, kind TEXT NOT NULL, previous TEXT, run TEXT,
    is_lost INTEGER NOT NULL DEFAULT 0, body BLOB NOT NULL, events BLOB, size INTEGER NOT NULL, used REAL NOT NULL,
    UNIQUE (tenant, id)
);
CREATE INDEX ended_by_use ON records (used, size) WHERE run IS NULL;
CREATE TABLE totals (count INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER put AFTER INSERT ON records WHEN NEW.run IS NULL
    BEGIN UPDATE totals SET count = count + 1, bytes = bytes + NEW.size; END;
CREATE TRIGGER gone AFTER DELETE ON records WHEN OLD.run IS NULL
    BEGIN UPDATE totals SET count = count - 1, bytes = bytes - OLD.size; END;
CREATE TRIGGER changed AFTER UPDATE OF run, size ON records BEGIN
    UPDATE totals SET count = count + (NEW.run IS NULL) - (OLD.run IS NULL),
        bytes = bytes + (NEW.run IS NULL) * NEW.size - (OLD.run IS NULL) * OLD.size;
END;
CREATE TABLE items (
    number INTEGER PRIMARY KEY, owner INTEGER NOT NULL REFERENCES records ON DELETE CASCADE, part TEXT NOT NULL,
    id TEXT NOT NULL, body BLOB NOT NULL
);
CREATE INDEX items_by_owner ON items (owner, part, number);
CREATE INDEX items_by_id ON items (id);
"""
# fullfsync: on macOS fsync alone leaves data in the cache of the drive; no effect elsewhere
_PRAGMAS = (
    "synchronous = NORMAL",
    "fullfsync = ON",
    "foreign_keys = ON",
    "journal_size_limit = 4194304",
)

logger = logging.getLogger("holdfast.store")


class FileDamaged(Exception):
    """The file was damaged, and has been set aside: the same again finds an empty one."""


class ResponseDatabase:
    """`responses/responses-1.sqlite` in a store's folder, or memory. One thread at a time.

    Its methods may raise FileDamaged; and sqlite3.Error and OSError for a disk that is full, locked
    or gone. `run` names this process in what it has not finished: when it dies, what it leaves is
    marked as lost by the next that opens the file.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._database: sqlite3.Connection | None = None
        self._claim: Claim | None = None
        self.run = secrets.token_hex(8)

    @contextlib.contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, whole or not at all."""
        with self.reading() as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                if database.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        database.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The open file. One that turns out to be damaged is set aside."""
        try:
            if self._database is None:
                self._database = self._open()
            yield self._database
        except DAMAGE_SIGNS as error:
            is_damage = type(error) in (sqlite3.DatabaseError, UnicodeDecodeError)
            if not is_damage:  # it is full, locked, read-only, …: not its own fault
                raise
            self._set_aside(error)
            raise FileDamaged from error

    def close(self) -> None:
        """Close the file. May be called twice; whatever comes later opens it again."""
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._claim is not None:
            self._claim.give_back()
            self._claim = None

    def _open(self) -> sqlite3.Connection:
        path = self._path()
        if path is not None:
            path.touch(mode=0o600)
        database = sqlite3.connect(
            path or ":memory:", timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            use_write_ahead_log(database, busy_seconds=_BUSY_SECONDS)
            for pragma in _PRAGMAS:
                database.execute(f"PRAGMA {pragma}")
            make_tables(database, _SCHEMA, version=_FORMAT)
            names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            if not names.issuperset(_TABLES):
                raise sqlite3.DatabaseError("its tables are missing")
            if path is not None:
                self._mark_lost(database, path.parent)
        except BaseException:
            database.close()
            raise
        return database

    def _path(self) -> Path | None:
        """Where the file is to be; None for memory."""
        if self._folder is None:
            return None
        try:
            StoreFolder(self._folder).check()
            place = self._folder / _FOLDER
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, StoreRefused) as error:
            logger.warning("responses are kept in memory only: %s", error)
            self._folder = None
            return None
        return _path_in(self._folder)

    def _mark_lost(self, database: sqlite3.Connection, place: Path) -> None:
        """Mark what servers that have died did not finish.

        Others may live: the locked folder of each says so.
        """
        if self._claim is None:
            sweep(place, prefix=_RUN)
            # a file system without locks: then others cannot be told from dead ones
            with contextlib.suppress(OSError):
                self._claim = claim(place, prefix=_RUN)
                self.run = self._claim.folder.name
        living = {each.name for each in place.iterdir() if each.name.startswith(_RUN)} | {self.run}
        runs = database.execute("SELECT DISTINCT run FROM records WHERE run IS NOT NULL").fetchall()
        dead = [run for run in runs if run[0] not in living]
        database.executemany("UPDATE records SET run = NULL, is_lost = 1 WHERE run = ?", dead)

    def _set_aside(self, error: Exception) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._folder is None:
            return
        path = _path_in(self._folder)
        logger.warning(
            "the file of responses is damaged (%s): it is set aside as %s, and begun anew",
            error,
            path.name + _DAMAGED,
        )
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.replace(path.with_name(path.name + _DAMAGED))


def clear_responses(folder: Path) -> None:
    """Delete all responses and conversations in a store's folder.

    A server may have the file open. Raises OSError.
    """
    path = _path_in(folder)
    path.with_name(path.name + _DAMAGED).unlink(missing_ok=True)
    if not path.is_file():
        return
    try:
        with contextlib.closing(
            sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
        ) as database:
            for table in ("items", "records"):
                database.execute(f"DELETE FROM {table}")
            database.execute("VACUUM")
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        path.unlink(missing_ok=True)


def _path_in(folder: Path) -> Path:
    return folder / _FOLDER / f"responses-{_FORMAT}.sqlite"


def sealed(content: bytes) -> bytes:
    """The content behind its checksum: SQLite has none of its own."""
    return xxhash.xxh3_64_digest(content) + content


def unsealed(blob: object) -> bytes:
    """The content. Raises sqlite3.DatabaseError when it is not as it was written."""
    if (
        not isinstance(blob, bytes)
        or xxhash.xxh3_64_digest(blob[_CHECK_BYTES:]) != blob[:_CHECK_BYTES]
    ):
        raise sqlite3.DatabaseError("a row does not match its checksum")
    return blob[_CHECK_BYTES:]
