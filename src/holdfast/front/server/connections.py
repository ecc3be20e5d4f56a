"""What a connection, and an address, may hold of the server: time to send and to read, bytes of a
head, connections at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httptools
from starlette.datastructures import Headers
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from holdfast.config import ServerSettings
from holdfast.front.server.dialect import DialectTable, problem_body
from holdfast.front.server.guard import Network, is_trusted
from holdfast.front.server.problem import Problem

MOST_HEAD_BYTES = 64 * 1024
# in the system's buffer: without a bound, Linux takes 4 MB for each client that does not read
_MOST_UNSENT_BYTES = 128 << 10
_LOG_SECONDS = 60.0
_MOST_ADDRESSES_LOGGED = 1000
_log = logging.getLogger(__name__)


class Addresses:
    """Counts the connections of each address, and keeps what is logged of an address to one line a
    minute.
    """

    def __init__(
        self,
        most: int,
        *,
        trusted: Sequence[Network] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """trusted: proxies, which speak for many."""
        self._most, self._trusted, self._clock = most, trusted, clock
        self._open: Counter[str] = Counter()
        self._logged: dict[str, float] = {}

    def has_room(self, address: str) -> bool:
        """Whether an address may open one more."""
        return self._open[address] < self._most or is_trusted(address, self._trusted)

    @property
    def counted(self) -> int:
        """Addresses that have any."""
        return len(self._open)

    def opened(self, address: str) -> None:
        """One more connection."""
        self._open[address] += 1

    def closed(self, address: str) -> None:
        """One less."""
        self._open[address] -= 1
        if self._open[address] <= 0:
            del self._open[address]

    def log(self, address: str, why: str) -> None:
        """Say why a connection was ended, unless something was said of this address within a
        minute.
        """
        now = self._clock()
        if now - self._logged.get(address, -_LOG_SECONDS) < _LOG_SECONDS:
            return
        if len(self._logged) >= _MOST_ADDRESSES_LOGGED:
            self._logged = {
                other: at for other, at in self._logged.items() if now - at < _LOG_SECONDS
            }
        if len(self._logged) < _MOST_ADDRESSES_LOGGED:
            self._logged[address] = now
            _log.info(
                "%s: %s (the next such line of this address in a minute at the earliest)",
                address,
                why,
            )


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 over httptools, with limits.

    It has none of its own but for the time between two requests.

    Of a request, only the head and the silence within its body are timed: the answer takes as long
    as it takes, and while nothing is read because the application is slow, the client is not to
    blame. Of an answer, the time is bounded in which the client reads nothing of what waits for it:
    the transport says when its buffer is full and when the client has read most of it. Who reads
    slowly is not meant: every 50 kB or so begin a new time.
    """

    def __init__(
        self,
        *,
        settings: ServerSettings,
        dialects: DialectTable,
        addresses: Addresses,
        config: Config,
        **given: Any,
    ) -> None:
        super().__init__(config=config, **given)
        self._settings, self._dialects, self._addresses = settings, dialects, addresses
        self._address = ""
        self._is_counted = self._is_refused = False
        self._in_body = False
        self._is_idle = True  # between two messages
        self._unread_bytes = 0  # received since the message last came on
        self._came_on_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None  # while the buffer is full

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """A client has connected; one that has too many open gets a word and is sent away."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        # Linux and macOS have it
        if connection is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT_BYTES)
        self._address = self.client[0] if self.client else ""
        if self._addresses.has_room(self._address):
            self._addresses.opened(self._address)
            self._is_counted = True
            self._wait(self._settings.head_seconds, self._head_is_late)
        else:
            most = self._settings.max_connections_per_address
            self._refuse(
                429, "too_many_connections", f"more than {most} connections from one address"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by whomever."""
        self._stop_waiting()
        self._stop_patience()
        if self._is_counted:
            self._is_counted = False
            self._addresses.closed(self._address)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The buffer is full: the application waits from now on."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._settings.stalled_seconds, self._give_up)

    def resume_writing(self) -> None:
        """The client has read on."""
        self._stop_patience()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client.

        What is wrong with them is answered with a 400 and logged once a minute, not every time.
        """
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        if self._is_idle and self._timer is None:
            self._wait(self._settings.head_seconds, self._head_is_late)
        self._unread_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # not understood here: the request itself is answered as HTTP/1.1
            self._unread_bytes = 0
        except httptools.HttpParserError:
            self._refuse(400, "invalid_http", "what was sent is not HTTP/1.1")
        if self._unread_bytes > MOST_HEAD_BYTES and not self._is_refused:
            self._refuse(
                431,
                "head_too_large",
                f"the head of a request is larger than {MOST_HEAD_BYTES:,} bytes",
            )

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        self._is_idle = False
        if self._timer is None:
            self._wait(self._settings.head_seconds, self._head_is_late)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. What comes behind a chunked body is no header: it would reach the application
        after all checks.
        """
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole: from here on the body is waited for."""
        self._unread_bytes = 0
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MOST_HEAD_BYTES:
            self._refuse(
                431,
                "head_too_large",
                f"the head of a request is larger than {MOST_HEAD_BYTES:,} bytes",
            )
        if self._is_refused:
            return
        self._came_on_at = self.loop.time()
        self._wait(self._settings.body_seconds, self._body_is_late)
        super().on_headers_complete()
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        """Bytes of the body, without what chunks have around them."""
        if self._is_refused:
            return
        self._unread_bytes = 0
        # who has its answer already is not given more time with every byte
        if not self.cycle.response_complete:
            self._came_on_at = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request is here."""
        self._unread_bytes = 0
        self._in_body, self._is_idle = False, True
        self._stop_waiting()
        if not self._is_refused:
            super().on_message_complete()

    def _head_is_late(self) -> None:
        # a beginning of the next request; its time comes when this one is answered
        if self.is_answering:
            self._wait(self._settings.head_seconds, self._head_is_late)
        elif self._is_idle:
            self.transport.close()  # not a byte of a request: browsers connect in advance
        else:
            self._refuse(
                408,
                "request_timeout",
                f"no whole head of a request within {self._settings.head_seconds:g} s",
            )

    def _body_is_late(self) -> None:
        limit = self._settings.body_seconds
        left = limit if self.flow.read_paused else self._came_on_at + limit - self.loop.time()
        if left > 0:
            self._wait(left, self._body_is_late)
        else:
            self._refuse(408, "request_timeout", f"no byte of the body for {limit:g} s")

    def _stop_patience(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _give_up(self) -> None:
        self._stall = None
        address = ":".join(map(str, self.client or ("?",)))
        path = self.scope.get("path", "?") if self.scope else "?"
        _log.warning(
            "%s has read nothing of %s for %g s; cancelled",
            address,
            path,
            self._settings.stalled_seconds,
        )
        self.transport.abort()  # not close: that would wait until the client has read the rest

    @property
    def is_answering(self) -> bool:
        """Whether a request has come whole or in part, and its answer has not gone whole."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._late, then)

    def _late(self, then: Callable[[], None]) -> None:
        self._timer = None
        then()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, code: str, why: str) -> None:
        """End the connection; with an answer, unless one was given to this request or others are
        still to be answered.
        """
        self._is_refused = True
        self._stop_waiting()
        self._addresses.log(self._address, f"connection ended, {why}")
        if self.is_answering and (self.pipeline or self.cycle.response_started):
            self.transport.abort()  # not close: that would wait for a client which does not read
            return
        if not (self._in_body and self.cycle is not None and self.cycle.response_complete):
            path = self._dialects.served_path(self.scope["path"]) if self._in_body else ""
            headers = Headers(raw=list(self.scope["headers"]) if self._in_body else [])
            body = problem_body(
                Problem(status=status, code=code, message=why),
                self._dialects.dialect_of(path, headers),
            )
            head = (
                b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
                % len(body)
            )
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
