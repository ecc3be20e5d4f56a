"""Clients that follow an answer from its log of events, while it is made or later."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from holdfast.errors import HoldfastError
from holdfast.front.server.access import caller_of
from holdfast.front.server.answers import AnswerFormat, EventWriter
from holdfast.front.server.held_answers import HeldAnswer, RequestIdentity
from holdfast.front.server.in_progress import unless_disconnected
from holdfast.front.server.problem import problem_of, record_problem
from holdfast.front.server.running import EventLog
from holdfast.front.server.services import Services
from holdfast.telemetry.request_log import RECORD, RequestRecord


class FollowingResponse(Response):
    """Streams the events of a log that follow a given number.

    The answer continues if the client leaves.
    """

    def __init__(self, log: EventLog, form: AnswerFormat, *, after: int = -1) -> None:
        super().__init__()
        self._events = log.after(after)
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what is there and what comes."""
        record: RequestRecord = scope[RECORD]
        keep_alive = self._form.keep_alive_of_follower
        writer = EventWriter(
            send, self._form, self._events, request_id=record.request_id, keep_alive=keep_alive
        )
        is_done = await unless_disconnected(receive, writer.run())
        record.is_aborted = not is_done and not writer.has_sent_all


class RejoiningResponse(Response):
    """The answer to an earlier request, for the same request sent again: all of it, from its
    beginning.
    """

    def __init__(self, services: Services, answer: HeldAnswer, request: Request) -> None:
        """answer: taken for this request, which leaves it at the end."""
        super().__init__()
        self._services = services
        self._answer = answer
        self._caller = caller_of(request)
        self._follower = (
            FollowingResponse(answer, answer.form) if answer.streams else FollowedWhole(answer)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what is there and what comes.

        Being cancelled, by an administrator or the server's stop, is told as an error.
        """
        record: RequestRecord = scope[RECORD]
        services, answer = self._services, self._answer
        record.model = answer.model
        record.rejoined = answer.request_id
        has_all = is_stopped = has_ended = False

        async def watched_send(message: Message) -> None:
            nonlocal has_ended
            has_ended = message["type"] == "http.response.body" and not message.get(
                "more_body", False
            )
            await send(message)

        try:
            with services.active.entered(record) as active:
                active.follows = answer
                with services.at_once.counted(self._caller, answer.choices, limits=services.limits):
                    try:
                        await self._follower(scope, receive, watched_send)
                        has_all = not record.is_aborted
                    except asyncio.CancelledError:
                        is_stopped = True
                        await send_stopped(
                            active.ended_by(), record, answer.form, send, has_ended=has_ended
                        )
        finally:
            leave(services, answer, has_all=has_all, is_stopped=is_stopped)


class FollowedWhole(Response):
    """The answer of a log in one piece."""

    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._events = log.after(-1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it as soon as it is complete."""
        record: RequestRecord = scope[RECORD]
        record.is_aborted = not await unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        frames = [frame async for frame in self._events]
        await send_whole(send, b"".join(frames))


def rejoined(
    identity: RequestIdentity | None, request: Request, services: Services
) -> Response | None:
    """The answer to the earlier request that this one repeats; None when it gets an answer of its
    own.
    """
    answer = None if identity is None else services.held.take(identity)
    return None if answer is None else RejoiningResponse(services, answer, request)


def leave(
    services: Services, answer: HeldAnswer, *, has_all: bool, is_stopped: bool = False
) -> bool:
    """A client of an answer is gone. Returns whether the answer is still wanted, or may be.

    is_stopped: an administrator or the server's stop has ended its request.
    """
    is_stopping = is_stopped or services.drain.is_on
    is_wanted = services.held.leave(
        answer, services.server, has_all=has_all, is_stopping=is_stopping
    )
    if services.active.has_clients:
        services.held.make_way()
    return is_wanted


async def send_whole(send: Send, body: bytes) -> None:
    """Send an answer in one piece."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_stopped(
    stopped: HoldfastError,
    record: RequestRecord,
    form: AnswerFormat,
    send: Send,
    *,
    has_ended: bool,
) -> None:
    """Tell a client why its request was stopped: in its stream, or by raising the error if nothing
    was sent yet.
    """
    problem = replace(problem_of(stopped), request_id=record.request_id)
    record_problem(record, problem, stopped)
    if not record.has_status:
        raise stopped from None
    if not has_ended:  # so it is a stream
        await send({"type": "http.response.body", "body": form.broken(problem), "more_body": False})
