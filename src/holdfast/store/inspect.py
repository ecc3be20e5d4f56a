"""The commands `holdfast store ls|stat|clear`.

A server may use the folder at the same time.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.machine.retention_clock import RetentionClock
from holdfast.store.block import (
    BlockKey,
    Entry,
    StoreRefused,
    reachable_keys,
)
from holdfast.store.folder import StoreFolder, record_files
from holdfast.store.index import BlockIndex, IndexSupervisor
from holdfast.store.maintenance import StoreLimits, StoreMaintenance, quarantined_files


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHoldings:
    """What the store contains for one model."""

    model: str  # short name
    served_as: str  # empty if unknown
    fingerprint: str
    blocks: int
    states: int  # saved model states
    tokens: int
    file_bytes: int
    last_used: float  # seconds since the epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSummary:
    """Sizes, limits and irregularities of a whole folder."""

    folder: Path
    blocks: int
    file_bytes: int
    allowed_bytes: int  # limit of the size
    unreachable_blocks: int  # blocks whose parent is gone; they are evicted first
    pinned_blocks: int
    written_today_bytes: int  # by all processes, since midnight UTC
    quarantined_files: int  # files with damaged content
    quarantined_bytes: int
    volume_bytes: int
    volume_free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalReport:
    """The deleted items."""

    keys: tuple[BlockKey, ...]  # of the deleted blocks
    freed_bytes: int


def list_store(folder: Path) -> tuple[ModelHoldings, ...]:
    """List what the store contains for each model, the largest first.

    Raises StoreRefused, OSError.
    """
    with _opened(folder, StoreLimits()) as opened:
        fingerprints = opened.supervisor.use(BlockIndex.fingerprints)
        by_model: dict[str, list[Entry]] = {}
        for entry in opened.supervisor.use(lambda index: index.entries(time.time())):
            if entry.is_missing:
                continue
            by_model.setdefault(entry.model, []).append(entry)
        all_holdings = [
            _holdings_of(
                model,
                fingerprints.get(model, ""),
                entries,
                served_as=opened.folder.served_as(model),
            )
            for model, entries in by_model.items()
        ]
    return tuple(sorted(all_holdings, key=lambda holdings: -holdings.file_bytes))


def summarize_store(folder: Path, *, limits: StoreLimits) -> StoreSummary:
    """Return sizes, limits and irregularities of a folder. Raises StoreRefused, OSError."""
    with _opened(folder, limits) as opened:
        now = time.time()
        rows = opened.supervisor.use(lambda index: index.entries(now))
        entries = [entry for entry in rows if not entry.is_missing]
        day = time.strftime("%Y-%m-%d", time.gmtime(now))
        bad_files = quarantined_files(opened.folder.quarantine_folder)
        volume = shutil.disk_usage(opened.folder.path)
        return StoreSummary(
            folder=opened.folder.path,
            blocks=len(entries),
            file_bytes=sum(entry.file_bytes for entry in entries),
            allowed_bytes=opened.allowed_bytes(),
            unreachable_blocks=len(entries) - len(reachable_keys(entries)),
            pinned_blocks=sum(entry.pinned for entry in entries),
            written_today_bytes=opened.supervisor.use(lambda index: index.written_bytes(day)),
            quarantined_files=len(bad_files),
            quarantined_bytes=sum(path.lstat().st_size for path in bad_files),
            volume_bytes=volume.total,
            volume_free_bytes=volume.free,
        )


def clear_store(folder: Path, *, model: str | None = None) -> RemovalReport:
    """Delete blocks, sessions and images, or only the blocks and sessions of one model (short name).

    The front's records (known answers, stored responses) stay. Raises StoreRefused, OSError.
    """
    with _opened(folder, StoreLimits()) as opened:
        files = list(opened.folder.block_files(model=model))
        for file in files:
            file.path.unlink(missing_ok=True)
        keys = tuple(file.key for file in files)
        opened.supervisor.use(lambda index: index.remove(keys))
        for path in _session_records(opened.folder, model):
            path.unlink(missing_ok=True)
        for model_name in {file.model for file in files}:
            opened.folder.remove_name(model_name)
        if model is None:
            shutil.rmtree(opened.folder.path / "images", ignore_errors=True)
            for path in quarantined_files(opened.folder.quarantine_folder):
                path.unlink(missing_ok=True)
    return RemovalReport(keys=keys, freed_bytes=sum(file.file_bytes for file in files))


def _session_records(folder: StoreFolder, model: str | None) -> list[Path]:
    """The files of the sessions of one model (short name); None: of all models."""
    root = folder.path / "sessions"
    if not root.is_dir():
        return []
    return [
        path
        for model_folder in root.iterdir()
        if model in (None, model_folder.name)
        for path in record_files(model_folder)
    ]


@contextmanager
def _opened(path: Path, limits: StoreLimits) -> Iterator[StoreMaintenance]:
    """Open an existing store; if its folder is read-only or full, with an index in memory."""
    folder = StoreFolder(path)
    folder.check()
    if not (folder.path / "blocks").is_dir():
        raise StoreRefused(f"there is no store at {folder.path}")
    supervisor = IndexSupervisor(folder)
    try:
        try:
            folder.prepare()
            supervisor.use(BlockIndex.stored_bytes)
        except OSError:  # the folder is read-only or full, but can still be inspected
            supervisor.open_in_memory()
        yield StoreMaintenance(folder, supervisor, limits, RetentionClock())
    finally:
        supervisor.close()


def _holdings_of(
    model: str, fingerprint: str, entries: list[Entry], *, served_as: str
) -> ModelHoldings:
    """Sum up the blocks of one model (short name)."""
    return ModelHoldings(
        model=model,
        served_as=served_as,
        fingerprint=fingerprint,
        blocks=len(entries),
        states=sum(entry.block.kind == "state" for entry in entries),
        tokens=sum(entry.block.tokens for entry in entries),
        file_bytes=sum(entry.file_bytes for entry in entries),
        last_used=max(entry.last_used for entry in entries),
    )
