"""Sessions out into portable files and in from them.

Files are the business of a thread for each transfer, arrays that of the device thread; between them
is a queue of a few blocks. The device thread does a little between two steps, so that streams
hardly feel it. Whatever goes wrong ends the one transfer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.store.block import BlockKey, ReadFailed
from holdfast.wire.sessions import SessionCommand
from holdfast.wire.token_ids import TOKEN_BYTES
from holdfast.worker.engine.fingerprint import is_outdated
from holdfast.worker.kv.codec import Content, check_values, to_bytes
from holdfast.worker.kv.snapshot import KVBlock, SnapshotMismatch, StateCheckpoint
from holdfast.worker.prefix.cache import PrefixCache
from holdfast.worker.prefix.chain import Branch, Cursor
from holdfast.worker.sessions.portable import (
    Frame,
    FrameHead,
    Header,
    Part,
    PortableBranch,
    SessionFile,
    bad_file,
    write_session,
)
from holdfast.worker.sessions.record import Session

# of the device thread between two steps, for all transfers; one block may take longer
SECONDS_AT_A_TIME = 0.004
QUEUED_FRAMES = 3
MOST_TRANSFERS = 4
MOST_QUEUED_BYTES = 128 << 20  # in the store's queue, which takes 512 MiB
_POLL_SECONDS = 0.05

T = TypeVar("T")
# the device's part, bit by bit; yields whether it has to wait for the thread
Steps: TypeAlias = Generator[bool, None, None]

logger = logging.getLogger("holdfast.worker.sessions")


@dataclass(slots=True, eq=False)
class Transfer:
    """A session on its way out or in."""

    command: SessionCommand
    session: Session | None = None  # of an import: when all of it is in
    # of an export: on its blocks, from its first moment on
    hold: ExitStack = field(default_factory=ExitStack)
    # of an export: blocks that the store could not give
    lost: list[BlockKey] = field(default_factory=list)
    failure: SessionRefused | None = None
    stop: threading.Event = field(default_factory=threading.Event)  # asks the thread to end
    # the thread puts nothing into the queue any more
    ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def costing_nobody_else(self) -> Iterator[None]:
        """What goes wrong in here is this transfer's failure, unless something did before."""
        failure: SessionRefused | None = _failed("the session could not be carried over")
        try:
            yield
            failure = None
        except SessionRefused as refusal:
            failure = refusal
        except SnapshotMismatch as misfit:
            failure = bad_file(f"the file does not fit this model: {misfit}")
        except (OSError, ReadFailed) as error:
            failure = _failed(f"the session's file: {error}")
        except Exception as error:  # whatever a damaged block makes of MLX
            logger.exception("the transfer of a session failed")
            failure = _failed(f"the session could not be carried over: {error}")
        finally:
            self.failure = self.failure or failure


