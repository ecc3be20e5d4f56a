"""Tracks which data of the simulated disk is synced, and chooses what a power cut loses.

A power cut keeps all synced data. Of the changes of names since their folder was synced, any may be
undone, but none without those that depend on it. Of the bytes written since their file was synced,
all, none, the first ones or some pages may survive. Writes older than `SETTLED_SECONDS` count as
synced. The real files always have the newest content; this file keeps an undo log.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.disk_kernel import PAGE, Real, content_of, exists, files, is_sqlite, remove
from tests.simulation.world import EPOCH, World

SETTLED_SECONDS = 30.0  # after which an operating system writes dirty pages by itself
_TICK = 0.004  # the resolution of timestamps


@dataclass(slots=True, eq=False)
class Inode:
    """A file or folder, independent of its names."""

    number: int
    names: int
    size: int
    accessed: float
    modified: float
    changed: float
    opens: int = 0
    graves: int = 0  # hidden links that keep it for a power cut
    # the undo log back to the last sync: the size, and overwritten bytes with their offsets
    synced_size: int = 0
    undo: list[tuple[int, bytes]] = field(default_factory=list)
    guarded: int = 0  # overwritten bytes below this offset are saved in `undo`
    dirty_since: float = 0.0
    is_fooled: bool = False  # a sync failed: the bytes dirty at that time are never synced


@dataclass(slots=True, eq=False)
class _Change:
    """A change of directory entries that a power cut may undo."""

    kind: str  # "create", "mkdir", "unlink", "rmdir", "rename" or "link"
    at: float
    paths: tuple[str, ...]
    grave: str = ""  # the name under which a removed file is kept
    inode: Inode | None = None  # of the removed file

    def touches(self, folder: str) -> bool:
        return any(os.path.dirname(path) == folder for path in self.paths)


class Durability:
    """The inodes of the files beneath a folder, and their unsynced changes."""

    def __init__(self, world: World, folder: str, source: random.Random) -> None:
        self.world, self.folder, self.random = world, folder, source
        # start and end of the part of each write-ahead log that a power cut may lose
        self.log_ends: dict[str, tuple[int, int]] = {}
        self._inodes: dict[int, Inode] = {}  # by the kernel's number
        self._numbers = itertools.count(1000)
        self._free_numbers: list[int] = []
        self._dirty: dict[Inode, None] = {}
        self._changes: list[_Change] = []
        self._graves = f"{folder}.graves"  # removed files that a power cut may bring back
        self._grave_numbers = itertools.count()
        Real.mkdir(self._graves)

    def close(self) -> None:
        """Delete the removed files that a power cut could bring back."""
        shutil.rmtree(self._graves, ignore_errors=True)

    # -- inodes

    def mark(self) -> float:
        """The timestamp of a file that changes now."""
        now = self.world.wall()
        return now - now % _TICK

    def inode(self, real: os.stat_result) -> Inode:
        """The inode of a file."""
        found = self._inodes.get(real.st_ino)
        if found is None or not (found.names > 0 or found.graves or found.opens):
            size = real.st_size
            found = Inode(next(self._numbers), real.st_nlink, size, EPOCH, EPOCH, EPOCH)
            found.synced_size = found.guarded = size
            self._inodes[real.st_ino] = found
        return found

    def fresh_inode(self, real: os.stat_result, path: str) -> Inode:
        """The inode of a file that was just created."""
        is_reused = self._free_numbers and not is_sqlite(path) and self.random.random() < 0.5
        number = self._free_numbers.pop() if is_reused else next(self._numbers)
        now = self.mark()
        found = Inode(number, real.st_nlink, 0, now, now, now)
        self._inodes[real.st_ino] = found
        if not stat.S_ISDIR(real.st_mode):
            self._soil(found)
        return found

    def release(self, inode: Inode) -> None:
        """Free an inode that has no names and is not open."""
        if not (inode.names or inode.graves or inode.opens):
            self._dirty.pop(inode, None)
            self._free_numbers.append(inode.number)

    # -- content

    def is_synced(self, path: Path) -> bool:
        """Whether the bytes of a file survive a power cut."""
        inode = self._inodes.get(Real.lstat(path).st_ino)
        settles_at = self.world.now - SETTLED_SECONDS
        return inode is None or inode not in self._dirty or inode.dirty_since < settles_at

    def _soil(self, inode: Inode) -> None:
        if inode not in self._dirty:
            inode.dirty_since = self.world.now
            self._dirty[inode] = None

    def save(self, inode: Inode, real: int, place: int, size: int) -> None:
        """Keep the synced bytes that are about to be overwritten. real: the kernel's descriptor."""
        if inode in self._dirty and self.world.now - inode.dirty_since > SETTLED_SECONDS:
            inode.undo.clear()
            inode.synced_size = inode.guarded = inode.size
            del self._dirty[inode]
        self._soil(inode)
        size = min(size, inode.guarded - place)
        if size > 0:
            with Real.file(f"/proc/self/fd/{real}", "rb", buffering=0) as file:
                inode.undo.append((place, Real.pread(file.fileno(), size, place)))

    def sync_began(self, inode: Inode) -> tuple[int, int]:
        """A sync of a file begins. Returns the argument of `synced` at its end."""
        inode.guarded = max(inode.guarded, inode.size)
        return len(inode.undo), inode.size

    def synced(self, inode: Inode, began: tuple[int, int]) -> None:
        """A sync has ended: all bytes written before it began are durable."""
        if inode.is_fooled:
            return
        undone, size = began
        del inode.undo[:undone]
        inode.synced_size = size
        if not inode.undo and inode.size == size:
            self._dirty.pop(inode, None)

    def sync_failed(self, inode: Inode) -> None:
        """As on Linux, the kernel marks the pages clean although they were not written."""
        inode.is_fooled = inode.is_fooled or inode in self._dirty

    def overwrite(self, path: str, content: bytes) -> None:
        """Replace a file's content. The new content is durable."""
        with Real.file(path, "wb", buffering=0) as file:
            file.write(content)
        inode = self.inode(Real.lstat(path))
        inode.size = inode.synced_size = inode.guarded = len(content)
        inode.undo.clear()
        self._dirty.pop(inode, None)

    # -- names

    def record(self, kind: str, *paths: str, grave: str = "", inode: Inode | None = None) -> None:
        """Record a change of names. grave, inode: of the removed file."""
        if not any(map(is_sqlite, paths)):
            self._settle(self._count_settled())
            self._changes.append(_Change(kind, self.world.now, paths, grave, inode))

    def removed(self, path: str, *, replaced: bool = False) -> str:
        """A file's name is about to be removed, or replaced by another file. Returns where the file is
        kept for a power cut, or "". Unlinks the name unless it will be replaced.
        """
        status = Real.lstat(path)
        inode = self.inode(status)
        grave = ""
        if not is_sqlite(path):
            grave = f"{self._graves}/{next(self._grave_numbers)}"
            Real.link(path, grave)
            inode.graves += 1
        if not replaced:
            Real.unlink(path)
        inode.names -= 1
        if not grave and not inode.names:
            self._inodes.pop(status.st_ino, None)
            self.release(inode)
        return grave

    def forget(self, status: os.stat_result) -> None:
        """Forget a removed folder."""
        self._inodes.pop(status.st_ino, None)

    def settle_all(self) -> None:
        """Make all changes of names durable."""
        self._settle(len(self._changes))

    def _count_settled(self) -> int:
        before = self.world.now - SETTLED_SECONDS
        return sum(1 for _ in itertools.takewhile(lambda each: each.at < before, self._changes))

    def _settle(self, count: int) -> None:
        """Make the oldest changes durable."""
        oldest = self._changes[:count]
        del self._changes[:count]
        self._forget_graves(oldest)

    def touching(self, folder: str) -> list[_Change]:
        """The changes in a folder, and those that they depend on."""
        found = []
        needed: set[str] = set()
        for change in reversed(self._changes):
            if change.touches(folder) or not needed.isdisjoint(change.paths):
                needed.update(change.paths)
                found.append(change)
        return found

    def make_durable(self, changes: Iterable[_Change]) -> None:
        """Make these changes durable: a power cut no longer undoes them."""
        gone = dict.fromkeys(changes)
        self._changes = [change for change in self._changes if change not in gone]
        self._forget_graves(gone)

    def _forget_graves(self, changes: Iterable[_Change]) -> None:
        for change in changes:
            if change.grave:
                Real.unlink(change.grave)
                change.grave = ""
                if change.inode is not None:
                    change.inode.graves -= 1
                    self.release(change.inode)

    # -- a power cut

    def power_cut(self, *, loses_all: bool) -> None:
        """Put the files into a state that a power cut may leave. loses_all: all unsynced data is lost,
        otherwise some of it.
        """
        self._settle(self._count_settled())
        lost = list(self._changes) if loses_all else self._lost_changes()
        for change in reversed(lost):
            self._undo(change)
        kept = [change for change in self._changes if change not in set(lost)]
        self._changes = []
        self._forget_graves(kept)
        torn = 0
        for path in files(self.folder):
            inode = self._inodes.get(Real.lstat(path).st_ino)
            if inode is not None and inode in self._dirty and not is_sqlite(path):
                torn += self._tear(path, inode, loses_all=loses_all)
                del self._dirty[inode]
        self._dirty.clear()
        for path in files(self.folder):
            if path.endswith(".sqlite"):
                self._tear_database(path, loses_all=loses_all)
        for inode in self._inodes.values():
            inode.undo.clear()
            inode.synced_size = inode.guarded = inode.size
            inode.is_fooled = False
        self.world.tell(f"power cut: {len(lost)} names undone, {torn} files torn")

    def _lost_changes(self) -> list[_Change]:
        """Choose the changes of names to undo, in order."""
        changes = self._changes
        style = self.random.choice(("none", "all", "end", "some", "some"))
        if style == "none":
            return []
        if style == "end":  # as in a journal
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
                inode = self.inode(Real.lstat(path))
                Real.unlink(path)
                inode.names -= 1
                self.release(inode)
            case "mkdir":
                remove(path)
            case "rmdir":
                Real.mkdir(path, 0o700)
            case "unlink":
                Real.rename(change.grave, path)
            case "rename":
                Real.rename(path, change.paths[0])
                if change.grave:
                    Real.rename(change.grave, path)
        if change.inode is not None:
            change.inode.graves -= 1
            change.inode.names += 1

    def _tear(self, path: str, inode: Inode, *, loses_all: bool) -> bool:
        """Choose the content of a file that was not synced."""
        new = content_of(path)
        old = bytearray(new)
        for place, saved in reversed(inode.undo):
            if len(old) < place + len(saved):
                old.extend(bytes(place + len(saved) - len(old)))
            old[place : place + len(saved)] = saved
        del old[inode.synced_size :]
        old.extend(bytes(inode.synced_size - len(old)))
        style = self.random.choice(("new", "old", "start", "pages", "pages"))
        if loses_all:
            style = "old"
        if not inode.is_fooled and self.world.now - inode.dirty_since > SETTLED_SECONDS:
            style = "new"
        found = bytearray(new)
        if style == "old":
            found = old
        elif style == "start" and len(new) > len(old):
            del found[self.random.randint(len(old), len(new)) :]
        elif style in ("start", "pages"):
            for place in range(0, len(found), PAGE):
                if self.random.random() < 0.5:
                    end = min(place + PAGE, len(found))
                    page = old[place:end]
                    found[place:end] = page + bytes(end - place - len(page))
        if found == new:
            return False
        with Real.file(path, "r+b", buffering=0) as file:
            file.write(found)
            file.truncate(len(found))
        inode.size = len(found)
        return True

    def _tear_database(self, path: str, *, loses_all: bool) -> None:
        chance = self.random.random()
        log = f"{path}-wal"
        if os.path.dirname(path).endswith("/index"):  # it may be lost: it is rebuilt from the files
            if chance < 0.1:
                Real.unlink(path)
                return
            if chance < 0.2:
                os.truncate(path, self.random.randrange(Real.lstat(path).st_size + 1))
            elif chance < 0.3:
                flip(path, self.random)
        if exists(f"{path}-shm"):
            Real.unlink(f"{path}-shm")
        start, end = self.log_ends.pop(path, (0, 0))
        if not exists(log) or not 0 < start <= end <= Real.lstat(log).st_size:
            return
        if loses_all:
            os.truncate(log, start)
        elif chance > 0.5:
            os.truncate(log, self.random.randint(start, end))


def flip(path: str, source: random.Random) -> None:
    """Flip one random bit of a file, unless it is empty."""
    with Real.file(path, "r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            place = source.randrange(size * 8)
            file.seek(place // 8)
            byte = file.read(1)[0]
            file.seek(place // 8)
            file.write(bytes([byte ^ 1 << place % 8]))
