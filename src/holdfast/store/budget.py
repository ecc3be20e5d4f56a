"""Who has to go, and how much may be there. Pure functions.

Least recently *used* goes first; a block is as recent as the most recent of its descendants, so children go before parents and a
shared prefix outlives its branches. Blocks that nobody can reach (their parent is gone) go before everything else. A pinned block
keeps all of its ancestors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from holdfast.store.keys import BlockKey

UNLIMITED = 2**63 - 1
SLACK_PARTS = 50  # an eviction makes room for 1/50 of the budget at once, so that the next blocks need none


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """What the store may take: of the volume, of the disk's life, of RAM."""

    budget_bytes: int = UNLIMITED
    volume_percent: float = 20.0  # of the volume's size; the smaller of the two counts
    spare_bytes: int = 2 << 30  # the store does not grow into the last free bytes of the volume
    daily_write_bytes: int = UNLIMITED  # per day (UTC), all processes together
    queue_bytes: int = 512 << 20  # payload waiting to be written; it stays in RAM for so long
    queue_blocks: int = 4096
    quarantine_bytes: int = 256 << 20
    quarantine_files: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeSpace:
    """Size of the volume that holds the store, and what is free of it."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)  # positional: a hundred thousand of these are made at once
class Holding:
    """What the budget needs to know of a stored block. Blocks of all models and processes count."""

    key: BlockKey
    parent_key: BlockKey
    start: int
    file_bytes: int
    last_used: float
    pinned: bool
    is_state: bool
    model: str = ""  # short name of its fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """The blocks to remove, in this order, and the bytes that this frees."""

    keys: tuple[BlockKey, ...] = ()
    freed_bytes: int = 0


def allowed_bytes(limits: StoreLimits, *, volume: VolumeSpace, stored_bytes: int) -> int:
    """How many bytes the store may hold now.

    A volume that others fill makes the store stop growing, not shrink: new blocks then take the place of old ones.
    """
    room_bytes = max(0, volume.free_bytes - limits.spare_bytes)
    of_volume = int(volume.total_bytes * limits.volume_percent / 100)
    return max(0, min(limits.budget_bytes, of_volume, stored_bytes + room_bytes))


def choose_victims(holdings: Sequence[Holding], *, excess_bytes: int, in_use: Collection[BlockKey] = ()) -> Eviction:
    """The least recently used blocks that free `excess_bytes` together, children before parents; fewer if there are no more.

    `in_use` are parents of blocks that are being written: they and their ancestors stay.
    """
    if excess_bytes <= 0:
        return Eviction()
    keys: list[BlockKey] = []
    freed_bytes = 0
    for holding in eviction_order(holdings, in_use=in_use):
        if freed_bytes >= excess_bytes:
            break
        keys.append(holding.key)
        freed_bytes += holding.file_bytes
    return Eviction(keys=tuple(keys), freed_bytes=freed_bytes)


def eviction_order(holdings: Sequence[Holding], *, in_use: Collection[BlockKey] = ()) -> list[Holding]:
    """All blocks that may be evicted, first victim first: a child always stands before its parent."""
    by_depth = sorted(holdings, key=lambda holding: (holding.start, holding.is_state))
    kept, recency = _kept_and_recency(by_depth, in_use)
    reachable = reachable_keys((holding.key, holding.parent_key, holding.start) for holding in by_depth)
    victims = [holding for holding in by_depth if holding.key not in kept]
    return sorted(
        victims,
        key=lambda holding: (holding.key in reachable, recency[holding.key], -holding.start, not holding.is_state),
    )


def reachable_keys(blocks: Iterable[tuple[BlockKey, BlockKey, int]]) -> set[BlockKey]:
    """The keys whose whole chain of parents is there. Blocks are (key, parent key, start), parents before children."""
    reachable: set[BlockKey] = set()
    for key, parent_key, start in blocks:
        if start == 0 or parent_key in reachable:
            reachable.add(key)
    return reachable


def _kept_and_recency(by_depth: Sequence[Holding], in_use: Collection[BlockKey]) -> tuple[set[BlockKey], dict[BlockKey, float]]:
    """What must stay because of a pin beneath it, and when each block's subtree was last used."""
    kept = set(in_use)
    kept.update(holding.key for holding in by_depth if holding.pinned)
    recency = {holding.key: holding.last_used for holding in by_depth}
    for holding in reversed(by_depth):  # children first: a child starts behind its parent's start
        parent = holding.parent_key
        if holding.key in kept:
            kept.add(parent)
        if parent in recency:
            recency[parent] = max(recency[parent], recency[holding.key])
    return kept, recency
