"""Answers that are made without their client, and clients that follow the events of an answer from some place on."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.http.server.answers import KEEP_ALIVE_COMMENT, AnswerFormat
from holdfast.http.server.disconnect import unless_disconnected
from holdfast.http.server.errors import RECORD
from holdfast.http.server.generation import GenerationResponse
from holdfast.http.server.running import EventLog
from holdfast.http.server.sse import EventWriter
from holdfast.telemetry.request_log import RequestRecord, write_line


class FollowingResponse(Response):
    """The events of a log behind a number, as a stream. The client may leave: the answer goes on."""

    def __init__(self, log: EventLog, form: AnswerFormat, *, after: int = -1) -> None:
        super().__init__()
        self._log, self._form, self._after = log, form, after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what is there and what comes."""
        record: RequestRecord = scope[RECORD]
        # A keep-alive of the form's would be an event of the answer, with a number, that only one of those who follow gets.
        events, keep_alive = self._log.after(self._after), lambda: KEEP_ALIVE_COMMENT
        writer = EventWriter(send, self._form, events, request_id=record.request_id, keep_alive=keep_alive)
        record.is_aborted = not await unless_disconnected(receive, writer.run())


async def run_alone(response: GenerationResponse, request: Request, *, stopped: asyncio.Event) -> None:
    """Make an answer that nobody waits for, until it is to be stopped; it leaves a line of its own in the log."""
    record = RequestRecord(
        method="background",
        path=request.url.path,
        client=request.client.host if request.client is not None else "",
        request_id=request.scope[RECORD].request_id,
        key=request.scope[RECORD].key,
        status=200,
    )

    async def receive() -> dict[str, str]:
        await stopped.wait()
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        pass  # whoever wants the events has them from the form

    try:
        await response({"type": "http", RECORD: record}, receive, send)
    finally:
        write_line(record)
        if (traces := request.app.state.services.traces) is not None:
            traces.book(record, route=request.url.path, headers=request.scope["headers"])
