"""What the store keeps: blocks, their identity and their errors. Frozen; crosses threads."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from holdfast.errors import HoldfastError
from holdfast.wire.requests import TOKEN_BYTES

BlockKey: TypeAlias = bytes
BlockKind: TypeAlias = Literal["kv", "state"]

KEY_BYTES = 32
KINDS: tuple[BlockKind, ...] = ("kv", "state")
MOST_TOKENS = 1 << 40  # in a chain; bounds what a damaged header can claim

Part: TypeAlias = bytes | memoryview


class ReadFailed(HoldfastError):
    """A block cannot be read from the store: a cache miss, never a failed request."""

    def __init__(self, key: BlockKey, reason: str) -> None:
        super().__init__(f"block {key.hex()[:12]}: {reason}")
        self.key, self.reason = key, reason


class BlockMissing(ReadFailed):
    """The store does not have the block, or cannot reach it now."""


class BadBlock(ReadFailed):
    """The file of the block is damaged. It is never used, and moves to the quarantine."""


class StoreRefused(HoldfastError):
    """The folder holds files of others, so it cannot be used as a store."""


class Block(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Identity and place of a block of KV, or of a state: its key, its parent, its tokens.

    start: position of its first token in the chain. A block at 0 follows a root; any other follows
        at least one token of its parent, which therefore starts before it.
    packed_tokens: the block's token ids as little-endian uint32; empty for a state.
    """

    key: BlockKey
    parent_key: BlockKey
    parent_tokens: int
    kind: BlockKind
    start: int
    packed_tokens: bytes

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES or len(self.parent_key) != KEY_BYTES:
            raise ValueError(f"keys have {KEY_BYTES} bytes")
        first = self.start == 0
        if not 0 <= self.parent_tokens <= self.start < MOST_TOKENS or first != (
            self.parent_tokens == 0
        ):
            raise ValueError(
                f"a block at {self.start} cannot follow {self.parent_tokens} tokens of its parent"
            )
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r}")
        if len(self.packed_tokens) % TOKEN_BYTES:
            raise ValueError(f"{len(self.packed_tokens)} bytes are no tokens")

    @property
    def tokens(self) -> int:
        """The number of tokens; 0 for a state."""
        return len(self.packed_tokens) // TOKEN_BYTES


class StoredBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block with its bytes, which must not change once a store has them."""

    block: Block
    parts: tuple[Part, ...]

    @property
    def key(self) -> BlockKey:
        """The block's key."""
        return self.block.key

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(memoryview(part).nbytes for part in self.parts)


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stored block, of any model and process, without its bytes."""

    block: Block
    model: str  # short name of its fingerprint
    file_bytes: int
    last_used: float  # seconds since the epoch
    pinned: bool = False


class StoreChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to blocks since the last call."""

    stored: tuple[BlockKey, ...] = ()  # durable now
    lost: tuple[BlockKey, ...] = ()  # dropped, evicted, found missing or damaged
