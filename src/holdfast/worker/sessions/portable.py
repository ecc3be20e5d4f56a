"""The portable file of a session: what it has read, to be taken in by another server of the same
model. No MLX.

    18s   magic "HOLDFAST-SESSION-1"
    u64   bytes of the header, then the header: msgpack, see `Header`
    for each frame of the header: u64 bytes of its head, the head (msgpack, see `FrameHead`), its
    parts one after the other
    16s   xxh3-128 of everything before

All integers are little-endian. The checksum guards against damage, not against forgery: all that a
file claims is checked (here, and against the model in `transfer.py`), but not whether its numbers
are what the model would have computed. Import only files that you trust.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec
import xxhash

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.store.block import MOST_TOKENS
from holdfast.wire.sessions import is_fit_metadata, is_fit_ttl, is_session_id
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.prefix.index import MOST_STATES
from holdfast.worker.sessions.record import MOST_BRANCHES

MAGIC = b"HOLDFAST-SESSION-1"
_LENGTH = struct.Struct("<Q")
_SUM_BYTES = 16
_MOST_HEADER_BYTES = 4 << 20  # a million tokens in eight branches take a tenth of it
_MOST_FRAME_HEAD_BYTES = 128 << 10  # 256 tokens, and what describes the arrays of 500 layers
_MOST_FRAME_BYTES = 512 << 20  # a block of the largest models
_PIECE_BYTES = 8 << 20


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A step of a branch: tokens of frame `frame` up to the chain's token `end`."""

    frame: int
    tokens: int  # of the frame's own
    end: int


class PortableBranch(msgspec.Struct, frozen=True, array_like=True):
    """A branch: its parts, and frame and position of its states."""

    parts: tuple[Part, ...]
    states: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        """How long the chain is said to be."""
        return self.parts[-1].end if self.parts else 0


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the file is about."""

    fingerprint: str
    session_id: str
    created_at: float
    metadata: dict[str, str]
    ttl_seconds: float | None
    requests: int
    frames: int
    branches: tuple[PortableBranch, ...]


class FrameHead(msgspec.Struct, frozen=True, array_like=True):
    """One block or state. Its own tokens begin at token `offset` of the block whose bytes follow."""

    kind: Literal["kv", "state"]
    offset: int
    packed_tokens: bytes
    meta: bytes
    part_bytes: tuple[int, ...]


_Head = TypeVar("_Head", Header, FrameHead)
# of a frame in each branch with it: behind which other one, from which token on
_Place: TypeAlias = tuple[int | None, int]


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame and its bytes."""

    head: FrameHead
    parts: tuple[memoryview, ...]


def bad_file(message: str) -> SessionRefused:
    """A file is not a session's, or is damaged."""
    return SessionRefused(SessionFailure.BAD_FILE, message)


