"""What a store has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["writing", "memory-only"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    """A snapshot. Counts are of this process, except the first group, which is the whole folder's."""

    model: str  # short name, under which the folder has the model's blocks
    mode: Mode
    blocks: int
    stored_bytes: int
    allowed_bytes: int
    written_today_bytes: int  # by all processes

    queued_blocks: int
    queued_bytes: int
    written_blocks: int
    written_bytes: int
    duplicate_blocks: int  # were there already
    dropped_blocks: int  # all of the next four
    dropped_queue_full: int
    dropped_memory_only: int
    dropped_daily_budget: int
    dropped_no_room: int
    evicted_blocks: int
    salvaged_blocks: int  # finished for writers that had died
    rebuilt_indexes: int
    outages: int  # how often the folder could not be written

    read_blocks: int
    read_bytes: int
    reads_from_queue: int
    missing_blocks: int
    bad_blocks: int

    write_seconds: float
    sync_seconds: float
    index_seconds: float
    read_seconds: float


@dataclass(slots=True)
class WriteCounters:
    """Counted by the I/O thread alone."""

    written_blocks: int = 0
    written_bytes: int = 0
    duplicate_blocks: int = 0
    dropped_memory_only: int = 0
    dropped_daily_budget: int = 0
    dropped_no_room: int = 0
    evicted_blocks: int = 0
    salvaged_blocks: int = 0
    bad_blocks: int = 0
    outages: int = 0
    write_seconds: float = 0.0
    sync_seconds: float = 0.0
    index_seconds: float = 0.0


@dataclass(slots=True)
class ReadCounters:
    """Counted by the reading thread alone."""

    read_blocks: int = 0
    read_bytes: int = 0
    reads_from_queue: int = 0
    missing_blocks: int = 0
    read_seconds: float = 0.0


@dataclass(slots=True)
class FolderCounts:
    """What the I/O thread last knew of the folder."""

    blocks: int = 0
    stored_bytes: int = 0
    allowed_bytes: int = 0
    written_today_bytes: int = 0
    mode: Mode = field(default="writing")
