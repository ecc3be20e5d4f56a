"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

_NOT_OFFERED = {errno.EINVAL, errno.ENOTSUP, errno.ENOTTY}
_MOST_OF_NAME = 60  # characters, of up to 4 bytes; file systems take names of 255 bytes


def sync_to_drive(file: int) -> None:
    """Make the content of an open file survive a power cut, and with it all that was synced on that
    drive before.

    On macOS fsync leaves data in the cache of the drive; only F_FULLFSYNC flushes that, and takes
    longer. Some volumes, mostly network ones, do not offer it. Source: Apple's fsync(2) and
    fcntl(2).
    """
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        try:
            fcntl.fcntl(file, full_sync)
            return
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
    os.fsync(file)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which only its owner may read; it takes its place when the block ends, and
    is gone when that fails.

    What must outlive a power cut has to be synced in the block.
    """
    with _written_beside(path, placed=os.replace) as file:
        yield file


@contextlib.contextmanager
def first_file(path: Path) -> Iterator[IO[bytes]]:
    """Like `whole_file`, but a file that is there when the block ends stays: several that begin at
    once all find one.
    """
    with _written_beside(path, placed=_placed_if_first) as file:
        yield file


@contextlib.contextmanager
def _written_beside(path: Path, *, placed: Callable[[str, Path], None]) -> Iterator[IO[bytes]]:
    handle, fresh = tempfile.mkstemp(prefix=f".{path.name[:_MOST_OF_NAME]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        placed(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise


def _placed_if_first(fresh: str, path: Path) -> None:
    try:
        os.link(fresh, path)
    except FileExistsError:
        pass
    except OSError:
        # a file system without hard links: then the last of those that begin within a moment counts
        os.replace(fresh, path)
        return
    os.unlink(fresh)
