"""Runs the application: binds the port, starts uvicorn, and stops in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from holdfast.config import ServerSettings
from holdfast.errors import ConfigError
from holdfast.http.unread import PatientProtocol

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
_LAST_WORDS_SECONDS = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(app: ASGIApp, settings: ServerSettings, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` gets the URL once connections are accepted and the application has started.

    Raises ConfigError when the address cannot be used. Returns after a stop in order; a second signal stops at once.
    """
    with listen(settings) as listener:
        url = url_of(listener)
        server(app, settings, on_started=lambda: on_ready(url)).run(sockets=[listener])


def server(app: ASGIApp, settings: ServerSettings, *, on_started: Callable[[], None]) -> Server:
    """A server that is ready to run, for whoever has a loop of their own: `await server.serve(sockets=[listener])`."""
    config = uvicorn.Config(
        app,
        http=functools.partial(PatientProtocol, settings=settings),  # type: ignore[arg-type]  # called as the class would be
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_seconds),
    )
    return Server(config, on_started=on_started)


class Server(uvicorn.Server):
    """uvicorn's server that says when it has started, and that returns after a signal instead of raising it again."""

    def __init__(self, config: uvicorn.Config, *, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then tell."""
        await super().startup(sockets=sockets)
        if self.started and not self.should_exit:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; answers that took too long are cancelled, and get a moment to say so to their clients."""
        await super().shutdown(sockets)
        remaining = set(self.server_state.tasks)
        if self.force_exit:
            for task in remaining:
                task.cancel()
        if remaining:
            await asyncio.wait(remaining, timeout=_LAST_WORDS_SECONDS)

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
        raise ConfigError(_why_not(error, settings)) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The address of a bound socket as clients write it."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _why_not(error: OSError, settings: ServerSettings) -> str:
    where = f"port {settings.port} on {settings.host}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is taken by another program; stop it or choose another port (--port)"
    if error.errno == errno.EACCES:
        return f"{where} may not be used by this user; choose a port from 1024 on (--port)"
    return f"cannot listen on {where}: {error.strerror}"
