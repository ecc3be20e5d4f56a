"""Keeps a store's folder within its limits: evicts, removes, quarantines.

Runs on the I/O thread, or in a command of `inspect.py`. Damaged files are moved to the quarantine, a
folder in which people can look at them. Depth is the position in a chain: parents come before children.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.config import StoreSettings
from holdfast.machine.retention_clock import RetentionClock
from holdfast.store.block import (
    BadBlock,
    BlockKey,
    BlockMissing,
    BlockUnreadable,
    Entry,
    by_place,
    reachable_keys,
    read_block,
)
from holdfast.store.folder import StoreFolder
from holdfast.store.index import BlockIndex, IndexSupervisor

# an eviction frees an additional 1/50 of the budget, so that the next blocks need no eviction
SLACK_PARTS = 50
# A drive of 1 TB usually endures 600 TB of writes, which is 16 years at this rate.
DAILY_WRITE_BYTES = 100 << 30
_BAD_SUFFIX = ".bad"  # of files in quarantine
_NOT_FOR_NAMES = re.compile(r"[^a-z0-9]+")  # characters that do not belong into a file's name
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """How much the store may use of the volume, of the drive's endurance, and of RAM."""

    budget_bytes: int | None = None  # None: only the following fields limit the store
    # of the volume's size; the smaller one of this and `budget_bytes` applies
    volume_percent: float = 20.0
    spare_bytes: int = 2 << 30  # space on the volume that the store leaves free
    # per day (UTC), for all processes together; None: unlimited
    daily_write_bytes: int | None = None
    queue_bytes: int = 512 << 20  # payload in RAM that waits to be written
    queue_blocks: int = 4096
    quarantine_bytes: int = 256 << 20  # size of damaged files that are kept
    quarantine_files: int = 16


def store_limits(settings: StoreSettings) -> StoreLimits:
    """Build the limits from the settings.

    Fields without a setting have the defaults of StoreLimits.
    """
    daily = DAILY_WRITE_BYTES if settings.daily_write_bytes is None else settings.daily_write_bytes
    return StoreLimits(budget_bytes=settings.disk_bytes, daily_write_bytes=daily)


def allowed_bytes(
    limits: StoreLimits, *, volume_bytes: int, free_bytes: int, stored_bytes: int
) -> int:
    """How many bytes the store may hold now.

    When other files fill the volume, the store stops growing but does not shrink: new blocks then
    replace old ones.
    """
    room_bytes = max(0, free_bytes - limits.spare_bytes)
    of_volume = int(volume_bytes * limits.volume_percent / 100)
    allowed = max(0, min(of_volume, stored_bytes + room_bytes))
    return allowed if limits.budget_bytes is None else min(allowed, limits.budget_bytes)


