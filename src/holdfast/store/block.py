"""Blocks: their identity and their files.

`Block` identifies a run of tokens, or a model state after such a run. The prefix tree, the RAM tier
and the disk all use it. Its key is a hash of the block and of everything before it, so equal keys
mean equal chains (sequences of blocks, each the parent of the next; the parent of the first one is a
root). `Block` does not say where the keys and values are: in live state, in RAM, or in the store.

The form of keys and values is "native", or says how they are quantized.

The file of a block is a preamble, a header and the payload. Checksums cover every byte.

    0   8s   magic "HOLDFST" and a line feed
    8   u32  format version
    12  u32  header bytes
    16  u64  payload bytes
    24  16s  xxh3-128 of the payload (the parts), padding included
    40  8x   zeros
    48  16s  xxh3-128 of bytes 0..47, the header and its padding
    64  header: a msgpack array (see `_Header`), zeros up to a multiple of 64; then the parts,
    each padded likewise

All integers are little-endian. Both checksums are seeded with the key, so a payload is valid only
under its own name. xxh3 protects against damage, but not against an attacker who can write to the
folder; only the user who owns the folder can.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import xxhash

from holdfast.errors import HoldfastError
from holdfast.wire.requests import TOKEN_BYTES

BlockKey: TypeAlias = bytes
BlockKind: TypeAlias = Literal["kv", "state"]

KEY_BYTES = 32
KINDS: tuple[BlockKind, ...] = ("kv", "state")
MOST_TOKENS = 1 << 40  # length of a chain; a header that claims more is damaged

Part: TypeAlias = bytes | memoryview

FORMAT = 2
ALIGNMENT = 64
MOST_HEADER_BYTES = 16 << 20

# personalization of blake2b, so that a root's key never equals a block's key
_ROOT_PERSON = b"holdfast root 1"
_CHILD_PERSON = b"holdfast child 1"
_CHILD_HEAD = struct.Struct(
    "<32sQB"
)  # what is hashed first: the parent's key, its tokens, the kind

_MAGIC = b"HOLDFST\n"
_PREAMBLE = struct.Struct("<8sIIQ16s8x")
_SUM_BYTES = 16
_MOST_BUFFERS = 63  # in each writev; well below IOV_MAX
# macOS refuses reads and writes of 2 GiB; 63 pieces of this size are slightly less
_MOST_PIECE_BYTES = 32 << 20


class ReadFailed(HoldfastError):
    """A block cannot be read from the store. This is a cache miss, never a failed request."""

    def __init__(self, key: BlockKey, reason: str) -> None:
        super().__init__(f"block {key.hex()[:12]}: {reason}")
        self.key = key
        self.reason = reason


class BlockMissing(ReadFailed):
    """The store does not have the block."""


class BlockUnreadable(ReadFailed):
    """The file of the block cannot be read at the moment. This says nothing about its content: the
    file stays in place, and the next request that needs it tries again.
    """


class BadBlock(ReadFailed):
    """The content of the block's file is damaged. It is moved to the quarantine and never used."""


class StoreRefused(HoldfastError):
    """The folder cannot be used as a store, for example because it contains other files."""


