"""The folder of a store: its layout, ownership and locks, and the records of sessions.

    HOLDFAST-STORE-2            marks the folder as a store; the number is the format
    lock                        flock: only one process at a time rebuilds, salvages or evicts
    blocks/<model>/<key>.block  a block, never changed; <model> is the short name of a fingerprint
    blocks/<model>/name         the name that the model was last served as, for people
    incoming/<writer>/          files being written, and a lock that shows if the writer is alive
    index/<time>-<format>.sqlite  see index.py
    quarantine/                 damaged files
    sessions/<model>/           records of sessions, see `Records`
    answers/                    the exact tokens of generated answers, see answers.py
    responses/                  stored responses and conversations, see responses.py
    images/                     images of prompts, written by the front

A name is durable if a power cut cannot undo it: the folder that contains it was synced. A process
claims its own folder in `incoming`; when it has died, another process salvages its files.

Nothing outside the folder is touched: only this module builds paths, links are not followed, and
only files whose names have one of these forms are removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from holdfast.config import StoreSettings
from holdfast.files import (
    LOCK,
    abandoned,
    atomic_write,
    claim,
    expanded,
    read_regular,
    store_folder,
    sync_to_drive,
    try_lock,
)
from holdfast.store.block import KEY_BYTES, BlockKey, StoreRefused, fingerprint_id

# values of the setting store.folder
AUTO = "auto"
OFF = "off"
MARKER_STEM = "HOLDFAST-STORE-"
MARKER = MARKER_STEM + "2"
_EARLIER_MARKER = MARKER_STEM + "1"
BLOCK_SUFFIX = ".block"
_NAME_FILE = "name"  # file next to a model's blocks with the name under which it was last served
_LONGEST_NAME = 200

_OUR_FOLDERS = (
    "blocks",
    "incoming",
    "index",
    "quarantine",
    "sessions",
    "answers",
    "responses",
    "images",
)
# files that operating systems put into folders
_HARMLESS = {".DS_Store", "lost+found", ".localized", "desktop.ini"}
_MODEL_NAME = re.compile(r"[0-9a-f]{16}")
_KEY_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_LOCK_POLL_SECONDS = 0.02
RECORD_SUFFIX = ".session"
_RECORD_NAME = re.compile(r"[0-9a-f]{32}")
_SUM_BYTES = 16
# transient errors, which may go away by themselves
MAY_PASS = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EINTR,
    errno.EIO,
    errno.ESTALE,
    errno.EBUSY,
    errno.ETIMEDOUT,
}
# errors of fsync on file systems that cannot sync folders
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP}
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)  # not kw_only: one is created per file of the store
class BlockFile:
    """The file of a block, as found in a listing of the folder. Its content was not read."""

    key: BlockKey
    model: str  # short name of the model's fingerprint
    root: Path  # the folder that contains all models' folders
    file_bytes: int
    modified: float  # seconds since the epoch

    @property
    def path(self) -> Path:
        """The path of the file.

        It is computed on demand, because most files of a large store are only counted.
        """
        return self.root / self.model / (self.key.hex() + BLOCK_SUFFIX)


class StoreFolder:
    """The paths and locks of a store's folder.

    One thread makes changes; other threads may ask for paths. Every method may raise OSError.
    """

    def __init__(self, path: Path, *, names: Mapping[str, str] | None = None) -> None:
        """names: the names under which models are served, by fingerprint."""
        self.path = expanded(path)
        self._names = names or {}
        # descriptor of the locked file that shows others that this process uses its incoming folder
        self._claim: int | None = None
        # this process's folder for unfinished files; None: not claimed
        self._incoming: Path | None = None
        # of the parent folder, to notice an unmounted volume
        self._parent_device: int | None = None
        self._holds_lock = False  # this process holds the lock of `exclusive`
        self._unsynced_ancestors: set[Path] = set()  # folders with new names, above the store's
        self._durable_folders: set[Path] = set()  # folders of models whose names are durable

    @property
    def index_folder(self) -> Path:
        """The folder of the index files."""
        return self.path / "index"

    @property
    def quarantine_folder(self) -> Path:
        """The folder of damaged files."""
        return self.path / "quarantine"

    def block_path(self, key: BlockKey, *, model: str) -> Path:
        """The file of a block. model: short name of its fingerprint."""
        return self.path / "blocks" / model / (key.hex() + BLOCK_SUFFIX)

    def check(self) -> None:
        """Raise StoreRefused if the folder is a link, holds other files, or has another format.

        Changes nothing.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise StoreRefused(f"{self.path} is not a folder")
        names = {entry.name for entry in os.scandir(self.path)} - _HARMLESS
        markers = {
            name
            for name in names
            if name.startswith(MARKER_STEM) and name.removeprefix(MARKER_STEM).isdigit()
        }
        if markers and not markers & {MARKER, _EARLIER_MARKER}:
            raise StoreRefused(
                f"{self.path} is a store of another version of Holdfast ({min(markers)}): use "
                "another folder"
            )
        if not markers and not self._looks_like_ours(names):
            raise StoreRefused(
                f"{self.path} holds other files ({min(names)}, …): give the store a folder of its "
                "own"
            )
        for name in _OUR_FOLDERS:
            if name in names and not stat.S_ISDIR(os.lstat(self.path / name).st_mode):
                raise StoreRefused(f"{self.path / name} is not a plain folder")

    def _looks_like_ours(self, names: set[str]) -> bool:
        """Whether a folder without a marker is empty, or a store that has lost its marker."""
        if any(
            name not in (*_OUR_FOLDERS, "lock") and not name.startswith(MARKER) for name in names
        ):
            return False
        model_folders = [
            child.name
            for name in _OUR_FOLDERS[:1]
            if name in names
            for child in os.scandir(self.path / name)
        ]
        return all(_MODEL_NAME.fullmatch(name) for name in model_folders)

    @property
    def exists(self) -> bool:
        """Whether the folder exists and is marked as a store."""
        return (self.path / MARKER).is_file() or (self.path / _EARLIER_MARKER).is_file()

    def prepare(self) -> None:
        """Create and mark the folder if necessary, but never below the mount point of an unmounted
        volume.
        """
        self._make_root()
        self.check()
        for name in _OUR_FOLDERS:
            (self.path / name).mkdir(mode=0o700, exist_ok=True)
        if not self.exists:
            new_file = self.path / f"{MARKER}.{secrets.token_hex(4)}"
            new_file.touch(mode=0o600)
            new_file.write_text(
                "The prefix cache of Holdfast. Safe to delete as a whole.\n",
                encoding="utf-8",
            )
            new_file.replace(self.path / MARKER)
            _exclude_from_backups(self.path)
        elif (self.path / _EARLIER_MARKER).is_file():
            self._delete_earlier_format()
        # A block is durable only if the folders around it are, and the process that created them may
        # have died before it could sync them.
        sync_folder(self.path)
        for folder in sorted(self._unsynced_ancestors):
            _sync_ancestor(folder)
            self._unsynced_ancestors.remove(folder)

    def _delete_earlier_format(self) -> None:
        """Delete the blocks and sessions of an earlier version, which this version cannot read."""
        with self.exclusive():
            if not (self.path / _EARLIER_MARKER).is_file():  # another process has already done it
                return
            for name in ("blocks", "index", "sessions", "quarantine"):
                shutil.rmtree(self.path / name)
                (self.path / name).mkdir(mode=0o700)
            (self.path / _EARLIER_MARKER).replace(self.path / MARKER)
        _LOG.warning("deleted the cache of an earlier version from the store: %s", self.path)

    def _make_root(self) -> None:
        """Make the store's folder, also if it was deleted while this process runs. If its volume was
        unmounted meanwhile, raise OSError instead of making it below the mount point.
        """
        parent = self.path.parent
        self._unsynced_ancestors.add(parent)
        if self._parent_device is None:
            missing = [ancestor for ancestor in self.path.parents if not ancestor.exists()]
            self._unsynced_ancestors.update(ancestor.parent for ancestor in missing)
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._parent_device = parent.stat().st_dev
        elif parent.stat().st_dev != self._parent_device:
            raise OSError(errno.ENODEV, "its volume is not mounted", str(self.path))
        else:
            self.path.mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def exclusive(self, *, wait_seconds: float = 10.0) -> Iterator[None]:
        """Hold the folder's lock.

        The lock is reentrant, because work under it may have to rebuild the index.

        Raises OSError if the folder is not marked as a store, or if another process holds the lock
        for longer than `wait_seconds`.
        """
        if self._holds_lock:
            yield
            return
        if not self.exists:
            raise FileNotFoundError(errno.ENOENT, "the folder of the store is gone", str(self.path))
        lock = os.open(
            self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            deadline = time.monotonic() + wait_seconds
            while not try_lock(lock):
                if time.monotonic() > deadline:
                    raise OSError(errno.EBUSY, "locked by another process", str(self.path))
                time.sleep(_LOCK_POLL_SECONDS)
            self._holds_lock = True
            yield
        finally:
            self._holds_lock = False
            os.close(lock)  # this releases the lock

    def incoming(self) -> Path:
        """The folder for the files that this process is writing. Created on demand."""
        if self._incoming is not None and not self._incoming.is_dir():
            self.release()
        if self._incoming is None:
            claimed = claim(self.path / "incoming", prefix=f"{os.getpid()}-")
            self._incoming = claimed.folder
            self._claim = claimed.file
        return self._incoming

    def release(self) -> None:
        """Give up this process's incoming folder.

        The next process that opens the store salvages its files.
        """
        if self._incoming is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._incoming / LOCK)
                os.rmdir(self._incoming)
        if self._claim is not None:
            os.close(self._claim)
        self._claim = self._incoming = None

    @contextlib.contextmanager
    def abandoned(self) -> Iterator[list[Path]]:
        """Yield the files that processes left in their incoming folders when they died.

        Removes these folders at the end.
        """
        others = [
            folder for folder in _plain_folders(self.path / "incoming") if folder != self._incoming
        ]
        with abandoned(others) as folders:
            yield [path for folder in folders for path in sorted(folder.glob("*.part"))]
            for folder in folders:
                with contextlib.suppress(OSError):
                    os.unlink(folder / LOCK)
                    os.rmdir(folder)

    def block_files(self, *, model: str | None = None) -> Iterator[BlockFile]:
        """List every file that is named like a block, of one model or of all."""
        root = self.path / "blocks"
        for folder in _plain_folders(root):
            if not _MODEL_NAME.fullmatch(folder.name) or model not in (None, folder.name):
                continue
            model_name = folder.name
            with os.scandir(folder) as entries:
                for entry in entries:
                    name = entry.name.removesuffix(BLOCK_SUFFIX)
                    if not _KEY_NAME.fullmatch(name) or not entry.name.endswith(BLOCK_SUFFIX):
                        continue
                    status = _status(entry)
                    if status is not None and stat.S_ISREG(status.st_mode):
                        yield BlockFile(
                            bytes.fromhex(name), model_name, root, status.st_size, status.st_mtime
                        )

    def sync_names(self) -> None:
        """Make the names of all files of blocks durable. Raises OSError."""
        for model_folder in _plain_folders(self.path / "blocks"):
            sync_folder(model_folder)

    def make_model_folder(self, fingerprint: str) -> Path:
        """Return the folder of a model's blocks.

        Creates it if necessary, with a note of the model's name.
        """
        folder = self.path / "blocks" / fingerprint_id(fingerprint)
        self.make_durably(folder)
        name = self._names.get(fingerprint, "")[:_LONGEST_NAME]
        if name and self.served_as(folder.name) != name:
            new_file = folder / f"{_NAME_FILE}.{secrets.token_hex(4)}"
            new_file.touch(mode=0o600)
            new_file.write_text(name, encoding="utf-8")
            new_file.replace(folder / _NAME_FILE)
        return folder

    def make_durably(self, folder: Path) -> None:
        """Create a folder in one of the store's folders if necessary, and make its name durable.

        Another process may have created it and died before it could sync its name.
        """
        if not folder.is_dir():
            self._durable_folders.discard(folder)
            folder.mkdir(mode=0o700, exist_ok=True)
        if folder not in self._durable_folders:
            sync_folder(folder.parent)
            self._durable_folders.add(folder)

    def served_as(self, model: str) -> str:
        """The name that a model (short name of its fingerprint) was last served as; empty if
        unknown.
        """
        try:
            with open(
                self.path / "blocks" / model / _NAME_FILE, encoding="utf-8", errors="replace"
            ) as file:
                name = file.read(_LONGEST_NAME)
        except OSError:
            return ""
        return "".join(character for character in name if character.isprintable())

    def remove_name(self, model: str) -> None:
        """Remove the note of a model's name."""
        (self.path / "blocks" / model / _NAME_FILE).unlink(missing_ok=True)


