"""Writes blocks in groups: files first, then one round of fsync, then names. I/O thread only.

A file lies complete in the incoming folder as soon as it is written: if this process is killed, the next one that opens the store
finishes it. fsync and the rename make it safe from a power cut, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.store.block import Block
from holdfast.store.block_file import EncodedBlock, write_buffers
from holdfast.store.folder import StoreFolder, sync_folder
from holdfast.store.index import IndexRow, row_of
from holdfast.store.keys import fingerprint_id
from holdfast.store.statistics import WriteCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A complete file that has no name yet."""

    row: IndexRow
    file: int
    path: Path


class WriteGroup:
    """The files of one group. The blocks' parts are let go by the owner when the group is published."""

    def __init__(self, folder: StoreFolder, *, fingerprint: str, counters: WriteCounters) -> None:
        self._folder, self._fingerprint, self._counters = folder, fingerprint, counters
        self._written: list[_Written] = []
        self.blocks: list[Block] = []
        self.file_bytes = 0

    def write(self, block: Block, encoded: EncodedBlock, *, now: float) -> None:
        """Write a block's file into the incoming folder. Raises OSError; nothing of the file is left then."""
        began = time.perf_counter()
        path = self._folder.incoming() / f"{block.key.hex()}.part"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            write_buffers(file, encoded.buffers)
        except BaseException:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        row = row_of(block, fingerprint=self._fingerprint, created=now, file_bytes=encoded.file_bytes, last_used=now)
        self._written.append(_Written(row=row, file=file, path=path))
        self.blocks.append(block)
        self.file_bytes += encoded.file_bytes
        self._counters.write_seconds += time.perf_counter() - began

    def publish(self, *, between: Callable[[], None]) -> list[IndexRow]:
        """Make all files durable under their names. `between` is called between two fsyncs. Raises OSError."""
        for written in self._written:
            began = time.perf_counter()
            os.fsync(written.file)
            self._counters.sync_seconds += time.perf_counter() - began
            between()
        began = time.perf_counter()
        model_folder = self._folder.make_model_folder(self._fingerprint)
        for written in self._written:
            os.replace(written.path, self._folder.block_path(written.row.entry.key, model=fingerprint_id(self._fingerprint)))
        sync_folder(model_folder)
        self._counters.sync_seconds += time.perf_counter() - began
        self._counters.written_blocks += len(self._written)
        self._counters.written_bytes += self.file_bytes
        rows = [written.row for written in self._written]
        self._close()
        return rows

    def abandon(self) -> None:
        """Remove what was written, as far as the folder lets us."""
        for written in self._written:
            try:
                written.path.unlink(missing_ok=True)
            except OSError:
                continue  # it stays where a later opening finds it
        self._close()

    def _close(self) -> None:
        for written in self._written:
            os.close(written.file)
        self._written = []
