"""What the store keeps and what it says about it. Frozen; crosses threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.errors import HoldfastError
from holdfast.store.keys import KEY_BYTES, KINDS, BlockKey, BlockKind, unpack_tokens

MOST_TOKENS = 1 << 40  # in a chain; a bound for what damaged headers may say

Part: TypeAlias = bytes | memoryview


class ReadFailed(HoldfastError):
    """A block cannot be had from the store. A miss for whoever asked, never a failed request."""

    def __init__(self, key: BlockKey, reason: str) -> None:
        super().__init__(f"block {key.hex()[:12]}: {reason}")
        self.key, self.reason = key, reason


class BlockMissing(ReadFailed):
    """The store does not have the block, or cannot get at it now."""


class BadBlock(ReadFailed):
    """The file of the block is damaged. It is never answered from and goes to quarantine."""


class StoreRefused(HoldfastError):
    """The folder cannot be used as a store without touching what is not ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A run of tokens and the bytes that belong to it. `parts` must never change once the block was given to a store.

    `start` is the position of its first token in the chain. A block at 0 follows a root, any other at least one token of its
    parent, which therefore starts before it. `meta` says how the parts are laid out and is opaque here.
    """

    key: BlockKey
    parent_key: BlockKey
    parent_tokens: int
    kind: BlockKind
    start: int
    token_ids: tuple[int, ...]
    meta: bytes
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES or len(self.parent_key) != KEY_BYTES:
            raise ValueError(f"keys have {KEY_BYTES} bytes")
        first = self.start == 0
        if not 0 <= self.parent_tokens <= self.start < MOST_TOKENS or first != (self.parent_tokens == 0):
            raise ValueError(f"a block at {self.start} cannot follow {self.parent_tokens} tokens of its parent")
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r}")

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(memoryview(part).nbytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A stored block without its payload."""

    key: BlockKey
    parent_key: BlockKey
    parent_tokens: int
    kind: BlockKind
    start: int
    packed_tokens: bytes = field(repr=False)  # little-endian uint32
    file_bytes: int
    created: float  # seconds since the epoch
    last_used: float

    @property
    def tokens(self) -> int:
        """How many tokens the block holds; 0 for a state."""
        return len(self.packed_tokens) // 4

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens, unpacked anew at each call."""
        return unpack_tokens(self.packed_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreChanges:
    """What happened to blocks since the last time somebody asked."""

    stored: tuple[BlockKey, ...] = ()  # durable now
    lost: tuple[BlockKey, ...] = ()  # dropped, evicted, found missing or damaged
