"""The errors of SQLite that follow from errors of its system calls."""

from __future__ import annotations

import errno
import os
import sqlite3

_CODES = {
    errno.ENOSPC: sqlite3.SQLITE_FULL,
    errno.EDQUOT: sqlite3.SQLITE_FULL,
    errno.EROFS: sqlite3.SQLITE_READONLY,
    errno.EMFILE: sqlite3.SQLITE_CANTOPEN,
    errno.ENFILE: sqlite3.SQLITE_CANTOPEN,
    errno.EACCES: sqlite3.SQLITE_CANTOPEN,
    errno.EPERM: sqlite3.SQLITE_PERM,
    errno.ENOENT: sqlite3.SQLITE_CANTOPEN,
    errno.EBUSY: sqlite3.SQLITE_BUSY,
}


def sqlite_error(error: int) -> Exception:
    """What Python's sqlite3 raises after a system call has failed with this error number."""
    if error == errno.ENOMEM:
        return MemoryError()
    failure = sqlite3.OperationalError(os.strerror(error))
    failure.sqlite_errorcode = _CODES.get(error, sqlite3.SQLITE_IOERR)
    return failure
