"""Runs one checked request to its end: opens it, writes the answer, and stops the work as soon as the client is gone."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from holdfast.errors import HoldfastError, WorkerUnavailable
from holdfast.http.answers import AnswerPlan, StreamFormat, UsageTally, WholeAnswer, refuse_broken_end
from holdfast.http.batch import open_streams
from holdfast.http.disconnect import unless_disconnected
from holdfast.http.errors import RECORD, note_problem, problem_of
from holdfast.http.explanation import ChoiceExplanation, Explanation, explain_choice, explanation_of
from holdfast.http.openai_shapes import Usage
from holdfast.http.services import OutputStream, Services, is_loading
from holdfast.http.sse import DONE, EventWriter, error_event
from holdfast.messages.output import OutputEvent, TextDelta
from holdfast.messages.requests import ChatPrompt, TextPrompt
from holdfast.telemetry.request_log import AnswerRecord, RequestRecord
from holdfast.telemetry.requests import RequestWatch


class GenerationResponse(Response):
    """The answer to one checked request. Nothing has been submitted before it is called."""

    def __init__(self, services: Services, plan: AnswerPlan, watch: RequestWatch) -> None:
        super().__init__()
        self._services, self._plan, self._watch = services, plan, watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send. Being cancelled, which only the server's stop does, ends the answer with an error."""
        out = _Output(send)
        record: RequestRecord = scope[RECORD]
        record.model = self._plan.requests[0].model
        try:
            answered = await unless_disconnected(receive, self._answer(out.send, record))
        except asyncio.CancelledError:
            stopped = WorkerUnavailable("the server stopped before the answer was done")
            note_problem(record, problem_of(stopped), stopped)
            await out.break_off(stopped)
            return
        record.is_aborted = not answered

    async def _answer(self, send: Send, record: RequestRecord) -> None:
        form = self._plan.form
        opened = _Opened(self._services, self._plan, self._watch, record)
        try:
            if isinstance(form, WholeAnswer):
                await _write_whole(await opened.stream(), form, opened.account, send)
                return
            # A full queue still gets its own status, which a client understands better. A model that is being loaded may take
            # minutes, though, and a line on which nothing comes for so long is cut by whatever stands between.
            if not is_loading(self._services, self._plan.requests[0].model):
                await opened.stream()
            await _write_stream(opened, form, send)
        finally:
            await opened.aclose()
            self._watch.close()


class _Output:
    """Knows how far the answer has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = self._ended = False

    async def send(self, message: Message) -> None:
        self.is_started = True
        self._ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def break_off(self, error: HoldfastError) -> None:
        if not self.is_started:
            raise error
        if not self._ended:  # so it is a stream
            await self._send({"type": "http.response.body", "body": error_event(problem_of(error)), "more_body": False})


class _Opened:
    """The answer's events, from the moment at which the worker has taken the request."""

    def __init__(self, services: Services, plan: AnswerPlan, watch: RequestWatch, record: RequestRecord) -> None:
        self._services, self._plan, self._watch, self._record = services, plan, watch, record
        self._stream: OutputStream | None = None

    async def stream(self) -> OutputStream:
        """The events; opens them the first time, which waits for a model that is being loaded."""
        if self._stream is None:
            self._stream = await open_streams(self._services.gateway, self._plan.requests)
            self._watch.accepted(self._plan.requests[0].model, dropped_tokens=self._stream.dropped_tokens)
            self._record.answer = AnswerRecord(
                prompt_tokens=self._stream.prompt_tokens,
                choices_per_prompt=self._plan.choices_per_prompt,
                prompt=_content(self._plan) if self._services.log.content else "",
            )
        return self._stream

    @property
    def account(self) -> _Account:
        """An account of the opened stream."""
        assert self._stream is not None, "stream() comes first"
        return _Account(self._plan, self._watch, self._record, dropped_tokens=self._stream.dropped_tokens)

    def broke_off(self, error: HoldfastError) -> None:
        """For a stream that was begun: its client gets the error as an event, the log in the line of the request."""
        note_problem(self._record, problem_of(error), error)

    async def aclose(self) -> None:
        """Cancel what still runs."""
        if self._stream is not None:
            await self._stream.aclose()


class _Account:
    """What is told about an answer as a whole when its choices have ended."""

    def __init__(self, plan: AnswerPlan, watch: RequestWatch, record: RequestRecord, *, dropped_tokens: int) -> None:
        self._explains, self._watch, self._record, self._dropped_tokens = plan.explains, watch, record, dropped_tokens
        self._tally = UsageTally(choices_per_prompt=plan.choices_per_prompt)
        self._explained: list[ChoiceExplanation] = []

    def observe(self, event: OutputEvent) -> None:
        """Raises for a choice that ended as none should."""
        watch = self._watch
        watch.observe(event)
        if self._record.answer is not None:
            self._record.answer.see(event)
        if isinstance(event, TextDelta):
            return
        refuse_broken_end(event)
        self._tally.add(event)
        if self._explains:
            first_text = watch.first_text_seconds(event.index)
            self._explained.append(
                explain_choice(
                    event,
                    dropped_tokens=self._dropped_tokens,
                    accept_seconds=watch.accept_seconds,
                    first_text_seconds=first_text,
                )
            )

    def usage(self, *, prompt_tokens: int) -> Usage:
        return self._tally.usage(prompt_tokens=prompt_tokens)

    def explanation(self) -> Explanation | None:
        return explanation_of(self._explained)


def _content(plan: AnswerPlan) -> str:
    """What was asked, for the log."""
    said = []
    for request in plan.requests:
        match request.prompt:
            case TextPrompt(text=text):
                said.append(text)
            case ChatPrompt(messages=messages):
                said.append(msgspec.json.encode(messages).decode())
            case tokens:
                said.append(msgspec.json.encode(tokens.token_ids).decode())
    return "\n".join(said) or "(empty)"


async def _write_stream(opened: _Opened, form: StreamFormat, send: Send) -> None:
    writer = EventWriter(send)

    async def produce() -> None:
        try:
            stream = await opened.stream()
            account = opened.account
            writer.begin_with(form.opening(prompt_tokens=stream.prompt_tokens))
            async for event in stream:
                account.observe(event)
                writer.put(form.delta(event) if isinstance(event, TextDelta) else form.finish(event))
                if writer.is_full:
                    await writer.wait_for_room()
        except HoldfastError as error:
            opened.broke_off(error)
            raise
        usage = account.usage(prompt_tokens=stream.prompt_tokens)
        writer.put(form.closing(usage, account.explanation()) + DONE)
        writer.end()

    producer = asyncio.create_task(produce())
    try:
        await writer.run(producer)
    finally:
        producer.cancel()
        await asyncio.wait((producer,))


async def _write_whole(stream: OutputStream, form: WholeAnswer, account: _Account, send: Send) -> None:
    async for event in stream:
        account.observe(event)
        if isinstance(event, TextDelta):
            form.delta(event)
        else:
            form.finish(event)
    body = form.body(account.usage(prompt_tokens=stream.prompt_tokens), account.explanation())
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