class Transfers:
    """Exports and imports under way.

    Device thread, but for `_write` and `_read`, which are threads'.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        context_tokens: int,
        check_room: Callable[[SessionCommand, SessionFile], None],
        register: Callable[[SessionCommand, Header, Sequence[bytearray]], Session],
    ) -> None:
        """Both are called on the device thread and raise SessionRefused.

        check_room: whether a checked file may come in, before anything does. register: makes a
        session of the chains that came.
        """
        self._cache, self._context_tokens, self._check_room, self._register = (
            cache,
            context_tokens,
            check_room,
            register,
        )
        self._under_way: dict[Transfer, tuple[Steps, threading.Thread]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        return bool(self._under_way)

    def begin_export(self, command: SessionCommand, session: Session) -> None:
        """Write what is kept of a session.

        Raises SessionRefused when too much is under way, or nothing is left.
        """
        self._refuse_too_many()
        index = self._cache.index
        branches = [part for branch in session.branches if (part := index.kept_part(branch)).blocks]
        if session.branches and not branches:
            message = (
                "nothing of what this session has read is kept any more: it was evicted, or the "
                "store was cleared"
            )
            raise SessionRefused(SessionFailure.NOT_KEPT, message)
        sources = self._sources(branches)
        numbers = {key: number for number, key in enumerate(sources)}
        header = _header(session, branches, numbers, fingerprint=index.fingerprint)
        transfer = Transfer(command, session, hold=index.hold(sources))
        contents = queue.Queue[Content | None](QUEUED_FRAMES)
        self._start(
            transfer,
            self._give(transfer, sources, contents),
            partial(self._write, transfer, header, sources.items(), contents),
        )

    def begin_import(self, command: SessionCommand) -> None:
        """Check a file, then take in what is in it.

        Raises SessionRefused when too much is under way.
        """
        self._refuse_too_many()
        transfer, checked, frames = (
            Transfer(command),
            queue.Queue[SessionFile](),
            queue.Queue[Frame](QUEUED_FRAMES),
        )
        self._start(
            transfer,
            self._take(transfer, checked, frames),
            partial(self._read, transfer, checked, frames),
        )

    def advance(self) -> list[Transfer]:
        """Go on with what is under way, a little; returns what has come to its end."""
        until = time.perf_counter() + SECONDS_AT_A_TIME
        ended = [
            transfer
            for transfer, (steps, _) in self._under_way.items()
            if _has_ended(transfer, steps, until)
        ]
        for transfer in ended:
            self._end(transfer)
        return ended

    def close(self) -> None:
        """Stop everything; what is half in stays as ordinary memory."""
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
        def run() -> None:
            try:
                with transfer.costing_nobody_else():
                    work()
            finally:
                transfer.ended.set()

        thread = threading.Thread(target=run, name="holdfast-session")
        thread.start()
        self._under_way[transfer] = steps, thread

    def _end(self, transfer: Transfer) -> None:
        steps, thread = self._under_way.pop(transfer)
        transfer.stop.set()
        thread.join()
        steps.close()
        transfer.hold.close()

    # -- out

    def _sources(self, branches: Sequence[Branch]) -> dict[BlockKey, tuple[int, bytes]]:
        """What the file's frames are made of, in their order: of a block, which of its tokens are
        named, and from which on.
        """
        sources: dict[BlockKey, tuple[int, bytes]] = {}
        for branch in branches:
            chain, at = bytearray(), 0
            for block, each in zip(
                self._cache.index.blocks_of(branch), branch.blocks, strict=False
            ):
                chain += block.packed_tokens[
                    len(chain) - TOKEN_BYTES * each.start : TOKEN_BYTES * each.tokens
                ]
            for step in branch.blocks:
                named = bytes(chain[TOKEN_BYTES * at : TOKEN_BYTES * step.end])
                if len(named) > len(sources.get(step.key, (0, b""))[1]):
                    sources[step.key] = step.tokens - (step.end - at), named
                at = step.end
            for state in branch.states:
                sources.setdefault(state.key, (0, b""))
        return sources

    def _give(
        self, transfer: Transfer, keys: Iterable[BlockKey], contents: queue.Queue[Content | None]
    ) -> Steps:
        """Put contents into the queue; None where the store has it."""
        for key in keys:
            while contents.full():
                yield True
            payload = self._cache.payload(key)
            contents.put_nowait(
                to_bytes(payload) if isinstance(payload, KVBlock | StateCheckpoint) else None
            )
            yield False
        while not transfer.ended.is_set():
            yield True

    def _write(
        self,
        transfer: Transfer,
        header: Header,
        sources: Iterable[tuple[BlockKey, tuple[int, bytes]]],
        contents: queue.Queue[Content | None],
    ) -> None:
        def frames() -> Iterator[Frame]:
            failure: ReadFailed | None = None
            for key, (offset, packed_tokens) in sources:
                content = _when_it_can(partial(contents.get, timeout=_POLL_SECONDS), transfer.stop)
                try:
                    meta, parts = self._stored(key) if content is None else content
                except ReadFailed as error:
                    # the file is given up; look for everything else that is lost
                    failure = error
                    transfer.lost.append(key)
                    continue
                sizes = tuple(part.nbytes for part in parts)
                yield Frame(
                    FrameHead(
                        "kv" if packed_tokens else "state", offset, packed_tokens, meta, sizes
                    ),
                    parts,
                )
            if failure is not None:
                raise failure

        write_session(Path(transfer.command.path), header, frames())

    def _stored(self, key: BlockKey) -> Content:
        if self._cache.store is None:
            raise ReadFailed(key, "it has left memory in the meantime")
        block = self._cache.store.read(key).result()
        return block.meta, tuple(memoryview(part) for part in block.parts)

    # -- in

    def _read(
        self, transfer: Transfer, checked: queue.Queue[SessionFile], frames: queue.Queue[Frame]
    ) -> None:
        """Check a file as a whole; then put its frames into the queue, in the order of the branches
        that need them.
        """
        stop = transfer.stop
        file = SessionFile(
            Path(transfer.command.path), most_tokens=self._context_tokens, is_stopped=stop.is_set
        )
        try:
            if file.header.fingerprint != self._cache.index.fingerprint:
                message = "the file is of another model, or of other weights or settings of it"
                if is_outdated(file.header.fingerprint):
                    message = (
                        "the file was written by an earlier version of Holdfast, whose memory this "
                        "one cannot use"
                    )
                raise SessionRefused(SessionFailure.OTHER_MODEL, message)
            for number in range(file.header.frames):
                self._check_frame(file, number)
                if stop.is_set():
                    return
            checked.put(file)
            for branch in file.header.branches:
                for number in (
                    *(part.frame for part in branch.parts),
                    *(frame for frame, _ in branch.states),
                ):
                    _when_it_can(
                        partial(frames.put, file.frame(number), timeout=_POLL_SECONDS), stop
                    )
        finally:
            file.close()

    def _check_frame(self, file: SessionFile, number: int) -> None:
        """Hold a block or state against the model, its values too, before the first of the file is
        taken in.
        """
        frame, place = file.frame(number), file.place(number)
        head = frame.head
        try:
            claimed = self._cache.describe(head.kind, head.meta, head.part_bytes)
            if place != (claimed.length if head.kind == "state" else claimed.start + head.offset):
                raise SnapshotMismatch(f"a {head.kind} stands elsewhere than its branch says")
            if (
                head.kind == "kv"
                and not 0 <= head.offset <= claimed.length - len(head.packed_tokens) // TOKEN_BYTES
            ):
                raise SnapshotMismatch("a block is shorter than its tokens")
            check_values(claimed.arrays, frame.parts)
        except SnapshotMismatch as misfit:
            raise bad_file(
                f"block {number} of the file does not fit this model: {misfit}"
            ) from None

    def _take(
        self, transfer: Transfer, checked: queue.Queue[SessionFile], frames: queue.Queue[Frame]
    ) -> Steps:
        """Take in what comes out of the queue, and register it as a session when it is all there."""
        command = transfer.command
        file = yield from self._next(transfer, checked)
        self._check_room(command, file)
        chains: list[bytearray] = []
        for branch in file.header.branches:
            chain, cursor = bytearray(), self._cache.cursor(tenant=command.tenant)
            for part in branch.parts:
                frame = yield from self._next(transfer, frames)
                self._take_block(cursor, chain, part, frame)
            for _ in branch.states:
                frame = yield from self._next(transfer, frames)
                state = self._cache.decoded("state", frame.head.meta, frame.parts)
                assert isinstance(state, StateCheckpoint)
                self._cache.insert_checkpoint(cursor, chain, state)
            chains.append(chain)
        transfer.session = self._register(command, file.header, chains)

    def _next(self, transfer: Transfer, items: queue.Queue[T]) -> Generator[bool, None, T]:
        """The next item of a queue, when it is there and the store has not so much to write that it
        might drop what comes.
        """
        yield False
        while True:
            # asked before the queue is looked into: nothing comes after it
            has_all = transfer.ended.is_set()
            if not self._writes_too_much():
                try:
                    return items.get_nowait()
                except queue.Empty:
                    if has_all:
                        raise _failed("the file has ended too early") from None
            yield True

    def _writes_too_much(self) -> bool:
        return (
            self._cache.store is not None
            and self._cache.store.statistics().queued_bytes > MOST_QUEUED_BYTES
        )

    def _take_block(self, cursor: Cursor, chain: bytearray, part: Part, frame: Frame) -> None:
        """Take in a part of a branch, and go on with its chain."""
        chain += frame.head.packed_tokens[: TOKEN_BYTES * part.tokens]
        block = self._cache.decoded("kv", frame.head.meta, frame.parts)
        assert isinstance(block, KVBlock)
        self._cache.insert_block(cursor, chain, block.cut(part.tokens, offset=frame.head.offset))


def _has_ended(transfer: Transfer, steps: Steps, until: float) -> bool:
    """Do the device's part of a transfer until that time, but at least a bit of it; whether that
    was all.
    """
    with transfer.costing_nobody_else():
        if transfer.failure is not None:
            return True
        for waits in steps:
            if waits or time.perf_counter() > until:
                return False
    return True


def _when_it_can(attempt: Callable[[], T], stop: threading.Event) -> T:
    """Try until the queue lets us.

    Raises SessionRefused when the transfer is to end: its other part has, or the worker.
    """
    while not stop.is_set():
        try:
            return attempt()
        except (queue.Empty, queue.Full):
            continue
    raise _failed("the session could not be carried over")


def _failed(message: str) -> SessionRefused:
    return SessionRefused(SessionFailure.FAILED, message)


def _header(
    session: Session,
    branches: Sequence[Branch],
    numbers: Mapping[BlockKey, int],
    *,
    fingerprint: str,
) -> Header:
    """The head of a session's file; `numbers` of the frames."""
    portable: list[PortableBranch] = []
    for branch in branches:
        begins = (0, *(step.end for step in branch.blocks))
        parts = (
            Part(numbers[step.key], step.end - begin, step.end)
            for step, begin in zip(branch.blocks, begins, strict=False)
        )
        portable.append(
            PortableBranch(
                tuple(parts), tuple((numbers[state.key], state.position) for state in branch.states)
            )
        )
    return Header(
        fingerprint=fingerprint,
        session_id=session.session_id,
        created_at=session.created_at,
        metadata=session.metadata,
        ttl_seconds=session.ttl_seconds,
        requests=session.requests,
        frames=len(numbers),
        branches=tuple(portable),
    )