def choose_victims(
    entries: Sequence[Entry], *, excess_bytes: int, in_use: Collection[BlockKey] = ()
) -> list[Entry]:
    """Choose the least recently used blocks that together free `excess_bytes`, or all if that is
    not enough.

    Children come before parents. in_use: parents of blocks that are being written; they and their
    ancestors are not chosen.
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
    """Return all blocks that may be evicted, the first victim first.

    A child always comes before its parent.
    """
    by_depth = sorted(entries, key=by_place)
    kept, recency = _kept_and_recency(by_depth, in_use)
    reachable = reachable_keys(entry for entry in by_depth if not entry.is_missing)
    victims = [entry for entry in reversed(by_depth) if entry.block.key not in kept]
    # unreachable blocks first, then by the last use; the sort keeps children before their parents
    return sorted(
        victims, key=lambda entry: (entry.block.key in reachable, recency[entry.block.key])
    )


def _kept_and_recency(
    by_depth: Sequence[Entry], in_use: Collection[BlockKey]
) -> tuple[set[BlockKey], dict[BlockKey, float]]:
    """Return the keys that must not be evicted (pinned or in use, with all ancestors), and when each
    block or a descendant was last used.
    """
    kept = set(in_use)
    kept.update(entry.block.key for entry in by_depth if entry.pinned)
    recency = {entry.block.key: entry.last_used for entry in by_depth}
    # children first: a child starts after its parent
    for block in (entry.block for entry in reversed(by_depth)):
        if block.key in kept:
            kept.add(block.parent_key)
        if block.parent_key in recency:
            recency[block.parent_key] = max(recency[block.parent_key], recency[block.key])
    return kept, recency


class StoreMaintenance:
    """Removes stored blocks. Every method may raise OSError."""

    def __init__(
        self,
        folder: StoreFolder,
        supervisor: IndexSupervisor,
        limits: StoreLimits,
        clock: RetentionClock,
    ) -> None:
        self.folder = folder
        self.supervisor = supervisor
        self._limits = limits
        self._clock = clock

    def drop_old_pins(self) -> None:
        """Remove expired pins. The newest use of a block shows whether the clock has jumped ahead."""
        newest = self.supervisor.use(BlockIndex.newest_use)
        if newest is not None:
            self._clock.start_from(newest)
        self.supervisor.use(lambda index: index.drop_old_pins(self._clock()))

    def allowed_bytes(self) -> int:
        """How many bytes the store may hold now."""
        volume = shutil.disk_usage(self.folder.path)
        stored = self.supervisor.use(BlockIndex.stored_bytes)
        return allowed_bytes(
            self._limits, volume_bytes=volume.total, free_bytes=volume.free, stored_bytes=stored
        )

    def shortage_bytes(self, wanted_bytes: int) -> int:
        """How many bytes must be removed before `wanted_bytes` more may be written."""
        return max(
            0, self.supervisor.use(BlockIndex.stored_bytes) + wanted_bytes - self.allowed_bytes()
        )

    def make_room(self, wanted_bytes: int, *, in_use: Collection[BlockKey]) -> list[Entry]:
        """Evict blocks until `wanted_bytes` more bytes fit. If they cannot fit, evicts only what
        exceeds the limit already. Returns the evicted blocks.
        """
        if not self.shortage_bytes(wanted_bytes):
            return []
        # check again, because another process may just have made room
        with self.folder.exclusive():
            return self._unlink(
                self._victims(wanted_bytes, in_use=in_use) or self._victims(0, in_use=in_use)
            )

    def _victims(self, wanted_bytes: int, *, in_use: Collection[BlockKey]) -> list[Entry]:
        """The blocks to evict so that `wanted_bytes` more bytes fit, and a few more, so that not
        every new block causes an eviction; none if they fit already, or not even then.
        """
        shortage = self.shortage_bytes(wanted_bytes)
        allowed = self.allowed_bytes()
        if not shortage or wanted_bytes > allowed:
            return []
        excess_bytes = shortage + allowed // SLACK_PARTS
        victims = choose_victims(self._entries(), excess_bytes=excess_bytes, in_use=in_use)
        is_enough = sum(victim.file_bytes for victim in victims) >= shortage
        return victims if is_enough or not wanted_bytes else []

    def evict(self, excess_bytes: int, *, in_use: Collection[BlockKey] = ()) -> list[Entry]:
        """Remove the least recently used blocks, which together free `excess_bytes`.

        Returns the removed blocks.
        """
        with self.folder.exclusive():
            victims = choose_victims(self._entries(), excess_bytes=excess_bytes, in_use=in_use)
            return self._unlink(victims)

    def _entries(self) -> list[Entry]:
        return self.supervisor.use(lambda index: index.entries(self._clock()))

    def _unlink(self, entries: Iterable[Entry]) -> list[Entry]:
        """Delete blocks, and return the deleted ones. A file that cannot be deleted stays, with its
        row, and does not stop the others. Raises OSError if none could be deleted.
        """
        deleted: list[Entry] = []
        failure: OSError | None = None
        for entry in entries:
            try:
                # the file first: a row without a file is a miss, but a file without a row would
                # come back
                self.folder.block_path(entry.block.key, model=entry.model).unlink(missing_ok=True)
                deleted.append(entry)
            except OSError as error:
                failure = failure or error
        self.supervisor.use(lambda index: index.remove([entry.block.key for entry in deleted]))
        if failure is not None and not deleted:
            raise failure
        return deleted

    def remove(self, keys: Iterable[BlockKey], *, model: str) -> list[BlockKey]:
        """Delete blocks of one model (short name). Returns those whose files could not be deleted.

        Raises OSError if the index cannot be changed.
        """
        deleted_keys: list[BlockKey] = []
        undeleted_keys: list[BlockKey] = []
        for key in keys:
            try:
                self.folder.block_path(key, model=model).unlink(missing_ok=True)
                deleted_keys.append(key)
            except OSError:
                undeleted_keys.append(key)
        self.supervisor.use(lambda index: index.remove(deleted_keys))
        return undeleted_keys

    def recheck_file(self, path: Path, key: BlockKey) -> bool:
        """Read a block that another thread could not use, and quarantine its file if it is damaged.
        Returns whether the file is damaged or gone.
        """
        try:
            read_block(path, key, model=path.parent.name)
        except BlockUnreadable:
            return False
        except BlockMissing:
            pass
        except BadBlock as bad:
            _LOG.warning("a damaged block is moved to the quarantine: %s", bad)
            try:
                quarantine(path, bad, folder=self.folder.quarantine_folder)
                self._bound_quarantine()
            except OSError as error:  # the file is replaced when the block is stored again
                _LOG.warning("the quarantine cannot be changed: %s", error)
        else:
            return False
        self.supervisor.use(lambda index: index.mark_lost([key]))
        return True

    def _bound_quarantine(self) -> None:
        """Delete the oldest damaged files beyond the limits."""
        bound_quarantine(
            self.folder.quarantine_folder,
            most_bytes=self._limits.quarantine_bytes,
            most_files=self._limits.quarantine_files,
        )

    def set_aside_damaged(self) -> tuple[int, list[BlockKey]]:
        """Quarantine the files that were found damaged when the index was opened.

        Returns the number of damaged files, and the keys of all lost blocks.
        """
        lost_blocks = self.supervisor.lost_blocks
        self.supervisor.lost_blocks = {}
        damaged_files = [
            file
            for file in lost_blocks.values()
            if file is not None and self.recheck_file(file.path, file.key)
        ]
        return len(damaged_files), list(lost_blocks)


def quarantine(path: Path, bad: BadBlock, *, folder: Path) -> None:
    """Move a damaged file to the quarantine, if it still exists. Its new name says why.

    Raises OSError.
    """
    reason = _NOT_FOR_NAMES.sub("-", bad.reason.lower()).strip("-")[:40]
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.replace(path, folder / f"{time.time_ns():020d}.{bad.key.hex()}.{reason}{_BAD_SUFFIX}")


def bound_quarantine(folder: Path, *, most_bytes: int, most_files: int) -> int:
    """Delete the oldest files in quarantine until the rest is within the limits.

    Returns how many files remain. Raises OSError.
    """
    kept_files = 0
    total_bytes = 0
    for path in reversed(quarantined_files(folder)):
        total_bytes += path.lstat().st_size
        if kept_files < most_files and total_bytes <= most_bytes:
            kept_files += 1
        else:
            path.unlink(missing_ok=True)
    return kept_files


def quarantined_files(folder: Path) -> list[Path]:
    """The files in quarantine, oldest first."""
    return sorted(
        path for path in folder.glob(f"*{_BAD_SUFFIX}") if path.is_file() and not path.is_symlink()
    )
