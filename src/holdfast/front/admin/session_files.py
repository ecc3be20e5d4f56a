"""Portable files of sessions on their way through the server: private, and gone when they are
through.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from starlette.requests import Request
from starlette.responses import StreamingResponse

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.front.server.body import body_pieces

MEDIA_TYPE = "application/octet-stream"
_PIECE_BYTES = 1 << 20
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def private_path() -> Iterator[Path]:
    """A path for one file, in a folder that nobody else may look into and that is deleted at the
    end.
    """
    with tempfile.TemporaryDirectory(
        prefix="holdfast-session-", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder) / "session"


async def take_in(request: Request, path: Path, *, limit_bytes: int) -> None:
    """Write a request's body into a file.

    Raises RequestRefused (413) beyond the limit, SessionRefused when there is no room.
    """
    try:
        with path.open("wb") as file:
            async for piece in body_pieces(request, limit_bytes=limit_bytes):
                await asyncio.to_thread(file.write, piece)
    except OSError as error:
        failure = SessionFailure.NO_ROOM if error.errno in _NO_SPACE else SessionFailure.FAILED
        raise SessionRefused(
            failure, f"the file cannot be stored for checking: {error.strerror}"
        ) from None


def sent(path: Path, *, name: str) -> StreamingResponse:
    """A file as an answer. It may be deleted as soon as this returns."""
    file = path.open("rb")
    safe = "".join(
        character if character.isascii() and (character.isalnum() or character in "._-") else "_"
        for character in name
    )
    headers = {
        "content-length": str(os.fstat(file.fileno()).st_size),
        "content-disposition": f'attachment; filename="{safe}.holdfast-session"',
    }
    return StreamingResponse(_pieces(file), headers=headers, media_type=MEDIA_TYPE)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece
