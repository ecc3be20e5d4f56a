"""How much the store may hold, and what it evicts. Pure functions.

The least recently *used* block goes first. A block is as recent as the most recent of its
descendants, so children go before parents and a shared prefix outlives its branches. Unreachable
blocks (their parent is gone) go before everything else. A pinned block keeps all of its ancestors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from holdfast.config import StoreSettings
from holdfast.store.block import BlockKey, Entry

# an eviction frees an additional 1/50 of the budget, so that the next blocks need none
SLACK_PARTS = 50
# A drive of 1 TB usually endures 600 TB of writes: 16 years at this rate.
DAILY_WRITE_BYTES = 100 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """What the store may use of the volume, of the disk's endurance, and of RAM."""

    budget_bytes: int | None = None  # None: only the fields below limit it
    volume_percent: float = 20.0  # of the volume's size; the smaller of the two counts
    spare_bytes: int = 2 << 30  # of the volume, which the store leaves free
    daily_write_bytes: int | None = None  # per day (UTC), all processes together; None: unlimited
    queue_bytes: int = 512 << 20  # payload waiting to be written; held in RAM
    queue_blocks: int = 4096
    quarantine_bytes: int = 256 << 20
    quarantine_files: int = 16


def store_limits(settings: StoreSettings) -> StoreLimits:
    """The limits from the settings; StoreLimits has the defaults."""
    daily = DAILY_WRITE_BYTES if settings.daily_write_bytes is None else settings.daily_write_bytes
    return StoreLimits(budget_bytes=settings.disk_bytes, daily_write_bytes=daily)


def allowed_bytes(
    limits: StoreLimits, *, volume_bytes: int, free_bytes: int, stored_bytes: int
) -> int:
    """How many bytes the store may hold now.

    When others fill the volume, the store stops growing, but does not shrink: new blocks then
    replace old ones.
    """
    room_bytes = max(0, free_bytes - limits.spare_bytes)
    of_volume = int(volume_bytes * limits.volume_percent / 100)
    allowed = max(0, min(of_volume, stored_bytes + room_bytes))
    return allowed if limits.budget_bytes is None else min(allowed, limits.budget_bytes)


def choose_victims(
    entries: Sequence[Entry], *, excess_bytes: int, in_use: Collection[BlockKey] = ()
) -> list[Entry]:
    """The least recently used blocks that together free `excess_bytes`, if there are enough.

    Children before parents. in_use: parents of blocks that are being written; they and their
    ancestors stay.
    """
    victims: list[Entry] = []
    if excess_bytes <= 0:
        return victims
    for entry in eviction_order(entries, in_use=in_use):
        if excess_bytes <= 0:
            break
        victims.append(entry)
        excess_bytes -= entry.file_bytes
    return victims


def eviction_order(entries: Iterable[Entry], *, in_use: Collection[BlockKey] = ()) -> list[Entry]:
    """All blocks that may be evicted, the first victim first; a child always before its parent."""
    by_depth = sorted(entries, key=by_place)
    kept, recency = _kept_and_recency(by_depth, in_use)
    reachable = reachable_keys(by_depth)
    victims = [entry for entry in reversed(by_depth) if entry.block.key not in kept]
    return sorted(
        victims, key=lambda entry: (entry.block.key in reachable, recency[entry.block.key])
    )


def by_place(entry: Entry) -> tuple[int, bool]:
    """A sort key: parents before children, blocks before states."""
    return entry.block.start, entry.block.kind == "state"


def reachable_keys(by_depth: Iterable[Entry]) -> set[BlockKey]:
    """The keys whose whole chain of parents is stored. Expects parents before children."""
    reachable: set[BlockKey] = set()
    for block in (entry.block for entry in by_depth):
        if block.start == 0 or block.parent_key in reachable:
            reachable.add(block.key)
    return reachable


def _kept_and_recency(
    by_depth: Sequence[Entry], in_use: Collection[BlockKey]
) -> tuple[set[BlockKey], dict[BlockKey, float]]:
    """What pins keep, and when each block's subtree was last used."""
    kept = set(in_use)
    kept.update(entry.block.key for entry in by_depth if entry.pinned)
    recency = {entry.block.key: entry.last_used for entry in by_depth}
    # children first: a child starts after its parent does
    for block in (entry.block for entry in reversed(by_depth)):
        if block.key in kept:
            kept.add(block.parent_key)
        if block.parent_key in recency:
            recency[block.parent_key] = max(recency[block.parent_key], recency[block.key])
    return kept, recency