def chosen_folder(settings: StoreSettings, environ: Mapping[str, str]) -> str:
    """The folder that a server uses, as an absolute path; empty if the cache is only in RAM.

    Raises ConfigError if the home directory does not exist.
    """
    if settings.folder in ("", OFF):
        return ""
    if settings.folder == AUTO:
        return str(store_folder(environ))
    return os.path.abspath(expanded(settings.folder))


def is_folder(settings: StoreSettings) -> bool:
    """Whether store.folder names a folder, and is not `auto` or `off`."""
    return settings.folder not in ("", AUTO, OFF)


def library_folder(settings: StoreSettings, environ: Mapping[str, str]) -> str:
    """Like `chosen_folder`, for the Python library, which has no store on disk by default."""
    return "" if settings.folder == AUTO else chosen_folder(settings, environ)


def is_plain_file(path: Path) -> bool:
    """Whether the path is a plain file, not a link. Raises OSError if that cannot be determined."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def sync_folder(path: Path) -> None:
    """Make the names of the files in a folder durable, if its file system can."""
    try:
        sync_by_name(path, flags=os.O_DIRECTORY, sync=os.fsync)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def sync_by_name(path: Path, *, flags: int, sync: Callable[[int], None]) -> None:
    """Sync a file by its name, so that thousands of files need not stay open.

    flags: further flags for `os.open`. sync: the function that syncs; `sync_to_drive` also flushes
    the drive's own cache, for all files that were synced before.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        sync(file)
    finally:
        os.close(file)


