"""Reads and writes the file of an exported session: block files, as in the store, and a manifest.
Does not import MLX.

    block files   one after the other: see `store/block.py`
    manifest      msgpack, see `Manifest`
    16s           xxh3-128 of the manifest
    u64           bytes of the manifest, little-endian
    18s           magic "HOLDFAST-SESSION-2"

The checksums detect damage, not forgery. Everything in a file is checked (here, and against the
model in `transfer.py`), except whether its keys and values are those that the model would have
computed. Import only files that you trust.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import xxhash

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.files import open_regular
from holdfast.store.block import (
    BadBlock,
    Block,
    BlockKey,
    StoredBlock,
    decode_block,
    encode_block,
    fingerprint_id,
)
from holdfast.wire.requests import TOKEN_BYTES
from holdfast.wire.sessions import is_session_id, is_valid_metadata, is_valid_ttl
from holdfast.worker.prefix.chain import Branch
from holdfast.worker.prefix.index import MOST_STATES
from holdfast.worker.sessions.registry import MOST_BRANCHES

MAGIC = b"HOLDFAST-SESSION-2"
_EARLIER_MAGIC = b"HOLDFAST-SESSION-1"  # at the beginning of the file
# Size limits: a manifest or block is read as a whole, before or while its checksum is verified.
_MOST_MANIFEST_BYTES = 64 << 20  # a million tokens have some 4,000 blocks of 30 bytes each
_MOST_BLOCK_BYTES = 512 << 20  # a block of the largest models
_TRAILER = struct.Struct(f"<16sQ{len(MAGIC)}s")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an exported session and of the blocks in its file."""

    fingerprint: str
    session_id: str
    created_at: float
    metadata: dict[str, str]
    ttl_seconds: float | None
    requests: int
    branches: tuple[Branch, ...]
    blocks: tuple[tuple[BlockKey, int], ...] = ()  # key and size of each block file, in order


def bad_file(message: str) -> SessionRefused:
    """Create the error for a file that is not an exported session, or is damaged."""
    return SessionRefused(SessionFailure.BAD_FILE, message)


