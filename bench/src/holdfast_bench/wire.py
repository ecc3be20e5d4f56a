"""The load generator's HTTP client: one request per connection, and a time stamp for each piece.

During a request, it only records `(now, data)`. Pieces are parsed afterwards, so that the client
takes little CPU time from the server on the same machine. `Connection: close` marks the end of an
answer for all servers alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from holdfast.errors import HoldfastError

TOO_LONG = "no end within"
_DONE = b"data: [DONE]"
_LONGEST_TAIL = 64  # bytes that may contain the beginning of the end mark


class ServerUnreachable(HoldfastError):
    """A server did not accept a connection."""


@dataclass(slots=True)
class RawAnswer:
    """An unparsed answer. Times are those of `time.perf_counter`."""

    sent_at: float = 0.0  # before the connection was opened
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended_at: float = 0.0
    aborted: bool = False  # by the client
    error: str = ""

    def content(self) -> bytes:
        """All bytes, including the head."""
        return b"".join(data for _, data in self.pieces)


class _Exchange(asyncio.Protocol):
    def __init__(self, request: bytes, answer: RawAnswer) -> None:
        self._request, self._answer = request, answer
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._answer.pieces.append((time.perf_counter(), data))
        if _DONE in self._tail + data:
            self.finish()  # some servers keep the connection open
        self._tail = data[-_LONGEST_TAIL:]

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not self._answer.aborted:
            self._answer.error = f"the connection broke: {exc}"
        self.finish()

    def finish(self) -> None:
        if not self.over.done():
            self._answer.ended_at = time.perf_counter()
            self.over.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Call:
    """A running request. `abort()` closes the connection, as a client does."""

    def __init__(
        self,
        *,
        url: str,
        body: Mapping[str, Any] | None,
        api_key: str = "",
        timeout_seconds: float = 600.0,
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, f"{url} names no host"
        self._host, self._port = parts.hostname, parts.port or 80
        self._request = _request_bytes(parts.path or "/", parts.netloc, body, api_key)
        self._timeout_seconds = timeout_seconds
        self._exchange: _Exchange | None = None
        self.answer = RawAnswer()

    async def run(self) -> RawAnswer:
        """Send, and wait for the end, an abort or the timeout. Raises ServerUnreachable."""
        loop = asyncio.get_running_loop()
        self.answer.sent_at = time.perf_counter()
        try:
            _, exchange = await loop.create_connection(
                lambda: _Exchange(self._request, self.answer), self._host, self._port
            )
        except OSError as error:
            raise ServerUnreachable(
                f"{self._host}:{self._port} cannot be reached: {error}"
            ) from error
        self._exchange = exchange
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await exchange.over
        except TimeoutError:
            self.answer.error = f"{TOO_LONG} {self._timeout_seconds:.0f} s"
            self.answer.ended_at = time.perf_counter()
        finally:
            exchange.close()
        return self.answer

    def abort(self) -> None:
        """Close the connection now."""
        self.answer.aborted = True
        if self._exchange is not None:
            self._exchange.close()
            self._exchange.finish()


def _request_bytes(path: str, host: str, body: Mapping[str, Any] | None, api_key: str) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        f"Host: {host}",
        "Connection: close",
        "Accept: */*",
    ]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "", ""]).encode() + content


async def get_json(
    url: str, *, api_key: str = "", timeout_seconds: float = 10.0
) -> tuple[int, Any]:
    """GET a URL: returns the status, and the parsed body or None. Raises ServerUnreachable."""
    raw = await Call(url=url, body=None, api_key=api_key, timeout_seconds=timeout_seconds).run()
    status, body = split_answer(raw.content())
    with contextlib.suppress(ValueError):
        return status, json.loads(body)
    return status, None


def split_answer(content: bytes) -> tuple[int, bytes]:
    """The status (0 if there is none) and the body, decoded from chunked transfer."""
    head, _, body = content.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    first = lines[0].split(b" ", 2)
    status = int(first[1]) if len(first) > 1 and first[1].isdigit() else 0
    headers = [line.lower().replace(b" ", b"") for line in lines[1:]]
    return status, _without_chunk_sizes(body) if b"transfer-encoding:chunked" in headers else body


def _without_chunk_sizes(body: bytes) -> bytes:
    parts = []
    while body:
        size_line, _, rest = body.partition(b"\r\n")
        try:
            size = int(size_line.split(b";")[0], 16)
        except ValueError:  # cut off by an abort
            break
        if size == 0:
            break
        parts.append(rest[:size])
        body = rest[size + 2 :]
    return b"".join(parts)