class Block(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Identifies a block of KV, or a model state: the key, the parent, the tokens.

    parent_tokens: the number of the parent's tokens, 0 if it is a root.
    start: position of the block's first token in the chain. A block at 0 follows a root. Any other
        block follows at least one token of its parent, which therefore starts before it.
    packed_tokens: the block's token ids as little-endian uint32; empty for a state.
    """

    key: BlockKey
    parent_key: BlockKey
    parent_tokens: int
    kind: BlockKind
    start: int
    packed_tokens: bytes

    def __post_init__(self) -> None:
        """Raise ValueError if the fields contradict each other, as those of a damaged file may."""
        if len(self.key) != KEY_BYTES or len(self.parent_key) != KEY_BYTES:
            raise ValueError(f"keys have {KEY_BYTES} bytes")
        follows_root = self.parent_tokens == 0
        is_possible = 0 <= self.parent_tokens <= self.start < MOST_TOKENS
        if not is_possible or follows_root != (self.start == 0):
            raise ValueError(
                f"a block at {self.start} cannot follow {self.parent_tokens} tokens of its parent"
            )
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r}")
        if len(self.packed_tokens) % TOKEN_BYTES:
            raise ValueError(f"{len(self.packed_tokens)} bytes are not a whole number of tokens")

    @property
    def tokens(self) -> int:
        """The number of tokens; 0 for a state."""
        return len(self.packed_tokens) // TOKEN_BYTES


class StoredBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block with its bytes. The bytes must not change once a store has them.

    form: of the keys and values in the parts, as in `root_key`; of a state, always "native". None if
        an earlier version wrote the file and did not state it.
    """

    block: Block
    parts: tuple[Part, ...]  # the bytes, in pieces
    form: str | None = "native"

    @property
    def key(self) -> BlockKey:
        """The block's key."""
        return self.block.key

    @property
    def nbytes(self) -> int:
        """The total size of all parts in bytes."""
        return sum(memoryview(part).nbytes for part in self.parts)


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stored block without its bytes. It may come from any model and process."""

    block: Block
    model: str  # short name of the model's fingerprint
    file_bytes: int  # 0: the file is gone, but blocks after this one are stored
    last_used: float  # seconds since the epoch
    pinned: bool = False

    @property
    def is_missing(self) -> bool:
        """Whether the block's file is missing. The blocks after it become usable again once it is
        recomputed and stored.
        """
        return self.file_bytes == 0


class StoreChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of blocks since the last call of `changes`."""

    stored: tuple[BlockKey, ...] = ()  # durable by now
    lost: tuple[BlockKey, ...] = ()  # dropped, evicted, or found missing or damaged


def root_key(fingerprint: str, tenant: str = "", form: str = "native") -> BlockKey:
    """The parent key of the first block of every chain of one model, tenant and form of keys and
    values.

    Chains in different forms are separate, because the keys and values that later layers compute
    depend on whether attention saw quantized ones in earlier layers.
    """
    model_and_form = (fingerprint if form == "native" else f"{fingerprint}, KV {form}").encode()
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=_ROOT_PERSON)
    digest.update(struct.pack("<Q", len(model_and_form)) + model_and_form + tenant.encode())
    return digest.digest()


def child_key(
    parent: BlockKey, parent_tokens: int, packed_tokens: bytes, kind: BlockKind
) -> BlockKey:
    """The key of a block that follows the first `parent_tokens` tokens of block `parent`.

    The parent of a first block is the root, with 0 tokens; a state does not contain tokens.

    Keys separate tenants and models, so the hash must resist deliberate collisions. blake2b takes 2
    µs for 256 tokens (blake3 is not faster at this size).
    """
    if len(parent) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(parent)}")
    digest = hashlib.blake2b(
        _CHILD_HEAD.pack(parent, parent_tokens, KINDS.index(kind)),
        digest_size=KEY_BYTES,
        person=_CHILD_PERSON,
    )
    digest.update(packed_tokens)
    return digest.digest()


def fingerprint_id(fingerprint: str) -> str:
    """A short name for a fingerprint, usable as the name of a folder."""
    return hashlib.blake2b(fingerprint.encode(), digest_size=8).hexdigest()


def by_place(entry: Entry) -> tuple[int, bool]:
    """Sort key that puts parents before children, and blocks before states."""
    return entry.block.start, entry.block.kind == "state"


def reachable_keys(by_depth: Iterable[Entry]) -> set[BlockKey]:
    """Return the keys of entries whose whole chain of parents is among the entries.

    Expects parents before children.
    """
    reachable: set[BlockKey] = set()
    for block in (entry.block for entry in by_depth):
        if block.start == 0 or block.parent_key in reachable:
            reachable.add(block.key)
    return reachable


# the fields of a block, the fingerprint of its model, the size of each part, and the form of keys
# and values, which earlier versions did not write
_Header: TypeAlias = tuple[
    bytes, bytes, int, BlockKind, int, bytes, str, tuple[int, ...], str | None
]
_HEADER_FIELDS = 9


def _aligned(size: int) -> int:
    """The next multiple of ALIGNMENT, in bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _checksum(key: BlockKey, buffers: tuple[Part, ...]) -> bytes:
    """The checksum of buffers, one after the other, seeded with the block's key."""
    digest = xxhash.xxh3_128(seed=int.from_bytes(key[:8], "little"))
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def _padded(parts: tuple[Part, ...]) -> Iterator[Part]:
    """The bytes of each part, followed by zeros up to a multiple of ALIGNMENT."""
    for part in parts:
        flat = memoryview(part).cast("B")
        yield flat
        if flat.nbytes % ALIGNMENT:
            yield bytes(-flat.nbytes % ALIGNMENT)


