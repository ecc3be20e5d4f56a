"""The tables of a new SQLite file, which several processes may begin with at the same moment."""

from __future__ import annotations

import sqlite3


def make_tables(database: sqlite3.Connection, schema: str, *, version: int) -> int:
    """Make them unless the file has some; returns the version of those it has. Raises sqlite3.Error."""
    found = _version_of(database)
    if found == 0:
        try:
            database.executescript(f"BEGIN IMMEDIATE; {schema} PRAGMA user_version = {version}; COMMIT;")
        except sqlite3.OperationalError:  # another process has made them meanwhile, or it is the disk
            if database.in_transaction:
                database.execute("ROLLBACK")
            if _version_of(database) == 0:
                raise
        found = _version_of(database)
    return found


def _version_of(database: sqlite3.Connection) -> int:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    return int(version)
