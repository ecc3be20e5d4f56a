"""Sessions out into portable files and in from them.

Files are the business of a thread for each transfer, arrays that of the device thread; between them is a queue of a few blocks.
The device thread does a little between two steps, so that streams hardly feel it. Whatever goes wrong ends the one transfer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.errors import SessionRefused
from holdfast.kv.codec import Content, check_values, to_bytes
from holdfast.kv.snapshot import KVBlock, SnapshotMismatch, StateCheckpoint
from holdfast.messages.sessions import ExportSession, ImportSession, SessionFailure
from holdfast.prefix.branch import Branch
from holdfast.prefix.cache import PrefixCache
from holdfast.prefix.hold import Hold
from holdfast.prefix.piece import Cursor
from holdfast.sessions.portable import (
    BadSessionFile,
    Frame,
    FrameHead,
    Header,
    Part,
    PortableBranch,
    SessionFile,
    write_session,
)
from holdfast.sessions.session import Session
from holdfast.store.block import TOKEN_BYTES, BlockKey, ReadFailed

SECONDS_AT_A_TIME = 0.004  # of the device thread between two steps, for all transfers; one block may take longer
QUEUED_FRAMES = 3
MOST_TRANSFERS = 4
MOST_QUEUED_BYTES = 128 << 20  # in the store's queue, which takes 512 MiB
_POLL_SECONDS = 0.05

logger = logging.getLogger("holdfast.sessions")


@dataclass(frozen=True, slots=True)
class _Source:
    """What a frame of a file is made of."""

    offset: int
    packed_tokens: bytes
    key: BlockKey


class _Stopped(Exception):
    """The worker ends, or the device's part of the transfer has failed."""


@dataclass(slots=True)
class Export:
    """A session on its way out. The device thread puts contents into the queue; None: the store has it."""

    command: ExportSession
    session: Session
    hold: Hold
    header: Header
    sources: list[_Source]
    given: int = 0
    contents: queue.Queue[Content | None] = field(default_factory=lambda: queue.Queue(QUEUED_FRAMES))
    stop: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    failure: SessionRefused | None = None


@dataclass(slots=True)
class Import:
    """A session on its way in. The thread puts the frames into the queue, in the order of the branches that need them."""

    command: ImportSession
    header: Header | None = None  # set when the file was checked as a whole
    nbytes: int = 0  # of all that is in it
    chains: list[bytearray] = field(default_factory=list)
    frames: queue.Queue[Frame] = field(default_factory=lambda: queue.Queue(QUEUED_FRAMES))
    taking: Generator[None, Frame, None] | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    failure: SessionRefused | None = None


