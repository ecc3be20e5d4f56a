"""Blocks on their way to disk: the mailbox that other threads put them into, and the files that are
complete but not durable yet.

Files are made durable in groups: first all files are written, then one round of fsync follows, then
they get their final names. A complete file is in the incoming folder once it is written. If
this process is killed, the next one that opens the store salvages it. fsync and the rename also
protect it from a power cut. Writing never waits for a whole round of fsync: a slow disk delays
durability, but does not change what survives a kill.

To publish a file is to make it durable and to give it its final name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from holdfast.files import sync_to_drive
from holdfast.store.block import (
    KEY_BYTES,
    BadBlock,
    Block,
    BlockKey,
    BlockMissing,
    BlockUnreadable,
    Entry,
    Part,
    StoreChanges,
    StoredBlock,
    fingerprint_id,
    read_block,
    read_header,
    write_buffers,
)
from holdfast.store.folder import BLOCK_SUFFIX, StoreFolder, sync_by_name, sync_folder
from holdfast.wire.events import StoreFigures

Answer = TypeVar("Answer")
Task: TypeAlias = Callable[[], None]
# the answer of the mailbox to a block
Offer: TypeAlias = Literal["taken", "held already", "full", "closed"]

_LOG = logging.getLogger(__name__)
_MOST_CHANGES = 1 << 17  # how many changes to remember; a read also notices a lost block


class Mailbox:
    """The queue of the I/O thread: a bounded number of blocks, and tasks, in the order sent.

    Any thread may call it. Blocks can be read from the mailbox until the I/O thread has finished
    with them.
    """

    def __init__(self, *, most_bytes: int, most_blocks: int) -> None:
        self._most_bytes = most_bytes
        self._most_blocks = most_blocks
        self._changed = threading.Condition()  # its lock protects all fields
        self._waiting: deque[StoredBlock | Task] = deque()  # in the order sent
        self._blocks: dict[BlockKey, StoredBlock] = {}  # not finished by the I/O thread
        self._held_bytes = 0
        self._closed = False
        self._unanswered: set[Future[Any]] = set()  # futures of questions (`ask`)
        # stored, and not (or no longer) stored, since the last call of `changes`
        self._stored: deque[BlockKey] = deque(maxlen=_MOST_CHANGES)
        self._lost: deque[BlockKey] = deque(maxlen=_MOST_CHANGES)
        self.refused_blocks = 0  # because the queue was full

    def offer_block(self, block: StoredBlock) -> Offer:
        """Queue a block for writing if there is room.

        An empty mailbox takes a block of any size.
        """
        size = block.nbytes
        with self._changed:
            if self._closed:
                return "closed"
            if block.key in self._blocks:
                return "held already"
            is_full = (
                self._held_bytes + size > self._most_bytes or len(self._blocks) >= self._most_blocks
            )
            if is_full and self._blocks:
                self.refused_blocks += 1
                self._lost.append(block.key)
                return "full"
            self._blocks[block.key] = block
            self._held_bytes += size
            self._waiting.append(block)
            self._changed.notify()
        return "taken"

    def send(self, task: Task) -> bool:
        """Queue a task after everything sent before. Returns False if the mailbox is closed."""
        with self._changed:
            if self._closed:
                return False
            self._waiting.append(task)
            self._changed.notify()
        return True

    def ask(self, question: Callable[[], Answer]) -> Future[Answer]:
        """Queue a question for the I/O thread, and return a future of its answer.

        The future is cancelled if the mailbox is already closed, or is abandoned before the answer.
        The caller gets any exception. The I/O thread gets it, too, to handle failures of the store,
        unless it is an AssertionError (of `check_invariants`).
        """
        answer: Future[Answer] = Future()

        def answer_question() -> None:
            # on the I/O thread
            self._unanswered.discard(answer)
            try:
                answer.set_result(question())
            except AssertionError as error:
                answer.set_exception(error)
            except BaseException as error:
                answer.set_exception(error)
                raise

        self._unanswered.add(answer)
        if not self.send(answer_question):
            self._unanswered.discard(answer)
            answer.cancel()
        return answer

    def next_work(self, timeout_seconds: float | None) -> StoredBlock | Task | None:
        """Return the next block or task.

        Returns None after a timeout, or if the mailbox is closed and empty.
        """
        with self._changed:
            if not self._waiting and not self._closed:
                self._changed.wait(timeout_seconds)
            return self._waiting.popleft() if self._waiting else None

    def take_block(self) -> StoredBlock | None:
        """Return the next item if it is a block, else None. Never waits."""
        with self._changed:
            if not self._waiting or not isinstance(self._waiting[0], StoredBlock):
                return None
            block = self._waiting.popleft()
            assert isinstance(block, StoredBlock)
            return block

    def held_block(self, key: BlockKey) -> StoredBlock | None:
        """Return a block that is queued or being written; None for any other."""
        with self._changed:
            return self._blocks.get(key)

    def finish(self, keys: Iterable[BlockKey], *, stored: bool) -> None:
        """Release blocks. stored: they are durable now; otherwise they will never be."""
        with self._changed:
            for key in keys:
                block = self._blocks.pop(key, None)
                if block is not None:
                    self._held_bytes -= block.nbytes
                (self._stored if stored else self._lost).append(key)

    def report_lost(self, keys: Iterable[BlockKey]) -> None:
        """Record that the store does not have these blocks any more."""
        with self._changed:
            self._lost.extend(keys)

    def changes(self) -> StoreChanges:
        """Return what was stored and lost since the last call."""
        with self._changed:
            changes = StoreChanges(stored=tuple(self._stored), lost=tuple(self._lost))
            self._stored.clear()
            self._lost.clear()
        return changes

    def held_blocks_and_bytes(self) -> tuple[int, int]:
        """The number of blocks in the mailbox, and their size in bytes."""
        with self._changed:
            return len(self._blocks), self._held_bytes

    @property
    def closed(self) -> bool:
        """Whether the mailbox refuses everything new."""
        return self._closed

    def close(self) -> None:
        """Refuse everything new. Queued blocks are still handed out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Drop everything and cancel all answers, so that nobody waits forever."""
        self.close()
        with self._changed:
            self._waiting.clear()
        for answer in tuple(self._unanswered):
            answer.cancel()


class WriteAhead:
    """Files that are complete, but not durable or not in the index yet; oldest first.

    I/O thread only.
    """

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
        """The time at which the oldest file was written. Requires at least one file."""
        return next(iter(self._written_at.values()))

    @property
    def parent_keys(self) -> set[BlockKey]:
        """The keys of the parents of all these blocks."""
        return {entry.block.parent_key for entry in self._entries.values()}

    def write(
        self, block: Block, buffers: tuple[Part, ...], *, now: float, steady_now: float
    ) -> None:
        """Write a block's file into the incoming folder.

        buffers: the content of the file. now: in seconds since the epoch; steady_now: on the steady
        clock. If writing fails, raises OSError and leaves no file.
        """
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
        """Return the oldest files within these limits; at least one if there are any."""
        chosen: list[Entry] = []
        total_bytes = 0
        for entry in self._entries.values():
            total_bytes += entry.file_bytes
            if chosen and (total_bytes > most_bytes or len(chosen) >= most_blocks):
                break
            chosen.append(entry)
        return chosen

    def publish(self, group: list[Entry], *, between: Callable[[], None]) -> None:
        """Make files durable, under their final names.

        between: called after each fsync; may write more files. Raises OSError.

        The drive's own cache is flushed once, with the last file. If a power cut undoes a rename,
        the file is still in the incoming folder, and the next process that opens the store salvages
        it.
        """
        _sync_files([self._path(entry.block.key) for entry in group], between=between)
        model_folder = self._folder.make_model_folder(self._fingerprint)
        for entry in group:
            os.replace(
                self._path(entry.block.key),
                self._folder.block_path(entry.block.key, model=entry.model),
            )
        sync_folder(model_folder)
        self._figures.written_bytes += sum(entry.file_bytes for entry in group)

    def drop(self, group: list[Entry]) -> None:
        """Forget files, because they were published."""
        for entry in group:
            if self._entries.pop(entry.block.key, None) is not None:
                del self._written_at[entry.block.key]
                self.file_bytes -= entry.file_bytes

    def abandon(self) -> list[BlockKey]:
        """Forget all files, and delete those that are not durable, if possible. Returns the keys."""
        keys = list(self._entries)
        for key in keys:
            # otherwise the file is salvaged when the store is opened again
            with contextlib.suppress(OSError):
                self._path(key).unlink(missing_ok=True)
        self._entries.clear()
        self._written_at.clear()
        self.file_bytes = 0
        return keys

    def _path(self, key: BlockKey) -> Path:
        return self._incoming / f"{key.hex()}.part"


def _sync_files(paths: Sequence[Path], *, between: Callable[[], None] = lambda: None) -> None:
    """Sync files, and flush the drive's own cache once, with the last one. Calls `between` after each."""
    for path in paths:
        sync = sync_to_drive if path is paths[-1] else os.fsync
        sync_by_name(path, flags=os.O_NOFOLLOW, sync=sync)
        between()


def salvage(folder: StoreFolder) -> int:
    """Publish the complete files that dead processes left, and delete the incomplete ones.

    The caller holds the folder's lock. Returns how many files were published. Raises OSError.
    """
    targets: dict[Path, Path] = {}
    with folder.abandoned() as paths:
        for path in paths:
            name = path.name.partition(".")[0]
            try:
                key = bytes.fromhex(name) if len(name) == 2 * KEY_BYTES else b""
                _, fingerprint = read_header(path, key)
                read_block(path, key, model=fingerprint_id(fingerprint))
            except (BlockMissing, BlockUnreadable) as failure:
                _LOG.warning("a file of a dead process is left for the next start: %s", failure)
                continue
            except (BadBlock, ValueError):
                path.unlink(missing_ok=True)
                continue
            targets[path] = folder.make_model_folder(fingerprint) / (name + BLOCK_SUFFIX)
        _sync_files(list(targets))  # the dead process may not have synced them
        for path, target in targets.items():
            os.replace(path, target)
        folder.sync_names()  # a dead process may have renamed files without syncing their folder
    return len(targets)
