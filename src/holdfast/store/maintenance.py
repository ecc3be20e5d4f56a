"""Keeps a store's folder within its limits: evict, remove, quarantine.

I/O thread, or a command of `inspect.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from holdfast.store.block import BadBlock, BlockKey, BlockMissing, Entry
from holdfast.store.block_file import read_block
from holdfast.store.budget import (
    SLACK_PARTS,
    StoreLimits,
    allowed_bytes,
    choose_victims,
    reachable_keys,
)
from holdfast.store.folder import StoreFolder, fingerprint_id
from holdfast.store.index import BlockIndex
from holdfast.store.index_supervisor import IndexSupervisor
from holdfast.store.records import record_files

_QUARANTINED = ".bad"
_NOT_FOR_NAMES = re.compile(r"[^a-z0-9]+")
_LOG = logging.getLogger(__name__)


class StoreMaintenance:
    """Removes what is stored. Every method may raise OSError."""

    def __init__(
        self,
        folder: StoreFolder,
        supervisor: IndexSupervisor,
        limits: StoreLimits,
        clock: Callable[[], float],
    ) -> None:
        self.folder = folder
        self.supervisor = supervisor
        self._limits = limits
        self._clock = clock

    def allowed_bytes(self) -> int:
        """How many bytes the store may hold now."""
        volume = shutil.disk_usage(self.folder.path)
        stored = self.supervisor.use(BlockIndex.stored_bytes)
        return allowed_bytes(
            self._limits, volume_bytes=volume.total, free_bytes=volume.free, stored_bytes=stored
        )

    def shortage_bytes(self, wanted_bytes: int) -> int:
        """How many bytes must go before this many more may be written."""
        return max(
            0, self.supervisor.use(BlockIndex.stored_bytes) + wanted_bytes - self.allowed_bytes()
        )

    def make_room(self, wanted_bytes: int, *, in_use: Collection[BlockKey]) -> list[Entry]:
        """Evict until `wanted_bytes` more fit, and a little more, so that not every block evicts.

        Returns what was evicted.
        """
        if not self.shortage_bytes(wanted_bytes):
            return []
        with self.folder.exclusive():  # check again: another process may just have made room
            shortage = self.shortage_bytes(wanted_bytes)
            allowed = self.allowed_bytes()
            if not shortage or wanted_bytes > allowed:
                return []
            return self.evict(shortage + allowed // SLACK_PARTS, in_use=in_use)

    def evict(self, excess_bytes: int, *, in_use: Collection[BlockKey] = ()) -> list[Entry]:
        """Remove the least recently used blocks until this many bytes are free; returns them."""
        with self.folder.exclusive():
            victims = choose_victims(self._entries(), excess_bytes=excess_bytes, in_use=in_use)
            self._unlink(victims)
        return victims

    def remove_unreachable(self) -> list[Entry]:
        """Remove the blocks whose parents are gone, unless they are pinned; returns them."""
        with self.folder.exclusive():
            entries = self._entries()
            reachable = reachable_keys(entries)
            lost = [
                entry for entry in entries if entry.block.key not in reachable and not entry.pinned
            ]
            self._unlink(lost)
        return lost

    def _entries(self) -> list[Entry]:
        return self.supervisor.use(lambda index: index.entries(self._clock()))

    def _unlink(self, entries: Iterable[Entry]) -> None:
        done = []
        try:
            # files first: a row without a file is a miss, a file without a row would come back
            for entry in entries:
                self.folder.block_path(entry.block.key, model=entry.model).unlink(missing_ok=True)
                done.append(entry.block.key)
        finally:
            if done:
                self.supervisor.use(lambda index: index.remove(done))

    def remove(self, keys: Iterable[BlockKey], *, fingerprint: str) -> None:
        """Delete blocks of one model."""
        model = fingerprint_id(fingerprint)
        gone = list(keys)
        for key in gone:
            self.folder.block_path(key, model=model).unlink(missing_ok=True)
        self.supervisor.use(lambda index: index.remove(gone))

    def remove_models(self, is_outdated: Callable[[str], bool]) -> None:
        """Delete blocks and sessions of outdated fingerprints, with one line in the log."""
        fingerprints = self.supervisor.use(lambda index: index.fingerprints())
        models = [model for model, fingerprint in fingerprints.items() if is_outdated(fingerprint)]
        if not models:
            return
        with self.folder.exclusive():
            files = [found for model in models for found in self.folder.block_files(model=model)]
            for found in files:
                found.path.unlink(missing_ok=True)
            sessions = [
                path
                for model in models
                for path in record_files(self.folder.path / "sessions" / model)
            ]
            for path in sessions:
                path.unlink(missing_ok=True)
            self.supervisor.use(lambda index: index.remove([found.key for found in files]))
            self.supervisor.use(lambda index: index.remove_models(models))
        if files or sessions:
            _LOG.warning(
                "deleted %d block%s (%.1f MB) and %d session%s of earlier versions from the store: "
                "%s",
                len(files),
                "" if len(files) == 1 else "s",
                sum(found.file_bytes for found in files) / 1e6,
                len(sessions),
                "" if len(sessions) == 1 else "s",
                self.folder.path,
            )

    def condemn(self, path: Path, bad: BadBlock) -> bool:
        """Quarantine a damaged file unless a good one replaced it; returns whether it was bad."""
        try:
            read_block(path, bad.key, model=path.parent.name)
        except BlockMissing:
            return False
        except BadBlock as still_bad:
            _LOG.warning("a damaged block was moved to the quarantine: %s", still_bad)
            quarantine(path, still_bad, folder=self.folder.quarantine_folder)
            self._bound_quarantine()
            self.supervisor.use(lambda index: index.remove_rows([bad.key]))
            return True
        return False

    def _bound_quarantine(self) -> None:
        bound_quarantine(
            self.folder.quarantine_folder,
            most_bytes=self._limits.quarantine_bytes,
            most_files=self._limits.quarantine_files,
        )

    def set_aside_damaged(self) -> tuple[int, list[BlockKey]]:
        """Quarantine what was found damaged when the index was opened.

        Returns the number of damaged files, and all keys that are gone.
        """
        gone = self.supervisor.gone
        self.supervisor.gone = {}
        damaged = [found for found in gone.values() if found is not None]
        for file, bad in damaged:
            quarantine(file.path, bad, folder=self.folder.quarantine_folder)
        if damaged:
            were = "file was" if len(damaged) == 1 else "files were"
            _LOG.warning("%d damaged %s moved to the quarantine", len(damaged), were)
            self._bound_quarantine()
        return len(damaged), list(gone)


def quarantine(path: Path, bad: BadBlock, *, folder: Path) -> None:
    """Move a damaged file, if it still exists, to the quarantine; its name says why.

    Raises OSError.
    """
    reason = _NOT_FOR_NAMES.sub("-", bad.reason.lower()).strip("-")[:40]
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.replace(path, folder / f"{time.time_ns():020d}.{bad.key.hex()}.{reason}{_QUARANTINED}")


def bound_quarantine(folder: Path, *, most_bytes: int, most_files: int) -> int:
    """Delete the oldest files beyond the bounds; returns how many remain. Raises OSError."""
    kept = 0
    kept_bytes = 0
    for path in reversed(quarantined_files(folder)):
        kept_bytes += path.lstat().st_size
        if kept < most_files and kept_bytes <= most_bytes:
            kept += 1
        else:
            path.unlink(missing_ok=True)
    return kept


def quarantined_files(folder: Path) -> list[Path]:
    """The files in quarantine, oldest first."""
    return sorted(
        path for path in folder.glob(f"*{_QUARANTINED}") if path.is_file() and not path.is_symlink()
    )