class Transfers:
    """Exports and imports under way. Device thread, but for `_write` and `_read`, which are threads'."""

    def __init__(self, memory: PrefixCache, *, context_tokens: int, check_room: Callable[[Import], None]) -> None:
        """`check_room` raises SessionRefused when a checked file may not come in; on the device thread, before anything does."""
        self._memory, self._context_tokens, self._check_room = memory, context_tokens, check_room
        self._under_way: dict[int, tuple[Export | Import, threading.Thread]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        return bool(self._under_way)

    def begin_export(self, command: ExportSession, session: Session) -> None:
        """Write what is kept of a session. Raises SessionRefused when too much is under way."""
        self._refuse_too_many()
        library = self._memory.index
        branches = [part for branch in session.branches if (part := library.kept_part(branch)).steps]
        sources, header = self._sources(session, branches)
        hold = library.hold([key for branch in branches for key in branch.keys])
        export = Export(command=command, session=session, hold=hold, header=header, sources=sources)
        self._start(export, lambda: self._write(export))

    def begin_import(self, command: ImportSession) -> None:
        """Check a file, then take in what is in it. Raises SessionRefused when too much is under way."""
        self._refuse_too_many()
        incoming = Import(command)
        self._start(incoming, lambda: self._read(incoming))

    def advance(self) -> list[Export | Import]:
        """Go on with what is under way, a little; returns what has come to its end."""
        until = time.perf_counter() + SECONDS_AT_A_TIME
        ended: list[Export | Import] = []
        for number, (transfer, thread) in list(self._under_way.items()):
            if not self._has_ended(transfer, until):
                continue
            transfer.stop.set()
            thread.join()
            if isinstance(transfer, Export):
                transfer.hold.release()
            del self._under_way[number]
            ended.append(transfer)
        return ended

    def close(self) -> None:
        """Stop everything; what is half in stays as ordinary memory."""
        for transfer, _ in self._under_way.values():
            transfer.stop.set()
        for transfer, thread in self._under_way.values():
            thread.join()
            if isinstance(transfer, Export):
                transfer.hold.release()
        self._under_way.clear()

    def _refuse_too_many(self) -> None:
        if len(self._under_way) >= MOST_TRANSFERS:
            raise SessionRefused(SessionFailure.BUSY, f"{MOST_TRANSFERS} exports and imports are under way: try again later")

    def _start(self, transfer: Export | Import, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=_run, args=(transfer, work), name="holdfast-session")
        thread.start()
        self._under_way[id(transfer)] = transfer, thread

    def _has_ended(self, transfer: Export | Import, until: float) -> bool:
        """Do the device's part of a transfer until that time, but at least once."""
        if transfer.failure is not None:
            return True
        try:
            return self._give(transfer, until) if isinstance(transfer, Export) else self._take(transfer, until)
        except SessionRefused as refusal:
            transfer.failure = refusal
        except SnapshotMismatch as error:
            transfer.failure = SessionRefused(SessionFailure.BAD_FILE, f"the file does not fit this model: {error}")
        except Exception as error:  # whatever a damaged block makes of MLX must cost nobody else anything
            logger.exception("the transfer of a session failed")
            transfer.failure = SessionRefused(SessionFailure.FAILED, f"the session could not be carried over: {error}")
        return True

    # -- out

    def _give(self, export: Export, until: float) -> bool:
        while export.given < len(export.sources) and not export.contents.full():
            export.contents.put_nowait(self._content(export.sources[export.given].key))
            export.given += 1
            if time.perf_counter() > until:
                break
        return export.ended.is_set()

    def _content(self, key: BlockKey) -> Content | None:
        payload = self._memory.index.payload(key)
        return to_bytes(payload) if isinstance(payload, KVBlock | StateCheckpoint) else None

    def _write(self, export: Export) -> None:
        write_session(Path(export.command.path), export.header, self._frames(export))

    def _frames(self, export: Export) -> Iterator[Frame]:
        for source in export.sources:
            content = _wait(lambda: export.contents.get(timeout=_POLL_SECONDS), export.stop)
            if content is None:
                if self._memory.store is None:
                    raise ReadFailed(source.key, "it has left memory in the meantime")
                block = self._memory.store.read(source.key).result()
                content = block.meta, tuple(memoryview(part) for part in block.parts)
            meta, parts = content
            head = FrameHead(
                kind="kv" if source.packed_tokens else "state",
                offset=source.offset,
                packed_tokens=source.packed_tokens,
                meta=meta,
                part_bytes=tuple(part.nbytes for part in parts),
            )
            yield Frame(head, parts)

    def _sources(self, session: Session, branches: list[Branch]) -> tuple[list[_Source], Header]:
        sources: dict[BlockKey, _Source] = {}
        portable: list[PortableBranch] = []
        numbers: dict[BlockKey, int] = {}
        for branch in branches:
            chain, at = self._memory.index.chain_of(branch), 0
            parts: list[Part] = []
            for step in branch.steps:
                own, offset = step.end - at, step.tokens - (step.end - at)
                number = numbers.setdefault(step.key, len(numbers))
                known = sources.get(step.key)
                if known is None or len(known.packed_tokens) < 4 * own:
                    sources[step.key] = _Source(offset, bytes(chain[TOKEN_BYTES * at : TOKEN_BYTES * step.end]), step.key)
                parts.append(Part(number, own, step.end))
                at = step.end
            states: list[tuple[int, int]] = []
            for state in branch.states:
                sources.setdefault(state.key, _Source(0, b"", state.key))
                states.append((numbers.setdefault(state.key, len(numbers)), state.position))
            portable.append(PortableBranch(tuple(parts), tuple(states)))
        header = Header(
            fingerprint=self._memory.index.fingerprint,
            session_id=session.session_id,
            created_at=session.created_at,
            metadata=session.metadata,
            ttl_seconds=session.ttl_seconds,
            requests=session.requests,
            frames=len(numbers),
            branches=tuple(portable),
        )
        return [sources[key] for key in numbers], header

    # -- in

    def _read(self, incoming: Import) -> None:
        path = Path(incoming.command.path)
        file = SessionFile(path, most_tokens=self._context_tokens, is_stopped=incoming.stop.is_set)
        try:
            if file.header.fingerprint != self._memory.index.fingerprint:
                raise SessionRefused(
                    SessionFailure.OTHER_MODEL, "the file is of another model, or of other weights or settings of it"
                )
            self._check_frames(file, incoming.stop)
            incoming.nbytes, incoming.header = file.nbytes, file.header
            for number in _order(file.header):
                frame = file.frame(number)
                _wait(lambda frame=frame: incoming.frames.put(frame, timeout=_POLL_SECONDS), incoming.stop)  # type: ignore[misc]
        finally:
            file.close()

    def _check_frames(self, file: SessionFile, stop: threading.Event) -> None:
        """Hold every block and state against the model, its values too, before the first of them is taken in."""
        states = {frame: position for branch in file.header.branches for frame, position in branch.states}
        for number in range(file.header.frames):
            head = file.head(number)
            try:
                claimed = self._memory.describe(head.kind, head.meta, head.part_bytes)
                if number in states and claimed.length != states[number]:
                    raise SnapshotMismatch("a state stands elsewhere than its branch says")
                if number not in states and not 0 <= head.offset <= claimed.length - len(head.packed_tokens) // 4:
                    raise SnapshotMismatch("a block is shorter than its tokens")
                check_values(claimed.arrays, file.frame(number).parts)
            except SnapshotMismatch as misfit:
                raise BadSessionFile(f"block {number} of the file does not fit this model: {misfit}") from None
            if stop.is_set():
                raise _Stopped

    def _take(self, incoming: Import, until: float) -> bool:
        has_all = incoming.ended.is_set()  # asked before the queue is looked into: nothing comes after it
        if incoming.header is None:
            return has_all
        if incoming.taking is None:
            self._check_room(incoming)
            incoming.taking = self._take_in(incoming, incoming.header)
            if next(incoming.taking, self) is self:
                return has_all  # a session that has read nothing
        while not incoming.frames.empty() and not self._writes_too_much():
            try:
                incoming.taking.send(incoming.frames.get_nowait())
            except StopIteration:
                return True
            if time.perf_counter() > until:
                break
        return has_all and incoming.frames.empty()

    def _writes_too_much(self) -> bool:
        """Whether the store has so much to write that it might drop what comes now."""
        return self._memory.store is not None and self._memory.store.statistics().queued_bytes > MOST_QUEUED_BYTES

    def _take_in(self, incoming: Import, header: Header) -> Generator[None, Frame, None]:
        """Is sent one frame after the other."""
        tenant = incoming.command.tenant
        for branch in header.branches:
            chain, start = bytearray(), 0
            cursor = self._memory.cursor(tenant=tenant)
            for part in branch.parts:
                frame = yield
                self._take_run(cursor, chain, part, frame, start=start)
                start = part.end
            for _ in branch.states:
                frame = yield
                state = self._memory.decoded("state", frame.head.meta, _views(frame))
                assert isinstance(state, StateCheckpoint)
                self._memory.insert_checkpoint(cursor, chain, state)
            incoming.chains.append(chain)

    def _take_run(self, cursor: Cursor, chain: bytearray, part: Part, frame: Frame, *, start: int) -> None:
        """Take in a part of a branch, and go on with its chain."""
        head = frame.head
        chain += head.packed_tokens[: TOKEN_BYTES * part.tokens]
        whole = self._memory.decoded("kv", head.meta, _views(frame))
        assert isinstance(whole, KVBlock)
        own = replace(whole.cut(part.tokens, offset=head.offset), start=start)
        self._memory.insert_block(cursor, chain, own)


def _run(transfer: Export | Import, work: Callable[[], None]) -> None:
    """A thread's life. Whatever escapes is the transfer's failure."""
    failure: SessionRefused | None = SessionRefused(SessionFailure.FAILED, "the session could not be carried over")
    try:
        work()
        failure = None
    except SessionRefused as refusal:
        failure = refusal
    except BadSessionFile as bad:
        failure = SessionRefused(SessionFailure.BAD_FILE, str(bad))
    except (OSError, ReadFailed) as error:
        failure = SessionRefused(SessionFailure.FAILED, f"the session's file: {error}")
    except _Stopped:
        failure = transfer.failure or failure
    except Exception:
        logger.exception("the transfer of a session failed")
    finally:
        if transfer.failure is None:
            transfer.failure = failure
        transfer.ended.set()


def _wait(attempt: Callable[[], Content | None], stop: threading.Event) -> Content | None:
    """Try until the queue lets us. Raises _Stopped."""
    while not stop.is_set():
        try:
            return attempt()
        except (queue.Empty, queue.Full):
            continue
    raise _Stopped


def _order(header: Header) -> Iterator[int]:
    """The frames in the order in which they are taken in."""
    for branch in header.branches:
        yield from (part.frame for part in branch.parts)
        yield from (frame for frame, _ in branch.states)


def _views(frame: Frame) -> tuple[memoryview, ...]:
    return tuple(memoryview(part) for part in frame.parts)
