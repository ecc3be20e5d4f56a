"""The disk of the simulated world: real files in a folder, under the calls of Python that reach them.

Each call beneath the folder is an event: other tasks may run before it, it takes virtual time, it can
fail as planned, and it belongs to the process that makes it. `disk_calls.py` redirects Python's calls
to this file, `disk_durability.py` tracks which data is synced, and `disk_sqlite.py` has the databases.

Not modelled: symbolic links; changes of permissions undone by a power cut; a drive's cache that only
F_FULLFSYNC flushes; bytes that SQLite wrote but did not sync, except the end of its write-ahead
log (so answers.py with `synchronous = OFF` loses less than it might); bytes of an earlier file in
a new one; writes by `mmap` and changes of the folder while no world runs, which count as synced;
statements of cursors from `Connection.cursor`, which do not count as events; a limit on open files,
except by a plan for EMFILE. `full` does not apply to SQLite's files: plan errors of "sqlite". Their
timestamps never change.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import math
import os
import random
import stat
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tests.fakes.sqlite_errors import sqlite_error
from tests.simulation.disk_durability import Durability, Inode
from tests.simulation.disk_kernel import PAGE, Real, content_of, exists, files, first_bytes, remove
from tests.simulation.disk_sqlite import Connection
from tests.simulation.world import Killed, Process, World, world_or_none

OPERATIONS = (
    "open", "read", "write", "sync", "rename", "unlink", "stat", "list", "mkdir", "touch", "sqlite",
)  # fmt: skip
SHORT = -1  # planned for "read" and "write" instead of an error: only part of the bytes
FIRST_DESCRIPTOR = 2_000_000  # above the kernel's descriptors; none is reused
_CHANGING = {"open", "write", "sync", "rename", "unlink", "mkdir", "touch", "sqlite"}
_VOLUME_PAGES = 1 << 28


@dataclass(slots=True)
class Plan:
    """Planned failures: of the calls of an operation ("any": of all) whose path contains `only`, `left`
    calls fail, from number `first` on.
    """

    operation: str
    error: int
    first: int
    left: int
    only: str
    seen: int = 0


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


class SimulatedDisk:
    """The files beneath one folder, in one world.

    full_until: writes fail with ENOSPC until then. counts: calls of tasks, by operation. misuses: uses of closed
    descriptors.
    """

    def __init__(self, world: World, folder: str | Path) -> None:
        global _disk
        self.world = world
        self.folder = os.path.realpath(folder)
        self.prefix = self.folder + "/"
        self.random = random.Random(f"disk {world.seed}")
        self.full_until = -math.inf
        self.counts: Counter[str] = Counter()
        self.misuses: list[str] = []
        self.durability = Durability(world, self.folder, self.random)
        self.connections: dict[int, weakref.ref[Connection]] = {}
        self._is_bypassed = False
        self.may_lie = False  # a call may have failed with ENOENT although the file exists
        self._plans: list[Plan] = []
        self._done: Counter[str] = Counter()  # writes and syncs that have succeeded
        self._then: list[tuple[str, int, Callable[[], None]]] = []  # callbacks, and after how many
        self._numbers = itertools.count(FIRST_DESCRIPTOR)
        self._descriptors: dict[int, Descriptor] = {}
        self._owned: dict[Process, dict[int, Descriptor]] = {}
        tempfile._name_sequence = _Names(self.random)  # type: ignore[attr-defined]
        _disk = self

    def close(self) -> None:
        """Close all open files, and delete the copies for power cuts."""
        global _disk
        for process in list(self._owned):
            self._end(process)
        self.durability.close()
        if _disk is self:
            _disk = None
            tempfile._name_sequence = None  # type: ignore[attr-defined]

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Calls go to the real files, without events and planned failures. For checks that look at the
        disk from outside, between two events.
        """
        self._is_bypassed = True
        try:
            yield
        finally:
            self._is_bypassed = False

    @property
    def is_used(self) -> bool:
        """Whether this disk handles calls beneath the folder now."""
        return world_or_none() is self.world and not self._is_bypassed

    # -- faults

    def plan(
        self, operation: str, error: int, *, nth: int = 1, count: int = 10**9, only: str = ""
    ) -> Plan:
        """Let `count` calls of tasks fail, from the n-th next one on."""
        assert operation in (*OPERATIONS, "any"), operation
        assert error > 0 or (error == SHORT and operation in ("read", "write"))
        plan = Plan(operation, error, nth, count, only)
        self._plans.append(plan)
        self.may_lie = self.may_lie or error == errno.ENOENT
        return plan

    def after(
        self, operation: Literal["write", "sync"], count: int, then: Callable[[], None]
    ) -> None:
        """Call `then` after `count` more successful writes or syncs."""
        self._then.append((operation, self._done[operation] + count, then))

    def _did(self, operation: str) -> None:
        self._done[operation] += 1
        due = [each for each in self._then if each[1] <= self._done[each[0]]]
        self._then = [each for each in self._then if each not in due]
        for _, _, then in due:
            then()

    def heal(self) -> None:
        """Drop all planned failures and callbacks; the disk is no longer full."""
        self._plans.clear()
        self._then.clear()
        self.full_until = min(self.full_until, self.world.now)

    def damage(self, path: str) -> None:
        """Corrupt a file in one of the ways that disks and people do."""
        old, dice = content_of(path), self.random
        new = bytearray(old)
        kind = dice.choice(("flip", "flip", "cut", "extend", "blank", "replace"))
        place = dice.randrange(len(old) or 1)
        match kind:
            case "flip" if old:
                new[place] ^= 1 << dice.randrange(8)
            case "cut":
                del new[place:]
            case "extend":
                new += dice.randbytes(dice.randint(1, 5000))
            case "blank":
                new[place : place + PAGE] = bytes(len(new[place : place + PAGE]))
            case "replace":
                new[:] = content_of(dice.choice(self.files(Path(path).suffix)))
        self.durability.overwrite(path, bytes(new))
        self.world.note("damaged", kind, place, self._short(path))

    def vanish(self, path: str) -> None:
        """Remove a file or a whole folder, as if somebody had deleted it."""
        self.durability.settle_all()
        remove(path)
        self.world.note("vanished", self._short(path))

    def files(self, suffix: str) -> list[str]:
        """The sorted paths of the files with this suffix."""
        return [path for path in files(self.folder) if path.endswith(suffix)]

    def files_in(self, folder: str) -> list[str]:
        """The sorted paths of the files beneath all folders of this name."""
        return [path for path in files(self.folder) if f"/{folder}/" in path]

    def power_cut(self, *, loses_all: bool) -> None:
        """Put the files into a state that a power cut may leave. All processes must be dead. loses_all:
        all unsynced data is lost.
        """
        assert all(each.owner is self.world.outside for each in self._descriptors.values())
        assert not self.living_connections(), "kill all processes first"
        self.durability.power_cut(loses_all=loses_all)

    # -- open files

    def open_files(self, process: Process) -> list[str]:
        """The paths of the files and databases that a process has open."""
        found = [each.path for each in self._owned.get(process, {}).values()]
        return found + [each.path for each in self.living_connections() if each.owner is process]

    def living_connections(self) -> list[Connection]:
        """The databases that are open."""
        found = [reference() for reference in self.connections.values()]
        return [each for each in found if each is not None]

    def own(self, process: Process) -> dict[int, Descriptor]:
        """The open files of a process, which are closed when it ends."""
        owned = self._owned.get(process)
        if owned is None:
            owned = self._owned[process] = {}
            process.ends.append(partial(self._end, process))
        return owned

    def _end(self, process: Process) -> None:
        for each in self.living_connections():
            if each.owner is process:
                each.crash()
        for descriptor in list(self._owned.get(process, {}).values()):
            self._close(descriptor)

    # -- events

    def enter(self, operation: str, path: str) -> int:
        """The event before an operation. Raises Killed and OSError. Returns 0 or SHORT; for a
        sync, the number of the error that it will fail with.
        """
        world = self.world
        task = world.current
        if task is None:
            return 0
        if task.process.is_dead:
            raise Killed
        chance = self.random.random()
        if operation == "sync":
            pass  # `fsync` waits between its beginning and its end
        elif chance < 0.04:
            world.block(0.002 * self.random.random())
        elif operation in _CHANGING or chance > 0.75:
            world.yield_now()
        self.counts[operation] += 1
        return self._fault(operation, path)

    def _fault(self, operation: str, path: str) -> int:
        for plan in self._plans:
            is_hit = plan.operation in (operation, "any") and plan.only in path
            if not is_hit or not plan.left:
                continue
            plan.seen += 1
            if plan.seen >= plan.first:
                plan.left -= 1
                return self._fail(operation, plan.error, path)
        return 0

    def _fail(self, operation: str, error: int, path: str) -> int:
        self.world.note("fails", operation, error, self._short(path))
        if error == SHORT or operation == "sync":
            return error
        if operation == "sqlite":
            raise sqlite_error(error)
        raise OSError(error, os.strerror(error), path)

    def _short(self, path: object) -> str:
        return os.path.relpath(str(path), self.folder)

    # -- descriptors

    def seen(self, real: os.stat_result) -> os.stat_result:
        """A file's status with the simulated inode number and times."""
        inode = self.durability.inode(real)
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

    @property
    def full(self) -> bool:
        """Whether writes fail with ENOSPC."""
        return self.world.now < self.full_until

    # -- calls with a path

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        self.enter("open", path)
        is_nameless = flags & os.O_TMPFILE == os.O_TMPFILE
        is_new = is_nameless or (flags & os.O_CREAT != 0 and not exists(path))
        if is_new and self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        real = Real.open(path, flags & ~os.O_TRUNC, mode)
        status = Real.fstat(real)
        known = self.durability
        inode = known.fresh_inode(status, path) if is_new else known.inode(status)
        if is_new and not is_nameless:
            known.record("create", path)
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
        return self.seen(Real.stat(path, follow_symlinks=follow_symlinks))

    def lstat(self, path: str) -> os.stat_result:
        return self.stat(path, follow_symlinks=False)

    def statvfs(self, path: str) -> os.statvfs_result:
        self.enter("stat", path)
        Real.stat(path)
        free = 0 if self.full else _VOLUME_PAGES
        return os.statvfs_result(
            (PAGE, PAGE, _VOLUME_PAGES, free, free, 1 << 20, 1 << 20, 1 << 20, 0, 255)
        )

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self.enter("mkdir", path)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        Real.mkdir(path, mode)
        self.durability.fresh_inode(Real.lstat(path), path)
        self.durability.record("mkdir", path)

    def rmdir(self, path: str) -> None:
        self.enter("unlink", path)
        status = Real.lstat(path)
        Real.rmdir(path)
        self.durability.forget(status)
        self.durability.record("rmdir", path)

    def unlink(self, path: str) -> None:
        self.enter("unlink", path)
        if path.endswith(".block"):
            self.world.on_delete(Path(path))
        status = Real.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        inode = self.durability.inode(status)
        inode.changed = self.durability.mark()
        if grave := self.durability.removed(path):
            self.durability.record("unlink", path, grave=grave, inode=inode)

    remove = unlink

    def rename(self, source: str, target: str) -> None:
        self.enter("rename", target)
        if source.endswith(".block"):
            self.world.on_delete(Path(source))
        known = self.durability
        status = Real.lstat(source)
        grave, replaced = "", None
        if exists(target):
            found = Real.lstat(target)
            if found.st_ino == status.st_ino:
                return
            if stat.S_ISREG(found.st_mode):
                replaced = known.inode(found)
                grave = known.removed(target, replaced=True)
        Real.rename(source, target)
        known.inode(status).changed = known.mark()
        if stat.S_ISDIR(status.st_mode):  # the paths of its contents have changed
            known.settle_all()
        known.record("rename", source, target, grave=grave, inode=replaced if grave else None)

    replace = rename

    def link(self, source: str, target: str) -> None:
        self.enter("rename", target)
        Real.link(source, target)
        inode = self.durability.inode(Real.lstat(target))
        inode.names += 1
        inode.changed = self.durability.mark()
        self.durability.record("link", target)

    def utime(
        self, path: str | int, times: Any = None, *, ns: Any = None, follow_symlinks: bool = True
    ) -> None:
        if isinstance(path, int):
            descriptor = self.descriptor(path, "utime")
            self.enter("touch", descriptor.path)
            status = Real.fstat(descriptor.real)
        else:
            self.enter("touch", path)
            status = Real.stat(path, follow_symlinks=follow_symlinks)
        inode = self.durability.inode(status)
        inode.changed = self.durability.mark()
        if ns is not None:
            inode.accessed, inode.modified = ns[0] / 1e9, ns[1] / 1e9
        else:
            inode.accessed, inode.modified = times or (inode.changed, inode.changed)

    def entries(self, path: str) -> list[os.DirEntry[str]]:
        """The entries of a folder, in random order."""
        self.enter("list", path)
        with Real.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        self.random.shuffle(found)
        return found

    # -- calls with a descriptor

    def duplicate(self, number: int, process: Process) -> int:
        """Another process gets an open file, too. Not an event. Returns its descriptor there."""
        given = self.descriptor(number, "duplicate")
        given.inode.opens += 1
        copy = replace(given, number=next(self._numbers), real=os.dup(given.real), owner=process)
        self._descriptors[copy.number] = copy
        self.own(process)[copy.number] = copy
        return copy.number

    def close_descriptor(self, number: int) -> None:
        """Close a file. Not an event, because garbage collection may close a file anywhere."""
        self._close(self.descriptor(number, "close"))

    def _close(self, descriptor: Descriptor) -> None:
        del self._descriptors[descriptor.number]
        self._owned[descriptor.owner].pop(descriptor.number)
        Real.close(descriptor.real)
        descriptor.inode.opens -= 1
        self.durability.release(descriptor.inode)

    def fstat(self, number: int) -> os.stat_result:
        descriptor = self.descriptor(number, "fstat")
        self.enter("stat", descriptor.path)
        self.still_open(descriptor, "fstat")
        return self.seen(Real.fstat(descriptor.real))

    def lseek(self, number: int, place: int, how: int) -> int:
        descriptor = self.descriptor(number, "lseek")
        if how == os.SEEK_CUR:
            place += descriptor.place
        elif how == os.SEEK_END:
            place += Real.fstat(descriptor.real).st_size
        if place < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        descriptor.place = place
        return place

    def readv(self, number: int, buffers: Sequence[Any], offset: int | None = None) -> int:
        descriptor = self.descriptor(number, "read")
        if self.enter("read", descriptor.path) == SHORT:
            wanted = sum(memoryview(each).nbytes for each in buffers)
            buffers = first_bytes(buffers, self.random.randint(1, max(1, wanted - 1)))
        self.still_open(descriptor, "read")
        if offset is not None:
            return Real.preadv(descriptor.real, buffers, offset)
        done = Real.preadv(descriptor.real, buffers, descriptor.place)
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
            return self._write(descriptor, first_bytes(buffers, size), size, offset)
        if size > PAGE and self.world.current is not None and self.random.random() < 0.2:
            # a kill or another reader may come between two parts
            first = self.random.randrange(1, size)
            done = self._write(descriptor, first_bytes(buffers, first), first, offset)
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
        if self.full and place + size > inode.size:
            size = self.random.randrange(size)  # only a part fits
            if not size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            buffers = first_bytes(buffers, size)
        self.durability.save(inode, real, place, size)
        done = os.pwritev(real, buffers, place)
        if offset is None:
            descriptor.place = place + done
        inode.size = max(inode.size, place + done)
        inode.modified = inode.changed = self.durability.mark()
        self._did("write")
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
        self.durability.save(inode, descriptor.real, size, max(0, inode.size - size))
        Real.ftruncate(descriptor.real, size)
        inode.size = size
        inode.modified = inode.changed = self.durability.mark()

    def fsync(self, number: int) -> None:
        descriptor = self.descriptor(number, "fsync")
        error = self.enter("sync", descriptor.path)
        known, inode = self.durability, descriptor.inode
        # changes during the sync may stay unsynced
        changes = known.touching(descriptor.path) if descriptor.is_folder else []
        began = known.sync_began(inode)
        if self.world.current is not None:
            seconds = 10 ** self.random.uniform(-4.0, -1.5)
            if self.random.random() < 0.003:
                seconds = self.random.uniform(0.5, 5.0)
            self.world.block(seconds)
        if error:
            known.sync_failed(inode)
            raise OSError(error, os.strerror(error))
        if descriptor.is_folder:
            known.make_durable(changes)
        else:
            known.synced(inode, began)
        self._did("sync")

    def flock(self, number: int, how: int) -> None:
        """Lock with the kernel's locks, but wait in virtual time."""
        while True:
            real = self.descriptor(number, "flock").real
            try:
                return Real.flock(real, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if how & fcntl.LOCK_NB:
                    raise
            self.world.block(0.01 * (1 + self.random.random()))


_disk: SimulatedDisk | None = None


def disk_now() -> SimulatedDisk | None:
    """The disk of the running world, if it is in use."""
    return _disk if _disk is not None and _disk.is_used else None


class _Names:
    """Names of temporary files, deterministic by seed."""

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def __iter__(self) -> _Names:
        return self

    def __next__(self) -> str:
        return f"{self._source.getrandbits(40):010x}"
