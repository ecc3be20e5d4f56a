"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

_MOST_OF_NAME = 60  # characters, of up to 4 bytes; file systems take names of 255 bytes


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which only its owner may read; it takes its place when the block ends, and is gone when that fails.

    What must outlive a power cut has to be synced in the block.
    """
    with _written_beside(path, placed=os.replace) as file:
        yield file


@contextlib.contextmanager
def first_file(path: Path) -> Iterator[IO[bytes]]:
    """Like `whole_file`, but a file that is there when the block ends stays: several that begin at once all find one."""
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
    except OSError:  # a file system without hard links: then the last of those that begin within a moment counts
        os.replace(fresh, path)
        return
    os.unlink(fresh)
