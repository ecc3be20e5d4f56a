"""The front's end of a worker's heartbeats."""

from __future__ import annotations

import msgspec
import zmq

from holdfast.messages.events import Heartbeat


class Heartbeats:
    """The newest heartbeat of one worker. Loop's thread only; looked at now and then, so it needs no reader on the loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.endpoint = endpoint
        self._decoder = msgspec.msgpack.Decoder(Heartbeat)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        for option, value in ((zmq.CONFLATE, 1), (zmq.LINGER, 0)):
            self._socket.setsockopt(option, value)
        self._socket.bind(endpoint)

    def poll(self) -> Heartbeat | None:
        """The newest one, if there is one that was not seen yet."""
        newest = None
        while not self._socket.closed:
            try:
                newest = self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        return newest

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()
