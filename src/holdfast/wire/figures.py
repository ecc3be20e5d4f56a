"""Figures that a worker tells: counters since its start and gauges of now.

Leaf module: no MLX, no web framework.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

DropReason: TypeAlias = Literal["queue_full", "memory_only", "daily_budget", "no_room"]


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Cumulative-ready histogram: `counts[i]` observations ≤ `bounds[i]`, the last count is above
    all bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0


class StoreFigures(msgspec.Struct, kw_only=True):
    """The store of a worker: the folder as it is now, and counters of this worker since its start.

    The store's threads count in one of these, each in fields of its own; what travels is a copy.
    """

    model: str  # short name of the model in the folder
    # memory-only while the folder cannot be written or has no room
    mode: Literal["writing", "memory-only"] = "writing"
    blocks: int = 0
    stored_bytes: int = 0
    allowed_bytes: int = 0
    written_today_bytes: int = 0  # by all processes
    queued_blocks: int = 0
    queued_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    evicted_blocks: int = 0
    bad_blocks: int = 0
    missing_blocks: int = 0
    outages: int = 0  # how often the folder could not be written
    dropped_blocks: dict[DropReason, int] = {}  # not written, by reason


class CacheFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker keeps, and counters of its memory since its start."""

    kept_tokens: int = 0  # in RAM or on disk, each once
    tenants: int = 0
    ram_bytes: int = 0
    ram_budget_bytes: int = 0
    ram_evicted_blocks: int = 0
    parked_sequences: int = 0  # that have ended, and whose state is kept as it was
    parked_bytes: int = 0  # of their states, what several share once
    ram_tokens: int = 0  # that were not read again, by where they were
    moved_tokens: int = 0  # of these, in a parked state that went over to the next request
    shared_tokens: int = 0  # of these, in buffers that several sequences hold
    disk_tokens: int = 0
    read_ahead_tokens: int = 0  # read for next turns, while there was nothing else to do
    used_ahead_tokens: int = 0  # of these, that such turns began from
    lookups: dict[str, int] = {}  # by CacheOutcome
    waiting: int = 0  # requests that wait for another one's reading now
    waits: int = 0
    lookup_seconds: Histogram | None = None
    restore_seconds: Histogram | None = None  # of requests for which something was there
    store: StoreFigures | None = None  # None: no folder is set


class ConstraintFigures(msgspec.Struct, kw_only=True):
    """Counters of a worker since its start.

    The engine counts in one of these; what travels is a copy.
    """

    sequences: int = 0  # that were opened with a grammar or a thinking budget
    masks: int = 0  # of tokens that a grammar allowed, one for each that was drawn
    mask_seconds: float = 0.0
    failures: int = 0  # sequences that ended because nothing was allowed any more


class ResidencyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is loaded and used, and counters since the server's start."""

    loaded: int = 0  # 1 when it is
    leases: int = 0  # requests that use it
    waiting: int = 0  # requests that wait until there is room for it
    footprint_bytes: int = 0  # of memory, as measured
    # loaded, failed; unloaded by what it made way for: room, idle, asked
    changes: dict[str, int] = {}
    wait_seconds: dict[str, float] = {}  # of requests, by what they waited for: place or load


class WorkerStatistics(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Counters since the worker's start, and gauges of now."""

    in_answer: bool = False  # to TELL_STATISTICS; a working worker also tells them unasked
    running: int = 0
    queued: int = 0
    max_running: int = 0  # the limits that count
    step_tokens: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    kv_reserved_bytes: int = 0
    kv_budget_bytes: int = 0
    resident_bytes: int = 0
    device_bytes: int = 0  # that a GPU has for this worker; 0 without one
    step_seconds: Histogram | None = None
    memory: CacheFigures | None = None  # None: this worker keeps nothing
    constraints: ConstraintFigures = msgspec.field(default_factory=ConstraintFigures)
