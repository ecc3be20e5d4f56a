"""The names of blocks: a chain of hashes, so that a key says everything that was read before it.

blake2b from the standard library: keys keep tenants and models apart, so they must be free of
collisions that somebody looks for. A key over 256 tokens costs 2 µs; blake3 is no faster at this
size.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from holdfast.store.block import KEY_BYTES, KINDS, BlockKey, BlockKind
from holdfast.wire.token_ids import TokenIds

# blake2b's `person`: the two kinds of keys can never meet
_ROOT, _CHILD = b"holdfast root 1", b"holdfast child 1"
_CHILD_HEAD = struct.Struct("<32sQB")


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32. Raises OverflowError for an id that does not fit."""
    return TokenIds.of(token_ids).packed


def root_key(fingerprint: str, tenant: str = "") -> BlockKey:
    """The parent of all first blocks of one model (`fingerprint`) for one tenant (`tenant`)."""
    named = fingerprint.encode()
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=_ROOT)
    digest.update(struct.pack("<Q", len(named)) + named + tenant.encode())
    return digest.digest()


def child_key(
    parent: BlockKey, parent_tokens: int, packed_tokens: bytes, kind: BlockKind
) -> BlockKey:
    """The key of a block of `packed_tokens` behind the first `parent_tokens` tokens of block
    `parent`.

    A first block has the root as its parent, with 0 tokens; a state has no tokens of its own.
    """
    if len(parent) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(parent)}")
    digest = hashlib.blake2b(
        _CHILD_HEAD.pack(parent, parent_tokens, KINDS.index(kind)),
        digest_size=KEY_BYTES,
        person=_CHILD,
    )
    digest.update(packed_tokens)
    return digest.digest()
