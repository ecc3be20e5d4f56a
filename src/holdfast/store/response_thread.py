"""The thread that works with the file of responses, so that nobody else waits for the disk."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from holdfast.config import DEFAULT_RESPONSES, ResponsesSettings
from holdfast.errors import ResponsesUnavailable
from holdfast.store.response_database import FileDamaged
from holdfast.store.responses import ResponseFile

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger("holdfast.store")


class ResponseStore:
    """A file of responses for an asyncio loop: what is asked of it is done in order, in a thread of
    its own.
    """

    def __init__(
        self, folder: Path | None = None, limits: ResponsesSettings = DEFAULT_RESPONSES
    ) -> None:
        self.limits = limits
        self._file = ResponseFile(folder, limits)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="responses")

    def call(
        self, method: Callable[Concatenate[ResponseFile, P], T], *given: P.args, **named: P.kwargs
    ) -> asyncio.Future[T]:
        """Begin to do something with the file: `await store.call(ResponseFile.record, …)`.

        It is done even if nobody waits.

        Raises what the method raises, and ResponsesUnavailable.
        """
        return asyncio.wrap_future(self._thread.submit(partial(self._do, method, *given, **named)))

    async def close(self) -> None:
        """Finish what was begun, and close the file."""
        await asyncio.wrap_future(self._thread.submit(self._file.close))
        self._thread.shutdown(wait=False)

    def _do(
        self, method: Callable[Concatenate[ResponseFile, P], T], *given: P.args, **named: P.kwargs
    ) -> T:
        try:
            try:
                return method(self._file, *given, **named)
            except FileDamaged:
                return method(self._file, *given, **named)
        except (sqlite3.Error, OSError, FileDamaged) as error:
            logger.warning("the file of responses cannot be used: %s", error)
            raise ResponsesUnavailable(f"stored responses cannot be used now: {error}") from error
