"""Makes responses that are kept: before the eyes of their client, or in the background."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.errors import ResponsesUnavailable
from holdfast.front.responses.run import ResponseRun
from holdfast.front.server.body import json_response
from holdfast.front.server.following import FollowingResponse
from holdfast.front.server.generation import GenerationResponse, run_alone
from holdfast.front.server.problem import RequestRefused, problem_of
from holdfast.front.server.services import Services, is_waited_for


class KeptResponse(Response):
    """An answer that is stored as far as it was generated, which may be after its client has left."""

    def __init__(self, response: Response, run: ResponseRun) -> None:
        super().__init__()
        self._response, self._run = response, run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send."""
        try:
            await self._response(scope, receive, send)
        finally:
            self._run.stop()


async def in_background(
    request: Request, services: Services, response: GenerationResponse, run: ResponseRun
) -> Response:
    """Have a response made, and tell what it is so far, or follow its events.

    Raises what it is refused for.
    """
    running, most = services.running, services.responses.limits.max_background
    if len(running.tasks) >= most:
        reason = (
            f"`background`: this server makes at most {most} responses in the background at once; "
            "please try again later"
        )
        raise RequestRefused(reason, status=429, code="rate_limit_exceeded", field="background")
    queued = run.response
    task = asyncio.create_task(
        run_alone(response, request, stopped=run.stopped), name="background response"
    )
    running.tasks.add(task)
    task.add_done_callback(running.tasks.discard)
    task.add_done_callback(lambda ended: _ended(ended, run))
    if is_waited_for(services, queued.model):
        run.form.keep_alive()  # so that it is there already: nobody is to wait for so long
    else:
        beginning = asyncio.create_task(run.begun())
        try:
            await asyncio.wait((task, beginning), return_when=asyncio.FIRST_COMPLETED)
        finally:
            beginning.cancel()
        if not run.events:
            await task
    try:
        await run.put_down()
    except ResponsesUnavailable:  # so nobody could ever ask for it
        run.stop()
        raise
    return FollowingResponse(run, run.form) if run.keeping.streams else json_response(queued)


def _ended(task: asyncio.Task[None], run: ResponseRun) -> None:
    if task.cancelled():
        run.stop()
    elif (error := task.exception()) is not None:
        run.fail(problem_of(error))
