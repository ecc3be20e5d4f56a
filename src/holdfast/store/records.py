"""The records of sessions: small named files with a checksum, replaced as a whole. I/O thread."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import xxhash

from holdfast.files import sync_to_drive
from holdfast.store.folder import StoreFolder, sync_folder

SUFFIX = ".session"
_NAME = re.compile(r"[0-9a-f]{32}")
_SUM_BYTES = 16
_LOG = logging.getLogger(__name__)


class Records:
    """The records of one model. Every method may raise OSError."""

    def __init__(self, folder: StoreFolder, *, model: str) -> None:
        """`model`: short name of its fingerprint."""
        self._folder = folder.path / "sessions" / model
        self._model = model

    def put(self, name: str, data: bytes) -> None:
        """Write or replace a record; durable on return."""
        path = self._path(name)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.new")
        with open(fresh, "wb", opener=_private) as file:
            file.write(data + self._sum(name, data))
            file.flush()
            sync_to_drive(file.fileno())
        fresh.replace(path)
        sync_folder(self._folder)

    def remove(self, name: str) -> None:
        """Delete a record, if it exists."""
        self._path(name).unlink(missing_ok=True)

    def all(self) -> dict[str, bytes]:
        """All intact records; damaged ones are deleted, with a warning."""
        found: dict[str, bytes] = {}
        for path in record_files(self._folder):
            try:
                content = path.read_bytes()
            except OSError as error:
                _LOG.warning("a session's record cannot be read: %s", error)
                continue
            data = content[:-_SUM_BYTES]
            name = path.stem
            if content[-_SUM_BYTES:] == self._sum(name, data):
                found[name] = data
            else:
                _LOG.warning("a session's record is damaged and was deleted: %s", path)
                path.unlink(missing_ok=True)
        return found

    def _path(self, name: str) -> Path:
        check_name(name)
        return self._folder / f"{name}{SUFFIX}"

    def _sum(self, name: str, data: bytes) -> bytes:
        return xxhash.xxh3_128_digest(f"{self._model}/{name}/".encode() + data)


def check_name(name: str) -> None:
    """Raise ValueError if this is not the name of a record."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"not a record name: {name!r}")


def record_files(folder: Path) -> list[Path]:
    """The files in a model's folder that are named like records."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _is_record(path))


def _is_record(path: Path) -> bool:
    return (
        path.suffix == SUFFIX
        and bool(_NAME.fullmatch(path.stem))
        and path.is_file()
        and not path.is_symlink()
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
