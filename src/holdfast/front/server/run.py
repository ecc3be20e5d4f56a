"""Run the application: bind the port, load the certificate, start uvicorn's server, and stop it in
order.
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
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from holdfast.config import ServerSettings
from holdfast.errors import AddressInUse, ConfigError
from holdfast.front.server.connections import Addresses, BoundedProtocol
from holdfast.front.server.guard import trusted_networks
from holdfast.front.server.services import Services

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_LAST_WORDS_SECONDS = 1.0
_LOOK_SECONDS = 0.1  # how often a second signal is looked for
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ServerCertificate:
    """What clients are shown. Loop's thread only."""

    def __init__(self, *, certificate: str, key: str) -> None:
        """Paths of PEM files: the certificate with those that vouch for it behind it, and its key.

        Raises ConfigError.
        """
        self._certificate, self._key = certificate, key
        self._current = self._read()
        # A listener keeps its context for good, so this one only passes each handshake on to the
        # one that is in force.
        self.context = self._read()
        self.context.sni_callback = self._hand_over  # called without a name as well

    def reload(self) -> None:
        """Take the files as they are now, for new connections; with files that cannot be used, all
        stays as it is.
        """
        try:
            self._current = self._read()
        except ConfigError as error:
            _log.error("the certificate was not renewed, the one before stays in use: %s", error)
        else:
            _log.info("new connections get the certificate as it is now in %s", self._certificate)

    def _hand_over(
        self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._current

    def _read(self) -> ssl.SSLContext:
        for setting, path in (
            ("server.tls_cert", self._certificate),
            ("server.tls_key", self._key),
        ):
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"{setting}: {path}: {error.strerror}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"server.tls_cert, server.tls_key: {_unusable(error)}: {self._certificate}, "
                f"{self._key}"
            ) from None
        return context


def certificate_of(settings: ServerSettings) -> ServerCertificate | None:
    """The certificate that is set; None where none is.

    Raises ConfigError in one line when it cannot be used.
    """
    return (
        ServerCertificate(certificate=settings.tls_cert, key=settings.tls_key)
        if settings.tls_cert
        else None
    )


def _no_password() -> str:
    # Without this, OpenSSL would ask on the terminal.
    raise ValueError("the key is locked by a password, which a server cannot type")


def _unusable(error: Exception) -> str:
    if not isinstance(error, ssl.SSLError):
        return str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    return "these files are no certificate and key in PEM form"


def server(
    app: Starlette,
    settings: ServerSettings,
    *,
    on_started: Callable[[], None],
    certificate: ServerCertificate | None = None,
) -> HttpServer:
    """A server of `create_application`'s application, for whoever has a loop: `await
    server.serve(sockets=[listener])`.

    It serves until SIGINT or SIGTERM, then answers what runs and refuses what is new; a second
    signal ends it at once. With a certificate it speaks HTTPS.
    """
    config = uvicorn.Config(
        app,
        http=functools.partial(  # type: ignore[arg-type]  # uvicorn calls it as it would call the class
            BoundedProtocol,
            settings=settings,
            dialects=app.state.dialects,
            addresses=Addresses(
                settings.max_connections_per_address,
                trusted=trusted_networks(settings.trusted_proxies),
            ),
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
    services: Services = app.state.services
    return HttpServer(
        config,
        services=services,
        on_started=on_started,
        shutdown_seconds=settings.shutdown_seconds,
        certificate=certificate,
    )


class HttpServer(uvicorn.Server):
    """uvicorn's server that says when it has started, and that returns after a signal instead of
    raising it again.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        services: Services,
        on_started: Callable[[], None],
        shutdown_seconds: float,
        certificate: ServerCertificate | None = None,
    ) -> None:
        super().__init__(config)
        self._certificate, self._drain, self._background = (
            certificate,
            services.drain,
            services.running.tasks,
        )
        self._library, self._held = services.library, services.held
        self._on_started, self._shutdown_seconds = on_started, shutdown_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then call `on_started`."""
        if self._certificate is not None:
            self.config.ssl = self._certificate.context
        await super().startup(sockets=sockets)
        if self.started and not self.should_exit:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: running answers end by themselves, or are cut and get a moment to say so; then no
        more connections.

        The port stays open until then: who comes meanwhile, a load balancer's question for /health
        too, is told in words that the server is stopping, and when to try again.
        """
        await self._drained()
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in tuple(self.server_state.connections):
            connection.shutdown()  # closes those that wait for a request
        for task in self.server_state.tasks:
            task.cancel()
        await self._ended(_LAST_WORDS_SECONDS)
        for connection in tuple(self.server_state.connections):
            # who does not read what was written to it would be waited for
            connection.transport.abort()
        await self._ended(_LAST_WORDS_SECONDS)
        await self.lifespan.shutdown()

    async def _drained(self) -> None:
        self._drain.begin(self._shutdown_seconds)
        self._library.stop()
        await self._held.end_lost()
        self.server_state.default_headers = [
            *self.server_state.default_headers,
            (b"connection", b"close"),
        ]
        for connection in tuple(self.server_state.connections):
            if connection.is_answering:  # type: ignore[union-attr]  # all are BoundedProtocol's
                connection.shutdown()  # closes it behind the answer
        # What comes from now on is short: it is refused, looks at something, or ends it.
        running = {*self.server_state.tasks, *self._background}
        if running and not self.force_exit:
            _log.info(
                "waiting for %s, %g s at most; press Ctrl-C again to end now",
                _answers(running),
                self._shutdown_seconds,
            )
        while running and not self.force_exit and self._drain.seconds_left:
            _, running = await asyncio.wait(
                running, timeout=min(_LOOK_SECONDS, self._drain.seconds_left)
            )
        if running:
            _log.info("%s cut off", _answers(running))
        else:
            await self._ended(_LAST_WORDS_SECONDS)

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
        # One that comes before the first was acted upon is the same once more: some send it to a
        # process and to its group.
        self.force_exit = self.force_exit or self._drain.is_on
        self.should_exit = True


def _answers(tasks: Collection[asyncio.Task[None]]) -> str:
    return "1 answer" if len(tasks) == 1 else f"{len(tasks)} answers"


def listen(settings: ServerSettings) -> socket.socket:
    """A bound socket. Raises ConfigError in one line when the address is taken or not ours."""
    host, port = settings.host.strip("[]"), settings.port
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"server.host {settings.host!r} is not an address of this machine: {error}"
        ) from None
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
        return ConfigError(
            f"{where} may not be used by this user; choose a port from 1024 on (--port)"
        )
    return ConfigError(f"cannot listen on {where}: {error.strerror}")
