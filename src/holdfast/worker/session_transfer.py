"""Sessions out into portable files and in from them. Files are the business of a thread that never touches MLX."""

from __future__ import annotations

import queue
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.cache.branch import Branch
from holdfast.cache.codec import PackedRun, cut, run_to_bytes, state_from_bytes, state_to_bytes
from holdfast.cache.hold import Hold
from holdfast.cache.snapshot import SnapshotMismatch, StateSnapshot
from holdfast.errors import SessionRefused
from holdfast.session_messages import ExportSession, ImportSession, SessionFailure
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
from holdfast.store.block import Block, ReadFailed
from holdfast.store.keys import BlockKey, pack_tokens, unpack_tokens
from holdfast.worker.memory import Memory

BLOCKS_AT_A_TIME = 4  # taken in between two steps: a few milliseconds


@dataclass(slots=True)
class Export:
    """A session on its way out."""

    command: ExportSession
    session: Session
    hold: Hold
    failure: SessionRefused | None = None


@dataclass(slots=True)
class Import:
    """A session on its way in; `branches` are the chains that have been taken in."""

    command: ImportSession
    file: SessionFile | None = None
    failure: SessionRefused | None = None
    chains: list[array[int]] = field(default_factory=list)
    steps: Iterator[None] | None = None


@dataclass(frozen=True, slots=True)
class _Source:
    """What a frame is made of: bytes that are there, or a key to be read from the store."""

    offset: int
    packed_tokens: bytes
    key: BlockKey
    block: Block | tuple[bytes, tuple[memoryview, ...]] | None  # meta and parts


