"""SQLite on the simulated disk. Its C code makes its system calls itself, so a statement is atomic in
the simulation: other tasks run before or after it.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import struct
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.simulation.disk_kernel import Real, content_of, exists
from tests.simulation.world import Killed

if TYPE_CHECKING:
    from tests.simulation.disk import SimulatedDisk

_BUSY_DELAYS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.025, 0.025, 0.05, 0.05, 0.1)


class Connection(sqlite3.Connection):
    """A connection that waits for locks in virtual time, and that ends with its process."""

    def __init__(
        self,
        disk: SimulatedDisk,
        database: Any,
        timeout: float = 5.0,
        *args: Any,
        **more: Any,
    ) -> None:
        self.disk, self.path, self.owner = disk, os.fspath(database), disk.world.here
        self._patience, self._is_closed = timeout, False
        self._task = disk.world.current if more.get("check_same_thread", True) else None
        more["check_same_thread"] = False
        disk.enter("sqlite", self.path)
        super().__init__(database, 0.0, *args, **more)
        self._cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()
        try:
            self._number = Real.lstat(self.path).st_ino
        except OSError:
            self._number = 0
        disk.own(self.owner)
        key = id(self)
        connections = disk.connections
        connections[key] = weakref.ref(self, lambda _: connections.pop(key, None))

    def execute(self, statement: str, *more: Any) -> sqlite3.Cursor:
        return self._kept(self._patiently(statement, partial(super().execute, statement, *more)))

    def executemany(self, statement: str, rows: Iterable[Any]) -> sqlite3.Cursor:
        rows = list(rows)  # for a second attempt
        return self._kept(self._patiently(statement, partial(super().executemany, statement, rows)))

    def executescript(self, script: str) -> sqlite3.Cursor:
        return self._kept(self._patiently(script, partial(super().executescript, script)))

    def commit(self) -> None:
        self._patiently("COMMIT", super().commit)

    def rollback(self) -> None:
        self._patiently("ROLLBACK", super().rollback)

    def close(self) -> None:
        if self._is_closed:
            return
        self._enter("CLOSE")
        self._forget()
        super().close()

    @property
    def in_transaction(self) -> bool:
        if self.owner.is_dead:
            raise Killed
        return super().in_transaction

    def crash(self) -> None:
        """Close the file as the kernel does for a killed process: without a commit and without a
        checkpoint of the log.
        """
        others = [
            each
            for each in self.disk.living_connections()
            if each is not self and each._number == self._number
        ]
        self._forget()
        names = [self.path + suffix for suffix in ("", "-wal", "-journal")]
        is_there = exists(self.path) and Real.lstat(self.path).st_ino == self._number
        kept: dict[str, bytes] = {}
        if is_there and not others:
            kept = {name: content_of(name) for name in names if exists(name)}
            self._note_log(kept.get(names[1], b""))
        for cursor in list(self._cursors):
            cursor.close()
        super().close()
        for name, content in kept.items():
            if not exists(name) or content_of(name) != content:
                with Real.file(name, "r+b" if exists(name) else "wb") as file:
                    file.write(content)
                    file.truncate()

    def _note_log(self, log: bytes) -> None:
        """Note which part of the log is not yet in the database."""
        self.disk.durability.log_ends.pop(self.path, None)
        try:
            shared = content_of(self.path + "-shm")[:136]
        except OSError:
            return
        if len(shared) < 136 or len(log) < 32 or log[16:24] != shared[32:40]:
            return
        page = struct.unpack_from("=H", shared, 14)[0]
        page = 65536 if page == 1 else page
        frames = struct.unpack_from("=I", shared, 16)[0]
        merged = struct.unpack_from("=I", shared, 96)[0]
        self.disk.durability.log_ends[self.path] = (
            32 + merged * (24 + page),
            32 + frames * (24 + page),
        )

    def _forget(self) -> None:
        self._is_closed = True
        self.disk.connections.pop(id(self), None)

    def _kept(self, cursor: sqlite3.Cursor) -> sqlite3.Cursor:
        self._cursors.add(cursor)
        return cursor

    def _enter(self, statement: str) -> None:
        world = self.disk.world
        if statement.startswith(("ROLLBACK", "CLOSE")):  # they do not fail
            world.yield_now()
        else:
            try:
                self.disk.enter("sqlite", self.path)
            except (sqlite3.Error, MemoryError):
                # after most failures, SQLite has rolled back by itself
                if not self._is_closed and self.in_transaction and self.disk.random.random() < 0.5:
                    super().execute("ROLLBACK")
                raise
        if self._task is not None and world.current not in (None, self._task):
            raise sqlite3.ProgrammingError("the connection belongs to another thread")
        if self.owner.is_dead:
            raise Killed

    def _patiently(self, statement: str, call: Callable[[], Any]) -> Any:
        self._enter(statement)
        world = self.disk.world
        ends_at = world.now + self._patience
        delays = itertools.chain(_BUSY_DELAYS, itertools.repeat(0.1))
        while True:
            changes, was_open = self.total_changes, self.in_transaction
            try:
                return call()
            except sqlite3.OperationalError as error:
                code = error.sqlite_errorcode
                if (
                    code & 0xFF != sqlite3.SQLITE_BUSY
                    or code == sqlite3.SQLITE_BUSY_SNAPSHOT
                    or (was_open and not statement.startswith("COMMIT"))
                    or self.in_transaction != was_open
                    or self.total_changes != changes
                    or statement.startswith("PRAGMA journal_mode")  # SQLite does not wait there
                    or world.current is None
                    or world.now >= ends_at
                ):
                    raise
            world.block(min(next(delays), max(0.0, ends_at - world.now) + 1e-6))
