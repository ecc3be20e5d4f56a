"""Answers that are made in the background, without a client."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from holdfast.front.server.errors import RECORD
from holdfast.front.server.generation import GenerationResponse
from holdfast.telemetry.request_log import RequestRecord, write_line


async def run_alone(
    response: GenerationResponse, request: Request, *, stopped: asyncio.Event
) -> None:
    """Make an answer that nobody waits for, until it is to be stopped; it leaves a line of its own
    in the log.
    """
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
