"""Files and folders: the user's folders, atomic writes, and folders claimed by a process.

A claimed folder belongs to one process for as long as the process lives: the process holds a lock
(flock) on a file in the folder. The kernel releases the lock when the process ends, even if it is
killed. The lock needs no process ids, and child programs do not inherit it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO

from holdfast.errors import ConfigError

CLAIM_PREFIX = "holdfast."  # for names of claimed folders; short, because socket paths are
LOCK = "lock"
_CLAIM_ATTEMPTS = 100
_MAX_TEXT_BYTES = 16 << 20
# errors of F_FULLFSYNC on volumes that do not support it
_NO_FULL_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOTTY}
_MAX_NAME_CHARACTERS = 60  # each of up to 4 bytes; file systems allow 255 bytes


def expanded(path: str | Path) -> Path:
    """An absolute path, with `~` and `~user` replaced by the home folder.

    Raises ConfigError if that user lacks a home folder.
    """
    expanded_path = os.path.expanduser(path)
    if str(expanded_path).startswith("~"):
        raise ConfigError(
            f"{path}: {Path(expanded_path).parts[0]} has no home folder; for a folder of that name "
            f"write ./{expanded_path}"
        )
    return Path(expanded_path).absolute()


def caches_folder(environ: Mapping[str, str]) -> Path:
    """Holdfast's folder among the user's caches. Raises RuntimeError if the user lacks a home
    folder.

    Like all folders that this module returns, it may not exist yet.
    """
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).absolute() / "holdfast"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "holdfast"


def state_folder(environ: Mapping[str, str]) -> Path:
    """Holdfast's folder for state other than caches, such as logs.

    Raises RuntimeError if the user lacks a home folder.
    """
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]).absolute() / "holdfast"
    on_mac = sys.platform == "darwin"
    return Path.home() / ("Library/Application Support" if on_mac else ".local/state") / "holdfast"


def store_folder(environ: Mapping[str, str]) -> Path:
    """The store's default folder. Raises RuntimeError if the home directory is unknown.

    macOS may empty ~/Library/Caches when the disk is full, so on macOS the store is in
    ~/Library/Application Support.
    """
    if sys.platform == "darwin" and not environ.get("XDG_CACHE_HOME"):
        return state_folder(environ) / "store"
    return caches_folder(environ) / "store"


def logs_folder(environ: Mapping[str, str]) -> Path:
    """The folder for log files. Raises RuntimeError if the user lacks a home folder."""
    return state_folder(environ) / "logs"


def performance_folder(environ: Mapping[str, str]) -> Path:
    """The folder for histories of the performance. Raises RuntimeError if the user lacks a home
    folder.
    """
    return state_folder(environ) / "performance"


def crash_reports_folder(environ: Mapping[str, str]) -> str:
    """The folder for reports of crashed workers; empty if the user lacks a home folder."""
    try:
        return str(state_folder(environ) / "crashes")
    except RuntimeError:
        return ""


def configuration_folder(environ: Mapping[str, str]) -> Path:
    """Holdfast's folder among the user's settings. Raises RuntimeError if the user lacks a home
    folder.
    """
    if environ.get("XDG_CONFIG_HOME"):
        return Path(environ["XDG_CONFIG_HOME"]).absolute() / "holdfast"
    return (Path(environ["HOME"]) if environ.get("HOME") else Path.home()) / ".config" / "holdfast"


def hash_cache_file(environ: Mapping[str, str]) -> str:
    """The file that caches hashes of model files; empty if the user lacks a home folder."""
    return _in_caches(environ, "hashes", "model-files.json")


def compiled_code_folder(environ: Mapping[str, str]) -> str:
    """The folder that caches the code that MLX compiles; empty if the user lacks a home folder."""
    return _in_caches(environ, "compiled")


def quality_folder(environ: Mapping[str, str]) -> str:
    """The folder that keeps the results of `holdfast quality`; empty if the user lacks a home
    folder.
    """
    return _in_caches(environ, "quality")


def kernels_folder(environ: Mapping[str, str]) -> Path:
    """The folder that keeps Holdfast's compiled kernels. Raises RuntimeError if the home directory
    is unknown.
    """
    return caches_folder(environ) / "kernels"


def _in_caches(environ: Mapping[str, str], *names: str) -> str:
    """A path in the caches folder; empty if the user lacks a home folder."""
    try:
        return str(caches_folder(environ).joinpath(*names))
    except RuntimeError:
        return ""


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading, or the null device, which counts as an empty file. Raises
    OSError for any other kind: opening a FIFO would block until a writer comes, and reading a
    device may never end.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a null character
        raise OSError(errno.EINVAL, f"not a valid file name: {error}", str(path)) from None
    try:
        status = os.fstat(file)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        is_null = status.st_rdev == os.stat(os.devnull).st_rdev
        if not stat.S_ISREG(status.st_mode) and not (stat.S_ISCHR(status.st_mode) and is_null):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    except BaseException:
        os.close(file)
        raise
    return os.fdopen(file, "rb")


def read_text(path: str | Path) -> str:
    """The text of a small regular file. Raises OSError and UnicodeDecodeError."""
    with open_regular(path) as file:
        content = file.read(_MAX_TEXT_BYTES + 1)
    if len(content) > _MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"larger than {_MAX_TEXT_BYTES:,} bytes", str(path))
    return content.decode("utf-8")


def read_regular(path: str | Path) -> bytes:
    """The content of a regular file. Raises OSError."""
    with open_regular(path) as file:
        return file.read()


def sync_to_drive(file: int) -> None:
    """Make an open file, and all data synced before, survive a power cut.

    On macOS, fsync leaves data in the drive's cache; only F_FULLFSYNC flushes that cache, which
    takes longer. Some volumes, mostly network volumes, do not support F_FULLFSYNC. Source: Apple's
    fsync(2) and fcntl(2).
    """
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        try:
            fcntl.fcntl(file, full_sync)
            return
        except OSError as error:
            if error.errno not in _NO_FULL_SYNC:
                raise
    os.fsync(file)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file, readable only by its owner, that replaces `path` when the block succeeds.

    To survive a power cut, the file must be synced inside the block.
    """
    with _new_file(path, move_into_place=os.replace) as file:
        yield file


