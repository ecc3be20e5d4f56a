"""Runs one checked request to its end: opens it, writes the answer, and stops the work as soon as the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from holdfast.errors import GenerationFailed, HoldfastError, WorkerUnavailable
from holdfast.http.server.answers import AnswerPlan, TokenCounts, WholeChoice
from holdfast.http.server.batch import open_streams
from holdfast.http.server.body import read_body
from holdfast.http.server.disconnect import unless_disconnected
from holdfast.http.server.errors import RECORD
from holdfast.http.server.explanation import Explanation, explain_choice, explanation_of
from holdfast.http.server.extensions import extended
from holdfast.http.server.problem import problem_of, record_problem
from holdfast.http.server.services import OutputStream, Services, is_waited_for
from holdfast.http.server.sse import EventWriter
from holdfast.http.server.time_limit import TimeLimit
from holdfast.messages.events import FinishReason
from holdfast.messages.output import ChoiceFinished, OutputEvent
from holdfast.messages.requests import ChatPrompt
from holdfast.telemetry.request_log import RequestRecord
from holdfast.telemetry.requests import AnswerRecord


async def generate(
    request: Request, services: Services, plan_of: Callable[[bytes], AnswerPlan], *, body: bytes | None = None
) -> Response:
    """The answer to a request for generated text. `plan_of` makes a plan of its body, or raises RequestRefused.

    body: if it has been read already.
    """
    answer = AnswerRecord(services.metrics)
    if body is None:
        body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    plan = extended(plan_of(body), request, limits=services.limits)
    return GenerationResponse(services, plan, answer)


class GenerationResponse(Response):
    """The answer to one checked request. Nothing has been submitted before it is called."""

    def __init__(self, services: Services, plan: AnswerPlan, answer: AnswerRecord) -> None:
        super().__init__()
        self._services, self._plan, self._answer = services, plan, answer
        self._stream: OutputStream | None = None  # once the worker has taken the request
        self._explained: list[Explanation] = []
        self._reasoning_tokens = 0
        self._limit = TimeLimit(plan.time_limit_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send. Being cancelled, by the server's stop or an administrator, ends the answer with an error."""
        record: RequestRecord = scope[RECORD]
        record.asked = self._plan.requests[0]
        record.model = record.asked.model
        has_ended = False

        async def watched_send(message: Message) -> None:
            nonlocal has_ended
            has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        answers = sum(request.choices for request in self._plan.requests)
        counted = self._services.at_once.counted(self._plan.caller, answers, limits=self._services.limits)
        with counted, self._services.active.entered(record) as active:
            try:
                record.is_aborted = not await unless_disconnected(receive, self._generate(watched_send, record))
            except asyncio.CancelledError:
                stopped = active.ended_by()
                problem = replace(problem_of(stopped), request_id=record.request_id)
                record_problem(record, problem, stopped)
                if not record.has_status:
                    raise stopped from None
                if not has_ended:  # so it is a stream
                    await send({"type": "http.response.body", "body": self._plan.form.broken(problem), "more_body": False})

    async def _generate(self, send: Send, record: RequestRecord) -> None:
        try:
            if not self._plan.streams:
                await self._write_whole(send, await self._opened(record))
                return
            # A full queue still gets its own status, which a client understands better. A model that is being loaded may take
            # minutes, though, and a line on which nothing comes for so long is cut by whatever stands between.
            if not is_waited_for(self._services, self._plan.requests[0].model):
                await self._opened(record)
            await EventWriter(send, self._plan.form, self._events(record), request_id=record.request_id).run()
        finally:
            if self._stream is not None:
                await self._stream.aclose()
            self._answer.close()

    async def _opened(self, record: RequestRecord) -> OutputStream:
        """The events; submits the request the first time, which waits for a model that is being loaded."""
        if self._stream is None:
            self._stream = await self._limit.stream(open_streams(self._services.generate, self._plan.requests))
            self._answer.accepted(
                self._plan.requests[0].model,
                prompt_tokens=self._stream.prompt_tokens,
                put_back_tokens=self._stream.put_back_tokens,
                dropped_tokens=self._stream.dropped_tokens,
                choices_per_prompt=self._plan.choices_per_prompt,
                prompt=_content(self._plan) if self._services.log.content else "",
            )
            record.answer = self._answer
        return self._stream

    async def _events(self, record: RequestRecord) -> AsyncIterator[bytes]:
        form = self._plan.form
        try:
            stream = await self._opened(record)
            yield form.opening(prompt_tokens=stream.prompt_tokens)
            async for event in stream:
                self._observe(event)
                yield form.finish(event) if isinstance(event, ChoiceFinished) else form.delta(event)
        except HoldfastError as error:
            record_problem(record, problem_of(error), error)
            raise
        yield form.closing(self._counts(), explanation_of(self._explained))

    async def _write_whole(self, send: Send, stream: OutputStream) -> None:
        choices = [WholeChoice() for _ in range(len(self._plan.requests) * self._plan.choices_per_prompt)]
        async for event in stream:
            self._observe(event)
            if isinstance(event, ChoiceFinished):
                choices[event.index].finish_reason, choices[event.index].end = event.finish_reason, event
            else:
                choices[event.index].deltas.append(event)
        body = self._plan.form.whole(choices, self._counts(), explanation_of(self._explained))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _observe(self, event: OutputEvent) -> None:
        """Count one event. Raises for a choice that ended as none should."""
        self._answer.observe(event)
        if not isinstance(event, ChoiceFinished):
            return
        _refuse_broken_end(event)
        self._reasoning_tokens += event.reasoning_tokens
        if self._plan.explains:
            explained = explain_choice(
                event,
                put_back_tokens=self._answer.put_back_tokens,
                dropped_tokens=self._answer.dropped_tokens,
                accept_seconds=self._answer.accept_seconds,
                first_text_seconds=self._answer.first_text_seconds(event.index),
                unenforced=self._stream.unenforced if self._stream is not None else (),
            )
            self._explained.append(explained)

    def _counts(self) -> TokenCounts:
        answer = self._answer
        return TokenCounts(
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.tokens,
            cached_tokens=answer.cached_tokens or 0,
            reasoning_tokens=self._reasoning_tokens,
            breakpoints=self._stream.breakpoints if self._stream is not None else (),
        )


def _refuse_broken_end(event: ChoiceFinished) -> None:
    """Raise for a choice that ended by anything else than its own stop or length: that is an error, never an answer."""
    if event.reason is FinishReason.CANCELLED:
        raise WorkerUnavailable("the server cancelled the request before it was done; please try again")
    if event.reason is FinishReason.FAILED:
        raise GenerationFailed("the request failed; the server's log has the details")


def _content(plan: AnswerPlan) -> str:
    """What was asked, for the log."""
    asked = []
    for request in plan.requests:
        prompt = request.prompt.messages if isinstance(request.prompt, ChatPrompt) else request.prompt
        asked.append(prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode())
    return "\n".join(asked) or "(empty)"
