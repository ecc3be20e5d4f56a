"""Whether files of the Hub's cache are what the Hub has: each lies under the name of its hash,
which is computed again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.errors import ModelLoadError

_SHA256 = re.compile(r"[0-9a-f]{64}")  # of files in Git LFS and Xet: those of weights
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_CHUNK_BYTES = 8 << 20


def check_files(files: Iterable[Path], *, read: Callable[[int], None] = lambda size: None) -> None:
    """Hash files of a snapshot.

    One that is damaged is removed, so that it is fetched anew the next time.

    read: told of each chunk's bytes. Raises ModelLoadError that names the damaged ones.
    """
    damaged = [file for file in files if not _is_whole(file, read)]
    for file in damaged:
        os.unlink(file.resolve())
        file.unlink(missing_ok=True)
    if damaged:
        names = ", ".join(sorted(file.name for file in damaged))
        raise ModelLoadError(
            f"damaged on the way from the Hub, and removed: {names}; try again to fetch it anew"
        )


def _is_whole(file: Path, read: Callable[[int], None]) -> bool:
    """True as well for files of which the cache does not tell the hash (copied instead of linked)."""
    blob = file.resolve()
    if _SHA256.fullmatch(blob.name):
        digest = hashlib.sha256()
    elif _GIT_SHA1.fullmatch(blob.name):
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    else:
        return True
    with blob.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
            read(len(chunk))
    return digest.hexdigest() == blob.name