def _sync_ancestor(path: Path) -> None:
    """Sync a folder outside the store. One that this process may not read or that is on a read-only
    volume cannot be synced; that is no error.
    """
    try:
        sync_folder(path)
    except OSError as error:
        if error.errno not in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise


def _exclude_from_backups(path: Path) -> None:
    """Exclude the store from Time Machine, if possible.

    Otherwise it would copy gigabytes every hour.
    """
    tool = shutil.which("tmutil")
    if tool is not None:
        subprocess.run(
            [tool, "addexclusion", str(path)], capture_output=True, timeout=30, check=False
        )


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """The status of a file or link; None if it is gone."""
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # another process has evicted it since it was listed
        return None


def _plain_folders(root: Path) -> list[Path]:
    """The folders in a folder, without links to folders."""
    with os.scandir(root) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))


class ReadRecords(NamedTuple):
    """The records of one model."""

    found: Mapping[str, bytes]  # content by name
    unread: frozenset[str]  # names of records that cannot be read at the moment


class Records:
    """The records of one model's sessions: small named files with a checksum.

    A record is only ever replaced as a whole. I/O thread only. Every method may raise OSError.
    """

    def __init__(self, folder: StoreFolder, *, model: str) -> None:
        """model: short name of the model's fingerprint."""
        self._store = folder
        self._folder = folder.path / "sessions" / model
        self._model = model

    def put(self, name: str, data: bytes) -> None:
        """Write or replace a record. The record is durable when this returns."""
        path = self._path(name)
        self._store.make_durably(self._folder)
        with atomic_write(path) as file:
            file.write(data + self._checksum(name, data))
            file.flush()
            sync_to_drive(file.fileno())
        sync_folder(self._folder)

    def remove(self, name: str) -> None:
        """Delete a record, if it exists."""
        self._path(name).unlink(missing_ok=True)

    def all(self) -> ReadRecords:
        """Return all undamaged records. Damaged ones are deleted, with a warning."""
        contents: dict[str, bytes] = {}
        unread: set[str] = set()
        for path in record_files(self._folder):
            try:
                content = read_regular(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                _LOG.warning("a session's record cannot be read now: %s", error)
                unread.add(path.stem)
                continue
            data = content[:-_SUM_BYTES]
            name = path.stem
            if content[-_SUM_BYTES:] == self._checksum(name, data):
                contents[name] = data
            else:
                _LOG.warning("a session's record is damaged and was deleted: %s", path)
                path.unlink(missing_ok=True)
        return ReadRecords(contents, frozenset(unread))

    def _path(self, name: str) -> Path:
        check_name(name)
        return self._folder / f"{name}{RECORD_SUFFIX}"

    def _checksum(self, name: str, data: bytes) -> bytes:
        """Covers model and name, so that a file under another name counts as damaged."""
        return xxhash.xxh3_128_digest(f"{self._model}/{name}/".encode() + data)


def check_name(name: str) -> None:
    """Raise ValueError if this is not a valid name for a record."""
    if not _RECORD_NAME.fullmatch(name):
        raise ValueError(f"not a record name: {name!r}")


def record_files(folder: Path) -> list[Path]:
    """The files in a model's folder that are named like records. Raises OSError."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return []
        with os.scandir(folder) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if _is_record(entry.name) and entry.is_file(follow_symlinks=False)
            )
    except FileNotFoundError:
        return []


def _is_record(name: str) -> bool:
    stem, _, suffix = name.rpartition(".")
    return f".{suffix}" == RECORD_SUFFIX and bool(_RECORD_NAME.fullmatch(stem))
