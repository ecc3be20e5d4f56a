"""Reads and verifies blocks on a thread of its own, so that a restore never waits for somebody's
fsync.

It opens files by name and only reads: a block file is never changed, so no agreement with the I/O
thread is needed.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from holdfast.store.block import BadBlock, BlockKey, BlockMissing, StoredBlock
from holdfast.store.block_file import read_block
from holdfast.store.folder import StoreFolder
from holdfast.store.mailbox import Mailbox
from holdfast.wire.figures import StoreFigures


class BlockReader:
    """The reading thread's work. `ask` is for any thread, `run` for the one."""

    def __init__(
        self,
        folder: StoreFolder,
        mailbox: Mailbox,
        *,
        figures: StoreFigures,
        on_bad: Callable[[Path, BadBlock], None],
    ) -> None:
        """`figures` name the model.

        `on_bad` is called on the reading thread with each file that is damaged.
        """
        self._folder, self._mailbox, self._figures, self._on_bad = folder, mailbox, figures, on_bad
        self._asked: queue.SimpleQueue[tuple[BlockKey, Future[StoredBlock]] | None] = (
            queue.SimpleQueue()
        )
        self._ended = False

    def ask(self, key: BlockKey) -> Future[StoredBlock]:
        """A future of the block. One that is not running yet can be cancelled."""
        future: Future[StoredBlock] = Future()
        self._asked.put((key, future))
        if self._ended:
            self._refuse_all()
        return future

    def end(self) -> None:
        """Let the thread end after what was asked so far."""
        self._asked.put(None)

    def run(self) -> None:
        """Answer until `end`."""
        try:
            while (asked := self._asked.get()) is not None:
                key, future = asked
                if future.set_running_or_notify_cancel():
                    self._answer(key, future)
        finally:
            self._ended = True
            self._refuse_all()

    def _answer(self, key: BlockKey, future: Future[StoredBlock]) -> None:
        try:
            block = self._read(key)
        except BlockMissing as missing:
            self._figures.missing_blocks += 1
            future.set_exception(missing)
        except BadBlock as bad:
            future.set_exception(bad)
            self._on_bad(self._folder.block_path(key, model=self._figures.model), bad)
        except MemoryError:
            self._figures.missing_blocks += 1
            future.set_exception(BlockMissing(key, "no memory to read it into"))
        except BaseException as error:
            future.set_exception(error)
            raise
        else:
            future.set_result(block)

    def _read(self, key: BlockKey) -> StoredBlock:
        held = self._mailbox.held(key)
        if held is not None:
            return held
        stored = read_block(
            self._folder.block_path(key, model=self._figures.model), key, model=self._figures.model
        )
        self._figures.read_bytes += stored.nbytes
        return stored

    def _refuse_all(self) -> None:
        while True:
            try:
                asked = self._asked.get_nowait()
            except queue.Empty:
                return
            if asked is not None and asked[1].set_running_or_notify_cancel():
                asked[1].set_exception(BlockMissing(asked[0], "the store is closed"))
