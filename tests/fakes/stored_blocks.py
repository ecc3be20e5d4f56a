"""Chains of small blocks whose contents follow from their keys, so that any reader can recognize
wrong ones.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from holdfast.store.block import (
    Block,
    BlockKey,
    BlockKind,
    BlockMissing,
    ReadFailed,
    StoredBlock,
    child_key,
    encode_block,
    fingerprint_id,
    read_block,
    root_key,
    write_buffers,
)
from holdfast.store.folder import (
    StoreFolder,
)
from holdfast.worker.prefix.chain import (
    pack_tokens,
)

FINGERPRINT = "model one"


def payload(key: BlockKey, size: int) -> bytes:
    return hashlib.shake_128(key).digest(size)


def make_block(
    token_ids: Sequence[int], *, after: StoredBlock | None = None, cut: int | None = None, kind: BlockKind = "kv",
    fingerprint: str = FINGERPRINT, tenant: str = "", part_bytes: Sequence[int] = (1000, 64, 0),
) -> StoredBlock:  # fmt: skip
    """The block of `token_ids` after the first `cut` tokens of `after` (by default all tokens), or
    after the root.
    """
    parent = root_key(fingerprint, tenant) if after is None else after.key
    parent_tokens = 0 if after is None else after.block.tokens if cut is None else cut
    packed_tokens = pack_tokens(token_ids)
    key = child_key(parent, parent_tokens, packed_tokens, kind)
    return StoredBlock(
        block=Block(
            key=key,
            parent_key=parent,
            parent_tokens=parent_tokens,
            kind=kind,
            start=0 if after is None else after.block.start + parent_tokens,
            packed_tokens=packed_tokens,
        ),
        parts=tuple(
            payload(key + bytes([number % 256]), size) for number, size in enumerate(part_bytes)
        ),
    )


def make_chain(
    length: int, *, tokens: int = 4, first: int = 0, after: StoredBlock | None = None, fingerprint: str = FINGERPRINT,
    part_bytes: Sequence[int] = (1000, 64, 0),
) -> list[StoredBlock]:  # fmt: skip
    blocks: list[StoredBlock] = []
    for number in range(length):
        ids = range(first + number * tokens, first + (number + 1) * tokens)
        after = make_block(ids, after=after, fingerprint=fingerprint, part_bytes=part_bytes)
        blocks.append(after)
    return blocks


def bytes_of(block: StoredBlock) -> StoredBlock:
    """The block with its parts as bytes, for comparing."""
    return replace(block, parts=tuple(bytes(part) for part in block.parts))


def is_right(block: StoredBlock) -> bool:
    """Whether the contents belong to the key."""
    return all(
        bytes(part) == payload(block.key + bytes([n % 256]), memoryview(part).nbytes)
        for n, part in enumerate(block.parts)
    )


def write_file(path: Path, block: StoredBlock, *, fingerprint: str = FINGERPRINT) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    write_buffers(file, encode_block(block, fingerprint=fingerprint))
    os.close(file)


def file_bytes(block: StoredBlock) -> bytes:
    return b"".join(bytes(buffer) for buffer in encode_block(block, fingerprint=FINGERPRINT))


def filled(path: Path, blocks: Sequence[StoredBlock]) -> StoreFolder:
    """A store's folder with the files of these blocks and no index."""
    folder = StoreFolder(path)
    folder.prepare()
    folder.make_model_folder(FINGERPRINT)
    for block in blocks:
        write_file(folder.block_path(block.key, model=fingerprint_id(FINGERPRINT)), block)
    return folder


def unusable_files(folder: Path) -> dict[Path, ReadFailed]:
    """The block files of a store that are damaged or cannot be read, and why."""
    failures: dict[Path, ReadFailed] = {}
    for found in StoreFolder(folder).block_files():
        try:
            read_block(found.path, found.key, model=found.model)
        except BlockMissing:
            continue  # evicted since it was found
        except ReadFailed as failure:
            failures[found.path] = failure
    return failures