def encode_block(stored: StoredBlock, *, fingerprint: str) -> tuple[Part, ...]:
    """Return the buffers of a block's file, in order, without copying the payload.

    The parts must be C-contiguous.
    """
    payload = tuple(_padded(stored.parts))
    sizes = tuple(memoryview(part).nbytes for part in stored.parts)
    block_fields = msgspec.structs.astuple(stored.block)
    header = msgspec.msgpack.encode((*block_fields, fingerprint, sizes, stored.form))
    payload_checksum = _checksum(stored.key, payload)
    payload_bytes = sum(map(len, payload))
    preamble = _PREAMBLE.pack(_MAGIC, FORMAT, len(header), payload_bytes, payload_checksum)
    padded_header = header + bytes(-len(header) % ALIGNMENT)
    head = preamble + _checksum(stored.key, (preamble, padded_header)) + padded_header
    return (head, *payload)


def write_buffers(file: int, buffers: tuple[Part, ...]) -> None:
    """Write all buffers to a file descriptor without joining them. Raises OSError."""
    pieces = [piece for buffer in buffers for piece in _pieces(memoryview(buffer))]
    next_piece = 0  # number of the first piece that is not written completely
    while next_piece < len(pieces):
        written = os.writev(file, pieces[next_piece : next_piece + _MOST_BUFFERS])
        while next_piece < len(pieces) and written >= pieces[next_piece].nbytes:
            written -= pieces[next_piece].nbytes
            next_piece += 1
        if written:
            pieces[next_piece] = pieces[next_piece][written:]


def _pieces(buffer: memoryview) -> Iterator[memoryview]:
    """Views of a buffer that are small enough for one call of the system."""
    for start in range(0, buffer.nbytes, _MOST_PIECE_BYTES):
        yield buffer[start : start + _MOST_PIECE_BYTES]


def read_block(path: Path, key: BlockKey, *, model: str) -> StoredBlock:
    """Read and verify a whole file. Returns read-only views of one buffer.

    model: short name of the fingerprint that the file must have. The file is read instead of
    mapped, so that a later truncation cannot cause a fault. Raises BlockMissing, BlockUnreadable,
    BadBlock.
    """
    with _opened(path, key) as file:
        preamble = _read_preamble(file, key)
        # From the heap, not from an anonymous mapping: reused memory causes no page faults (11
        # instead of 0.7 GB/s, measured).
        buffer = memoryview(bytearray(os.fstat(file).st_size))
        _fill(file, buffer, key)
    return _verified_block(buffer, key, preamble, model=model)


def decode_block(content: bytes, key: BlockKey, *, model: str) -> StoredBlock:
    """Decode and verify the content of a block's file, as `read_block` does. Raises BadBlock."""
    preamble = _checked_preamble(content[:ALIGNMENT], key, file_bytes=len(content))
    return _verified_block(memoryview(content), key, preamble, model=model)


def _verified_block(
    buffer: memoryview, key: BlockKey, preamble: bytes, *, model: str
) -> StoredBlock:
    """Verify a whole file in memory, whose preamble was checked. Raises BadBlock."""
    block, fingerprint, part_bytes, form = _verified_header(buffer, key, preamble)
    if fingerprint_id(fingerprint) != model:
        raise BadBlock(key, "belongs to another model")
    payload = buffer[_payload_start(preamble) :].toreadonly()
    if _checksum(key, (payload,)) != _PREAMBLE.unpack(preamble)[4]:
        raise BadBlock(key, "wrong payload checksum")
    return StoredBlock(block=block, parts=tuple(_parts_of(payload, part_bytes)), form=form)


def read_header(path: Path, key: BlockKey) -> tuple[Block, str]:
    """Read and verify the header of a file, and check the file's length, without reading the
    payload. Returns the block and the fingerprint of its model.

    Raises BlockMissing, BlockUnreadable, BadBlock.
    """
    with _opened(path, key) as file:
        preamble = _read_preamble(file, key)
        head = memoryview(bytearray(_payload_start(preamble)))
        _fill(file, head, key)
    block, fingerprint, *_ = _verified_header(head, key, preamble)
    return block, fingerprint


