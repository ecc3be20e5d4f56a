"""The file in which the history of a server survives restarts.

One server at a time uses a file: it holds a lock next to it. The file is written again some minutes
after a change, and when the server stops. Without requests, nothing happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import zlib
from pathlib import Path
from typing import Final

import msgspec

from holdfast.files import atomic_write, open_regular, sync_to_drive, try_lock
from holdfast.front.telemetry.history import MOST_BYTES, PerformanceHistory

SAVE_SECONDS = 300.0
SUFFIX = ".history"
_MAGIC: Final = b"HFHIST1\n"
_CHECKSUM_BYTES = 4
_LONGEST_BYTES = 2 * MOST_BYTES  # of the file: finished cells, current cells, and their names

_log = logging.getLogger(__name__)


class HistoryFile:
    """Keeps a history in a file. Event loop's thread only, except for `open`."""

    def __init__(self, history: PerformanceHistory, path: Path) -> None:
        """The file is read by `open`."""
        self._history = history
        self._path = path
        self._lock: int | None = None  # file descriptor of the lock; None: not open
        self._save_timer: asyncio.TimerHandle | None = None  # set while a save is due
        self._save_task: asyncio.Task[None] | None = None  # the latest save
        self._has_changed = False  # since the last save

    def open(self) -> None:
        """Lock and read the file. If it is locked by another server or cannot be read, the history
        starts empty and is not saved, and the reason is logged. A damaged file is replaced.
        """
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(
                self._path.with_name(f".{self._path.name}.lock"),
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o600,
            )
            if not try_lock(lock):
                os.close(lock)
                _log.info("another server for this port keeps %s", self._path)
                return
            self._lock = lock
            self._read()
        except OSError as error:
            _log.warning("the history of the performance cannot be kept: %s", error)
            return
        self._history.on_change = self._note_change

    async def close(self) -> None:
        """Save what has changed, and let another server use the file."""
        if self._save_timer is not None:
            self._save_timer.cancel()
        if self._save_task is not None:
            await self._save_task
        if self._lock is None:
            return
        await self._save()
        os.close(self._lock)
        self._lock = None
        self._history.on_change = lambda: None

    def _read(self) -> None:
        """Restore the history from the file, if there is one and it is not damaged."""
        with contextlib.suppress(FileNotFoundError), open_regular(self._path) as file:
            content = file.read(_LONGEST_BYTES + 1)
            try:
                self._history.restore(_saved_history(content))
            except msgspec.DecodeError as error:
                _log.warning(
                    "the history of the performance starts empty, because %s is damaged: %s",
                    self._path,
                    error,
                )

    def _note_change(self) -> None:
        """Save the history some minutes from now, after its first change since the last save."""
        self._has_changed = True
        if self._save_timer is None:
            loop = asyncio.get_running_loop()
            self._save_timer = loop.call_later(SAVE_SECONDS, self._begin_to_save)

    def _begin_to_save(self) -> None:
        self._save_timer = None
        self._save_task = asyncio.create_task(self._save(), name="history is saved")

    async def _save(self) -> None:
        """Write the file if the history has changed. A failure is logged."""
        if not self._has_changed:
            return
        self._has_changed = False
        packed = self._history.serialize()
        try:
            await asyncio.to_thread(write_history, self._path, packed)
        except OSError as error:
            self._has_changed = True  # the next change, or the end, tries again
            _log.warning("the history of the performance is not saved: %s", error)


def write_history(path: Path, packed: bytes) -> None:
    """Replace the file. packed: the result of `PerformanceHistory.serialize`. Raises OSError."""
    checksum = zlib.crc32(packed).to_bytes(_CHECKSUM_BYTES, "big")
    with atomic_write(path) as file:
        file.write(_MAGIC + checksum + packed)
        file.flush()
        sync_to_drive(file.fileno())


def _saved_history(content: bytes) -> bytes:
    """The saved history. Raises msgspec.DecodeError if it is damaged."""
    head = len(_MAGIC) + _CHECKSUM_BYTES
    packed = content[head:]
    if not content.startswith(_MAGIC) or len(content) > _LONGEST_BYTES:
        raise msgspec.DecodeError("it is no history")
    if zlib.crc32(packed).to_bytes(_CHECKSUM_BYTES, "big") != content[len(_MAGIC) : head]:
        raise msgspec.DecodeError("its checksum is wrong")
    return packed
