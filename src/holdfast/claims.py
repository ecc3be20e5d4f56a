"""Folders that belong to a process for as long as it lives: a locked file in each of them says so,
also after a `kill -9`.

The lock is the kernel's (flock): it ends with the process, needs no process ids, and is not
inherited by other programs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LOCK = "lock"
_ATTEMPTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A folder that this process has claimed."""

    folder: Path
    file: int  # open and locked

    def give_back(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.file)


def claim(parent: Path, *, prefix: str) -> Claim:
    """Make a folder in `parent` that only its owner may look into, and claim it. Raises OSError."""
    for _ in range(_ATTEMPTS):
        folder = parent / f"{prefix}{secrets.token_hex(6)}"
        folder.mkdir(mode=0o700)
        file = lock_file(folder)
        if file is None:  # another process took the new, still unlocked folder for an abandoned one
            continue
        try:
            if try_lock(file) and folder.is_dir():
                return Claim(folder=folder, file=file)
        except OSError:  # a file system without locks
            os.close(file)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        os.close(file)
    raise OSError(
        errno.EBUSY, "other processes take every new folder for an abandoned one", str(parent)
    )


@contextlib.contextmanager
def abandoned(folders: Iterable[Path]) -> Iterator[list[Path]]:
    """Those of the folders whose owners are dead; they are nobody else's until the context ends.

    Raises OSError.
    """
    files: list[int] = []
    found: list[Path] = []
    try:
        for folder in folders:
            file = lock_file(folder)
            if file is None:  # its owner has just given it up
                continue
            files.append(file)
            if try_lock(file):
                found.append(folder)
        yield found
    finally:
        for file in files:
            os.close(file)


def sweep(parent: Path, *, prefix: str) -> None:
    """Remove what dead processes of this user have left in `parent`.

    What cannot be removed stays for the next time.
    """
    with contextlib.suppress(OSError), abandoned(_ours(parent, prefix)) as folders:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def living(parent: Path, *, prefix: str) -> list[Path]:
    """The folders in `parent` of processes of this user that live. Raises OSError."""
    found = []
    for folder in _ours(parent, prefix):
        with contextlib.suppress(FileNotFoundError):
            file = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if not try_lock(file):
                    found.append(folder)
            finally:
                os.close(file)
    return found


def lock_file(folder: Path) -> int | None:
    """The open file whose lock says whether the owner of a folder lives; None when somebody has
    removed the folder.
    """
    try:
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None


def try_lock(file: int) -> bool:
    """Lock an open file unless another process has.

    Raises OSError where the file system knows no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _ours(parent: Path, prefix: str) -> list[Path]:
    """Folders of that kind of name that belong to this user: others may have put anything into a
    shared `parent`.
    """
    found = []
    with os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700:
                    found.append(Path(entry.path))
    return found
