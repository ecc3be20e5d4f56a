"""The outermost layer: every request gets its id, is counted, and leaves one line in the log when
it is over.
"""

from __future__ import annotations

import asyncio
import re
import uuid

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import WorkerUnavailable
from holdfast.front.server.disconnect import disconnected
from holdfast.front.server.errors import RECORD, answer_of
from holdfast.telemetry.metrics import Metrics
from holdfast.telemetry.request_log import UNKNOWN_ROUTE, RequestRecord, write_line
from holdfast.telemetry.traces import Traces

# OpenAI's clients show the first one, Anthropic's the second
_ID_HEADERS = (b"x-request-id", b"request-id")
_WELL_FORMED_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def request_lines(app: ASGIApp, *, metrics: Metrics, traces: Traces | None = None) -> ASGIApp:
    """The application with this layer around it. Without `traces` there are none."""

    async def layer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        client, request_id = scope.get("client"), _request_id(scope)
        record = RequestRecord(
            method=scope["method"],
            path=scope["path"],
            client=client[0] if client else "",
            request_id=request_id.decode(),
        )
        scope[RECORD] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    *((name, request_id) for name in _ID_HEADERS),
                ]
            await send(message)

        try:
            with metrics.loop_lag.watched():
                await app(scope, receive, send_with_id)
        except ClientDisconnect:
            record.is_aborted = True
        except asyncio.CancelledError:
            # only the server's stop does that, to requests that know nothing better to do
            response = answer_of(
                WorkerUnavailable("the server stopped before the request was done"), scope
            )
            # Closed it is a moment later, by the server.
            await (
                disconnected(receive)
                if record.has_status
                else response(scope, receive, send_with_id)
            )
        finally:
            path = getattr(scope.get("endpoint"), "path", UNKNOWN_ROUTE)
            metrics.http_requests.labels(record.method, path, str(record.status)).inc()
            write_line(record)
            if traces is not None:
                traces.book(record, route=path, headers=scope["headers"])

    return layer


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _WELL_FORMED_ID.fullmatch(value):
            return bytes(value)
    return b"req_" + uuid.uuid4().hex.encode()