@contextmanager
def _opened(path: Path, key: BlockKey) -> Iterator[int]:
    """Open a block's file, but no link. Raises BlockMissing, BadBlock, BlockUnreadable, also for
    errors within the block.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise BlockMissing(key, "not in the store") from error
    except OSError as error:
        if error.errno == errno.ELOOP:  # because of O_NOFOLLOW
            raise BadBlock(key, "not a plain file") from error
        raise BlockUnreadable(key, f"cannot be opened: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise BadBlock(key, "not a plain file")
        yield file
    except OSError as error:
        raise BlockUnreadable(key, f"cannot be read: {error.strerror}") from error
    except MemoryError as error:
        raise BlockUnreadable(key, "no memory to read it into") from error
    finally:
        os.close(file)


def _read_preamble(file: int, key: BlockKey) -> bytes:
    """The first bytes of a file, up to the checksum of the header. Raises ReadFailed."""
    head = os.pread(file, ALIGNMENT, 0)
    file_bytes = os.fstat(file).st_size
    if len(head) < min(ALIGNMENT, file_bytes):
        raise BlockUnreadable(key, f"only {len(head)} bytes could be read")
    return _checked_preamble(head, key, file_bytes=file_bytes)


def _checked_preamble(head: bytes, key: BlockKey, *, file_bytes: int) -> bytes:
    """The preamble in the first bytes of a file, if it is one and agrees with the file's size. Raises
    BadBlock.
    """
    if len(head) < ALIGNMENT:
        raise BadBlock(key, f"truncated to {file_bytes} bytes")
    preamble = head[: _PREAMBLE.size]
    magic, version, header_bytes, payload_bytes, _ = _PREAMBLE.unpack(preamble)
    if magic != _MAGIC:
        raise BadBlock(key, "not a block file")
    if version != FORMAT:
        raise BadBlock(key, f"format {version}")
    claimed_bytes = _payload_start(preamble) + payload_bytes
    if header_bytes > MOST_HEADER_BYTES or claimed_bytes != file_bytes:
        raise BadBlock(key, f"{file_bytes} bytes long, the header says {claimed_bytes}")
    return preamble


def _payload_start(preamble: bytes) -> int:
    """Where the payload begins in the file: after the header and its padding."""
    return _aligned(ALIGNMENT + int(_PREAMBLE.unpack(preamble)[2]))


def _fill(file: int, buffer: memoryview, key: BlockKey) -> None:
    """Read a file from the start until the buffer is full. Raises BadBlock if the file is shorter."""
    done_bytes = 0
    while done_bytes < buffer.nbytes:
        read_bytes = os.readv(file, [buffer[done_bytes : done_bytes + _MOST_PIECE_BYTES]])
        if not read_bytes:
            raise BadBlock(key, f"ends after {done_bytes} bytes")
        done_bytes += read_bytes


def _verified_header(
    head: memoryview, key: BlockKey, preamble: bytes
) -> tuple[Block, str, tuple[int, ...], str | None]:
    """Return the block, the fingerprint, the sizes of the parts and the form if the checksum is
    right.

    head: the file up to the payload, or further. `preamble` was read first; the file may have changed
    since then.
    """
    preamble_bytes = _PREAMBLE.size
    header_start = preamble_bytes + _SUM_BYTES
    covered = (head[:preamble_bytes], head[header_start : _payload_start(preamble)])
    if _checksum(key, covered) != bytes(head[preamble_bytes:header_start]):
        raise BadBlock(key, "wrong header checksum")
    if head[:preamble_bytes] != preamble:
        raise BadBlock(key, "changed while it was read")
    _, _, header_bytes, payload_bytes, _ = _PREAMBLE.unpack(preamble)
    try:
        fields = msgspec.msgpack.decode(head[ALIGNMENT : ALIGNMENT + header_bytes], type=list[Any])
        fields = [*fields, None][:_HEADER_FIELDS]  # a later version may write further fields
        *block_fields, fingerprint, sizes, form = msgspec.convert(fields, _Header)
        block = Block(**dict(zip(Block.__struct_fields__, block_fields, strict=True)))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadBlock(key, f"header: {error}") from error
    if block.key != key:
        raise BadBlock(key, f"the file holds block {block.key.hex()[:12]}")
    if sum(map(_aligned, sizes)) != payload_bytes or any(size < 0 for size in sizes):
        raise BadBlock(key, "wrong part lengths in the header")
    return block, fingerprint, sizes, form


def _parts_of(payload: memoryview, part_bytes: tuple[int, ...]) -> Iterator[Part]:
    """The parts of these sizes, without the padding after each."""
    start = 0
    for size in part_bytes:
        yield payload[start : start + size]
        start += _aligned(size)
