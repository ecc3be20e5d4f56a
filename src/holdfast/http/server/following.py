"""Clients that follow an answer from its log of events, while it is made or later."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.http.server.answers import AnswerFormat
from holdfast.http.server.caller import caller_of
from holdfast.http.server.disconnect import unless_disconnected
from holdfast.http.server.errors import RECORD
from holdfast.http.server.held_answers import HeldAnswer, RequestIdentity
from holdfast.http.server.running import EventLog
from holdfast.http.server.services import Services
from holdfast.http.server.sse import EventWriter
from holdfast.telemetry.request_log import RequestRecord


class FollowingResponse(Response):
    """The events of a log behind a number, as a stream. The client may leave: the answer goes on."""

    def __init__(self, log: EventLog, form: AnswerFormat, *, after: int = -1) -> None:
        super().__init__()
        self._log, self._form, self._after = log, form, after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what is there and what comes."""
        record: RequestRecord = scope[RECORD]
        events = self._log.after(self._after)
        keep_alive = self._form.keep_alive_of_follower
        writer = EventWriter(send, self._form, events, request_id=record.request_id, keep_alive=keep_alive)
        is_done = await unless_disconnected(receive, writer.run())
        record.is_aborted = not is_done and not writer.has_sent_all


class RejoiningResponse(Response):
    """The answer to an earlier request, for the same request sent again: all of it, from its beginning."""

    def __init__(self, services: Services, answer: HeldAnswer, request: Request) -> None:
        """answer: that was taken for the request."""
        super().__init__()
        self._services = services
        self._answer = answer
        self._caller = caller_of(request)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what is there and what comes."""
        record: RequestRecord = scope[RECORD]
        services, answer = self._services, self._answer
        record.model = answer.record.model
        record.rejoined = answer.record.request_id
        choices = sum(request.choices for request in answer.plan.requests)
        has_all = False
        try:
            with services.at_once.counted(self._caller, choices, limits=services.limits):
                if answer.plan.streams:
                    await FollowingResponse(answer, answer.plan.form)(scope, receive, send)
                else:
                    record.is_aborted = not await unless_disconnected(receive, self._send_whole(send))
            has_all = not record.is_aborted
        finally:
            is_alone = not services.active.has_others(answer.record)
            services.held.leave(answer, services.server, has_all=has_all, is_alone=is_alone)

    async def _send_whole(self, send: Send) -> None:
        frames = [frame async for frame in self._answer.after(-1)]
        await send_whole(send, b"".join(frames))


def rejoined(identity: RequestIdentity, request: Request, services: Services) -> Response | None:
    """The answer to an earlier request that this one is the repetition of; None where it is a request of its own."""
    answer = services.held.take(identity)
    return None if answer is None else RejoiningResponse(services, answer, request)


async def send_whole(send: Send, body: bytes) -> None:
    """Send an answer in one piece."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
