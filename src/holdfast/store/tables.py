"""Preparing SQLite files that several processes may create at the same moment."""

from __future__ import annotations

import random
import sqlite3
import time

# Python decodes SQLite's texts and messages; those of a damaged file may not be UTF-8. What our own
# checks find is a DatabaseError without a code.
DAMAGE_SIGNS = (sqlite3.Error, UnicodeDecodeError)
_RETRY_SECONDS = 0.01


def use_write_ahead_log(database: sqlite3.Connection, *, busy_seconds: float) -> None:
    """Switch the file to a write-ahead log, waiting up to `busy_seconds` for other processes.

    SQLite's own timeout does not apply: if two switch one file at once, one fails immediately,
    because both would wait for each other. Raises sqlite3.Error.
    """
    deadline = time.monotonic() + busy_seconds
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
        time.sleep(_RETRY_SECONDS * random.random())


def make_tables(database: sqlite3.Connection, schema: str, *, version: int) -> int:
    """Create the tables unless the file has some; returns their version. Raises sqlite3.Error."""
    found = _version_of(database)
    if found == 0:
        try:
            database.executescript(
                f"BEGIN IMMEDIATE; {schema} PRAGMA user_version = {version}; COMMIT;"
            )
        except sqlite3.OperationalError:
            # another process has just made them, or the disk failed
            if database.in_transaction:
                database.execute("ROLLBACK")
            if _version_of(database) == 0:
                raise
        found = _version_of(database)
    return found


def _version_of(database: sqlite3.Connection) -> int:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    return int(version)
