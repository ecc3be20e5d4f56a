"""Writes blocks ahead and makes them durable in groups: files first, then one round of fsync, then names. I/O thread only.

A file lies complete in the incoming folder as soon as it is written: if this process is killed, the next one that opens the store
finishes it. fsync and the rename make it safe from a power cut, too. Writing never waits for a whole round of fsync: a slow disk
delays durability, but not what survives a kill.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.store.block import Block, BlockKey, Entry, Part
from holdfast.store.block_file import write_buffers
from holdfast.store.folder import StoreFolder, fingerprint_id, sync_folder
from holdfast.store.statistics import WriteCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A complete file, not yet durable or not yet in the index."""

    entry: Entry
    path: Path
    written_at: float  # steady clock

    @property
    def key(self) -> BlockKey:
        """The key of its block."""
        return self.entry.block.key


class WriteAhead:
    """The files that are written but not settled, oldest first."""

    def __init__(self, folder: StoreFolder, *, fingerprint: str, counters: WriteCounters) -> None:
        self._folder, self._fingerprint, self._counters = folder, fingerprint, counters
        self._model = fingerprint_id(fingerprint)
        self._files: dict[BlockKey, WrittenFile] = {}
        self.file_bytes = 0

    def __len__(self) -> int:
        return len(self._files)

    @property
    def oldest_at(self) -> float:
        """When the oldest file was written; there must be one."""
        return next(iter(self._files.values())).written_at

    @property
    def parent_keys(self) -> set[BlockKey]:
        """The parents of all blocks that are not settled."""
        return {written.entry.block.parent_key for written in self._files.values()}

    def write(self, block: Block, buffers: tuple[Part, ...], *, now: float, steady_now: float) -> None:
        """Write a block's file into the incoming folder. Raises OSError; nothing of the file is left then."""
        began = time.perf_counter()
        path = self._folder.incoming() / f"{block.key.hex()}.part"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            write_buffers(file, buffers)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        entry = Entry(block=block, model=self._model, file_bytes=sum(map(len, buffers)), last_used=now)
        self._files[block.key] = WrittenFile(entry=entry, path=path, written_at=steady_now)
        self.file_bytes += entry.file_bytes
        self._counters.write_seconds += time.perf_counter() - began

    def group(self, *, most_bytes: int, most_blocks: int) -> list[WrittenFile]:
        """The oldest files, within bounds; at least one if there is any."""
        chosen: list[WrittenFile] = []
        total_bytes = 0
        for written in self._files.values():
            total_bytes += written.entry.file_bytes
            if chosen and (total_bytes > most_bytes or len(chosen) >= most_blocks):
                break
            chosen.append(written)
        return chosen

    def publish(self, group: list[WrittenFile], *, between: Callable[[], None]) -> None:
        """Make files durable under their names. `between` is called between two fsyncs and may write more. Raises OSError."""
        for written in group:
            began = time.perf_counter()
            _sync_file(written.path)
            self._counters.sync_seconds += time.perf_counter() - began
            between()
        began = time.perf_counter()
        model_folder = self._folder.make_model_folder(self._fingerprint)
        for written in group:
            os.replace(written.path, self._folder.block_path(written.key, model=self._model))
        sync_folder(model_folder)
        self._counters.sync_seconds += time.perf_counter() - began
        self._counters.written_blocks += len(group)
        self._counters.written_bytes += sum(written.entry.file_bytes for written in group)

    def settle(self, group: list[WrittenFile]) -> None:
        """Forget files that are durable."""
        for written in group:
            if self._files.pop(written.key, None) is not None:
                self.file_bytes -= written.entry.file_bytes

    def abandon(self) -> list[BlockKey]:
        """Remove all files that are not settled, as far as the folder lets us. Returns their keys."""
        keys = list(self._files)
        for written in self._files.values():
            try:
                written.path.unlink(missing_ok=True)
            except OSError:
                continue  # it stays where a later opening finds it
        self._files.clear()
        self.file_bytes = 0
        return keys


def _sync_file(path: Path) -> None:
    """fsync by name: files that wait for it need not be kept open, there may be thousands."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(file)
    finally:
        os.close(file)
