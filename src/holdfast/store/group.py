"""Writes blocks ahead and makes them durable in groups: files, then one round of fsync, then names.

I/O thread only. A complete file is in the incoming folder as soon as it is written: if this process
is killed, the next one that opens the store salvages it. fsync and the rename protect it from a
power cut, too. Writing never waits for a whole round of fsync: a slow disk delays durability, but
not what survives a kill.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from holdfast.files import sync_to_drive
from holdfast.store.block import KEY_BYTES, BadBlock, Block, BlockKey, BlockMissing, Entry, Part
from holdfast.store.block_file import read_block, read_header, write_buffers
from holdfast.store.folder import (
    BLOCK_SUFFIX,
    StoreFolder,
    fingerprint_id,
    sync_by_name,
    sync_folder,
)
from holdfast.wire.events import StoreFigures


class WriteAhead:
    """The files that are complete, but not durable or not in the index yet, oldest first."""

    def __init__(self, folder: StoreFolder, *, fingerprint: str, figures: StoreFigures) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._figures = figures
        self._entries: dict[BlockKey, Entry] = {}
        self._written_at: dict[BlockKey, float] = {}  # steady clock
        self._incoming = Path()  # set by the first write
        self.file_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def oldest_at(self) -> float:
        """When the oldest file was written. There must be one."""
        return next(iter(self._written_at.values()))

    @property
    def parent_keys(self) -> set[BlockKey]:
        """The parents of all these blocks."""
        return {entry.block.parent_key for entry in self._entries.values()}

    def write(
        self, block: Block, buffers: tuple[Part, ...], *, now: float, steady_now: float
    ) -> None:
        """Write a block's file into the incoming folder. Raises OSError and then leaves no file."""
        self._incoming = self._folder.incoming()
        path = self._path(block.key)
        file = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            write_buffers(file, buffers)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        entry = Entry(
            block=block, model=self._figures.model, file_bytes=sum(map(len, buffers)), last_used=now
        )
        self._entries[block.key] = entry
        self._written_at[block.key] = steady_now
        self.file_bytes += entry.file_bytes

    def group(self, *, most_bytes: int, most_blocks: int) -> list[Entry]:
        """The oldest files, within bounds; at least one if there are any."""
        chosen: list[Entry] = []
        total_bytes = 0
        for entry in self._entries.values():
            total_bytes += entry.file_bytes
            if chosen and (total_bytes > most_bytes or len(chosen) >= most_blocks):
                break
            chosen.append(entry)
        return chosen

    def publish(self, group: list[Entry], *, between: Callable[[], None]) -> None:
        """Make files durable under their names.

        `between` is called between two fsyncs and may write more. Raises OSError.

        The drive's own cache is flushed once, with the last file. If a power cut undoes a rename,
        the file is still in the incoming folder, and the next store salvages it.
        """
        for entry in group:
            sync = sync_to_drive if entry is group[-1] else os.fsync
            sync_by_name(self._path(entry.block.key), flags=os.O_NOFOLLOW, sync=sync)
            between()
        model_folder = self._folder.make_model_folder(self._fingerprint)
        for entry in group:
            os.replace(
                self._path(entry.block.key),
                self._folder.block_path(entry.block.key, model=entry.model),
            )
        sync_folder(model_folder)
        self._figures.written_bytes += sum(entry.file_bytes for entry in group)

    def drop(self, group: list[Entry]) -> None:
        """Forget files that are durable."""
        for entry in group:
            if self._entries.pop(entry.block.key, None) is not None:
                del self._written_at[entry.block.key]
                self.file_bytes -= entry.file_bytes

    def abandon(self) -> list[BlockKey]:
        """Remove all files that are not durable, if possible. Returns their keys."""
        keys = list(self._entries)
        for key in keys:
            with contextlib.suppress(OSError):  # otherwise a later opening salvages it
                self._path(key).unlink(missing_ok=True)
        self._entries.clear()
        self._written_at.clear()
        self.file_bytes = 0
        return keys

    def _path(self, key: BlockKey) -> Path:
        return self._incoming / f"{key.hex()}.part"


def salvage(folder: StoreFolder) -> int:
    """Publish the complete files that dead writers left, and delete the incomplete ones.

    The caller holds the folder's lock. Returns how many were saved. Raises OSError.
    """
    saved = 0
    touched = set()
    with folder.abandoned() as paths:
        for path in paths:
            name = path.name.partition(".")[0]
            try:
                key = bytes.fromhex(name) if len(name) == 2 * KEY_BYTES else b""
                fingerprint = read_header(path, key).fingerprint
                read_block(path, key, model=fingerprint_id(fingerprint))
            except (BadBlock, BlockMissing, ValueError):
                path.unlink(missing_ok=True)
                continue
            target = folder.make_model_folder(fingerprint)
            os.replace(path, target / (name + BLOCK_SUFFIX))
            touched.add(target)
            saved += 1
        for target in touched:
            sync_folder(target)
    return saved
