"""Runs the application: binds the port, makes uvicorn's server, and stops it in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from holdfast.config import ServerSettings
from holdfast.errors import AddressInUse, ConfigError
from holdfast.http.server.connections import Addresses, BoundedProtocol
from holdfast.http.server.tls import ServerCertificate

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_LAST_WORDS_SECONDS = 1.0
_LOOK_SECONDS = 0.1  # how often a second signal is looked for
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def server(
    app: Starlette, settings: ServerSettings, *, on_started: Callable[[], None], certificate: ServerCertificate | None = None
) -> HttpServer:
    """A server of `create_application`'s application, for whoever has a loop: `await server.serve(sockets=[listener])`.

    It serves until SIGINT or SIGTERM and ends in order; a second signal ends it at once. With a certificate it speaks HTTPS.
    """
    config = uvicorn.Config(
        app,
        http=functools.partial(  # type: ignore[arg-type]  # uvicorn calls it as it would call the class
            BoundedProtocol,
            settings=settings,
            dialects=app.state.dialects,
            addresses=Addresses(settings.max_connections_per_address),
        ),
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=settings.keep_alive_seconds,  # type: ignore[arg-type]  # given to call_later
    )
    return HttpServer(config, on_started=on_started, shutdown_seconds=settings.shutdown_seconds, certificate=certificate)


class HttpServer(uvicorn.Server):
    """uvicorn's server that says when it has started, and that returns after a signal instead of raising it again."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        on_started: Callable[[], None],
        shutdown_seconds: float,
        certificate: ServerCertificate | None = None,
    ) -> None:
        super().__init__(config)
        self._certificate = certificate
        self._on_started, self._shutdown_seconds = on_started, shutdown_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then call `on_started`."""
        if self._certificate is not None:
            self.config.ssl = self._certificate.context
        await super().startup(sockets=sockets)
        if self.started and not self.should_exit:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: no new connections, then running answers end by themselves, or are cut and get a moment to say so."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in tuple(self.server_state.connections):
            connection.shutdown()  # closes those that wait for a request
        await self._wait_for_answers()
        for task in self.server_state.tasks:
            task.cancel()
        await self._ended(_LAST_WORDS_SECONDS)
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()  # who does not read what was written to it would be waited for
        await self._ended(_LAST_WORDS_SECONDS)
        await self.lifespan.shutdown()

    async def _wait_for_answers(self) -> None:
        if not self.server_state.tasks or self.force_exit:
            return
        limit = self._shutdown_seconds
        _log.info("waiting for %s, %g s at most; press Ctrl-C again to end now", self._running(), limit)
        give_up_at = time.monotonic() + limit
        while self.server_state.tasks and not self.force_exit and time.monotonic() < give_up_at:
            await asyncio.wait(tuple(self.server_state.tasks), timeout=_LOOK_SECONDS)
        if self.server_state.tasks:
            _log.info("%s cut off", self._running())

    def _running(self) -> str:
        number = len(self.server_state.tasks)
        return "1 answer" if number == 1 else f"{number} answers"

    async def _ended(self, limit_seconds: float) -> None:
        if self.server_state.tasks:
            await asyncio.wait(tuple(self.server_state.tasks), timeout=limit_seconds)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal; on the second one without waiting for running answers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def listen(settings: ServerSettings) -> socket.socket:
    """A bound socket. Raises ConfigError in one line when the address is taken or not ours."""
    host, port = settings.host.strip("[]"), settings.port
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"server.host {settings.host!r} is not an address of this machine: {error}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        url = _url(str(address[0]), int(address[1]), scheme=settings.scheme)
        raise _why_not(error, settings, url=url) from None
    return listener


def url_of(listener: socket.socket, *, scheme: str = "http") -> str:
    """The address of a bound socket as clients write it."""
    host, port = listener.getsockname()[:2]
    return _url(host, port, scheme=scheme)


def _url(host: str, port: int, *, scheme: str) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{shown}:{port}"


def _why_not(error: OSError, settings: ServerSettings, *, url: str) -> ConfigError:
    where = f"port {settings.port} on {settings.host}"
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(host=settings.host, port=settings.port, url=url)
    if error.errno == errno.EACCES:
        return ConfigError(f"{where} may not be used by this user; choose a port from 1024 on (--port)")
    return ConfigError(f"cannot listen on {where}: {error.strerror}")
