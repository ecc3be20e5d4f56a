"""Blocks of bytes on disk: put, read, list, remove. Callers never wait for the disk.

Durability: `put` returns immediately. A block survives the death of this process as soon as its
bytes are written, which takes milliseconds if the disk is fast enough: the next process that opens
the store salvages it. A block survives a power cut once `changes().stored` contains it, or after
`flush()`: then its file, the file's name and the folder are synced, which takes 50 ms plus the
disk's own time. Blocks may be lost (queue full, no room, no disk), but they are never wrong.

A record is a small file of a session, which is only ever replaced as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import TypeVar, get_args

import msgspec

from holdfast.store.block import (
    BlockKey,
    BlockMissing,
    BlockUnreadable,
    Entry,
    ReadFailed,
    StoreChanges,
    StoredBlock,
    fingerprint_id,
    read_block,
)
from holdfast.store.folder import (
    ReadRecords,
    StoreFolder,
    check_name,
)
from holdfast.store.io_thread import Clocks, IoThread
from holdfast.store.maintenance import StoreLimits
from holdfast.store.write_ahead import Mailbox
from holdfast.wire.events import DropReason, StoreFigures

FOREVER = 1e18  # in seconds since the epoch: the end of a pin that never expires

Answer = TypeVar("Answer")


class BlockReader:
    """Reads blocks on a separate thread. Any thread may call `request_block`."""

    def __init__(
        self,
        folder: StoreFolder,
        mailbox: Mailbox,
        *,
        figures: StoreFigures,
        on_failure: Callable[[Path, ReadFailed], None],
    ) -> None:
        """figures: the store's metrics, which the reader updates; they contain the model's short name.

        on_failure: called on the reading thread with the path of each file that could not be read,
            and the error.
        """
        self._folder = folder
        self._mailbox = mailbox
        self._figures = figures
        self._on_failure = on_failure
        # requested blocks; None ends the thread
        self._requests: queue.SimpleQueue[tuple[BlockKey, Future[StoredBlock]] | None] = (
            queue.SimpleQueue()
        )
        self._has_ended = False

    def request_block(self, key: BlockKey) -> Future[StoredBlock]:
        """Return a future of the block. It can be cancelled until the read begins."""
        future: Future[StoredBlock] = Future()
        self._requests.put((key, future))
        if self._has_ended:
            self._refuse_all()
        return future

    def end(self) -> None:
        """End the thread once it has answered all previous calls of `request_block`."""
        self._requests.put(None)

    def run(self) -> None:
        """Read blocks until `end` is called. The body of the reading thread."""
        try:
            while (request := self._requests.get()) is not None:
                key, future = request
                if future.set_running_or_notify_cancel():
                    self._answer(key, future)
        finally:
            self._has_ended = True
            self._refuse_all()

    def _answer(self, key: BlockKey, future: Future[StoredBlock]) -> None:
        """Set the future's result. A bug also ends the thread."""
        try:
            block = self._read(key)
        except ReadFailed as failure:
            self._figures.missing_blocks += isinstance(failure, BlockMissing)
            self._figures.unreadable_blocks += isinstance(failure, BlockUnreadable)
            self._on_failure(self._folder.block_path(key, model=self._figures.model), failure)
            future.set_exception(failure)
        except BaseException as error:
            future.set_exception(error)
            raise
        else:
            future.set_result(block)

    def _read(self, key: BlockKey) -> StoredBlock:
        """The block from the mailbox if it is not written yet, or else from its file."""
        queued_block = self._mailbox.held_block(key)
        if queued_block is not None:
            return queued_block
        stored = read_block(
            self._folder.block_path(key, model=self._figures.model), key, model=self._figures.model
        )
        self._figures.read_bytes += stored.nbytes
        return stored

    def _refuse_all(self) -> None:
        """Fail all requests, because no thread answers them any more."""
        while True:
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return
            if request is None:
                continue
            key, future = request
            if future.set_running_or_notify_cancel():
                future.set_exception(BlockUnreadable(key, "the store is closed"))