def write_session(path: Path, manifest: Manifest, blocks: Iterable[StoredBlock]) -> None:
    """Write a session's file, completely or not at all. Raises OSError and those of `blocks`."""
    temporary_path = path.with_name(path.name + ".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    written: list[tuple[BlockKey, int]] = []
    try:
        with open(os.open(temporary_path, flags, 0o600), "wb") as file:
            for block in blocks:
                buffers = encode_block(block, fingerprint=manifest.fingerprint)
                file.writelines(buffers)
                written.append((block.key, sum(map(len, buffers))))
            manifest = msgspec.structs.replace(manifest, blocks=tuple(written))
            encoded = msgspec.msgpack.encode(manifest)
            file.write(encoded)
            file.write(_TRAILER.pack(xxhash.xxh3_128_digest(encoded), len(encoded), MAGIC))
        temporary_path.replace(path)
    finally:
        temporary_path.unlink(missing_ok=True)


class SessionFile:
    """The file of a session, opened for reading. Methods may raise SessionRefused and OSError."""

    def __init__(self, path: Path, *, most_tokens: int) -> None:
        """Open a file and check its manifest, but not its blocks. most_tokens: the largest allowed
        number of tokens in a branch.
        """
        self._file = open_regular(path)  # closed by `close`
        try:
            self.manifest = self._read_manifest()
            self._check_manifest(most_tokens)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def refuse_other_model(self, fingerprint: str) -> None:
        """Raise SessionRefused if the file belongs to a model with another fingerprint."""
        if self.manifest.fingerprint != fingerprint:
            raise SessionRefused(
                SessionFailure.OTHER_MODEL,
                "the file belongs to another model or to other weights or settings of this model, "
                "or was written by another version of Holdfast",
            )

    @property
    def nbytes(self) -> int:
        """The size of all blocks."""
        return sum(size for _, size in self.manifest.blocks)

    def block(self, key: BlockKey) -> StoredBlock:
        """Read one block or state, and verify its checksums."""
        if key not in self._block_places:
            raise bad_file(f"block {key.hex()[:12]} is not in the file")
        begin, size = self._block_places[key]
        self._file.seek(begin)
        try:
            return decode_block(
                self._file.read(size), key, model=fingerprint_id(self.manifest.fingerprint)
            )
        except BadBlock as damage:
            raise bad_file(f"the file is damaged: {damage}") from damage

    def checked_chains(self, check: Callable[[StoredBlock], None]) -> list[bytes]:
        """Read and check all blocks; returns the packed tokens of each branch.

        check: called once with each block; may raise SessionRefused.
        """
        blocks: dict[BlockKey, Block] = {}
        for key, _ in self.manifest.blocks:
            stored = self.block(key)
            check(stored)
            blocks[key] = stored.block
        return [_chain_of(branch, blocks) for branch in self.manifest.branches]

    def _read_manifest(self) -> Manifest:
        """Read and decode the manifest at the end of the file, and find the places of the blocks."""
        if self._file.read(len(_EARLIER_MAGIC)) == _EARLIER_MAGIC:
            raise bad_file(
                "the file was exported by an earlier version of Holdfast: export it again"
            )
        file_bytes = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, file_bytes - _TRAILER.size))
        trailer = self._file.read()
        if len(trailer) < _TRAILER.size or not trailer.endswith(MAGIC):
            raise bad_file("the file is not an exported session, or is truncated")
        checksum, manifest_bytes, _ = _TRAILER.unpack(trailer)
        blocks_end = file_bytes - _TRAILER.size - manifest_bytes
        if blocks_end < 0 or manifest_bytes > _MOST_MANIFEST_BYTES:
            raise bad_file("the file is damaged: its manifest is too long")
        self._file.seek(blocks_end)
        encoded = self._file.read(manifest_bytes)
        if xxhash.xxh3_128_digest(encoded) != checksum:
            raise bad_file("the file is damaged: the checksum of its manifest does not match")
        try:
            manifest = msgspec.msgpack.decode(encoded, type=Manifest)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            # text that is not UTF-8 raises ValueError
            raise bad_file(f"the file's manifest cannot be read: {error}") from error
        self._block_places: dict[BlockKey, tuple[int, int]] = {}  # first byte and size in the file
        end = 0
        for key, size in manifest.blocks:
            if not 0 <= size <= _MOST_BLOCK_BYTES:
                raise bad_file(
                    f"the file's manifest has a block with an invalid size of {size:,} bytes"
                )
            self._block_places[key] = (end, size)
            end += size
        if end != blocks_end or len(self._block_places) != len(manifest.blocks):
            raise bad_file("the blocks of the file do not match its manifest")
        return manifest

    def _check_manifest(self, most_tokens: int) -> None:
        """Raise SessionRefused if the manifest describes a session that is impossible here."""
        manifest = self.manifest
        if (
            not is_session_id(manifest.session_id)
            or not is_valid_metadata(manifest.metadata)
            or not is_valid_ttl(manifest.ttl_seconds)
        ):
            raise bad_file("the id, the metadata or the time to live in the file is invalid")
        if len(manifest.branches) > MOST_BRANCHES:
            raise bad_file("the file has more branches than a session may have")
        for branch in manifest.branches:
            if branch.tokens > most_tokens:
                raise bad_file(
                    f"a branch of the file has {branch.tokens} tokens, "
                    f"but the model's context has only {most_tokens}"
                )
            if len(branch.states) > MOST_STATES:
                raise bad_file("a branch of the file has more states than allowed")


def _chain_of(branch: Branch, blocks: Mapping[BlockKey, Block]) -> bytes:
    """The packed tokens of a branch. Raises SessionRefused if its blocks do not fit."""
    chain = bytearray()
    for part in branch.blocks:
        block = blocks.get(part.key)
        position = len(chain) // TOKEN_BYTES
        if (
            block is None
            or block.kind != "kv"
            or not block.start == part.start <= position < part.end
            or part.tokens > block.tokens
        ):
            raise bad_file(f"block {part.key.hex()[:12]} of the file does not fit its branch")
        overlap = bytes(chain[block.start * TOKEN_BYTES :])
        if not block.packed_tokens.startswith(overlap):
            raise bad_file(f"block {part.key.hex()[:12]} of the file follows other tokens")
        chain += block.packed_tokens[len(overlap) : part.tokens * TOKEN_BYTES]
    for state in branch.states:
        block = blocks.get(state.key)
        if (
            block is None
            or block.kind != "state"
            or not block.start == state.position <= branch.tokens
        ):
            raise bad_file(f"state {state.key.hex()[:12]} of the file does not fit its branch")
    return bytes(chain)
