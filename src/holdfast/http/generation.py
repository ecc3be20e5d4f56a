"""Runs one checked request to its end: opens it, writes the answer, and stops the work as soon as the client is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.http.answers import AnswerPlan, StreamFormat, UsageTally, WholeAnswer, refuse_broken_end
from holdfast.http.batch import open_streams
from holdfast.http.services import OutputStream, Services
from holdfast.http.sse import DONE, EventWriter
from holdfast.messages import TextDelta
from holdfast.telemetry.requests import RequestWatch

_log = logging.getLogger(__name__)


class GenerationResponse(Response):
    """The answer to one checked request. Nothing has been submitted before it is called."""

    def __init__(self, services: Services, plan: AnswerPlan, watch: RequestWatch) -> None:
        super().__init__()
        self._services, self._plan, self._watch = services, plan, watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send."""
        answered = await _unless_disconnected(receive, self._answer(send))
        if not answered:
            _log.debug("client gone before the end of %s", self._plan.requests[0].request_id)

    async def _answer(self, send: Send) -> None:
        plan, watch = self._plan, self._watch
        tally = UsageTally(choices_per_prompt=plan.choices_per_prompt)
        try:
            stream = await open_streams(self._services.gateway, plan.requests)
            watch.accepted(plan.requests[0].model)
            try:
                if isinstance(plan.form, StreamFormat):
                    await _write_stream(stream, plan.form, tally, send, watch)
                else:
                    await _write_whole(stream, plan.form, tally, send, watch)
            finally:
                await stream.aclose()
        finally:
            watch.close()


async def _write_stream(stream: OutputStream, form: StreamFormat, tally: UsageTally, send: Send, watch: RequestWatch) -> None:
    writer = EventWriter(send, opening=form.opening())

    async def produce() -> None:
        async for event in stream:
            watch.observe(event)
            if isinstance(event, TextDelta):
                writer.put(form.delta(event))
            else:
                refuse_broken_end(event)
                tally.add(event)
                writer.put(form.finish(event))
        writer.put(form.usage(tally.usage(prompt_tokens=stream.prompt_tokens)) + DONE)
        writer.end()

    producer = asyncio.create_task(produce())
    try:
        await writer.run(producer)
    finally:
        producer.cancel()
        await asyncio.wait((producer,))


async def _write_whole(stream: OutputStream, form: WholeAnswer, tally: UsageTally, send: Send, watch: RequestWatch) -> None:
    async for event in stream:
        watch.observe(event)
        if isinstance(event, TextDelta):
            form.delta(event)
        else:
            refuse_broken_end(event)
            tally.add(event)
            form.finish(event)
    body = form.body(tally.usage(prompt_tokens=stream.prompt_tokens))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _unless_disconnected(receive: Receive, work: Coroutine[None, None, None]) -> bool:
    """Run `work` to its end, or cancel it when the client goes away first. Returns whether it ended; raises its error."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait((working, watching))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
