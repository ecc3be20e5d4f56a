"""Runs the application over HTTP: binds the port, loads the certificate, limits connections, and
shuts down in an orderly way.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any

import httptools
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from holdfast.config import ServerSettings
from holdfast.errors import AddressInUse, ConfigError
from holdfast.files import read_regular
from holdfast.front.server.dialect import NO_SNIFFING, DialectTable, problem_body
from holdfast.front.server.guard import Network, is_trusted, trusted_networks
from holdfast.front.server.problem import Problem
from holdfast.front.server.services import Services
from holdfast.machine.clocks import AwakeTimer, awake_clock

MOST_HEAD_BYTES = 64 * 1024  # request line and headers
# size of a socket's send buffer; by default, Linux uses 4 MB for each client that does not read
_MOST_UNSENT_BYTES = 128 << 10
_LOG_SECONDS = 60.0  # at most one line of the log per address in this time
_MOST_ADDRESSES_LOGGED = 1000
_BACKLOG = 2048  # connections that the system holds until they are accepted
_LAST_WORDS_SECONDS = 1.0  # time for answers that were cut off to send their error
_POLL_SECONDS = 0.1  # how often a drain checks for a second signal
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn's server, which reports when it has started, and returns after a signal.

    It serves until SIGINT or SIGTERM; then it refuses new requests and finishes running answers. A
    second signal ends the server immediately. Start it with `await
    server.serve(sockets=[listener])`.
    """

    def __init__(
        self,
        app: Starlette,
        settings: ServerSettings,
        *,
        on_started: Callable[[], None],
        certificate: ServerCertificate | None = None,
    ) -> None:
        """app: the result of `create_application`. certificate: if given, HTTPS is used."""
        connections_by_address = ConnectionCounter(
            settings.max_connections_per_address, trusted=trusted_networks(settings.trusted_proxies)
        )
        protocol = functools.partial(
            BoundedProtocol,
            settings=settings,
            dialects=app.state.dialects,
            connections_by_address=connections_by_address,
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,  # type: ignore[arg-type]  # uvicorn only calls this
                loop="uvloop",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=settings.keep_alive_seconds,  # type: ignore[arg-type]  # for call_later
            )
        )
        services: Services = app.state.services
        self._services = services
        self._drain = services.access.drain
        self._certificate = certificate
        self._on_started = on_started
        self._shutdown_seconds = settings.shutdown_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, then call `on_started`."""
        if self._certificate is not None:
            self.config.ssl = self._certificate.context
        await super().startup(sockets=sockets)
        if self.started and not self.should_exit:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running answers finish, or cut them off when their time is up; then close everything.

        The port stays open until then: new requests, and a load balancer's GET /health, are told
        that the server is stopping and when to try again.
        """
        await self._drain_answers()
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in tuple(self.server_state.connections):
            connection.shutdown()  # closes idle connections
        for task in self.server_state.tasks:
            task.cancel()
        await self._wait_for_tasks(_LAST_WORDS_SECONDS)
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()  # abort() does not wait for clients that read nothing
        await self._wait_for_tasks(_LAST_WORDS_SECONDS)
        await self.lifespan.shutdown()

    async def _drain_answers(self) -> None:
        """Refuse new work and wait until running answers have ended.

        The wait ends early at the time limit or a second signal.
        """
        self._drain.begin(self._shutdown_seconds)
        self._services.models.library.stop()
        await self._services.answers.resumable.cancel_lost()  # those whose client is gone
        self.server_state.default_headers = [
            *self.server_state.default_headers,
            (b"connection", b"close"),
        ]
        for connection in tuple(self.server_state.connections):
            if connection.is_answering:  # type: ignore[union-attr]  # all are BoundedProtocol
                connection.shutdown()  # closes the connection after the answer
        # From now on, requests are short, because they are refused, only read some state, or end
        # something.
        running = {*self.server_state.tasks, *self._services.answers.resumable.tasks}
        if running and not self.force_exit:
            _log.info(
                "waiting for %s, at most %g s; press Ctrl-C again to exit now",
                _answer_count(running),
                self._shutdown_seconds,
            )
        while running and not self.force_exit and self._drain.seconds_left:
            _, running = await asyncio.wait(
                running, timeout=min(_POLL_SECONDS, self._drain.seconds_left)
            )
        if running:
            _log.info("%s cut off", _answer_count(running))
        else:
            await self._wait_for_tasks(_LAST_WORDS_SECONDS)

    async def _wait_for_tasks(self, limit_seconds: float) -> None:
        if self.server_state.tasks:
            await asyncio.wait(tuple(self.server_state.tasks), timeout=limit_seconds)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal; on the second signal, stop without waiting for running answers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous_handlers = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: have uvicorn begin the shutdown, or hurry it up.

        The arguments are ignored: all signals of `_SIGNALS` mean the same.
        """
        # Until the drain has begun, a second signal is treated like the first, because some
        # programs signal both a process and its group.
        self.force_exit = self.force_exit or self._drain.is_on
        self.should_exit = True


def _answer_count(tasks: Collection[asyncio.Task[None]]) -> str:
    return "1 answer" if len(tasks) == 1 else f"{len(tasks)} answers"


def listen(settings: ServerSettings) -> socket.socket:
    """Bind a socket to the configured address and port.

    Raises ConfigError if the address is in use or does not belong to this machine.
    """
    host, port = settings.host.strip("[]"), settings.port
    try:
        addresses = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"server.host {settings.host!r} is not an address of this machine: {error}"
        ) from None
    family, socket_type, protocol, _, address = addresses[0]
    listener = socket.socket(family, socket_type, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        url = _url(str(address[0]), int(address[1]), scheme=settings.scheme)
        raise _bind_error(error, settings, url=url) from None
    return listener


def url_of(listener: socket.socket, *, scheme: str = "http") -> str:
    """The URL of a bound socket, as clients write it."""
    host, port = listener.getsockname()[:2]
    return _url(host, port, scheme=scheme)


def _url(host: str, port: int, *, scheme: str) -> str:
    """The URL of an address; for a wildcard address, with the loopback address, which works."""
    url_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
        host, f"[{host}]" if ":" in host else host
    )
    return f"{scheme}://{url_host}:{port}"


def _bind_error(error: OSError, settings: ServerSettings, *, url: str) -> ConfigError:
    """The error to show if the socket cannot be bound. url: what would have been served there."""
    address = f"port {settings.port} on {settings.host}"
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(host=settings.host, port=settings.port, url=url)
    if error.errno == errno.EACCES:
        return ConfigError(f"this user may not use {address}; choose a port from 1024 up (--port)")
    return ConfigError(f"cannot listen on {address}: {error.strerror}")


class ServerCertificate:
    """The TLS certificate. Only use it in the event loop's thread."""

    def __init__(self, *, certificate: str, key: str) -> None:
        """certificate, key: paths of PEM files; the certificate's file also contains its chain.

        Raises ConfigError if a file cannot be used.
        """
        self._certificate, self._key = certificate, key
        self._current_context = self._read()
        # A listener cannot change its TLS context, so this context passes each handshake to the
        # current one.
        self.context = self._read()
        # called at each handshake, even if the client names no host
        self.context.sni_callback = self._use_current_context

    def reload(self) -> None:
        """Read the files again and use them for new connections.

        If the files are invalid, nothing changes.
        """
        try:
            self._current_context = self._read()
        except ConfigError as error:
            _log.error("the certificate is not reloaded: %s", error)
        else:
            _log.info("the certificate is reloaded from %s", self._certificate)

    def _use_current_context(
        self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._current_context

    def _read(self) -> ssl.SSLContext:
        """Create a TLS context from the files. Raises ConfigError if one cannot be used."""
        for setting, path in (
            ("server.tls_cert", self._certificate),
            ("server.tls_key", self._key),
        ):
            try:
                read_regular(path)
            except OSError as error:
                raise ConfigError(f"{setting}: {path}: {error.strerror}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"server.tls_cert, server.tls_key: {_load_failure(error)}: {self._certificate}, "
                f"{self._key}"
            ) from None
        return context


def _no_password() -> str:
    # without this, OpenSSL would ask for a password on the terminal
    raise ValueError("the key needs a password; use a key without one")


def _load_failure(error: Exception) -> str:
    """Why OpenSSL cannot use certificate and key, in words for the user."""
    if not isinstance(error, ssl.SSLError):
        return str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key does not match the certificate"
    return "not a certificate and a key in PEM format"


class ConnectionCounter:
    """Counts connections by client address, and logs at most one line per address and minute."""

    def __init__(
        self,
        max_connections: int,
        *,
        trusted: Sequence[Network] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Limit each address to `max_connections` connections.

        trusted: proxies, which are not limited, because they connect for many clients.
        """
        self._max_connections = max_connections
        self._trusted = trusted
        self._clock = clock
        self._open: Counter[str] = Counter()  # open connections by address
        self._logged_at: dict[str, float] = {}  # time of the last line about each address

    def has_room(self, address: str) -> bool:
        """Whether an address may open one more connection."""
        return self._open[address] < self._max_connections or is_trusted(address, self._trusted)

    def count_opened(self, address: str) -> None:
        """Count a new connection."""
        self._open[address] += 1

    def count_closed(self, address: str) -> None:
        """Count a closed connection."""
        self._open[address] -= 1
        if self._open[address] <= 0:
            del self._open[address]

    def log(self, address: str, why: str) -> None:
        """Log why a connection was closed.

        A line is not logged if the last line about this address is less than a minute old.
        """
        now = self._clock()
        if now - self._logged_at.get(address, -_LOG_SECONDS) < _LOG_SECONDS:
            return
        if len(self._logged_at) >= _MOST_ADDRESSES_LOGGED:
            self._logged_at = {
                other: at for other, at in self._logged_at.items() if now - at < _LOG_SECONDS
            }
        if len(self._logged_at) < _MOST_ADDRESSES_LOGGED:
            self._logged_at[address] = now
            _log.info("%s: %s (no more such lines about this address for a minute)", address, why)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with more limits; uvicorn itself limits only idle connections.

    The head of a request (request line and headers) has a time limit. So does a pause within its
    body, unless the application is slow to read. An answer may take any time, but a connection is
    closed if the client does not read for too long: the transport reports when its buffer is full
    and when the client has read most of the buffer. A slow client stays connected, because the time
    limit restarts after every 50 kB or so. Time in which the machine sleeps does not count.

    A connection is refused if its address has too many, or if what it sends breaks a limit; from
    then on, its data is ignored.
    """

    def __init__(
        self,
        *,
        settings: ServerSettings,
        dialects: DialectTable,
        connections_by_address: ConnectionCounter,
        config: uvicorn.Config,
        **uvicorn_arguments: Any,
    ) -> None:
        super().__init__(config=config, **uvicorn_arguments)
        self._settings = settings
        self._dialects = dialects
        self._connections_by_address = connections_by_address
        self._address = ""  # of the client
        self._is_counted = False  # the connection counts for its address
        self._is_refused = False
        self._in_body = False  # the head is complete, and the body may not be
        self._is_idle = True  # the connection is between two messages
        self._unparsed_bytes = 0  # bytes received since the parser last made progress
        self._body_at = 0.0  # time at which the body last made progress
        self._timer: AwakeTimer | None = None  # limits the head or the body
        self._stall_timer: AwakeTimer | None = None  # set while the transport's buffer is full

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Count a new connection; refuse it if its address has too many."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        # Linux and macOS have this option
        if connection is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT_BYTES)
        self._address = self.client[0] if self.client else ""
        if self._connections_by_address.has_room(self._address):
            self._connections_by_address.count_opened(self._address)
            self._is_counted = True
            self._start_timer(self._settings.head_seconds, self._head_is_late)
        else:
            max_connections = self._settings.max_connections_per_address
            self._refuse(
                429,
                "too_many_connections",
                f"more than {max_connections} connections from one address",
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection, whichever side closed it."""
        self._stop_timer()
        self._stop_stall_timer()
        if self._is_counted:
            self._is_counted = False
            self._connections_by_address.count_closed(self._address)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Make the application wait, because the transport's buffer is full."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = awake_clock().call_later(
                self._settings.stalled_seconds, self._cancel_stalled
            )

    def resume_writing(self) -> None:
        """Let the application continue, because the client has read most of the buffer."""
        self._stop_stall_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client.

        Invalid bytes are answered with status 400, and logged at most once a minute.
        """
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        if self._is_idle and self._timer is None:
            self._start_timer(self._settings.head_seconds, self._head_is_late)
        self._unparsed_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # the upgrade is not supported, so the request is answered as HTTP/1.1
            self._unparsed_bytes = 0
        except httptools.HttpParserError:
            self._refuse(400, "invalid_http", "the data received is not HTTP/1.1")
        self._refuse_large_head(self._unparsed_bytes)

    def on_message_begin(self) -> None:
        """Start the time limit of a head at its first byte."""
        self._is_idle = False
        if self._timer is None:
            self._start_timer(self._settings.head_seconds, self._head_is_late)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header.

        Trailers of a chunked body are ignored, because they would bypass all checks.
        """
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the time limit of the body, because the head is complete."""
        self._unparsed_bytes = 0
        self._refuse_large_head(
            len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        )
        if self._is_refused:
            return
        self._body_at = awake_clock().time()
        self._start_timer(self._settings.body_seconds, self._body_is_late)
        super().on_headers_complete()
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        """Take bytes of the body, from which the chunk framing has been removed."""
        if self._is_refused:
            return
        self._unparsed_bytes = 0
        # a client that already has its answer gets no more time
        if not self.cycle.response_complete:
            self._body_at = awake_clock().time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the time limit of the body, because the request is complete."""
        self._unparsed_bytes = 0
        self._in_body, self._is_idle = False, True
        self._stop_timer()
        if not self._is_refused:
            super().on_message_complete()

    @property
    def is_answering(self) -> bool:
        """Whether a request has arrived, at least in part, and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _head_is_late(self) -> None:
        """Timer: the time limit of a head is over."""
        # While an answer is sent, what arrives is part of the next request, whose time limit begins
        # when that answer is complete.
        if self.is_answering:
            self._start_timer(self._settings.head_seconds, self._head_is_late)
        elif self._is_idle:
            self.transport.close()  # no error, as no request has begun: browsers connect in advance
        else:
            self._refuse(
                408,
                "request_timeout",
                f"no complete request head was received within {self._settings.head_seconds:g} s",
            )

    def _body_is_late(self) -> None:
        """Timer: refuse the request, or wait on if bytes have arrived or the application reads
        slowly.
        """
        limit = self._settings.body_seconds
        seconds_left = (
            limit if self.flow.read_paused else self._body_at + limit - awake_clock().time()
        )
        if seconds_left > 0:
            self._start_timer(seconds_left, self._body_is_late)
        else:
            self._refuse(408, "request_timeout", f"no byte of the body arrived for {limit:g} s")

    def _cancel_stalled(self) -> None:
        """Timer: close the connection, because the client has read nothing for too long."""
        self._stall_timer = None
        address = ":".join(map(str, self.client or ("?",)))
        path = self.scope.get("path", "?") if self.scope else "?"
        _log.warning(
            "%s has read nothing of %s for %g s; cancelled",
            address,
            path,
            self._settings.stalled_seconds,
        )
        self.transport.abort()  # close() would wait for the client

    def _start_timer(self, seconds: float, on_timeout: Callable[[], None]) -> None:
        """Start the timer of the head or the body, in place of the one that may be running."""
        self._stop_timer()
        self._timer = awake_clock().call_later(
            seconds, functools.partial(self._timer_fired, on_timeout)
        )

    def _timer_fired(self, on_timeout: Callable[[], None]) -> None:
        self._timer = None
        on_timeout()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _refuse_large_head(self, size: int) -> None:
        """Refuse the connection if a head, or the part of it received so far, is too large.

        size: in bytes.
        """
        if size > MOST_HEAD_BYTES and not self._is_refused:
            self._refuse(
                431,
                "head_too_large",
                f"the head of a request is larger than {MOST_HEAD_BYTES:,} bytes",
            )

    def _refuse(self, status: int, code: str, why: str) -> None:
        """Close the connection.

        An error is sent first, unless an answer has begun, or the answers to earlier requests on
        this connection are still to be sent. why: a message for the client and the log.
        """
        self._is_refused = True
        self._stop_timer()
        self._connections_by_address.log(self._address, f"connection closed: {why}")
        if self.is_answering and (self.pipeline or self.cycle.response_started):
            self.transport.abort()  # close() would wait for the client
            return
        if not (self._in_body and self.cycle is not None and self.cycle.response_complete):
            path = self._dialects.served_path(self.scope["path"]) if self._in_body else ""
            headers = Headers(raw=list(self.scope["headers"]) if self._in_body else [])
            body = problem_body(
                Problem(status=status, code=code, message=why),
                self._dialects.for_path(path, headers),
            )
            head = (
                b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
                b"%b: %b\r\n\r\n" % (len(body), *NO_SNIFFING)
            )
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