@contextlib.contextmanager
def atomic_create(path: Path) -> Iterator[IO[bytes]]:
    """Like `atomic_write`, but if `path` already exists, it is kept and the new file is discarded.

    If several processes write at the same time, the first file wins.
    """
    with _new_file(path, move_into_place=_move_unless_exists) as file:
        yield file


@contextlib.contextmanager
def _new_file(path: Path, *, move_into_place: Callable[[str, Path], None]) -> Iterator[IO[bytes]]:
    """Write a temporary file in the same folder, and move it to `path` when the block succeeds."""
    prefix = f".{path.name[:_MAX_NAME_CHARACTERS]}."
    descriptor, temporary_path = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        move_into_place(temporary_path, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary_path)
        raise


def _move_unless_exists(temporary_path: str, path: Path) -> None:
    """Move a file to `path`; delete it if there is already one."""
    try:
        os.link(temporary_path, path)
    except FileExistsError:
        pass
    except OSError:  # no hard links on this file system: the last writer wins
        os.replace(temporary_path, path)
        return
    os.unlink(temporary_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A folder that this process has claimed."""

    folder: Path
    file: int  # descriptor of its lock file, which is locked

    def give_back(self) -> None:
        """Remove the folder and everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.file)


def claim(parent: Path, *, prefix: str) -> Claim:
    """Create a folder in `parent` that only its owner can access, and claim it. Raises OSError."""
    for _ in range(_CLAIM_ATTEMPTS):
        folder = parent / f"{prefix}{secrets.token_hex(6)}"
        folder.mkdir(mode=0o700)
        lock = lock_file(folder)
        if lock is None:  # before it was locked, another process took it for abandoned
            continue
        try:
            if try_lock(lock) and _is_lock_of(lock, folder):
                return Claim(folder=folder, file=lock)
        except OSError:  # a file system without locks
            os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        os.close(lock)
    raise OSError(errno.EBUSY, "other processes remove every new folder as abandoned", str(parent))


@contextlib.contextmanager
def abandoned(folders: Iterable[Path]) -> Iterator[list[Path]]:
    """Yield those of the claimed folders whose owners have died.

    The folders are locked until the context ends, so no other process handles them until
    then. Raises OSError.
    """
    locks: list[int] = []
    abandoned_folders: list[Path] = []
    try:
        for folder in folders:
            lock = lock_file(folder)
            if lock is None:  # the owner has just removed the folder
                continue
            locks.append(lock)
            if try_lock(lock) and _is_lock_of(lock, folder):
                abandoned_folders.append(folder)
        yield abandoned_folders
    finally:
        for lock in locks:
            os.close(lock)


def _is_lock_of(file: int, folder: Path) -> bool:
    """Whether an open file is still the lock file of a folder: another process may have removed the
    folder before this file was locked, and one that claims it may have created a new lock file.
    """
    try:
        return os.path.samestat(os.fstat(file), os.lstat(folder / LOCK))
    except FileNotFoundError:
        return False


def sweep(parent: Path, *, prefix: str) -> None:
    """Remove the folders that dead processes of this user left in `parent`, as far as possible."""
    with contextlib.suppress(OSError), abandoned(_own_folders(parent, prefix)) as folders:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def living(parent: Path, *, prefix: str) -> list[Path]:
    """The folders in `parent` whose owners, processes of this user, are alive. Raises OSError."""
    folders = []
    for folder in _own_folders(parent, prefix):
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if not try_lock(lock):
                    folders.append(folder)
            finally:
                os.close(lock)
    return folders


def lock_file(folder: Path) -> int | None:
    """Open the lock file of a folder. Returns its descriptor; None if the folder is gone."""
    try:
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None


def try_lock(file: int) -> bool:
    """Lock an open file. Returns False if another process holds the lock.

    Raises OSError if the file system lacks locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _own_folders(parent: Path, prefix: str) -> list[Path]:
    """The folders with this prefix that belong to this user. Other users may also use `parent`."""
    folders = []
    with os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700:
                    folders.append(Path(entry.path))
    return folders
