"""Clients that do not read: their connection is closed after a while, which ends whatever is made for them."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from holdfast.config import ServerSettings

_MOST_UNSENT_BYTES = 128 << 10  # in the system's buffer: without a bound, Linux takes 4 MB for each client that does not read

_log = logging.getLogger(__name__)


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 over httptools, with an end to the patience with clients that read nothing.

    The transport says when its buffer is full and when the client has read most of it. What lies between is timed, for
    answers of any kind. Who reads slowly is not meant: every 50 kB or so begin a new time.
    """

    def __init__(self, *, settings: ServerSettings, config: Config, **given: Any) -> None:
        super().__init__(config=config, **given)
        self._stalled_seconds = settings.stalled_seconds
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """A client has connected."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux and macOS have it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT_BYTES)

    def pause_writing(self) -> None:
        """The buffer is full: the application waits from now on."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._stalled_seconds, self._give_up)

    def resume_writing(self) -> None:
        """The client has read on."""
        self._stop_timing()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by whomever."""
        self._stop_timing()
        super().connection_lost(exc)

    def _stop_timing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _give_up(self) -> None:
        self._stall = None
        address = ":".join(map(str, self.client or ("?",)))
        path = self.scope.get("path", "?") if self.scope else "?"
        _log.warning("%s has read nothing of %s for %g s; cancelled", address, path, self._stalled_seconds)
        self.transport.abort()  # not close: that would wait until the client has read the rest
