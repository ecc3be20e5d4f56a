"""The outermost layer: every request gets its id, is counted, and leaves one line in the log when it is over."""

from __future__ import annotations

import asyncio
import re
import uuid

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import WorkerUnavailable
from holdfast.http.server.errors import RECORD, answer_of
from holdfast.telemetry.metrics import Metrics
from holdfast.telemetry.request_log import RequestRecord, write_line

_WELL_FORMED_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class RequestLines:
    """ASGI middleware around all others."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        request_id = _request_id(scope)
        record = RequestRecord(
            method=scope["method"], path=scope["path"], client=client[0] if client else "", request_id=request_id.decode()
        )
        scope[RECORD] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._served(scope, receive, send_with_id)
        finally:
            path = getattr(scope.get("endpoint"), "path", "other")
            self._metrics.http_requests.labels(record.method, path, str(record.status)).inc()
            write_line(record)

    async def _served(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:
            scope[RECORD].is_aborted = True
        except asyncio.CancelledError:  # only the server's stop does that, to requests that know nothing better to do
            stopped = WorkerUnavailable("the server stopped before the request was done")
            response = answer_of(stopped, scope)
            if scope[RECORD].has_status:
                await _gone(receive)
            else:
                await response(scope, receive, send)


async def _gone(receive: Receive) -> None:
    """Wait until the connection is closed; the server does that a moment after it has cancelled."""
    while (await receive())["type"] != "http.disconnect":
        continue


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _WELL_FORMED_ID.fullmatch(value):
            return bytes(value)
    return b"req_" + uuid.uuid4().hex.encode()
