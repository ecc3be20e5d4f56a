"""The tokens of generated answers, in SQLite.

After a restart, conversations continue from exactly these tokens.

Only a request that contains the answer can read its row: the row's key is the first bytes of a hash
of the answer's text and of the tenant (the *secret*), and the row's bytes are encrypted with a key
that needs the whole hash. A *tag* distinguishes answers with equal texts. The
file only saves prefill work: a failure here never makes a request fail. A damaged file is replaced
by an empty one.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from holdfast.store.index import clear_tables, make_tables, use_write_ahead_log

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

SECRET_BYTES: Final = 32
_ID_BYTES = 16
_KEY_BYTES = 64  # AES-SIV with AES-256, which uses two keys
# Files of format 1 may hold answers with text after a stop string, which no client has received.
# Files of format 2 are encrypted with another cipher.
_FORMAT = 3
_BUSY_SECONDS = 1.0
_CLOSE_SECONDS = 2.0
_MAX_QUEUED = 1_000
MOST_BYTES = 32 << 20
# share of MOST_BYTES that remains after an eviction, so that not every new answer causes one
_KEPT_SHARE = 0.9
_SCHEMA = """
CREATE TABLE answers (
    id BLOB NOT NULL, tag BLOB NOT NULL, body BLOB NOT NULL, used REAL NOT NULL, PRIMARY KEY (id, tag)
) WITHOUT ROWID;
CREATE INDEX answers_by_use ON answers (used);
"""
# damaged rows may hold values of any type; MemoryError is how Python reports SQLite's NOMEM
_FILE_ERRORS = (sqlite3.Error, UnicodeDecodeError, OSError, TypeError, MemoryError)
# Only these indicate damaged content. Subclasses of DatabaseError mean that the disk is full, or
# that the file is locked, read-only or unreadable at the moment.
_DAMAGE_ERRORS = (sqlite3.DatabaseError, UnicodeDecodeError, TypeError)

Secret: TypeAlias = bytes
"""`SECRET_BYTES` bytes, a hash of the answer itself."""

logger = logging.getLogger("holdfast.store")


class StoredAnswer(NamedTuple):
    """A stored answer. Only the caller interprets the body.

    tag: distinguishes answers with the same secret.
    """

    tag: bytes
    body: bytes


class AnswerFile:
    """`answers/answers-3.sqlite` in a store's folder. Thread-safe; it writes on a separate thread.

    The file is opened on first use after the store has created the folder. Files in older formats
    are deleted then.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MOST_BYTES) -> None:
        self._folder = folder
        self._path = _path_in(folder)
        self._max_bytes = max_bytes
        self._total_bytes = 0
        self._ids: set[bytes] = set()  # of the rows in the file: the first bytes of their secrets
        self._database: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._write_queue: queue.Queue[tuple[Secret, StoredAnswer] | None] = queue.Queue(
            _MAX_QUEUED
        )
        self._writer: threading.Thread | None = None
        self._is_closed = False

    def find(self, secret: Secret) -> tuple[StoredAnswer, ...]:
        """Return all undamaged answers with this secret."""
        answers: list[StoredAnswer] = []
        if self._database is not None and secret[:_ID_BYTES] not in self._ids:
            return ()  # return immediately instead of waiting for the writer
        with self._open_file() as database:
            if database is not None and secret[:_ID_BYTES] in self._ids:
                rows = database.execute(
                    "SELECT tag, body FROM answers WHERE id = ?", (secret[:_ID_BYTES],)
                ).fetchall()
                for tag, sealed_body in rows:
                    body = _unsealed(sealed_body, secret=secret, tag=tag)
                    if body is not None:
                        answers.append(StoredAnswer(tag, body))
                database.execute(
                    "UPDATE answers SET used = ? WHERE id = ?", (time.time(), secret[:_ID_BYTES])
                )
        return tuple(answers)

    def put(self, secret: Secret, answer: StoredAnswer) -> None:
        """Queue an answer for writing, or drop it if the disk is too slow. Never blocks."""
        with self._lock:
            if self._is_closed:
                return
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="answers", daemon=True)
                self._writer.start()
                atexit.register(self.close)  # a daemon thread would lose its queue at exit
        with contextlib.suppress(queue.Full):
            self._write_queue.put_nowait((secret, answer))

    def close(self) -> None:
        """Write the queued answers and close the file. Idempotent."""
        with self._lock:
            self._is_closed = True
            writer = self._writer
        atexit.unregister(self.close)
        if writer is not None:
            with contextlib.suppress(queue.Full):
                self._write_queue.put_nowait(None)
            writer.join(_CLOSE_SECONDS)
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    def _write_all(self) -> None:
        """Write the queued answers until None is queued. Runs on the writer's thread."""
        while (item := self._write_queue.get()) is not None:
            secret, answer = item
            body = _sealed(answer.body, secret=secret, tag=answer.tag)
            with self._open_file() as database:
                if database is None:
                    continue
                key = secret[:_ID_BYTES]
                database.execute(
                    "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)",
                    (key, answer.tag, body, time.time()),
                )
                self._ids.add(key)
                self._total_bytes += len(body)
                if self._total_bytes > self._max_bytes:
                    self._evict(database)

    def _evict(self, database: sqlite3.Connection) -> None:
        """Delete the answers that were used longest ago, until part of the limit is free."""
        rows = database.execute(
            "SELECT id, tag, length(body) FROM answers ORDER BY used DESC"
        ).fetchall()
        kept_bytes = 0
        for index, (_, _, body_bytes) in enumerate(rows):
            if kept_bytes + body_bytes > self._max_bytes * _KEPT_SHARE:
                # one transaction: 18,000 transactions take 2.9 s, and readers wait for that
                database.execute("BEGIN IMMEDIATE")
                database.executemany(
                    "DELETE FROM answers WHERE id = ? AND tag = ?",
                    [(row[0], row[1]) for row in rows[index:]],
                )
                database.execute("COMMIT")
                break
            kept_bytes += body_bytes
        self._recount(database)

    @contextlib.contextmanager
    def _open_file(self) -> Iterator[sqlite3.Connection | None]:
        """Yield the open file, locked; None if it cannot be opened.

        After an error, the next call opens it again.
        """
        with self._lock:
            try:
                if self._database is None and self._path.parent.is_dir():
                    self._database = self._open()
            except _FILE_ERRORS as error:
                self._discard(error)
            try:
                yield self._database
            except _FILE_ERRORS as error:
                self._discard(error)

    def _open(self) -> sqlite3.Connection:
        """Open the file, and create its table if it is missing. Raises one of the errors in
        `_FILE_ERRORS`.
        """
        _unlink_older(self._folder)
        self._path.touch(mode=0o600)
        database = sqlite3.connect(
            self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            use_write_ahead_log(database, busy_seconds=_BUSY_SECONDS)
            # a killed process loses nothing; a power failure may lose cached answers
            database.execute("PRAGMA synchronous = OFF")
            database.execute("PRAGMA journal_size_limit = 1048576")
            make_tables(database, _SCHEMA, version=_FORMAT)
            self._recount(database)
        except _FILE_ERRORS:
            database.close()
            raise
        return database

    def _recount(self, database: sqlite3.Connection) -> None:
        """Read from the file which answers it has, and how many bytes they take."""
        rows = database.execute("SELECT id, length(body) FROM answers").fetchall()
        self._ids = {key for key, _ in rows}
        self._total_bytes = sum(size for _, size in rows)

    def _discard(self, error: BaseException) -> None:
        """Close the file after an error, and delete it if its content is damaged."""
        logger.warning("the file of answers cannot be used: %s", error)
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
        self._database = None
        self._ids = set()
        self._total_bytes = 0
        if type(error) not in _DAMAGE_ERRORS:
            return
        _unlink(self._path)


def clear_answers(folder: Path) -> None:
    """Delete all answers in a store's folder, even if a server has the file open.

    Raises OSError.
    """
    _unlink_older(folder)
    clear_tables(_path_in(folder), "answers", busy_seconds=_BUSY_SECONDS)


def _path_in(folder: Path, version: int = _FORMAT) -> Path:
    return folder / "answers" / f"answers-{version}.sqlite"


def _unlink_older(folder: Path) -> None:
    for version in range(1, _FORMAT):
        _unlink(_path_in(folder, version))


def _unlink(path: Path) -> None:
    """Delete a database, if it exists, and the files that SQLite keeps next to it."""
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(OSError):
            path.with_name(path.name + suffix).unlink(missing_ok=True)


def _sealed(body: bytes, *, secret: Secret, tag: bytes) -> bytes:
    return _cipher(secret).encrypt(body, [tag])


def _unsealed(sealed: bytes, *, secret: Secret, tag: bytes) -> bytes | None:
    """Decrypt the body. Returns None if it was changed."""
    from cryptography.exceptions import InvalidTag

    try:
        return _cipher(secret).decrypt(sealed, [tag])
    except InvalidTag:
        return None


def _cipher(secret: Secret) -> AESSIV:
    # imported at its first use, because importing it takes 9 ms and 6 MB of memory
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

    return AESSIV(hashlib.blake2b(secret, digest_size=_KEY_BYTES).digest())
