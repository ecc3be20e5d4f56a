"""The disk of the simulated world: real files in a folder, under the calls of Python that reach them.

Each call beneath the folder is an event: others may run before it, it takes virtual time, it can
fail as planned, and it belongs to the process that makes it. The disk knows what has been synced, so
that a power cut can leave what a real disk may leave. SQLite makes its own system calls, between
two calls of Python; whatever else happens, happens before or after such a call.

A power cut keeps what was synced. Of the names changed since their folder was synced, any may be
undone, but not one before another that it follows (`keeps_order`: the last ones are undone, as in a
journal). Of the bytes written since their file was synced, all, none, the first ones or some pages
may be there. What is older than `SETTLED_SECONDS` counts as synced.

Not modelled: symbolic links; changes of permissions undone by a power cut; a drive's cache that only
F_FULLFSYNC flushes; bytes that SQLite wrote but did not sync, except the end of its write-ahead
log (so answers.py with `synchronous = OFF` loses less than it might); bytes of an earlier file in
a new one; writes by `mmap` and changes of the folder while no world runs, which count as synced;
cursors from `Connection.cursor`, whose statements are no events; a bound on open files, except by a
plan for EMFILE. SQLite's files count neither as used space nor in `full`: plan errors of "sqlite".
Their times never change.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import itertools
import mmap
import os
import random
import shutil
import sqlite3
import stat
import struct
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulation.world import EPOCH, Killed, Process, World, world_or_none

OPERATIONS = (
    "open", "read", "write", "sync", "rename", "unlink", "stat", "list", "mkdir", "touch", "sqlite",
)  # fmt: skip
# planned in place of an error number
SHORT = -1  # of "read" and "write": only a part of the bytes
LIES = -2  # of "sync": returns, although nothing was synced
SETTLED_SECONDS = 30.0  # after which an operating system writes what nobody synced
FIRST_DESCRIPTOR = 2_000_000  # ours differ from the kernel's, and none is used twice
_PAGE = 4096
_TICK = 0.004  # of the clock that marks files
_BUSY_DELAYS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.025, 0.025, 0.05, 0.05, 0.1)
_SQLITE_SUFFIXES = (".sqlite", "-wal", "-shm", "-journal")
_CODES = {
    errno.ENOSPC: sqlite3.SQLITE_FULL,
    errno.EDQUOT: sqlite3.SQLITE_FULL,
    errno.EROFS: sqlite3.SQLITE_READONLY,
    errno.EMFILE: sqlite3.SQLITE_CANTOPEN,
    errno.ENFILE: sqlite3.SQLITE_CANTOPEN,
    errno.EACCES: sqlite3.SQLITE_CANTOPEN,
    errno.EPERM: sqlite3.SQLITE_PERM,
    errno.ENOENT: sqlite3.SQLITE_CANTOPEN,
    errno.EBUSY: sqlite3.SQLITE_BUSY,
}
_CHANGING = {"open", "write", "sync", "rename", "unlink", "mkdir", "touch", "sqlite"}


class _Real:
    """The calls that `install` replaces."""

    open, close, read, pread, readv, preadv = (
        os.open, os.close, os.read, os.pread, os.readv, os.preadv,
    )  # fmt: skip
    write, pwrite, writev, fsync, ftruncate = os.write, os.pwrite, os.writev, os.fsync, os.ftruncate
    lseek, fstat, stat, lstat, statvfs = os.lseek, os.fstat, os.stat, os.lstat, os.statvfs
    rename, replace, link, unlink, rmdir = os.rename, os.replace, os.link, os.unlink, os.rmdir
    mkdir, scandir, utime = os.mkdir, os.scandir, os.utime
    file = io.open
    flock = fcntl.flock
    connect = sqlite3.connect


@dataclass(slots=True)
class Plan:
    """Calls that fail: of the calls of an operation whose path contains `only`, those from number
    `first` on, `left` in all.
    """

    operation: str
    error: int
    first: int
    left: int
    only: str
    failed: int = 0
    seen: int = 0


class Inode:
    """A file or folder, whatever its names."""

    __slots__ = (
        "accessed", "changed", "dirty_since", "graves", "guarded", "is_fooled", "modified",
        "names", "number", "opens", "size", "synced_size", "undo",
    )  # fmt: skip

    def __init__(self, number: int, *, size: int, names: int, now: float) -> None:
        self.number = number
        self.names = names
        self.size = size
        self.accessed = self.modified = self.changed = now
        self.opens = 0
        self.graves = 0  # hidden names that keep it for a power cut
        # what leads back to the content at the last sync: its size, and overwritten bytes
        self.synced_size = self.guarded = size
        self.undo: list[tuple[int, bytes]] = []
        self.dirty_since = 0.0
        self.is_fooled = False  # a sync failed: what was not synced then never is


@dataclass(slots=True)
class Descriptor:
    """An open file."""

    number: int
    real: int
    path: str
    inode: Inode
    owner: Process
    is_folder: bool
    appends: bool
    place: int = 0  # where the next read or write begins


@dataclass(slots=True, eq=False)
class _Change:
    """A change of names that a power cut may undo."""

    kind: str  # "create", "mkdir", "unlink", "rmdir", "rename" or "link"
    at: float
    paths: tuple[str, ...]
    grave: str = ""  # the name under which a removed file is kept
    inode: Inode | None = None  # of the removed file

    def touches(self, folder: str) -> bool:
        return any(os.path.dirname(path) == folder for path in self.paths)


class SimulatedDisk:
    """The files beneath one folder, in one world.

    full: writes fail with ENOSPC. capacity: of the volume, in bytes. slowness: by which all times
    are multiplied. faults: the share of calls that fail by chance, by operation, with one of
    `chance_errors`. lies: the share of syncs that do nothing. keeps_order: whether the file system
    makes changes of names durable in their order. counts: the calls of tasks, by operation.
    misuses: uses of descriptors that were closed before.
    """

    def __init__(self, world: World, folder: str | Path, *, may_lose_power: bool = True) -> None:
        """may_lose_power: without it, calls take less real time, and `power_cut` is not allowed."""
        global _disk
        self.may_lose_power = may_lose_power
        self.world = world
        self.folder = os.path.realpath(folder)
        self.random = random.Random(f"disk {world.seed}")
        self.full = False
        self.capacity = 1 << 40
        self.slowness = 1.0
        self.faults: dict[str, float] = {}
        self.chance_errors: Sequence[int] = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES)
        self.lies = 0.0
        self.keeps_order = False
        self.counts: Counter[str] = Counter()
        self.misuses: list[str] = []
        self.used_bytes = 0
        # where the part of each write-ahead log begins and ends that a power cut may lose
        self.log_ends: dict[str, tuple[int, int]] = {}
        self._prefix = self.folder + "/"
        self._graves = f"{self.folder}.graves"  # removed files that a power cut may bring back
        self._grave_numbers = itertools.count()
        self._plans: list[Plan] = []
        self._numbers = itertools.count(FIRST_DESCRIPTOR)
        self._inode_numbers = itertools.count(1000)
        self._free_numbers: list[int] = []
        self._inodes: dict[int, Inode] = {}  # by the kernel's number
        self._dirty: dict[Inode, None] = {}
        self._changes: list[_Change] = []
        self._descriptors: dict[int, Descriptor] = {}
        self._owned: dict[Process, dict[int, Descriptor]] = {}
        self._connections: dict[int, weakref.ref[Connection]] = {}
        _Real.mkdir(self._graves)
        tempfile._name_sequence = _Names(self.random)  # type: ignore[attr-defined]
        _disk = self

    def close(self) -> None:
        """Close what is still open, and forget what a power cut could bring back."""
        global _disk
        for process in list(self._owned):
            self._end(process)
        self._settle(len(self._changes))
        shutil.rmtree(self._graves, ignore_errors=True)
        if _disk is self:
            _disk = None
            tempfile._name_sequence = None  # type: ignore[attr-defined]

    # -- faults

    def plan(
        self, operation: str, error: int, *, nth: int = 1, count: int = 10**9, only: str = ""
    ) -> Plan:
        """Let the n-th next call of tasks fail, and those after it, `count` in all."""
        assert operation in OPERATIONS, operation
        assert error > 0 or (error, operation) in {
            (SHORT, "read"),
            (SHORT, "write"),
            (LIES, "sync"),
        }
        plan = Plan(operation, error, nth, count, only)
        self._plans.append(plan)
        return plan

    def heal(self) -> None:
        """Forget all plans and faults."""
        self._plans.clear()
        self.faults = {}
        self.lies = 0.0
        self.full = False
        self.slowness = 1.0

    def slow(self, slowness: float, seconds: float) -> None:
        """Be slower for a while."""
        self.slowness = slowness
        self.world.after(seconds, lambda: setattr(self, "slowness", 1.0))

    def flip(self, path: str | Path, *, bit: int | None = None) -> bool:
        """Flip one bit of a file, by choice or by chance. Returns False if the file is empty."""
        with _Real.file(path, "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if not size:
                return False
            place = self.random.randrange(size * 8) if bit is None else bit
            file.seek(place // 8)
            byte = file.read(1)[0]
            file.seek(place // 8)
            file.write(bytes([byte ^ 1 << place % 8]))
        self.world.note("flipped", place, self._short(path))
        return True

    def truncate(self, path: str | Path, size: int | None = None) -> None:
        """Cut a file short, by choice or by chance."""
        status = _Real.lstat(path)
        inode = self._inode(status)
        size = self.random.randrange(status.st_size + 1) if size is None else size
        os.truncate(path, size)
        if not _is_sqlite(str(path)):
            self.used_bytes += size - inode.size
            inode.size = inode.synced_size = inode.guarded = size
            inode.undo.clear()
        self.world.note("truncated", size, self._short(path))

    def vanish(self, path: str | Path) -> None:
        """Let a file or a whole folder disappear, as if somebody had deleted it."""
        self._settle(len(self._changes))
        _remove(str(path))
        self._count_used()
        self.world.note("vanished", self._short(path))

    def files(self, suffix: str = "", *, only: str = "") -> list[str]:
        """The paths of the files beneath the folder, in order, without those that SQLite maps into
        memory: to truncate them ends the real process.
        """
        found = []
        for place, folders, names in _walk(self.folder):
            folders.sort()
            found += [os.path.join(place, name) for name in sorted(names) if name.endswith(suffix)]
        return [path for path in found if only in path and not path.endswith("-shm")]

    # -- what is open

    def is_synced(self, path: str | Path) -> bool:
        """Whether the bytes of a file survive a power cut."""
        inode = self._inodes.get(_Real.lstat(path).st_ino)
        settles_at = self.world.now - SETTLED_SECONDS
        return inode not in self._dirty or inode is None or inode.dirty_since < settles_at

    def open_files(self, process: Process) -> list[str]:
        """The paths of the files and databases that a process has open."""
        found = [each.path for each in self._owned.get(process, {}).values()]
        return found + [each.path for each in self._living_connections() if each.owner is process]

    def check(self) -> None:
        """Assert that no open file or connection outlives its process, and that none was used after
        it was closed.
        """
        assert not self.misuses, self.misuses
        for process in self._owned:
            assert not process.is_dead or not self.open_files(process), self.open_files(process)
        for each in self._living_connections():
            assert not each.owner.is_dead, each.path

    def _living_connections(self) -> list[Connection]:
        found = [reference() for reference in self._connections.values()]
        return [each for each in found if each is not None]

    def own(self, process: Process) -> dict[int, Descriptor]:
        """The open files of a process, which are closed when it ends."""
        owned = self._owned.get(process)
        if owned is None:
            owned = self._owned[process] = {}
            process.ends.append(partial(self._end, process))
        return owned

    def _end(self, process: Process) -> None:
        for each in self._living_connections():
            if each.owner is process:
                each.crash()
        for descriptor in list(self._owned.get(process, {}).values()):
            self._close(descriptor)

    # -- events

    def enter(self, operation: str, path: str) -> int:
        """The event before an operation. Raises Killed and OSError. Returns 0, SHORT or LIES."""
        world = self.world
        task = world.current
        if task is None:
            return 0
        if task.process.is_dead:
            raise Killed
        chance = self.random.random()
        if operation == "sync":
            pass  # takes its time between its beginning and its end
        elif chance < 0.04 * self.slowness:
            world.block(self.slowness * 0.002 * self.random.random())
        elif operation in _CHANGING or chance > 0.75:
            world.yield_now()
        self.counts[operation] += 1
        if self._plans or self.faults:
            return self._fault(operation, path)
        return 0

    def _fault(self, operation: str, path: str) -> int:
        for plan in self._plans:
            if plan.operation != operation or plan.only not in path or not plan.left:
                continue
            plan.seen += 1
            if plan.seen < plan.first:
                continue
            plan.left -= 1
            plan.failed += 1
            return self._fail(operation, plan.error, path)
        if self.random.random() < self.faults.get(operation, 0.0):
            return self._fail(operation, self.random.choice(self.chance_errors), path)
        return 0

    def _fail(self, operation: str, error: int, path: str) -> int:
        self.world.note("fails", operation, error, self._short(path))
        if error < 0:
            return error
        if operation == "sync":
            return error
        if operation == "sqlite":
            raise _sqlite_error(error)
        raise OSError(error, os.strerror(error), path)

    def _short(self, path: object) -> str:
        return os.path.relpath(str(path), self.folder)

    def _now(self) -> float:
        now = self.world.wall()
        return now - now % _TICK

    # -- inodes and descriptors

    def _inode(self, real: os.stat_result) -> Inode:
        found = self._inodes.get(real.st_ino)
        if found is None or not (found.names > 0 or found.graves or found.opens):
            size, names = real.st_size, real.st_nlink
            found = Inode(next(self._inode_numbers), size=size, names=names, now=EPOCH)
            self._inodes[real.st_ino] = found
        return found

    def _fresh_inode(self, real: os.stat_result, path: str) -> Inode:
        is_reused = self._free_numbers and not _is_sqlite(path) and self.random.random() < 0.5
        number = self._free_numbers.pop() if is_reused else next(self._inode_numbers)
        found = Inode(number, size=0, names=real.st_nlink, now=self._now())
        self._inodes[real.st_ino] = found
        if not stat.S_ISDIR(real.st_mode) and self.may_lose_power:
            self._soil(found)
        return found

    def _release(self, inode: Inode) -> None:
        """If an inode has no names, and nobody has it open, it is free again."""
        if inode.names or inode.graves or inode.opens:
            return
        self.used_bytes -= inode.size
        inode.size = 0
        self._dirty.pop(inode, None)
        self._free_numbers.append(inode.number)

    def seen(self, real: os.stat_result) -> os.stat_result:
        """A status as the world sees it."""
        inode = self._inode(real)
        accessed, modified, changed = inode.accessed, inode.modified, inode.changed
        return os.stat_result(
            (
                real.st_mode, inode.number, real.st_dev, real.st_nlink - inode.graves, real.st_uid,
                real.st_gid, real.st_size, int(accessed), int(modified), int(changed),
            ),
            {
                "st_atime": accessed,
                "st_mtime": modified,
                "st_ctime": changed,
                "st_atime_ns": int(accessed * 1e9),
                "st_mtime_ns": int(modified * 1e9),
                "st_ctime_ns": int(changed * 1e9),
                "st_blksize": real.st_blksize,
                "st_blocks": real.st_blocks,
                "st_rdev": real.st_rdev,
            },
        )  # fmt: skip

    def descriptor(self, number: int, call: str) -> Descriptor:
        """An open file. Raises Killed, and OSError if it is closed."""
        found = self._descriptors.get(number)
        here = self.world.here
        if here.is_dead:
            raise Killed
        if found is None or (found.owner is not here and self.world.current is not None):
            if found is not None and found.owner.is_dead:
                raise Killed
            self.misuses.append(f"{here.name}: {call} of {number}")
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return found

    def still_open(self, descriptor: Descriptor, call: str) -> None:
        """Raises OSError if a file was closed while a call on it waited."""
        if descriptor.number not in self._descriptors:
            self.descriptor(descriptor.number, call)

    def path_of(self, number: int) -> str:
        return self.descriptor(number, "a call in the folder").path

    # -- calls with a path

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        self.enter("open", path)
        is_nameless = flags & os.O_TMPFILE == os.O_TMPFILE
        is_new = is_nameless or (flags & os.O_CREAT != 0 and not _exists(path))
        if is_new and self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        real = _Real.open(path, flags & ~os.O_TRUNC, mode)
        status = _Real.fstat(real)
        inode = self._fresh_inode(status, path) if is_new else self._inode(status)
        if is_new and not is_nameless:
            self._record("create", path)
        inode.opens += 1
        owner = self.world.here
        is_folder = stat.S_ISDIR(status.st_mode)
        appends = flags & os.O_APPEND != 0
        descriptor = Descriptor(
            next(self._numbers), real, path, inode, owner, is_folder=is_folder, appends=appends
        )
        self._descriptors[descriptor.number] = descriptor
        self.own(owner)[descriptor.number] = descriptor
        if flags & os.O_TRUNC and stat.S_ISREG(status.st_mode) and not is_new:
            self._resize(descriptor, 0)
        return descriptor.number

    def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        self.enter("stat", path)
        return self.seen(_Real.stat(path, follow_symlinks=follow_symlinks))

    def lstat(self, path: str) -> os.stat_result:
        return self.stat(path, follow_symlinks=False)

    def statvfs(self, path: str) -> os.statvfs_result:
        self.enter("stat", path)
        _Real.stat(path)
        free = 0 if self.full else max(0, self.capacity - self.used_bytes) // _PAGE
        blocks = self.capacity // _PAGE
        return os.statvfs_result(
            (_PAGE, _PAGE, blocks, free, free, 1 << 20, 1 << 20, 1 << 20, 0, 255)
        )

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self.enter("mkdir", path)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        _Real.mkdir(path, mode)
        self._fresh_inode(_Real.lstat(path), path)
        self._record("mkdir", path)

    def rmdir(self, path: str) -> None:
        self.enter("unlink", path)
        status = _Real.lstat(path)
        _Real.rmdir(path)
        self._inodes.pop(status.st_ino, None)
        self._record("rmdir", path)

    def unlink(self, path: str) -> None:
        self.enter("unlink", path)
        if path.endswith(".block"):
            self.world.on_delete(Path(path))
        status = _Real.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        inode = self._inode(status)
        grave = ""
        if self.may_lose_power and not _is_sqlite(path):
            grave = self._new_grave()
            _Real.rename(path, grave)
            inode.graves += 1
        else:
            _Real.unlink(path)
        inode.names -= 1
        inode.changed = self._now()
        if grave:
            self._record("unlink", path, grave=grave, inode=inode)
        else:
            self._gone(inode, status)

    def _gone(self, inode: Inode, status: os.stat_result) -> None:
        """A name was removed for good. The kernel may use the number of the inode again."""
        if not inode.names:
            self._inodes.pop(status.st_ino, None)
        self._release(inode)

    remove = unlink

    def rename(self, source: str, target: str) -> None:
        self.enter("rename", target)
        if source.endswith(".block"):
            self.world.on_delete(Path(source))
        status = _Real.lstat(source)
        grave, replaced = "", None
        try:
            found = _Real.lstat(target)
        except FileNotFoundError:
            found = None
        if found is not None and found.st_ino == status.st_ino:
            return
        if found is not None and stat.S_ISREG(found.st_mode):
            replaced = self._inode(found)
            if self.may_lose_power and not _is_sqlite(target):
                grave = self._new_grave()
                _Real.link(target, grave)
                replaced.graves += 1
        try:
            _Real.rename(source, target)
        except OSError:
            if grave and replaced is not None:
                _Real.unlink(grave)
                replaced.graves -= 1
            raise
        self._inode(status).changed = self._now()
        if replaced is not None and found is not None:
            replaced.names -= 1
            if not grave:
                self._gone(replaced, found)
        if stat.S_ISDIR(status.st_mode):  # what is in it has another path now
            self._settle(len(self._changes))
        self._record("rename", source, target, grave=grave, inode=replaced if grave else None)

    replace = rename

    def link(self, source: str, target: str) -> None:
        self.enter("rename", target)
        _Real.link(source, target)
        inode = self._inode(_Real.lstat(target))
        inode.names += 1
        inode.changed = self._now()
        self._record("link", target)

    def utime(
        self, path: str | int, times: Any = None, *, ns: Any = None, follow_symlinks: bool = True
    ) -> None:
        if isinstance(path, int):
            descriptor = self.descriptor(path, "utime")
            self.enter("touch", descriptor.path)
            status = _Real.fstat(descriptor.real)
        else:
            self.enter("touch", path)
            status = _Real.stat(path, follow_symlinks=follow_symlinks)
        inode = self._inode(status)
        inode.changed = self._now()
        if ns is not None:
            inode.accessed, inode.modified = ns[0] / 1e9, ns[1] / 1e9
        else:
            inode.accessed, inode.modified = times or (inode.changed, inode.changed)

    def listdir(self, path: str) -> list[str]:
        self.enter("list", path)
        with _Real.scandir(path) as entries:
            return self._shuffled(entry.name for entry in entries)

    def scandir(self, path: str, *, place: Any = None) -> Listing:
        """place: how the caller named the folder."""
        self.enter("list", path)
        with _Real.scandir(path) as entries:
            found = {entry.name: entry for entry in entries}
        place = path if place is None else place
        return Listing([Entry(self, found[name], path, place) for name in self._shuffled(found)])

    def _shuffled(self, names: Iterable[str]) -> list[str]:
        found = sorted(names)
        self.random.shuffle(found)
        return found

    # -- calls with a descriptor

    def close_descriptor(self, number: int) -> None:
        """Close a file. No event, because the end of an object may close its file anywhere."""
        self._close(self.descriptor(number, "close"))

    def _close(self, descriptor: Descriptor) -> None:
        del self._descriptors[descriptor.number]
        self._owned[descriptor.owner].pop(descriptor.number)
        _Real.close(descriptor.real)
        descriptor.inode.opens -= 1
        self._release(descriptor.inode)

    def fstat(self, number: int) -> os.stat_result:
        descriptor = self.descriptor(number, "fstat")
        self.enter("stat", descriptor.path)
        self.still_open(descriptor, "fstat")
        return self.seen(_Real.fstat(descriptor.real))

    def lseek(self, number: int, place: int, how: int) -> int:
        descriptor = self.descriptor(number, "lseek")
        if how == os.SEEK_CUR:
            place += descriptor.place
        elif how == os.SEEK_END:
            place += _Real.fstat(descriptor.real).st_size
        if place < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        descriptor.place = place
        return place

    def readv(self, number: int, buffers: Sequence[Any], offset: int | None = None) -> int:
        descriptor = self.descriptor(number, "read")
        if self.enter("read", descriptor.path) == SHORT:
            wanted = sum(memoryview(each).nbytes for each in buffers)
            buffers = _first(buffers, self.random.randint(1, max(1, wanted - 1)))
        self.still_open(descriptor, "read")
        if offset is not None:
            return _Real.preadv(descriptor.real, buffers, offset)
        done = _Real.preadv(descriptor.real, buffers, descriptor.place)
        descriptor.place += done
        return done

    def read(self, number: int, size: int) -> bytes:
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.readv(number, [buffer])])

    def pread(self, number: int, size: int, offset: int) -> bytes:
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.readv(number, [buffer], offset)])

    def writev(self, number: int, buffers: Sequence[Any], offset: int | None = None) -> int:
        descriptor = self.descriptor(number, "write")
        is_short = self.enter("write", descriptor.path) == SHORT
        self.still_open(descriptor, "write")
        size = sum(memoryview(each).nbytes for each in buffers)
        if is_short and size > 1:
            size = self.random.randrange(1, size)
            return self._write(descriptor, _first(buffers, size), size, offset)
        if size > _PAGE and self.world.current is not None and self.random.random() < 0.2:
            # a kill, or another reader, comes in the middle
            first = self.random.randrange(1, size)
            done = self._write(descriptor, _first(buffers, first), first, offset)
            self.world.yield_now()
            if done < first:
                return done
            rest = memoryview(b"".join(map(bytes, buffers)))[first:]
            place = None if offset is None else offset + first
            try:
                return done + self._write(descriptor, [rest], size - first, place)
            except OSError:
                return done
        return self._write(descriptor, buffers, size, offset)

    def _write(
        self, descriptor: Descriptor, buffers: Sequence[Any], size: int, offset: int | None
    ) -> int:
        inode, real = descriptor.inode, descriptor.real
        place = descriptor.place if offset is None else offset
        if descriptor.appends:
            place = inode.size
        growth = place + size - inode.size
        room = 0 if self.full else self.capacity - self.used_bytes
        if growth > room:
            size -= growth - room
            if size <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            buffers = _first(buffers, size)
        self._save(inode, real, place, size)
        done = os.pwritev(real, buffers, place)
        if offset is None:
            descriptor.place = place + done
        self._grow(inode, place + done)
        inode.modified = inode.changed = self._now()
        return done

    def write(self, number: int, data: Any) -> int:
        return self.writev(number, [data])

    def pwrite(self, number: int, data: Any, offset: int) -> int:
        return self.writev(number, [data], offset)

    def ftruncate(self, number: int, size: int) -> None:
        self.enter("write", self.descriptor(number, "ftruncate").path)
        self._resize(self.descriptor(number, "ftruncate"), size)

    def _resize(self, descriptor: Descriptor, size: int) -> None:
        inode = descriptor.inode
        self._save(inode, descriptor.real, size, max(0, inode.size - size))
        _Real.ftruncate(descriptor.real, size)
        self.used_bytes += size - inode.size
        inode.size = size
        inode.modified = inode.changed = self._now()

    def _grow(self, inode: Inode, end: int) -> None:
        if end > inode.size:
            self.used_bytes += end - inode.size
            inode.size = end

    def fsync(self, number: int) -> None:
        descriptor = self.descriptor(number, "fsync")
        inode = descriptor.inode
        trouble = self.enter("sync", descriptor.path)
        is_folder = descriptor.is_folder
        folder = descriptor.path
        changes, undone, size = (
            self._touching(folder) if is_folder else [],
            len(inode.undo),
            inode.size,
        )
        inode.guarded = max(inode.guarded, size)
        if self.world.current is not None:
            seconds = 10 ** self.random.uniform(-4.0, -1.5)
            if self.random.random() < 0.003:
                seconds = self.random.uniform(0.5, 5.0)
            self.world.block(self.slowness * seconds)
        if trouble > 0:
            # as on Linux: the kernel forgets that the bytes were not written
            inode.is_fooled = inode.is_fooled or (not is_folder and inode in self._dirty)
            raise OSError(trouble, os.strerror(trouble))
        if trouble == LIES or (self.lies and self.random.random() < self.lies):
            self.world.note("lies", self._short(folder))
            return
        if is_folder:
            self._make_durable(changes)
        elif not inode.is_fooled:
            del inode.undo[:undone]
            inode.synced_size = size
            if not inode.undo and inode.size == size:
                self._dirty.pop(inode, None)

    def flock(self, number: int, how: int) -> None:
        """Locks are the kernel's, but nobody waits in real time."""
        while True:
            real = self.descriptor(number, "flock").real
            try:
                return _Real.flock(real, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if how & fcntl.LOCK_NB:
                    raise
            self.world.block(0.01 * (1 + self.random.random()))

    # -- what a power cut may undo

    def _soil(self, inode: Inode) -> None:
        if inode not in self._dirty:
            inode.dirty_since = self.world.now
            self._dirty[inode] = None

    def _save(self, inode: Inode, real: int, place: int, size: int) -> None:
        """Keep the synced bytes that are about to be overwritten."""
        if not self.may_lose_power:
            return
        if inode in self._dirty and self.world.now - inode.dirty_since > SETTLED_SECONDS:
            inode.undo.clear()
            inode.synced_size = inode.guarded = inode.size
            del self._dirty[inode]
        self._soil(inode)
        size = min(size, inode.guarded - place)
        if size > 0:
            with _Real.file(f"/proc/self/fd/{real}", "rb", buffering=0) as file:
                inode.undo.append((place, os.pread(file.fileno(), size, place)))

    def _new_grave(self) -> str:
        return f"{self._graves}/{next(self._grave_numbers)}"

    def _record(self, kind: str, *paths: str, grave: str = "", inode: Inode | None = None) -> None:
        if not self.may_lose_power or any(map(_is_sqlite, paths)):
            return
        now = self.world.now
        old = 0
        while old < len(self._changes) and self._changes[old].at < now - SETTLED_SECONDS:
            old += 1
        self._settle(old)
        self._changes.append(_Change(kind, now, paths, grave, inode))

    def _settle(self, count: int) -> None:
        """The oldest changes are durable now."""
        oldest = self._changes[:count]
        del self._changes[:count]
        self._forget_graves(oldest)

    def _touching(self, folder: str) -> list[_Change]:
        """The changes in a folder, and those that they follow."""
        if self.keeps_order:
            last = max(
                (at for at, change in enumerate(self._changes) if change.touches(folder)),
                default=-1,
            )
            return self._changes[: last + 1]
        found = []
        needed: set[str] = set()
        for change in reversed(self._changes):
            if change.touches(folder) or not needed.isdisjoint(change.paths):
                needed.update(change.paths)
                found.append(change)
        return found

    def _make_durable(self, changes: Iterable[_Change]) -> None:
        gone = dict.fromkeys(changes)
        self._changes = [change for change in self._changes if change not in gone]
        self._forget_graves(gone)

    def _forget_graves(self, changes: Iterable[_Change]) -> None:
        for change in changes:
            if change.grave:
                self._bury_for_good(change.grave, change.inode)
                change.grave = ""

    def _bury_for_good(self, grave: str, inode: Inode | None) -> None:
        _Real.unlink(grave)
        if inode is not None:
            inode.graves -= 1
            self._release(inode)

    def power_cut(self) -> None:
        """Leave what a disk may hold after a power cut. All processes must be dead."""
        assert all(each.owner is self.world.outside for each in self._descriptors.values())
        assert self.may_lose_power
        assert not self._living_connections(), "kill all processes first"
        lost = self._lost_changes()
        for change in reversed(lost):
            self._undo(change)
        kept = [change for change in self._changes if change not in set(lost)]
        self._changes = []
        self._forget_graves(kept)
        torn = 0
        for path in self.files():
            inode = self._inodes.get(_Real.lstat(path).st_ino)
            if inode is not None and inode in self._dirty and not _is_sqlite(path):
                torn += self._tear(path, inode)
                del self._dirty[inode]
        self._dirty.clear()
        for path in self.files(".sqlite"):
            self._tear_database(path)
        for inode in self._inodes.values():
            inode.undo.clear()
            inode.synced_size = inode.guarded = inode.size
            inode.is_fooled = False
        self._count_used()
        self.world.tell(f"power cut: {len(lost)} names undone, {torn} files torn")

    def _count_used(self) -> None:
        paths = (path for path in self.files() if not _is_sqlite(path))
        self.used_bytes = sum(_Real.lstat(path).st_size for path in paths)

    def _lost_changes(self) -> list[_Change]:
        """Choose the changes of names that are undone, in order."""
        self._settle(sum(change.at < self.world.now - SETTLED_SECONDS for change in self._changes))
        changes = self._changes
        style = self.random.choice(("none", "all", "end", "some", "some"))
        if style == "none":
            return []
        if style == "end" or self.keeps_order:
            return changes[self.random.randint(0, len(changes)) :]
        share = 1.0 if style == "all" else self.random.random()
        lost = []
        blocked: set[str] = set()
        for change in changes:
            if (
                self.random.random() < share
                or any(path in blocked or os.path.dirname(path) in blocked for path in change.paths)
                or (
                    change.kind == "rmdir"
                    and any(p.startswith(change.paths[0] + "/") for p in blocked)
                )
            ):
                blocked.update(change.paths)
                lost.append(change)
        return lost

    def _undo(self, change: _Change) -> None:
        path = change.paths[-1]
        match change.kind:
            case "create" | "link":
                inode = self._inode(_Real.lstat(path))
                _Real.unlink(path)
                inode.names -= 1
                self._release(inode)
            case "mkdir":
                _remove(path)
            case "rmdir":
                _Real.mkdir(path, 0o700)
            case "unlink":
                _Real.rename(change.grave, path)
            case "rename":
                _Real.rename(path, change.paths[0])
                if change.grave:
                    _Real.rename(change.grave, path)
        if change.inode is not None:
            change.inode.graves -= 1
            change.inode.names += 1

    def _tear(self, path: str, inode: Inode) -> bool:
        """Choose what a file that was not synced contains."""
        new = _content(path)
        old = bytearray(new)
        for place, saved in reversed(inode.undo):
            if len(old) < place + len(saved):
                old.extend(bytes(place + len(saved) - len(old)))
            old[place : place + len(saved)] = saved
        del old[inode.synced_size :]
        old.extend(bytes(inode.synced_size - len(old)))
        style = self.random.choice(("new", "old", "start", "pages", "pages"))
        if not inode.is_fooled and self.world.now - inode.dirty_since > SETTLED_SECONDS:
            style = "new"
        found = bytearray(new)
        if style == "old":
            found = old
        elif style == "start" and len(new) > len(old):
            del found[self.random.randint(len(old), len(new)) :]
        elif style in ("start", "pages"):
            for place in range(0, len(found), _PAGE):
                if self.random.random() < 0.5:
                    end = min(place + _PAGE, len(found))
                    page = old[place:end]
                    found[place:end] = page + bytes(end - place - len(page))
        if found == new:
            return False
        with _Real.file(path, "r+b", buffering=0) as file:
            file.write(found)
            file.truncate(len(found))
        inode.size = len(found)
        return True

    def _tear_database(self, path: str) -> None:
        chance = self.random.random()
        log = f"{path}-wal"
        if os.path.dirname(path).endswith("/index"):  # may be lost: it is built anew from the files
            if chance < 0.1:
                _Real.unlink(path)
                return
            if chance < 0.2:
                self.truncate(path)
            elif chance < 0.3:
                self.flip(path)
        if _exists(f"{path}-shm"):
            _Real.unlink(f"{path}-shm")
        start, end = self.log_ends.pop(path, (0, 0))
        if chance > 0.5 and _exists(log) and 0 < start <= end <= _Real.lstat(log).st_size:
            os.truncate(log, self.random.randint(start, end))


_disk: SimulatedDisk | None = None


class _Names:
    """Random names of temporary files, the same for the same seed."""

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def __iter__(self) -> _Names:
        return self

    def __next__(self) -> str:
        return f"{self._source.getrandbits(40):010x}"


class Entry:
    """In place of `os.DirEntry`."""

    __slots__ = ("_disk", "_full", "_real", "name", "path")

    def __init__(
        self, disk: SimulatedDisk, real: os.DirEntry[str], folder: str, place: Any
    ) -> None:
        self._disk, self._real, self.name = disk, real, real.name
        self._full = os.path.join(folder, real.name)
        self.path = real.name if isinstance(place, int) else os.path.join(place, real.name)

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._real.is_dir(follow_symlinks=follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._real.is_file(follow_symlinks=follow_symlinks)

    def is_symlink(self) -> bool:
        return self._real.is_symlink()

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._disk.stat(self._full, follow_symlinks=follow_symlinks)


class Listing:
    """In place of the iterator of `os.scandir`."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


class RawFile(io.RawIOBase):
    """In place of `io.FileIO`."""

    def __init__(self, file: int, mode: str, *, name: Any, owns: bool) -> None:
        self._file, self._owns = file, owns
        self.name, self.mode = name, mode
        self._reads = "r" in mode or "+" in mode
        self._writes = "r" not in mode or "+" in mode

    def fileno(self) -> int:
        self._check()
        return self._file

    def _check(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return self._writes

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._check()
        return os.readv(self._file, [buffer])

    def readall(self) -> bytes:
        self._check()
        parts = []
        size = os.fstat(self._file).st_size - os.lseek(self._file, 0, os.SEEK_CUR) + 1
        while part := os.read(self._file, max(size, _PAGE)):
            parts.append(part)
        return b"".join(parts)

    def write(self, data: Any) -> int:
        self._check()
        return os.write(self._file, data)

    def seek(self, place: int, how: int = os.SEEK_SET) -> int:
        self._check()
        return os.lseek(self._file, place, how)

    def tell(self) -> int:
        return self.seek(0, os.SEEK_CUR)

    def truncate(self, size: int | None = None) -> int:
        self._check()
        size = self.tell() if size is None else size
        os.ftruncate(self._file, size)
        return size

    def close(self) -> None:
        if self.closed:
            return
        try:
            super().close()
        finally:
            if self._owns:
                os.close(self._file)


class Connection(sqlite3.Connection):
    """A connection that waits for others in virtual time, and that its process does not outlive."""

    def __init__(self, database: Any, timeout: float = 5.0, *args: Any, **more: Any) -> None:
        assert _disk is not None
        self.disk, self.path, self.owner = _disk, os.fspath(database), _disk.world.here
        self._patience, self._is_closed = timeout, False
        self._task = _disk.world.current if more.get("check_same_thread", True) else None
        more["check_same_thread"] = False
        _disk.enter("sqlite", self.path)
        super().__init__(database, 0.0, *args, **more)
        self._cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()
        try:
            self._number = _Real.lstat(self.path).st_ino
        except OSError:
            self._number = 0
        _disk.own(self.owner)
        key = id(self)
        connections = _disk._connections
        connections[key] = weakref.ref(self, lambda _: connections.pop(key, None))

    def execute(self, statement: str, *more: Any) -> sqlite3.Cursor:
        return self._kept(self._patiently(statement, partial(super().execute, statement, *more)))

    def executemany(self, statement: str, rows: Iterable[Any]) -> sqlite3.Cursor:
        rows = list(rows)  # for a second attempt
        return self._kept(self._patiently(statement, partial(super().executemany, statement, rows)))

    def executescript(self, script: str) -> sqlite3.Cursor:
        return self._kept(self._patiently(script, partial(super().executescript, script)))

    def commit(self) -> None:
        self._patiently("COMMIT", super().commit)

    def rollback(self) -> None:
        self._patiently("ROLLBACK", super().rollback)

    def close(self) -> None:
        if self._is_closed:
            return
        self._enter("CLOSE")
        self._forget()
        super().close()

    @property
    def in_transaction(self) -> bool:
        if self.owner.is_dead:
            raise Killed
        return super().in_transaction

    def crash(self) -> None:
        """Close the file as the kernel does, for a killed process: nothing is committed, and the
        log is not merged.
        """
        others = [
            each
            for each in self.disk._living_connections()
            if each is not self and each._number == self._number
        ]
        self._forget()
        names = [self.path + suffix for suffix in ("", "-wal", "-journal")]
        is_there = _exists(self.path) and _Real.lstat(self.path).st_ino == self._number
        kept: dict[str, bytes] = {}
        if is_there and not others:
            kept = {name: _content(name) for name in names if _exists(name)}
            self._note_log(kept.get(names[1], b""))
        for cursor in list(self._cursors):
            cursor.close()
        super().close()
        for name, content in kept.items():
            if not _exists(name) or _content(name) != content:
                with _Real.file(name, "r+b" if _exists(name) else "wb") as file:
                    file.write(content)
                    file.truncate()

    def _note_log(self, log: bytes) -> None:
        """Remember which end of the log is not in the database yet."""
        self.disk.log_ends.pop(self.path, None)
        try:
            shared = _content(self.path + "-shm")[:136]
        except OSError:
            return
        if len(shared) < 136 or len(log) < 32 or log[16:24] != shared[32:40]:
            return
        page = struct.unpack_from("=H", shared, 14)[0]
        page = 65536 if page == 1 else page
        frames = struct.unpack_from("=I", shared, 16)[0]
        merged = struct.unpack_from("=I", shared, 96)[0]
        self.disk.log_ends[self.path] = (32 + merged * (24 + page), 32 + frames * (24 + page))

    def _forget(self) -> None:
        self._is_closed = True
        self.disk._connections.pop(id(self), None)

    def _kept(self, cursor: sqlite3.Cursor) -> sqlite3.Cursor:
        self._cursors.add(cursor)
        return cursor

    def _enter(self, statement: str) -> None:
        world = self.disk.world
        if statement.startswith(("ROLLBACK", "CLOSE")):  # they do not fail
            world.yield_now()
        else:
            try:
                self.disk.enter("sqlite", self.path)
            except (sqlite3.Error, MemoryError):
                # after most failures, SQLite has rolled back by itself
                if not self._is_closed and self.in_transaction and self.disk.random.random() < 0.5:
                    super().execute("ROLLBACK")
                raise
        if self._task is not None and world.current not in (None, self._task):
            raise sqlite3.ProgrammingError("the connection belongs to another thread")
        if self.owner.is_dead:
            raise Killed

    def _patiently(self, statement: str, call: Callable[[], Any]) -> Any:
        self._enter(statement)
        world = self.disk.world
        ends_at = world.now + self._patience
        delays = itertools.chain(_BUSY_DELAYS, itertools.repeat(0.1))
        while True:
            changes, was_open = self.total_changes, self.in_transaction
            try:
                return call()
            except sqlite3.OperationalError as error:
                code = error.sqlite_errorcode
                if (
                    code & 0xFF != sqlite3.SQLITE_BUSY
                    or code == sqlite3.SQLITE_BUSY_SNAPSHOT
                    or (was_open and not statement.startswith("COMMIT"))
                    or self.in_transaction != was_open
                    or self.total_changes != changes
                    or statement.startswith("PRAGMA journal_mode")  # SQLite does not wait there
                    or world.current is None
                    or world.now >= ends_at
                ):
                    raise
            world.block(min(next(delays), max(0.0, ends_at - world.now) + 1e-6))


def _sqlite_error(error: int) -> Exception:
    if error == errno.ENOMEM:
        return MemoryError()
    failure = sqlite3.OperationalError(os.strerror(error))
    failure.sqlite_errorcode = _CODES.get(error, sqlite3.SQLITE_IOERR)
    return failure


def _exists(path: str) -> bool:
    try:
        _Real.lstat(path)
    except OSError:
        return False
    return True


def _remove(path: str) -> None:
    """Remove a file or a whole folder, by the kernel's calls."""
    if not stat.S_ISDIR(_Real.lstat(path).st_mode):
        _Real.unlink(path)
        return
    with _Real.scandir(path) as entries:
        names = [entry.path for entry in entries]
    for name in names:
        _remove(name)
    _Real.rmdir(path)


def _is_sqlite(path: str) -> bool:
    return path.endswith(_SQLITE_SUFFIXES)


def _content(path: str) -> bytes:
    with _Real.file(path, "rb", buffering=0) as file:
        return file.readall()


def _walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Like `os.walk`, by the kernel's calls."""
    with _Real.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    folders = [name for name, is_folder in found if is_folder]
    yield folder, folders, [name for name, is_folder in found if not is_folder]
    for name in folders:
        yield from _walk(os.path.join(folder, name))


def _first(buffers: Sequence[Any], size: int) -> list[memoryview]:
    """The first bytes of buffers."""
    found = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")[:size]
        found.append(view)
        size -= view.nbytes
        if not size:
            break
    return found


# -- installation


def _own_path(path: Any, place: int | None = None) -> str | None:
    """The path as a string if it is in the folder of the world that runs."""
    disk = _disk
    if disk is None or world_or_none() is not disk.world:
        return None
    if isinstance(path, int):
        return None
    given: str | bytes = path if type(path) is str else os.fspath(path)
    name = os.fsdecode(given) if isinstance(given, bytes) else given
    if place is not None and place >= FIRST_DESCRIPTOR:
        return os.path.join(disk.path_of(place), name)
    if name.startswith(disk._prefix) or name == disk.folder:
        return name.rstrip("/") if name.endswith("/") else name
    return None


def _of_disk(number: int) -> SimulatedDisk:
    """The disk of one of our descriptors. Raises OSError if its world is over."""
    if _disk is None or world_or_none() is not _disk.world:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), f"descriptor {number}")
    return _disk


