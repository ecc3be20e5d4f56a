"""The thread that owns a store's files and index.

No other thread writes, renames, evicts or removes files. It gets its work from the `Mailbox`: blocks to
write and tasks to run. Blocks are written into a group of files, which is made durable together and then
added to the index (`WriteAhead`).

During an outage, the folder cannot be written: blocks are dropped, so the cache is in memory only, and
opening the folder is tried again at intervals.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.machine.retention_clock import RetentionClock
from holdfast.store.block import (
    BadBlock,
    BlockKey,
    BlockMissing,
    BlockUnreadable,
    Entry,
    ReadFailed,
    StoredBlock,
    StoreRefused,
    encode_block,
    reachable_keys,
    read_block,
)
from holdfast.store.folder import ReadRecords, Records, StoreFolder, is_plain_file
from holdfast.store.index import BlockIndex, IndexSupervisor
from holdfast.store.maintenance import (
    StoreLimits,
    StoreMaintenance,
)
from holdfast.store.write_ahead import Mailbox, WriteAhead, salvage
from holdfast.wire.events import DropReason, StoreFigures

_LOG = logging.getLogger(__name__)

_NICENESS = 10  # of 19: a tenth of the share that a computing thread gets on a busy core
GROUP_SECONDS = 0.05  # a group of files is made durable when it is this old, …
GROUP_BYTES = 64 << 20  # … or has this many bytes, …
GROUP_BLOCKS = 64  # … or has this many blocks
TOUCH_SECONDS = 1.0  # uses are recorded together, the first one after this time
RETRY_SECONDS = 60.0  # between tries to open the folder, and to repeat failed changes
MOST_REPORTED_LOST = 1 << 14  # how many reports to remember; more than reads that can be under way
_LEAST_EVICTED_BYTES = 256 << 10  # beyond the size of the new blocks, for the index
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The functions that tell the time."""

    wall: Callable[[], float] = time.time  # for timestamps and dates
    steady: Callable[[], float] = time.monotonic  # for durations