class Transfers:
    """Exports and imports under way. Device thread, but for `_run`, which is a thread's."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._done: queue.SimpleQueue[Export | Import] = queue.SimpleQueue()
        self._under_way = 0
        self._coming_in: list[Import] = []
        self._threads: list[threading.Thread] = []

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        return bool(self._under_way)

    def begin_export(self, command: ExportSession, session: Session) -> None:
        """Write what is kept of a session."""
        library = self._memory.library
        branches = [part for branch in session.branches if (part := library.kept_part(branch)).steps]
        sources, header = self._sources(session, branches)
        export = Export(command, session, library.hold([key for branch in branches for key in branch.keys]))

        def work() -> None:
            write_session(Path(command.path), header, map(self._frame, sources))

        self._start(export, work)

    def begin_import(self, command: ImportSession) -> None:
        """Check a file, then take in what is in it."""
        incoming = Import(command)

        def work() -> None:
            file = SessionFile(Path(command.path))
            if file.header.fingerprint != self._memory.library.fingerprint:
                file.close()
                raise SessionRefused(
                    SessionFailure.OTHER_MODEL, "the file is of another model, or of other weights or settings of it"
                )
            incoming.file = file

        self._start(incoming, work)

    def advance(self) -> list[Export | Import]:
        """Go on with what is under way, a little; returns what has come to its end."""
        ended: list[Export | Import] = []
        while not self._done.empty():
            transfer = self._done.get()
            if isinstance(transfer, Export):
                transfer.hold.release()
                ended.append(transfer)
            elif transfer.failure is not None:
                ended.append(transfer)
            else:
                transfer.steps = self._take_in(transfer)
                self._coming_in.append(transfer)
        for transfer in self._coming_in[:]:
            if self._is_in(transfer):
                self._coming_in.remove(transfer)
                ended.append(transfer)
        self._under_way -= len(ended)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return ended

    def close(self) -> None:
        """Wait for the threads; what is half in stays as ordinary memory."""
        for thread in self._threads:
            thread.join()
        for transfer in self._coming_in:
            if transfer.file is not None:
                transfer.file.close()

    def _start(self, transfer: Export | Import, work: Callable[[], None]) -> None:
        self._under_way += 1
        thread = threading.Thread(target=self._run, args=(transfer, work), name="holdfast-session")
        self._threads.append(thread)
        thread.start()

    def _run(self, transfer: Export | Import, work: Callable[[], None]) -> None:
        try:
            work()
        except SessionRefused as refusal:
            transfer.failure = refusal
        except BadSessionFile as bad:
            transfer.failure = SessionRefused(SessionFailure.BAD_FILE, str(bad))
        except (OSError, ReadFailed) as error:
            transfer.failure = SessionRefused(SessionFailure.FAILED, f"the session's file: {error}")
        finally:
            self._done.put(transfer)

    # -- out

    def _sources(self, session: Session, branches: list[Branch]) -> tuple[list[_Source], Header]:
        sources: dict[BlockKey, _Source] = {}
        portable: list[PortableBranch] = []
        numbers: dict[BlockKey, int] = {}
        for branch in branches:
            chain, at = self._memory.library.chain_of(branch), 0
            parts: list[Part] = []
            for step in branch.steps:
                own, offset = step.end - at, step.tokens - (step.end - at)
                number = numbers.setdefault(step.key, len(numbers))
                known = sources.get(step.key)
                if known is None or len(known.packed_tokens) < 4 * own:
                    sources[step.key] = self._source(step.key, offset, pack_tokens(chain[at : step.end]))
                parts.append(Part(number, own, step.end))
                at = step.end
            state = branch.state
            if state is not None:
                numbers.setdefault(state.key, len(numbers))
                sources.setdefault(state.key, self._source(state.key, 0, b""))
            portable.append(PortableBranch(tuple(parts), numbers[state.key] if state else None, state.position if state else 0))
        header = Header(
            fingerprint=self._memory.library.fingerprint,
            session_id=session.session_id,
            created_at=session.created_at,
            metadata=session.metadata,
            ttl_seconds=session.ttl_seconds,
            requests=session.requests,
            frames=len(numbers),
            branches=tuple(portable),
        )
        return [sources[key] for key in numbers], header

    def _source(self, key: BlockKey, offset: int, packed_tokens: bytes) -> _Source:
        payload = self._memory.library.payload(key)
        content = None
        if isinstance(payload, PackedRun):
            content = run_to_bytes(payload)
        elif isinstance(payload, StateSnapshot):
            content = state_to_bytes(payload)
        return _Source(offset, packed_tokens, key, content)

    def _frame(self, source: _Source) -> Frame:
        content = source.block
        if content is None:
            assert self._memory.store is not None, "a block is neither in RAM nor on a disk"
            block = self._memory.store.read(source.key).result()
            content = block.meta, tuple(memoryview(part) for part in block.parts)
        assert isinstance(content, tuple)
        meta, parts = content
        head = FrameHead(
            kind="kv" if source.packed_tokens else "state",
            offset=source.offset,
            packed_tokens=source.packed_tokens,
            meta=meta,
            part_bytes=tuple(part.nbytes for part in parts),
        )
        return Frame(head, parts)

    # -- in

    def _is_in(self, transfer: Import) -> bool:
        assert transfer.steps is not None
        assert transfer.file is not None
        try:
            for _ in range(BLOCKS_AT_A_TIME):
                next(transfer.steps)
        except StopIteration:
            transfer.file.close()
            return True
        except (SnapshotMismatch, OSError) as error:
            transfer.failure = SessionRefused(SessionFailure.BAD_FILE, f"the file does not fit this model: {error}")
            transfer.file.close()
            return True
        return False

    def _take_in(self, transfer: Import) -> Iterator[None]:
        """One block per step."""
        file, salt = transfer.file, transfer.command.tenant
        assert file is not None
        for branch in file.header.branches:
            chain, start = array("I"), 0
            for part in branch.parts:
                frame = file.frame(part.frame)
                head = frame.head
                chain.extend(unpack_tokens(head.packed_tokens[: 4 * part.tokens]))
                whole = self._memory.run_of(head.meta, _views(frame))
                if not 0 <= head.offset <= whole.tokens - part.tokens:
                    raise SnapshotMismatch("a block is shorter than its tokens")
                own = cut(whole, offset=head.offset, tokens=part.tokens)
                run = PackedRun(start=start, tokens=own.tokens, codec=own.codec, dtype=own.dtype, arrays=own.arrays)
                self._memory.keep_packed(chain, run, salt=salt)
                start = part.end
                yield
            if branch.state is not None:
                frame = file.frame(branch.state)
                state = state_from_bytes(frame.head.meta, _views(frame))
                if state.position != branch.state_position:
                    raise SnapshotMismatch("a state stands elsewhere than its branch says")
                self._memory.keep_state(chain, state, salt=salt)
                yield
            transfer.chains.append(chain)


def _views(frame: Frame) -> tuple[memoryview, ...]:
    return tuple(memoryview(part) for part in frame.parts)