def write_session(path: Path, header: Header, frames: Iterable[Frame]) -> None:
    """Write a session's file: whole, or not at all. Raises OSError, and whatever `frames` raises."""
    fresh = path.with_name(path.name + ".new")
    digest = xxhash.xxh3_128()
    try:
        with open(
            os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            for piece in _pieces(header, frames):
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _pieces(header: Header, frames: Iterable[Frame]) -> Iterator[memoryview | bytes]:
    encoded = msgspec.msgpack.encode(header)
    yield MAGIC + _LENGTH.pack(len(encoded)) + encoded
    for frame in frames:
        head = msgspec.msgpack.encode(frame.head)
        yield _LENGTH.pack(len(head)) + head
        yield from frame.parts


class SessionFile:
    """A session's file that is whole: header, and frames in any order.

    Raises SessionRefused and OSError.
    """

    def __init__(
        self,
        path: Path,
        *,
        most_tokens: int = MOST_TOKENS,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Reads and checks all of it; only places are kept.

        `is_stopped` is asked now and then; yes means SessionRefused.

        most_tokens: how long a branch may be.
        """
        self._most_tokens, self._is_stopped = most_tokens, is_stopped
        self._file = open(path, "rb")  # noqa: SIM115 - for the life of this object
        try:
            self._check_sum()
            self._file.seek(0)
            if self._take(len(MAGIC)) != MAGIC:
                raise bad_file("the file is not a session's")
            self.header = self._decoded(Header, most_bytes=_MOST_HEADER_BYTES)
            self._check_header()
            self._frames = [self._skip_frame() for _ in range(self.header.frames)]
            for branch in self.header.branches:
                self._check_frames_of(branch)
        except BaseException:
            self.close()
            raise

    def frame(self, number: int) -> Frame:
        """One frame."""
        head, place = self._frames[number]
        self._file.seek(place)
        content = memoryview(self._take(sum(head.part_bytes)))
        ends = itertools.accumulate(head.part_bytes)
        return Frame(
            head,
            tuple(
                content[end - length : end]
                for end, length in zip(ends, head.part_bytes, strict=True)
            ),
        )

    def place(self, number: int) -> int:
        """The token of the chain at which a block's named tokens begin, or up to which a state has
        read.
        """
        return self._places[number][1]

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return sum(sum(head.part_bytes) for head, _ in self._frames)

    def close(self) -> None:
        """Let the file go."""
        self._file.close()

    def _check_sum(self) -> None:
        self._end = os.fstat(self._file.fileno()).st_size - _SUM_BYTES
        if self._end < len(MAGIC):
            raise bad_file("the file is too short for a session's")
        digest = xxhash.xxh3_128()
        left = self._end
        while left:
            piece = b"" if self._is_stopped() else self._file.read(min(left, _PIECE_BYTES))
            if not piece:
                raise bad_file("the file is cut off")
            digest.update(piece)
            left -= len(piece)
        if self._file.read() != digest.digest():
            raise bad_file("the file is damaged or cut off: its checksum is another one")

    def _skip_frame(self) -> tuple[FrameHead, int]:
        head, place = self._decoded(FrameHead, most_bytes=_MOST_FRAME_HEAD_BYTES), self._file.tell()
        length, own = sum(head.part_bytes), len(head.packed_tokens)
        end = place + length
        if (
            min((0, *head.part_bytes)) < 0
            or length > _MOST_FRAME_BYTES
            or end > self._end
            or own % 4
            or own > 4 * BLOCK_TOKENS
        ):
            raise bad_file("a block of the file makes no sense")
        self._file.seek(end)
        return head, place

    def _check_header(self) -> None:
        header = self.header
        if (
            not is_session_id(header.session_id)
            or not is_fit_metadata(header.metadata)
            or not is_fit_ttl(header.ttl_seconds)
        ):
            raise bad_file("the name, the metadata or the time to live in the file make no sense")
        if len(header.branches) > MOST_BRANCHES:
            raise bad_file("the file has more branches than a session")
        self._places: dict[int, _Place] = {}
        for branch in header.branches:
            if branch.tokens > self._most_tokens:
                raise bad_file(
                    f"a branch of the file has {branch.tokens} tokens, the model takes "
                    f"{self._most_tokens}"
                )
            _check_branch(branch, self._places)
        if len(self._places) != header.frames or any(
            not 0 <= frame < header.frames for frame in self._places
        ):
            raise bad_file(
                f"the file has {header.frames} blocks, and its branches name {len(self._places)}, "
                "or others"
            )

    def _check_frames_of(self, branch: PortableBranch) -> None:
        for part in branch.parts:
            head = self._frames[part.frame][0]
            if head.kind != "kv" or part.tokens > len(head.packed_tokens) // 4:
                raise bad_file("a branch of the file makes no sense")
        for frame, _ in branch.states:
            if self._frames[frame][0].kind != "state":
                raise bad_file("a state of the file makes no sense")

    def _decoded(self, form: type[_Head], *, most_bytes: int) -> _Head:
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > most_bytes:
            raise bad_file("a head of the file is too long")
        try:
            return msgspec.msgpack.decode(self._take(length), type=form)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            # text that is no UTF-8 is a ValueError
            raise bad_file(f"a head of the file cannot be read: {error}") from error

    def _take(self, length: int) -> bytes:
        if self._file.tell() + length > self._end:
            raise bad_file("the file ends too early")
        return self._file.read(length)


def _check_branch(branch: PortableBranch, places: dict[int, _Place]) -> None:
    """A chain stands on each of its blocks once, and a block has one place: what it has read
    decides its name.
    """
    end, behind = 0, None
    named: set[int] = set()
    for part in branch.parts:
        if not 0 < part.end - end == part.tokens:
            raise bad_file("a branch of the file makes no sense")
        _name_once(part.frame, (behind, end), named, places)
        end, behind = part.end, part.frame
    if len(branch.states) > MOST_STATES:
        raise bad_file("a branch of the file has more states than are kept")
    for frame, position in branch.states:
        if not 0 < position <= end:
            raise bad_file("a state of the file makes no sense")
        _name_once(frame, (None, position), named, places)


def _name_once(frame: int, place: _Place, named: set[int], places: dict[int, _Place]) -> None:
    if frame in named or places.setdefault(frame, place) != place:
        raise bad_file(f"block {frame} of the file is named twice")
    named.add(frame)
