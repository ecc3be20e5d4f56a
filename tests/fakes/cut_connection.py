"""A TCP relay in front of a server, whose connections a test cuts."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Relay:
    """Forwards bytes between clients and the server until cut."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[socket.socket] = []
        self._is_cut = False
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                if self._is_cut:
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                self._pairs += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Close all connections, and accept no new ones until `mend`."""
        self._is_cut = True
        for each in self._pairs:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._listener.close()


@contextlib.contextmanager
def relayed(url: str) -> Iterator[Relay]:
    relay = Relay(int(url.rpartition(":")[2]))
    try:
        yield relay
    finally:
        relay.close()
