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
_MOST_BYTES = 1 << 16  # of a piece


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


class Call:
    """A running request. `abort()` closes the connection, as a client does."""

    def __init__(
        self, *, url: str, body: Mapping[str, Any] | None, timeout_seconds: float = 600.0
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, f"{url} names no host"
        self._host, self._port = parts.hostname, parts.port or 80
        self._request = _request_bytes(parts.path or "/", parts.netloc, body)
        self._timeout_seconds = timeout_seconds
        self._writer: asyncio.StreamWriter | None = None
        self.answer = RawAnswer()

    async def run(self) -> RawAnswer:
        """Send, and wait for the end, an abort or the timeout. Raises ServerUnreachable."""
        answer = self.answer
        answer.sent_at = time.perf_counter()
        try:
            reader, self._writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            raise ServerUnreachable(
                f"{self._host}:{self._port} cannot be reached: {error}"
            ) from error
        self._writer.write(self._request)
        tail = b""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                while data := await reader.read(_MOST_BYTES):
                    answer.pieces.append((time.perf_counter(), data))
                    if _DONE in tail + data:
                        break  # some servers keep the connection open
                    tail = data[-_LONGEST_TAIL:]
        except TimeoutError:
            answer.error = f"{TOO_LONG} {self._timeout_seconds:.0f} s"
        except OSError as error:
            if not answer.aborted:
                answer.error = f"the connection broke: {error}"
        finally:
            answer.ended_at = time.perf_counter()
            self._writer.transport.abort()
        return answer

    def abort(self) -> None:
        """Close the connection now."""
        self.answer.aborted = True
        if self._writer is not None:
            self._writer.transport.abort()


def _request_bytes(path: str, host: str, body: Mapping[str, Any] | None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        f"Host: {host}",
        "Connection: close",
        "Accept: */*",
    ]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def get_json(url: str, *, timeout_seconds: float = 10.0) -> tuple[int, Any]:
    """GET a URL: returns the status, and the parsed body or None. Raises ServerUnreachable."""
    raw = await Call(url=url, body=None, timeout_seconds=timeout_seconds).run()
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