def _by_path(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    takes_descriptors = hasattr(SimulatedDisk, f"f{name}") or name == "utime"
    by_descriptor = "utime" if name == "utime" else f"f{name}"

    def call(path: Any, *args: Any, dir_fd: int | None = None, **more: Any) -> Any:
        found = _own_path(path, dir_fd)
        if found is not None:
            return getattr(_disk, name)(found, *args, **more)
        if takes_descriptors and isinstance(path, int) and path >= FIRST_DESCRIPTOR:
            return getattr(_of_disk(path), by_descriptor)(path, *args)
        if dir_fd is not None:
            more["dir_fd"] = dir_fd
        return real(path, *args, **more)

    return call


def _by_two_paths(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(source: Any, target: Any, **more: Any) -> Any:
        first = _own_path(source, more.get("src_dir_fd"))
        second = _own_path(target, more.get("dst_dir_fd"))
        if first is None and second is None:
            return real(source, target, **more)
        if first is None or second is None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))
        return getattr(_disk, name)(first, second)

    return call


def _by_descriptor(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(file: int, *args: Any) -> Any:
        if file < FIRST_DESCRIPTOR:
            return real(file, *args)
        return getattr(_of_disk(file), name)(file, *args)

    return call


def _passed_on(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """For calls that need no more than the kernel's descriptor."""

    def call(file: Any, *args: Any, **more: Any) -> Any:
        if isinstance(file, int) and file >= FIRST_DESCRIPTOR:
            file = _of_disk(file).descriptor(file, name).real
        return real(file, *args, **more)

    return call


def _close(file: int) -> None:
    if file < FIRST_DESCRIPTOR:
        return _Real.close(file)
    return _of_disk(file).close_descriptor(file)


def _listing(real: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(path: Any = ".") -> Any:
        found = _own_path(path)
        if found is None and isinstance(path, int) and path >= FIRST_DESCRIPTOR:
            found = _of_disk(path).path_of(path)
        if found is None:
            return real(path)
        assert _disk is not None
        if name == "listdir":
            return _disk.listdir(found)
        return _disk.scandir(found, place=path if isinstance(path, int) else os.fspath(path))

    return call


_FLAGS = {
    "r": os.O_RDONLY,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}


def _open_file(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Callable[[Any, int], int] | None = None,
) -> Any:
    """In place of `open`."""
    is_ours = file >= FIRST_DESCRIPTOR if isinstance(file, int) else _own_path(file) is not None
    if not is_ours:
        return _Real.file(file, mode, buffering, encoding, errors, newline, closefd, opener)
    kind = mode.translate({ord("b"): None, ord("t"): None})
    number = file
    if not isinstance(file, int):
        flags = _FLAGS[kind[0]] | os.O_CLOEXEC
        if "+" in kind:
            flags = flags & ~os.O_WRONLY | os.O_RDWR
        number = os.open(file, flags, 0o666) if opener is None else opener(file, flags)
        if stat.S_ISDIR(_Real.fstat(_of_disk(number).descriptor(number, "open").real).st_mode):
            os.close(number)
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    raw = RawFile(number, kind, name=file, owns=closefd)
    if kind[0] == "a":
        raw.seek(0, os.SEEK_END)
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    buffered: Any
    if "+" in kind:
        buffered = io.BufferedRandom(raw, size)
    elif kind[0] == "r":
        buffered = io.BufferedReader(raw, size)
    else:
        buffered = io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffered
    text = io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)
    text.mode = mode  # type: ignore[misc]
    return text


def _connect(database: Any, *args: Any, **more: Any) -> sqlite3.Connection:
    """In place of `sqlite3.connect`."""
    if isinstance(database, int) or _own_path(database) is None:
        plain: sqlite3.Connection = _Real.connect(database, *args, **more)
        return plain
    found: Connection = _Real.connect(database, *args, **{"factory": Connection, **more})
    return found


class _Map(mmap.mmap):
    def __new__(cls, fileno: int, *args: Any, **more: Any) -> _Map:
        if fileno >= FIRST_DESCRIPTOR:
            fileno = _of_disk(fileno).descriptor(fileno, "mmap").real
        return super().__new__(cls, fileno, *args, **more)


def install() -> None:
    """Replace Python's calls, once for the whole interpreter."""
    if os.close is _close:
        return
    replaced: dict[str, Callable[..., Any]] = {"close": _close}
    for name in ("open", "stat", "lstat", "statvfs", "mkdir", "rmdir", "unlink", "remove", "utime"):
        replaced[name] = _by_path(name, getattr(os, name))
    for name in ("rename", "replace", "link"):
        replaced[name] = _by_two_paths(name, getattr(os, name))
    for name in ("listdir", "scandir"):
        replaced[name] = _listing(getattr(os, name), name)
    for name in (
        "read", "pread", "readv", "write", "pwrite", "writev", "fsync", "fstat", "ftruncate", "lseek",
    ):  # fmt: skip
        replaced[name] = _by_descriptor(name, getattr(os, name))
    replaced["fdatasync"] = _by_descriptor("fsync", os.fdatasync)
    for name in (
        "fchmod", "isatty", "get_inheritable", "set_inheritable", "get_blocking", "set_blocking",
        "fstatvfs", "posix_fadvise",
    ):  # fmt: skip
        if hasattr(os, name):
            replaced[name] = _passed_on(name, getattr(os, name))
    for name, call in replaced.items():
        real = getattr(os, name)
        for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if real in known:
                known.add(call)
        setattr(os, name, call)
    shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
    io.open = builtins.open = _open_file
    fcntl.flock = _by_descriptor("flock", fcntl.flock)
    fcntl.fcntl = _passed_on("fcntl", fcntl.fcntl)
    sqlite3.connect = _connect  # type: ignore[assignment]
    mmap.mmap = _Map  # type: ignore[misc]
