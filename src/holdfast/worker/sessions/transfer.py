"""Exports and imports of sessions.

One thread per transfer reads or writes the file, and the device thread works on the arrays; a queue
of a few blocks connects them. Between two steps, the device thread does only a little of this work,
so that running answers are hardly delayed. A failure ends only the transfer in which it occurs.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.store.block import Block, BlockKey, BlockUnreadable, ReadFailed, StoredBlock
from holdfast.wire.requests import TOKEN_BYTES
from holdfast.wire.sessions import SessionCommand
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.kv.layer import SnapshotMismatch
from holdfast.worker.kv.live import Snapshot
from holdfast.worker.prefix.cache import PrefixCache, encoded
from holdfast.worker.prefix.chain import Branch, Cursor, Root
from holdfast.worker.sessions.registry import MOST_BRANCHES, Session
from holdfast.worker.sessions.session_file import Manifest, SessionFile, bad_file, write_session

# time that the device thread spends on all transfers between two steps; one block may take longer
SECONDS_AT_A_TIME = 0.004
QUEUED_BLOCKS = 3
MOST_TRANSFERS = 4
MOST_QUEUED_BYTES = 128 << 20  # in the store's queue, which holds up to 512 MiB
_POLL_SECONDS = 0.05

T = TypeVar("T")
CheckedFiles: TypeAlias = queue.Queue[tuple[SessionFile, list[bytes]]]
QueuedBlocks: TypeAlias = queue.Queue[StoredBlock]
# blocks to write into the file: with their content, or only the key if it must be read from disk
QueuedContents: TypeAlias = queue.Queue[StoredBlock | BlockKey]
# the device thread's part of a transfer, in pieces; yields True if it waits for the other thread
Steps: TypeAlias = Generator[bool, None, None]

logger = logging.getLogger("holdfast.worker.sessions")


@dataclass(slots=True, eq=False)
class Transfer:
    """An export or import under way."""

    command: SessionCommand
    session: Session | None = None  # for an import: set when it is complete
    # for an export: prevents the eviction of its blocks
    hold: ExitStack = field(default_factory=ExitStack)
    # for an export: blocks that the store could not read
    lost: list[BlockKey] = field(default_factory=list)
    failure: SessionRefused | None = None
    stop: threading.Event = field(default_factory=threading.Event)  # asks the thread to end
    ended: threading.Event = field(default_factory=threading.Event)  # the thread has ended

    @contextmanager
    def recording_failure(self) -> Iterator[None]:
        """Record an exception in the block as the failure of this transfer, and do not raise it if
        a damaged file or block can cause it. The first failure counts.
        """
        failure: SessionRefused | None = _failure_of_transfer("the transfer was interrupted")
        try:
            yield
            failure = None
        except SessionRefused as refusal:
            failure = refusal
        except SnapshotMismatch as mismatch:
            failure = bad_file(f"the file does not fit this model: {mismatch}")
        except (OSError, ReadFailed) as error:
            failure = _failure_of_transfer(f"the session's file cannot be read or written: {error}")
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:  # of MLX
            logger.exception("the transfer of a session failed")
            failure = _failure_of_transfer(f"the transfer failed: {error}")
        finally:
            self.failure = self.failure or failure


class Transfers:
    """The exports and imports under way. Device thread only, except `_write_file` and `_read_file`."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        context_tokens: int,
        check_room: Callable[[SessionCommand, SessionFile], None],
        register: Callable[[SessionCommand, Manifest, Sequence[bytes]], Session],
    ) -> None:
        """Both callbacks run on the device thread and may raise SessionRefused.

        check_room: raises if a checked file may not be imported. register: creates a session from
        the chains.
        """
        self._cache = cache
        self._context_tokens = context_tokens
        self._check_room = check_room
        self._register = register
        self._under_way: dict[Transfer, tuple[Steps, threading.Thread]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is under way."""
        return bool(self._under_way)

    def begin_export(self, command: SessionCommand, session: Session) -> None:
        """Export the cached blocks of a session. Raises SessionRefused if there are too many
        transfers, or if no block is left.
        """
        self._refuse_too_many()
        index = self._cache.index
        kept = map(index.kept_part, session.branches)
        branches = [part for part in kept if part.blocks][:MOST_BRANCHES]
        if session.branches and not branches:
            raise SessionRefused(
                SessionFailure.NOT_KEPT,
                "no part of this session is cached any more: it was evicted, or the store was "
                "cleared",
            )
        # without duplicates, because branches share blocks
        blocks = {block.key: block for branch in branches for block in index.blocks_of(branch)}
        manifest = Manifest(
            fingerprint=self._cache.fingerprints.of(command),
            session_id=session.session_id,
            created_at=session.created_at,
            metadata=session.metadata,
            ttl_seconds=session.ttl_seconds,
            requests=session.requests,
            branches=tuple(branches),
        )
        transfer = Transfer(command, session, hold=index.hold_blocks(blocks))
        contents = QueuedContents(QUEUED_BLOCKS)
        self._start(
            transfer,
            self._export_blocks(transfer, blocks.values(), contents),
            partial(self._write_file, transfer, manifest, len(blocks), contents),
        )

    def begin_import(self, command: SessionCommand) -> None:
        """Check a file, then import its blocks. Raises SessionRefused if there are too many
        transfers.
        """
        self._refuse_too_many()
        transfer = Transfer(command)
        checked = CheckedFiles()
        blocks = QueuedBlocks(QUEUED_BLOCKS)
        self._start(
            transfer,
            self._import_blocks(transfer, checked, blocks),
            partial(self._read_file, transfer, checked, blocks),
        )

    def advance(self) -> list[Transfer]:
        """Continue all transfers for a short time; returns those that have ended."""
        ends_at = time.perf_counter() + SECONDS_AT_A_TIME
        ended = [
            transfer
            for transfer, (steps, _) in self._under_way.items()
            if _advance_transfer(transfer, steps, ends_at)
        ]
        for transfer in ended:
            self._end(transfer)
        return ended

    def close(self) -> None:
        """Stop all transfers; blocks that are already imported stay in the cache."""
        for transfer in self._under_way:
            transfer.stop.set()
        for transfer in list(self._under_way):
            self._end(transfer)

    def _refuse_too_many(self) -> None:
        if len(self._under_way) >= MOST_TRANSFERS:
            raise SessionRefused(
                SessionFailure.BUSY,
                f"{MOST_TRANSFERS} exports and imports are under way: try again later",
            )

    def _start(self, transfer: Transfer, steps: Steps, work: Callable[[], None]) -> None:
        """Start a transfer. steps: the device thread's part. work: the part of the transfer's own
        thread.
        """

        def run() -> None:
            try:
                with transfer.recording_failure():
                    work()
            finally:
                transfer.ended.set()

        thread = threading.Thread(target=run, name="holdfast-session")
        thread.start()
        self._under_way[transfer] = steps, thread

    def _end(self, transfer: Transfer) -> None:
        """Wait for a transfer's thread, and let its blocks be evicted again."""
        steps, thread = self._under_way.pop(transfer)
        transfer.stop.set()
        thread.join()
        steps.close()
        transfer.hold.close()

    # -- export

    def _export_blocks(
        self,
        transfer: Transfer,
        blocks: Iterable[Block],
        contents: QueuedContents,
    ) -> Steps:
        """Queue the blocks that are in memory, and the keys of the blocks that the transfer's
        thread must read from disk.
        """
        for block in blocks:
            while contents.full():
                yield True
            payload = self._cache.payload(block.key)
            contents.put_nowait(block.key if payload is None else encoded(block, payload))
            yield False
        while not transfer.ended.is_set():
            yield True

    def _write_file(
        self,
        transfer: Transfer,
        manifest: Manifest,
        count: int,
        contents: QueuedContents,
    ) -> None:
        """Write an exported session from a queue of `count` blocks, some of which are keys of
        stored blocks.
        """

        def blocks() -> Iterator[StoredBlock]:
            failure: ReadFailed | None = None
            for _ in range(count):
                block = _when_possible(partial(contents.get, timeout=_POLL_SECONDS), transfer.stop)
                if isinstance(block, bytes):
                    try:
                        block = self._read_block(block)
                    except BlockUnreadable:
                        raise  # the block is not lost: the next export may read it
                    except ReadFailed as error:
                        # the export has failed, but continues, to find all other lost blocks
                        failure = error
                        transfer.lost.append(error.key)
                        continue
                yield block
            if failure is not None:
                raise failure

        write_session(Path(transfer.command.path), manifest, blocks())

    def _read_block(self, key: BlockKey) -> StoredBlock:
        """Read a block from the store. Raises ReadFailed."""
        if self._cache.store is None:
            raise ReadFailed(key, "evicted from memory in the meantime")
        return self._cache.store.read(key).result()

    # -- import

    def _read_file(
        self,
        transfer: Transfer,
        checked: CheckedFiles,
        blocks: QueuedBlocks,
    ) -> None:
        """Check the whole file, then queue its blocks, branch by branch."""
        file = SessionFile(Path(transfer.command.path), most_tokens=self._context_tokens)

        branches = file.manifest.branches
        forms = {key: branch.form for branch in branches for key in branch.keys}

        def check(block: StoredBlock) -> None:
            if transfer.stop.is_set():
                raise _failure_of_transfer("the transfer was interrupted")
            self._check_block(block, self._cache.index.root(form=forms.get(block.key, "native")))

        try:
            file.refuse_other_model(self._cache.fingerprints.of(transfer.command))
            checked.put((file, file.checked_chains(check)))
            for branch in branches:
                for key in branch.keys:
                    put = partial(blocks.put, file.block(key), timeout=_POLL_SECONDS)
                    _when_possible(put, transfer.stop)
        finally:
            file.close()

    def _check_block(self, stored: StoredBlock, root: Root) -> None:
        """Check a block or state, including its values, against the model."""
        try:
            self._cache.check(stored, root=root)
        except SnapshotMismatch as mismatch:
            raise bad_file(
                f"block {stored.key.hex()[:12]} of the file does not fit this model: {mismatch}"
            ) from None

    def _import_blocks(
        self,
        transfer: Transfer,
        checked: CheckedFiles,
        blocks: QueuedBlocks,
    ) -> Steps:
        """Import the blocks from the queue; register the session when all are there."""
        command = transfer.command
        file, chains = yield from self._next_item(transfer, checked)
        self._check_room(command, file)
        imported: list[bytes] = []  # the packed tokens of each branch that can be used
        for branch, chain in zip(file.manifest.branches, chains, strict=True):
            root = self._cache.index.root(tenant=command.tenant, form=branch.form)
            cursor = Cursor(root)
            tokens = yield from self._take_blocks(transfer, blocks, branch, chain, cursor)
            imported.append(chain[: tokens * TOKEN_BYTES])
            for _ in branch.states:
                stored = yield from self._next_item(transfer, blocks)
                state = self._cache.decoded(stored, root=root)
                self._cache.store_snapshots(cursor, imported[-1], (state,))
        transfer.session = self._register(command, file.manifest, imported)

    def _take_blocks(
        self,
        transfer: Transfer,
        blocks: QueuedBlocks,
        branch: Branch,
        chain: bytes,
        cursor: Cursor,
    ) -> Generator[bool, None, int]:
        """Import the blocks of a branch; returns how many of its tokens can be used.

        If a branch leaves another one within a quantized block, it has that block's first tokens
        and a block with the rest: these are joined. If it ends there, it is cut to the tokens
        before that block, because no sequence can continue within it.
        """
        tokens = 0
        incomplete: Snapshot | None = None  # the first tokens of a quantized block
        is_cut = False  # the rest of the branch is skipped
        for block in branch.blocks:
            stored = yield from self._next_item(transfer, blocks)
            payload = self._cache.decoded(stored, root=cursor.root).cut(block.tokens)
            if incomplete is not None and incomplete.start < payload.start:
                is_one_block = block.end - incomplete.start <= BLOCK_TOKENS
                is_cut = (
                    is_cut or payload.is_quantized != incomplete.is_quantized or not is_one_block
                )
                payload = payload if is_cut else incomplete.joined_with(payload)
            if is_cut:
                continue
            incomplete = None
            if payload.is_quantized and block.end % BLOCK_TOKENS:
                incomplete = payload
            else:
                self._cache.store_snapshots(cursor, chain, (payload,))
                tokens = block.end
        return tokens

    def _next_item(self, transfer: Transfer, items: queue.Queue[T]) -> Generator[bool, None, T]:
        """Wait for the next item of a queue and return it. Also waits until the store's queue has
        room for it. Yields as `Steps` do.
        """
        yield False
        while True:
            # read this first: the thread adds no item after its end
            has_all_items = transfer.ended.is_set()
            if not self._writes_too_much():
                try:
                    return items.get_nowait()
                except queue.Empty:
                    if has_all_items:
                        raise _failure_of_transfer("the file ended too early") from None
            yield True

    def _writes_too_much(self) -> bool:
        """Whether the store's queue is so full that no further block should be imported now."""
        return (
            self._cache.store is not None
            and self._cache.store.statistics().queued_bytes > MOST_QUEUED_BYTES
        )


def _advance_transfer(transfer: Transfer, steps: Steps, ends_at: float) -> bool:
    """Do some of the device thread's part of a transfer, until the time `ends_at` or until it must
    wait for the other thread. Returns whether the transfer has ended.
    """
    with transfer.recording_failure():
        if transfer.failure is not None:
            return True
        for waits in steps:
            if waits or time.perf_counter() > ends_at:
                return False
    return True


def _when_possible(attempt: Callable[[], T], stop: threading.Event) -> T:
    """Repeat an attempt to use a queue while the queue is full or empty. Returns the attempt's
    result. Raises SessionRefused if `stop` is set.
    """
    while not stop.is_set():
        try:
            return attempt()
        except (queue.Empty, queue.Full):
            continue
    raise _failure_of_transfer("the transfer was interrupted")


def _failure_of_transfer(message: str) -> SessionRefused:
    return SessionRefused(SessionFailure.FAILED, message)