class BlockStore:
    """The blocks of one model, in a folder that other models and processes may share.

    Any thread may call it. It has two threads: one owns the files and the index, the other reads.
    They are not daemons; `close` ends them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        served_as: str = "",
        limits: StoreLimits | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        """Open the store and start its threads.

        Raises StoreRefused if the folder contains files that do not belong to a store. A folder
        that cannot be read or written is not an error.

        fingerprint: identifies the model; only its blocks are visible.
        served_as: the model's name, shown to people who inspect the folder.
        """
        limits = limits or StoreLimits()
        clocks = clocks or Clocks()
        self._folder = StoreFolder(folder, names={fingerprint: served_as})
        # the I/O thread handles a folder that cannot be read
        with contextlib.suppress(OSError):
            self._folder.check()
        self._figures = StoreFigures(
            model=fingerprint_id(fingerprint), dropped_blocks=dict.fromkeys(get_args(DropReason), 0)
        )
        self._mailbox = Mailbox(most_bytes=limits.queue_bytes, most_blocks=limits.queue_blocks)
        self._io = IoThread(
            self._folder,
            self._mailbox,
            fingerprint=fingerprint,
            figures=self._figures,
            limits=limits,
            clocks=clocks,
        )
        self._reader = BlockReader(
            self._folder, self._mailbox, figures=self._figures, on_failure=self._on_failure
        )
        self._threads = (
            threading.Thread(target=self._io.run, name="holdfast-store"),
            threading.Thread(target=self._reader.run, name="holdfast-store-reader"),
        )
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- blocks

    def put(self, block: StoredBlock) -> None:
        """Queue a block for writing.

        The block can be read immediately. If the queue is full, the block is dropped and counted.

        The parts must be contiguous and must not change any more. They are released once the block
        is on disk.
        """
        self._mailbox.offer_block(block)

    def read(self, key: BlockKey) -> Future[StoredBlock]:
        """Return a future of the verified block, whose parts are views of one buffer.

        The future fails with BlockMissing, BlockUnreadable or BadBlock. Callbacks run on the
        reading thread. Release a block before you ask for many more: reused buffers cause no page
        faults.
        """
        return self._reader.request_block(key)

    def entries(self) -> tuple[Entry, ...]:
        """Return all blocks of this model whose parents are known, parents first, blocks before
        states. A block may be missing (`Entry.is_missing`) while blocks after it are stored.

        Blocks until the answer.
        """
        return self._run_task(self._io.entries, otherwise=())

    def changes(self) -> StoreChanges:
        """Return the blocks that have become durable and those lost since the last call.

        A key may be in both lists.
        """
        return self._mailbox.changes()

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Record a use of blocks.

        Pass all blocks of the path: a parent counts as used when a descendant is.
        """
        self._mailbox.send(functools.partial(self._io.touch, tuple(keys)))

    def pin(self, keys: Iterable[BlockKey], *, holder: str = "", until: float = FOREVER) -> None:
        """Protect blocks and their ancestors from eviction for `holder`, even across restarts.

        until: in seconds since the epoch, like time.time().
        """
        self._mailbox.send(functools.partial(self._io.pin, tuple(keys), holder, until))

    def unpin(self, keys: Iterable[BlockKey], *, holder: str = "") -> None:
        """Remove a holder's pins."""
        self._mailbox.send(functools.partial(self._io.unpin, tuple(keys), holder))

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Delete blocks, including queued ones. Pass children before parents."""
        self._mailbox.send(functools.partial(self._io.remove, tuple(keys)))

    # -- small named records

    def put_record(self, name: str, data: bytes) -> None:
        """Save a small record of this model; returns immediately.

        Raises ValueError unless the name has 32 hexadecimal digits.
        """
        check_name(name)
        self._mailbox.send(functools.partial(self._io.put_record, name, data))

    def remove_record(self, name: str) -> None:
        """Delete a record."""
        self._mailbox.send(functools.partial(self._io.remove_record, name))

    def records(self) -> ReadRecords | None:
        """Return all records of this model; None if they cannot be listed at the moment. Blocks."""
        return self._run_task(self._io.records, otherwise=None)

    def ask_records(self) -> Future[ReadRecords | None]:
        """Like `records`, but returns a future.

        The future is cancelled when the store is closed.
        """
        return self._mailbox.ask(self._io.records)

    # -- the whole store

    def flush(self, timeout_seconds: float = 60.0) -> bool:
        """Wait until all blocks and records put so far are durable.

        Returns whether they are; False after the timeout, or if the store is closed.
        """
        try:
            return self._mailbox.ask(self._io.flush).result(timeout_seconds)
        except (FutureTimeout, CancelledError):
            return False

    def close(self) -> None:
        """Write everything that is queued, and end the threads. May be called twice."""
        self._reader.end()
        self._mailbox.close()
        for thread in self._threads:
            thread.join()

    def statistics(self) -> StoreFigures:
        """A snapshot of the store's metrics. Never waits."""
        queued_blocks, queued_bytes = self._mailbox.held_blocks_and_bytes()
        return msgspec.structs.replace(
            self._figures,
            queued_blocks=queued_blocks,
            queued_bytes=queued_bytes,
            dropped_blocks=self._figures.dropped_blocks
            | {"queue_full": self._mailbox.refused_blocks},
        )

    def check_invariants(self) -> None:
        """Assert that the index is consistent."""
        self._run_task(self._io.check_invariants, otherwise=None)

    def _on_failure(self, path: Path, failure: ReadFailed) -> None:
        """Let the I/O thread check a file that could not be read. Called on the reading thread."""
        self._mailbox.send(functools.partial(self._io.recheck_file, path, failure))

    def _run_task(self, work: Callable[[], Answer], *, otherwise: Answer) -> Answer:
        """Run `work` on the I/O thread and wait. Returns `otherwise` if the store is closed."""
        try:
            return self._mailbox.ask(work).result()
        except CancelledError:
            return otherwise