class IoThread:
    """What the I/O thread does. Only the constructor may be called on another thread."""

    def __init__(
        self,
        folder: StoreFolder,
        mailbox: Mailbox,
        *,
        fingerprint: str,
        figures: StoreFigures,
        limits: StoreLimits,
        clocks: Clocks,
    ) -> None:
        self._folder = folder
        self._mailbox = mailbox
        self._fingerprint = fingerprint
        self._model = figures.model
        self._figures = figures
        self._limits = limits
        self._clocks = clocks
        self._supervisor = IndexSupervisor(folder)
        # for deletions by age: of pins, then of blocks that have not been used for long
        self._retention = RetentionClock(wall=clocks.wall, steady=clocks.steady)
        self._maintenance = StoreMaintenance(folder, self._supervisor, limits, self._retention)
        # complete files that are not durable or not in the index yet
        self._ahead = WriteAhead(folder, fingerprint=fingerprint, figures=figures)
        self._records = Records(folder, model=self._model)
        # blocks whose files could not be used when last read: if such a block is sent again, it is
        # written again unless its file turns out to be intact
        self._suspects: set[BlockKey] = set()
        # blocks whose loss was reported since they were last written, oldest first: a read that was
        # under way then must not report it again, because the block may be on its way to the disk
        self._reported_lost: OrderedDict[BlockKey, None] = OrderedDict()
        # failed changes to retry, by what they do and the name of the record that they change; a
        # newer change replaces an older one
        self._failed_changes: dict[tuple[str, str], Callable[[], None]] = {}
        self._last_retry_at = 0.0  # steady time of the last retry, or of the first failure
        self._to_remove: dict[BlockKey, None] = {}  # blocks whose files must be deleted
        # when blocks were last used, in seconds since the epoch; to be recorded in the index
        self._unrecorded_uses: dict[BlockKey, float] = {}
        self._first_use_at = 0.0  # steady time of the first of these uses
        # steady time of the next try to open the folder; set during an outage only
        self._reopen_at: float | None = None
        self._has_salvaged = False  # whether files of ended processes were looked for
        self._logged_day = ""  # day whose write limit was logged as reached

    # -- the loop

    def run(self) -> None:
        """Serve the mailbox until it is closed and empty."""
        _lower_priority()
        try:
            self._try_to_open()
            while True:
                work = self._mailbox.next_work(self._seconds_to_due_work())
                if isinstance(work, StoredBlock):
                    self._write(work)
                elif work is not None:
                    work()
                elif self._mailbox.closed:
                    break
                self._do_due_work()
            self.flush()
        finally:
            self._mailbox.abandon()  # the mailbox is empty then, except after a bug
            self._figures.mode = "memory-only"
            self._ahead.abandon()
            self._supervisor.close()
            self._folder.release()

    def _seconds_to_due_work(self) -> float | None:
        """The time to the next timed work (publish a group, record uses, retry failed changes); None if
        there is none.
        """
        now = self._clocks.steady()
        if self._ahead:
            return max(0.0, self._ahead.oldest_at + GROUP_SECONDS - now)
        if self._unrecorded_uses:
            return max(0.0, self._first_use_at + TOUCH_SECONDS - now)
        if self._failed_changes or self._to_remove:
            return max(0.0, self._last_retry_at + RETRY_SECONDS - now)
        return None

    def _do_due_work(self) -> None:
        """Publish the group if it is full or old enough; record uses and retry changes if it is time."""
        now = self._clocks.steady()
        is_full = self._ahead.file_bytes >= GROUP_BYTES or len(self._ahead) >= GROUP_BLOCKS
        if self._ahead and (is_full or now >= self._ahead.oldest_at + GROUP_SECONDS):
            self._publish()
        if self._unrecorded_uses and now >= self._first_use_at + TOUCH_SECONDS:
            self._record_uses()
        if (self._failed_changes or self._to_remove) and now >= self._last_retry_at + RETRY_SECONDS:
            self._retry_failed()

    # -- opening and outages

    def _try_to_open(self) -> bool:
        """Make the folder ready for writing. Returns whether that worked."""
        try:
            self._folder.prepare()
            self._folder.incoming()  # claims this process's own folder for unfinished files
            if not self._has_salvaged:
                with self._folder.exclusive():
                    salvage(self._folder)
                self._has_salvaged = True
            # the next use opens the index anew, because the folder may have changed
            self._supervisor.close()
            self._maintenance.drop_old_pins()
            # the limits may have become tighter since the store was last open
            self._count_evicted(self._maintenance.make_room(0, in_use=()))
            self._refresh_counts()
        except (OSError, StoreRefused) as error:
            self._pause(error)
            return False
        if self._reopen_at is not None:
            _LOG.info("the store can be written again: %s", self._folder.path)
        self._reopen_at = None
        self._figures.mode = "writing" if self._figures.allowed_bytes else "memory-only"
        return True

    def _pause(self, error: OSError | StoreRefused) -> None:
        """Begin or prolong an outage. Logs one warning per outage."""
        if self._reopen_at is None:
            self._figures.outages += 1
            _LOG.warning(
                "the store cannot be written (%s): the cache is in memory only; trying again every "
                "%.0f s: %s",
                getattr(error, "strerror", None) or error,
                RETRY_SECONDS,
                self._folder.path,
            )
        self._reopen_at = self._clocks.steady() + RETRY_SECONDS
        self._figures.mode = "memory-only"
        self._drop(self._ahead.abandon(), "memory_only")
        self._supervisor.close()

    def _reopen_if_due(self) -> bool:
        """Whether the folder can be written. During an outage, tries to open it when that is due."""
        if self._reopen_at is None:
            return True
        return self._clocks.steady() >= self._reopen_at and self._try_to_open()

    # -- writing

    def _write(self, block: StoredBlock) -> None:
        """Write a block, or drop it during an outage."""
        if not self._reopen_if_due():
            self._drop([block.key], "memory_only")
            return
        try:
            self._write_into_group(block)
        except OSError as error:
            self._drop([block.key], "memory_only")
            self._pause(error)

    def _drop(self, keys: list[BlockKey], reason: DropReason) -> None:
        """Drop blocks instead of writing them, and count them under `reason`."""
        self._figures.dropped_blocks[reason] += len(keys)
        self._note_lost(keys)
        self._mailbox.finish(keys, stored=False)

    def _report_lost(self, keys: Sequence[BlockKey]) -> None:
        """Report that the store does not have these blocks any more."""
        self._note_lost(keys)
        self._mailbox.report_lost(keys)

    def _note_lost(self, keys: Sequence[BlockKey]) -> None:
        """Remember that the loss of these blocks was reported."""
        for key in keys:
            self._reported_lost[key] = None
            self._reported_lost.move_to_end(key)
        while len(self._reported_lost) > MOST_REPORTED_LOST:
            self._reported_lost.popitem(last=False)

    def _write_into_group(self, block: StoredBlock) -> None:
        """Write a block, unless it is stored already or exceeds a limit."""
        self._to_remove.pop(block.key, None)  # the block is wanted again
        self._reported_lost.pop(block.key, None)
        if self._has_file(block.key):
            self._mailbox.finish([block.key], stored=True)
            self.touch([block.key])
            return
        now = self._retention()
        buffers = encode_block(block, fingerprint=self._fingerprint)
        file_bytes = sum(map(len, buffers))
        if self._exceeds_daily_budget(file_bytes):
            self._drop([block.key], "daily_budget")
        elif not self._make_room_for(block, file_bytes):
            self._drop([block.key], "no_room")
            self._note_room(self._maintenance.allowed_bytes() >= file_bytes)
        else:
            self._note_room(True)
            steady_now = self._clocks.steady()
            self._with_room(
                lambda: self._ahead.write(block.block, buffers, now=now, steady_now=steady_now),
                block,
            )

    def _has_file(self, key: BlockKey) -> bool:
        """Whether the folder has a file of this block that is not known to be damaged."""
        path = self._folder.block_path(key, model=self._model)
        if key not in self._suspects:
            return is_plain_file(path)
        try:
            read_block(path, key, model=self._model)
        except ReadFailed:
            return False
        self._suspects.discard(key)
        return True

    def _note_room(self, has_room: bool) -> None:
        """Record whether the store has room for any block at all.

        The statistics show this; if the volume has just become full, it is also logged.
        """
        if not has_room and self._figures.mode == "writing":
            _LOG.warning(
                "the volume of the store is full: the cache is in memory only until there is room "
                "again: %s",
                self._folder.path,
            )
        self._figures.mode = "writing" if has_room else "memory-only"

    def _parents_in_use(self, *blocks: StoredBlock) -> set[BlockKey]:
        """The parents of blocks that are being written. They must not be evicted."""
        return {*self._ahead.parent_keys, *(stored.block.parent_key for stored in blocks)}

    def _with_room(self, work: Callable[[], None], *blocks: StoredBlock) -> None:
        """Call `work`, which needs disk space. If the disk is full, evict blocks and try once more.

        blocks: the blocks that `work` writes.
        """
        try:
            work()
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            wanted_bytes = _LEAST_EVICTED_BYTES + sum(2 * block.nbytes for block in blocks)
            evicted = self._maintenance.evict(wanted_bytes, in_use=self._parents_in_use(*blocks))
            if not evicted:
                raise
            self._count_evicted(evicted)
            work()

    def _exceeds_daily_budget(self, file_bytes: int) -> bool:
        """Whether the limit of bytes per day forbids to write this many more. Logs it once a day."""
        limit = self._limits.daily_write_bytes
        day = self._day()
        if limit is None:
            return False
        written = (
            self._supervisor.use(lambda index: index.written_bytes(day)) + self._ahead.file_bytes
        )
        is_exceeded = written + file_bytes > limit
        if is_exceeded and self._logged_day != day:
            self._logged_day = day
            _LOG.warning("the store has reached its daily write limit of %d bytes", limit)
        return is_exceeded

    def _day(self) -> str:
        """Today (UTC), as the index names it."""
        return time.strftime("%Y-%m-%d", time.gmtime(self._clocks.wall()))

    def _make_room_for(self, block: StoredBlock, file_bytes: int) -> bool:
        """Evict blocks if necessary. Returns whether the store has room for the block now."""
        wanted_bytes = self._ahead.file_bytes + file_bytes
        if not self._maintenance.shortage_bytes(wanted_bytes):
            return True
        self._record_uses()  # must happen before the least recently used blocks are chosen
        self._count_evicted(
            self._maintenance.make_room(wanted_bytes, in_use=self._parents_in_use(block))
        )
        return not self._maintenance.shortage_bytes(wanted_bytes)

    def _count_evicted(self, evicted: list[Entry]) -> None:
        self._figures.evicted_blocks += len(evicted)
        self._report_lost([entry.block.key for entry in evicted])

    def _publish(self) -> list[Entry]:
        """Make the oldest files durable, and add them to the index. Returns the blocks of this group.

        Blocks that arrive while this runs are written to the incoming folder.
        """
        group = self._ahead.group(most_bytes=GROUP_BYTES, most_blocks=GROUP_BLOCKS)
        try:
            self._ahead.publish(group, between=self._write_arrived)
        except OSError as error:
            self._pause(error)
            return group
        self._suspects.difference_update(entry.block.key for entry in group)
        self._mailbox.finish([entry.block.key for entry in group], stored=True)
        try:
            self._with_room(lambda: self._add_rows(group))
            self._ahead.drop(group)
            # Other processes may have written, too. The blocks of this group may be evicted like
            # all others.
            self._count_evicted(self._maintenance.make_room(0, in_use=self._parents_in_use()))
            self._refresh_counts()
        except OSError as error:  # the files exist: they are found when the index is opened again
            self._ahead.drop(group)
            self._pause(error)
        return group

    def _add_rows(self, group: list[Entry]) -> None:
        """Add published blocks to the index, and their size to the bytes written today."""
        written_bytes = sum(entry.file_bytes for entry in group)
        self._supervisor.use(
            lambda index: index.add(group, fingerprints={self._model: self._fingerprint})
        )
        self._supervisor.use(lambda index: index.count_written(written_bytes, day=self._day()))

    def _write_arrived(self) -> None:
        """Write blocks that have arrived while a group of files is being made durable.

        The number of blocks per call is limited, so that the group gets finished.
        """
        for _ in range(GROUP_BLOCKS):
            block = self._mailbox.take_block() if self._reopen_at is None else None
            if block is None:
                return
            self._write(block)

    def _record_uses(self) -> None:
        """Write the last uses to the index. During an outage, they are forgotten."""
        uses = self._unrecorded_uses
        self._unrecorded_uses = {}
        if uses and self._reopen_at is None:
            self._on_index("record what was used", lambda index: index.touch(uses))

    def _refresh_counts(self) -> None:
        """Handle what opening the index has found damaged or lost, and update the metrics."""
        damaged, lost = self._maintenance.set_aside_damaged()
        self._figures.bad_blocks += damaged
        self._suspects.update(lost)
        self._report_lost(lost)
        day = self._day()
        self._figures.blocks = self._supervisor.use(BlockIndex.block_count)
        self._figures.stored_bytes = self._supervisor.use(BlockIndex.stored_bytes)
        self._figures.written_today_bytes = self._supervisor.use(
            lambda index: index.written_bytes(day)
        )
        self._figures.allowed_bytes = self._maintenance.allowed_bytes()

    # -- tasks, in the order in which they were sent

    def flush(self) -> bool:
        """Make everything durable that was sent before. Returns False during an outage."""
        files_left = len(self._ahead)
        while files_left > 0 and self._ahead:
            files_left -= len(self._publish())
        self._retry_failed()
        self._record_uses()
        return self._reopen_at is None

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Record that blocks were used."""
        if not self._unrecorded_uses:
            self._first_use_at = self._clocks.steady()
        self._unrecorded_uses.update(dict.fromkeys(keys, self._retention()))

    def pin(self, keys: tuple[BlockKey, ...], holder: str, until: float) -> None:
        """Protect blocks from eviction for `holder`, until that time in seconds since the epoch."""
        self._on_index("pin", lambda index: index.pin(keys, holder=holder, until=until))

    def unpin(self, keys: tuple[BlockKey, ...], holder: str) -> None:
        """Remove a holder's pins."""
        self._on_index("unpin", lambda index: index.unpin(keys, holder=holder))

    def put_record(self, name: str, data: bytes) -> None:
        """Write a record, later if that is impossible now."""
        self._attempt_or_defer(
            "write a session's record", name, lambda: self._records.put(name, data)
        )

    def remove_record(self, name: str) -> None:
        """Delete a record, later if that is impossible now."""
        self._attempt_or_defer("write a session's record", name, lambda: self._records.remove(name))

    def _attempt_or_defer(self, action: str, name: str, work: Callable[[], None]) -> None:
        """Call `work`. If it fails, or the folder cannot be written, retry later, unless newer work of
        the same kind (`action`) on the record `name` replaces it.
        """
        self._failed_changes.pop((action, name), None)
        if not (self._reopen_if_due() and self._attempt(action, work)):
            if not self._failed_changes:
                self._last_retry_at = self._clocks.steady()
            self._failed_changes[action, name] = work

    def _retry_failed(self) -> None:
        """Try failed deletions and changes again."""
        self._last_retry_at = self._clocks.steady()
        if self._to_remove and self._reopen_at is None:
            self._attempt("remove blocks", self._remove_files)
        for (action, name), work in tuple(self._failed_changes.items()):
            self._attempt_or_defer(action, name, work)

    def records(self) -> ReadRecords | None:
        """All records of this model; None if they cannot be listed at the moment."""
        try:
            return self._records.all()
        except OSError as error:
            _LOG.warning("the records of sessions cannot be listed now: %s", error)
            return None

    def remove(self, keys: tuple[BlockKey, ...]) -> None:
        """Delete blocks, including queued ones. Files that cannot be deleted now are retried."""
        self.flush()
        self._to_remove.update(dict.fromkeys(keys))
        self._attempt("remove blocks", self._remove_files)
        self._report_lost(keys)
        self._recount()

    def _remove_files(self) -> None:
        """Delete the blocks in `_to_remove`. Raises OSError if some cannot be deleted; these stay there."""
        undeleted_keys = self._maintenance.remove(tuple(self._to_remove), model=self._model)
        self._to_remove = dict.fromkeys(undeleted_keys)
        if undeleted_keys:
            raise OSError(errno.EBUSY, f"{len(undeleted_keys)} files cannot be deleted now")

    def recheck_file(self, path: Path, failure: ReadFailed) -> None:
        """Report a block as lost whose file the reading thread could not use, unless it may be readable
        later. Then check the file, and quarantine it if its content is damaged.
        """
        self._suspects.add(failure.key)
        if isinstance(failure, BlockUnreadable):
            return
        self._figures.bad_blocks += isinstance(failure, BadBlock)
        if isinstance(failure, BlockMissing) and self._has_again(failure.key, path):
            return
        if failure.key not in self._reported_lost:
            self._report_lost([failure.key])

        def check_file() -> None:
            if self._folder.exists:  # otherwise, the next write notices that it is gone
                self._maintenance.recheck_file(path, failure.key)
                self._refresh_counts()

        self._attempt("look at a block again", check_file)

    def _has_again(self, key: BlockKey, path: Path) -> bool:
        """Whether a block that was missing has been sent or written again since it was read, or may
        have been, if its file cannot be examined.
        """
        try:
            return self._mailbox.held_block(key) is not None or is_plain_file(path)
        except OSError:
            return True  # the next read finds out

    def entries(self) -> tuple[Entry, ...]:
        """Return the blocks of this model whose parents are all known, parents before children."""
        self.flush()
        if self._reopen_at is not None:
            self._supervisor.open_in_memory()
        try:
            entries = self._supervisor.use(
                lambda index: index.entries(self._retention(), model=self._model)
            )
        except OSError as error:
            self._pause(error)
            return ()
        reachable = reachable_keys(entries)
        return tuple(entry for entry in entries if entry.block.key in reachable)

    def check_invariants(self) -> None:
        """Assert that the index is consistent."""
        self._supervisor.use(lambda index: index.check_invariants())

    def _recount(self) -> None:
        self._attempt("count blocks", self._refresh_counts)

    def _on_index(self, action: str, work: Callable[[BlockIndex], object]) -> None:
        """Call `work` with the index; a failure is only logged."""
        self._attempt(action, lambda: self._supervisor.use(work))

    def _attempt(self, action: str, work: Callable[[], object]) -> bool:
        """Call `work`. If it raises OSError, only log that the store could not do `action`, and
        return False.
        """
        try:
            work()
        except OSError as error:
            if self._reopen_at is None:
                _LOG.warning("the store could not %s: %s", action, error)
            return False
        return True


def _lower_priority() -> None:
    """Lower this thread's priority, because a decode step waits for its slowest core.

    Linux only: on other systems, niceness applies to the whole process.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            # 0 means this thread
            os.setpriority(os.PRIO_PROCESS, 0, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
