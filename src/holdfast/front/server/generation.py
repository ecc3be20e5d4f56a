"""Answers checked requests: generates text, or only prefills (embeddings, relevance scores).

Generated text goes to the client and to other clients that follow the answer. Generation ends when
no client can want the answer any more. Embeddings and scores are sent in one piece; their
computation ends when the client disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from holdfast.errors import GenerationFailed, HoldfastError, QueueFull, WorkerUnavailable
from holdfast.front.images.sources import for_log
from holdfast.front.output import (
    ChoiceFinished,
    Embedding,
    OutputEvent,
    PromptProgress,
    Relevance,
    TextRead,
    TokenCounts,
)
from holdfast.front.request import ChatPrompt, EmbeddingRequest, GenerationRequest, RankRequest
from holdfast.front.server.access import caller_of
from holdfast.front.server.answers import AnswerFormat, EventWriter, GenerationPlan, StreamFormat
from holdfast.front.server.context import RequestContext, context_of
from holdfast.front.server.explanation import Explanation, explain_choice, explanation_of
from holdfast.front.server.problem import problem_of, record_problem
from holdfast.front.server.request import read_body
from holdfast.front.server.resumable_answers import RequestIdentity, ResumableAnswer, identity_of
from holdfast.front.server.services import ActiveRequest, Services, needs_load
from holdfast.front.server.streams import (
    OutputStream,
    TimeLimit,
    disconnected,
    open_streams,
    run_unless,
    run_unless_disconnected,
)
from holdfast.front.telemetry.request_log import (
    RECORD,
    AnswerRecord,
    RequestRecord,
    write_line,
    write_progress,
)
from holdfast.wire.events import FinishReason

# `UnsupportedFields.neutral` for endpoints that generate nothing: these requests extend no session,
# so the fields that name one are refused.
SESSION_FIELDS: Mapping[str, tuple[Any, ...]] = {"session_id": (), "prompt_cache_key": ()}
PrefillRequest = TypeVar("PrefillRequest", EmbeddingRequest, RankRequest)
PrefillResult = TypeVar("PrefillResult", bound=TextRead)
Plan_co = TypeVar("Plan_co", covariant=True)


class RequestBody(Protocol[Plan_co]):
    """The parsed body of a request."""

    @property
    def cache_salt(self) -> str | None:
        """Only requests with the same salt share cached prefixes."""
        ...

    def plan(self, context: RequestContext) -> Plan_co:
        """Return what to compute, and the format of the answer. Raises RequestRefused."""
        ...


async def generation_response(
    request: Request,
    services: Services,
    parse_body: Callable[[bytes], RequestBody[GenerationPlan]],
    *,
    body: bytes | None = None,
    outlives_client: bool = True,
) -> Response:
    """Create the answer to a request for generated text.

    parse_body: may raise RequestRefused.
    body: the request's body, if it has been received already.
    outlives_client: whether generation continues for a while after the client has disconnected, so
        that a retry of the request can get the answer.
    """
    answer_record = AnswerRecord(services.telemetry.metrics)
    if body is None:
        body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    identity = await identity_of(request, body, services.server) if outlives_client else None
    if (earlier := rejoin(identity, request, services)) is not None:
        return earlier
    parsed = parse_body(body)
    context = context_of(request, services, cache_salt=parsed.cache_salt)
    requests, answer_format = parsed.plan(context)
    return GenerationResponse(context, requests, answer_format, answer_record, identity=identity)


class GenerationResponse(Response):
    """The answer to one checked request. Calling it submits the request."""

    def __init__(
        self,
        context: RequestContext,
        requests: Sequence[GenerationRequest],
        answer_format: AnswerFormat,
        answer_record: AnswerRecord,
        *,
        identity: RequestIdentity | None = None,
    ) -> None:
        """Raises RequestRefused for an invalid time limit.

        answer_record: times and counts of the answer, begun when the request arrived.
        identity: identifies retries of the request; None: no other request gets this answer.
        """
        super().__init__()
        self._services = context.services
        self._caller = context.caller
        self._requests = requests
        self._format = answer_format
        self._identity = identity
        self._answer_record = answer_record  # times and counts, for metrics and the log
        self._resumable: ResumableAnswer | None = None  # the events that a retry may get
        # what an administrator sees and can cancel; set when this response is called
        self._active: ActiveRequest | None = None
        self._has_lost_client = False  # the client disconnected; generation may still go on
        self._writer: EventWriter | None = None  # only if the answer is streamed
        self._stream: OutputStream | None = None  # set when the worker has accepted the request
        self._limit = TimeLimit(context.time_limit_seconds())
        # how much of each prompt was cached, and why not more
        self._explanations: list[tuple[GenerationRequest, Explanation]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate the answer and send it to the client.

        If the server stops or an administrator cancels the request, the answer ends with an error.
        """
        record: RequestRecord = scope[RECORD]
        record.generation = self._requests[0]
        record.model = record.generation.model
        watched_send = _WatchedSend(send)
        services = self._services
        choices = sum(request.choices for request in self._requests)
        with ExitStack() as quota, services.answers.active.registered(record) as active:
            quota.enter_context(
                services.access.concurrency.counted(self._caller, choices, limits=services.limits)
            )
            self._active = active
            services.answers.resumable.pause_lost()  # this answer has a client, so it goes first
            if self._identity is not None:
                plan = (self._requests, self._format)
                self._resumable = services.answers.resumable.begin(self._identity, plan, record)
                active.generated_answer = self._resumable
            unwanted = self._wait_until_unwanted(receive, watched_send, record, quota)
            try:
                is_done = await run_unless(unwanted, self._write_answer(watched_send, record))
                record.is_aborted = record.is_aborted or not is_done
            except asyncio.CancelledError:
                await self._send_stop_error(active.stop_error(), record, watched_send)
            finally:
                if self._resumable is not None:
                    services.answers.resumable.mark_ended(self._resumable)
                    if not self._has_lost_client:
                        client_left(services, self._resumable, has_all=True)
        record.end()  # the client has its answer
        for request, explanation in self._explanations:
            await asyncio.to_thread(
                services.telemetry.misses.add_answer, request, explanation, record
            )

    async def _wait_until_unwanted(
        self, receive: Receive, watched_send: _WatchedSend, record: RequestRecord, quota: ExitStack
    ) -> None:
        """Wait until the client has disconnected and no retry can get the answer any more.

        quota: counts the answer against the caller's limit of concurrent answers until it closes.
        """
        await disconnected(receive)
        if watched_send.has_sent_all or (self._writer is not None and self._writer.has_sent_all):
            await asyncio.Future()  # the answer was delivered: only cleanup is left
        self._has_lost_client = True
        record.is_aborted = True
        if self._resumable is not None and client_left(
            self._services, self._resumable, has_all=False
        ):
            quota.close()  # allows the caller to send other requests from now on
            if self._writer is not None:
                self._writer.detach()
            await self._resumable.discarded.wait()

    async def _send_stop_error(
        self, stop_error: HoldfastError, record: RequestRecord, watched_send: _WatchedSend
    ) -> None:
        """Tell the client, or only the log if the client is gone, why its request was stopped."""
        if self._resumable is not None:
            self._resumable.end(stop_error)
        if self._has_lost_client:
            record_problem(record, problem_of(stop_error), stop_error)
        else:
            await watched_send.send_stop_error(stop_error, record, self._format)

    async def _write_answer(self, send: Send, record: RequestRecord) -> None:
        """Submit the request and send its answer, as a stream or in one piece."""
        try:
            if not self._requests[0].streams:
                await self._write_body(send, await self._submit(record), record)
                return
            # If the model is loaded, submit the request before sending the headers, so that a full
            # queue still gets its own status. If it must be loaded, which may take minutes, send
            # the headers first, because proxies close connections that are silent for so long.
            if not needs_load(self._services, self._requests[0].model):
                await self._submit(record)
            events = self._events(record)
            if self._resumable is not None:
                events = self._services.answers.resumable.recording(self._resumable, events)
            self._writer = EventWriter(
                send,
                self._format,
                events,
                request_id=record.request_id,
                keep_alive=self._keep_alive,
            )
            await self._writer.run()
        except HoldfastError as error:
            if self._resumable is not None:
                self._resumable.end(error)
            raise
        finally:
            if self._stream is not None:
                await self._stream.aclose()
            self._answer_record.close(record.waited)

    def _keep_alive(self) -> bytes:
        """The bytes that keep a silent connection open.

        In some protocols, the first keep-alive has the opening event of the stream. A retry must
        get that event, too, so a keep-alive before all events is recorded.
        """
        frame = self._format.keep_alive()
        if self._resumable is not None and not self._resumable.next_place:
            self._services.answers.resumable.record(self._resumable, frame)
        return frame

    async def _submit(self, record: RequestRecord) -> OutputStream:
        """Submit the request and wait until the worker accepts it. This may load the model.

        If the model is not loaded or its queue is full, the lost answers (those that are generated
        for a possible retry, after their client disconnected) are cancelled first, to make room.
        """
        submit = self._services.gateway.generate
        requests = self._requests
        resumable = self._services.answers.resumable
        async with self._limit.enforced():
            if needs_load(self._services, requests[0].model):
                await resumable.cancel_lost()
            try:
                stream = await open_streams(submit, requests)
            except QueueFull:
                if not await resumable.cancel_lost():
                    raise
                stream = await open_streams(submit, requests)
            self._stream = stream
        if self._resumable is not None:
            self._resumable.mark_accepted(stream)
        if self._active is not None:
            self._active.stream = stream
        self._answer_record.note_accepted(
            requests[0].model,
            prompt_tokens=stream.prompt_tokens,
            put_back_tokens=stream.put_back_tokens,
            dropped_tokens=stream.dropped_tokens,
            choices_per_prompt=requests[0].choices,
            prompt=_prompt_texts(self._requests) if self._services.settings.log.content else "",
        )
        record.answer = self._answer_record
        self._format.set_sampling(stream.sampling)
        return stream

    async def _events(self, record: RequestRecord) -> AsyncIterator[bytes]:
        """Yield the answer as events of the protocol. Submits the request unless that is done."""
        answer_format = self._format
        try:
            stream = self._stream or await self._submit(record)
            yield answer_format.stream_start(prompt_tokens=stream.prompt_tokens)
            async for event in self._limit.events(stream):
                self._observe(event, record)
                yield answer_format.event_bytes(event)
        except HoldfastError as error:
            record_problem(record, problem_of(error), error)
            raise
        yield answer_format.stream_end(self._counts(stream), self._explanation(stream, record))

    async def _write_body(self, send: Send, stream: OutputStream, record: RequestRecord) -> None:
        """Collect the whole answer and send it in one piece."""
        events: list[OutputEvent] = []
        async for event in self._limit.events(stream):
            self._observe(event, record)
            events.append(event)
        body = self._format.complete_body(
            events, self._counts(stream), self._explanation(stream, record)
        )
        if self._resumable is not None:
            self._services.answers.resumable.record(self._resumable, body)
            self._resumable.end()
        if not self._has_lost_client:
            await send_body(send, body)

    def _observe(self, event: OutputEvent, record: RequestRecord) -> None:
        """Record one event for metrics and log. Raises if a choice was cancelled or failed."""
        self._answer_record.observe(event)
        if isinstance(event, PromptProgress):
            write_progress(record, event)
        elif isinstance(event, ChoiceFinished):
            _raise_if_incomplete(event)

    def _counts(self, stream: OutputStream) -> TokenCounts:
        """The token counts to show, with two facts that only the stream knows."""
        return msgspec.structs.replace(
            self._answer_record.counts, breakpoints=stream.breakpoints, left_out=stream.left_out
        )

    def _explanation(self, stream: OutputStream, record: RequestRecord) -> Explanation | None:
        """Explain how much of each prompt was cached. None: the client did not ask for that.

        All explanations are kept, because `__call__` passes them on to the record of cache misses.
        """
        answer = self._answer_record
        choices = [
            explain_choice(
                event,
                put_back_tokens=answer.put_back_tokens,
                dropped_tokens=answer.dropped_tokens,
                accept_seconds=answer.accept_seconds,
                first_text_seconds=answer.first_text_seconds(event.index),
                unenforced=stream.unenforced,
            )
            for event, _ in answer.ends
        ]
        per_prompt = self._requests[0].choices
        for choice in choices:
            if choice.index % per_prompt == 0:  # the choices of a prompt share one prefill
                request = self._requests[choice.index // per_prompt]
                self._explanations.append((request, choice))
        return explanation_of(choices) if self._requests[0].explains else None


def _raise_if_incomplete(event: ChoiceFinished) -> None:
    """Raise an error if a choice was cancelled or failed: this must never look like an answer."""
    if event.reason is FinishReason.CANCELLED:
        raise WorkerUnavailable(
            "the server cancelled the request before it was complete; please try again"
        )
    if event.reason is FinishReason.FAILED:
        raise GenerationFailed("the request failed; the server's log has the details")


def _prompt_texts(requests: Sequence[GenerationRequest]) -> str:
    """The prompts as text, for a log that shows contents: messages as JSON, without image data."""
    texts = []
    for request in requests:
        prompt = request.prompt
        content = for_log(prompt.messages) if isinstance(prompt, ChatPrompt) else prompt
        texts.append(content if isinstance(content, str) else msgspec.json.encode(content).decode())
    return "\n".join(texts) or "(empty)"


async def run_in_background(
    response: GenerationResponse, request: Request, *, stopped: asyncio.Event
) -> None:
    """Generate an answer in the background, without a client, until it ends or `stopped` is set.

    The answer gets its own line in the request log.
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
        pass  # no client: its format has recorded each event, for clients that ask for it later

    try:
        await response({"type": "http", RECORD: record}, receive, send)
    finally:
        write_line(record)
        if (traces := request.app.state.services.telemetry.traces) is not None:
            traces.book(record, route=request.url.path, headers=request.scope["headers"])


class FollowingResponse(Response):
    """Sends the events of an answer that is generated independently of this client.

    The events are sent as a stream or in one piece.
    """

    def __init__(
        self, events: AsyncIterator[bytes], answer_format: StreamFormat, *, streams: bool = True
    ) -> None:
        """events: the events to send; the first one is the opening, which may be empty.
        streams: whether to send them as a stream, and not in one piece.
        """
        super().__init__()
        self._events = events
        self._format = answer_format
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the existing events and all that follow."""
        record: RequestRecord = scope[RECORD]
        if not self._streams:
            record.is_aborted = not await run_unless_disconnected(receive, self._send_body(send))
            return
        keep_alive = self._format.follower_keep_alive
        writer = EventWriter(
            send, self._format, self._events, request_id=record.request_id, keep_alive=keep_alive
        )
        is_done = await run_unless_disconnected(receive, writer.run())
        record.is_aborted = not is_done and not writer.has_sent_all

    async def _send_body(self, send: Send) -> None:
        frames = [frame async for frame in self._events]
        await send_body(send, b"".join(frames))


class RejoiningResponse(FollowingResponse):
    """Sends the answer to an earlier request to a client that repeats the request.

    The answer is sent from its first event.
    """

    def __init__(self, services: Services, answer: ResumableAnswer, request: Request) -> None:
        """answer: as `ResumableAnswers.claim` returned it, which counts this client.

        `__call__` therefore ends with `client_left`.
        """
        super().__init__(answer.events_after(-1), answer.format, streams=answer.streams)
        self._services = services
        self._answer = answer
        self._caller = caller_of(request)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the existing events and all that follow.

        If the server stops or an administrator cancels the request, the answer ends with an error.
        """
        record: RequestRecord = scope[RECORD]
        services = self._services
        answer = self._answer
        record.model = answer.model
        record.rejoined = answer.request_id
        has_all = is_stopped = False  # the client got the whole answer; its request was stopped
        watched_send = _WatchedSend(send)
        try:
            with (
                services.answers.active.registered(record) as active,
                services.access.concurrency.counted(
                    self._caller, answer.choices, limits=services.limits
                ),
            ):
                active.followed_answer = answer
                try:
                    await super().__call__(scope, receive, watched_send)
                    has_all = not record.is_aborted
                except asyncio.CancelledError:
                    is_stopped = True
                    await watched_send.send_stop_error(active.stop_error(), record, answer.format)
        finally:
            client_left(services, answer, has_all=has_all, is_stopped=is_stopped)


class _WatchedSend:
    """An ASGI `send` that forwards messages to a client and tracks whether the body is complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_ended = False  # the last message was passed to the connection
        self.has_sent_all = False  # the connection has accepted the last message

    async def __call__(self, message: Message) -> None:
        is_body = message["type"] == "http.response.body"
        self._has_ended = is_body and not message.get("more_body", False)
        await self._send(message)
        self.has_sent_all = self._has_ended

    async def send_stop_error(
        self, stop_error: HoldfastError, record: RequestRecord, answer_format: AnswerFormat
    ) -> None:
        """Tell the client why its request was stopped.

        If the response has begun, the stream gets an error event; otherwise this raises the error.
        """
        problem = replace(problem_of(stop_error), request_id=record.request_id)
        record_problem(record, problem, stop_error)
        if not record.has_status:  # no header was sent
            raise stop_error from None
        if not self._has_ended:  # only a stream can be interrupted midway
            body = answer_format.error_event(problem)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})


def rejoin(
    identity: RequestIdentity | None, request: Request, services: Services
) -> Response | None:
    """Create the response with the answer to the earlier request that `request` repeats.

    Returns None if the request needs a separate answer. identity: None if the request cannot
    share an answer.
    """
    answer = None if identity is None else services.answers.resumable.claim(identity)
    return None if answer is None else RejoiningResponse(services, answer, request)


def client_left(
    services: Services, answer: ResumableAnswer, *, has_all: bool, is_stopped: bool = False
) -> bool:
    """Note that a client of an answer is gone. Returns whether a retry may still get the answer.

    has_all: whether the client received the whole answer.
    is_stopped: whether the client's request was ended by an administrator or because the server
        stops.
    """
    is_stopping = is_stopped or services.access.drain.is_on
    is_wanted = services.answers.resumable.client_left(
        answer, services.server, has_all=has_all, is_stopping=is_stopping
    )
    if services.answers.active.has_clients:  # their answers go first
        services.answers.resumable.pause_lost()
    return is_wanted


async def send_body(send: Send, body: bytes) -> None:
    """Send an answer in one piece."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


EmbeddingPlan: TypeAlias = tuple[EmbeddingRequest, Callable[[Sequence[Embedding]], bytes]]
RankPlan: TypeAlias = tuple[RankRequest, Callable[[Sequence[Relevance]], bytes]]
"""A checked request whose prompts are only prefilled, and the function that creates the body of its
answer.
"""


async def embed(
    request: Request, services: Services, parse_body: Callable[[bytes], RequestBody[EmbeddingPlan]]
) -> Response:
    """Answer a request for embeddings.

    parse_body: may raise RequestRefused.
    """
    return await _prefill(request, services, parse_body, services.gateway.embed)


async def rank(
    request: Request, services: Services, parse_body: Callable[[bytes], RequestBody[RankPlan]]
) -> Response:
    """Answer a request to rank documents.

    parse_body: may raise RequestRefused.
    """
    return await _prefill(request, services, parse_body, services.gateway.rank)


async def _prefill(
    request: Request,
    services: Services,
    parse_body: Callable[
        [bytes], RequestBody[tuple[PrefillRequest, Callable[[Sequence[PrefillResult]], bytes]]]
    ],
    prefill: Callable[[PrefillRequest], Awaitable[tuple[PrefillResult, ...]]],
) -> Response:
    """Create the answer to a request whose prompts are only prefilled.

    prefill: the method of Gateway that has the request computed, one result for each prompt.
    """
    answer_record = AnswerRecord(services.telemetry.metrics)
    parsed = parse_body(await read_body(request, limit_bytes=services.limits.max_body_bytes))
    context = context_of(request, services, cache_salt=parsed.cache_salt)
    prefill_request, encode = parsed.plan(context)
    limit = TimeLimit(context.time_limit_seconds())

    async def body() -> bytes:
        with services.access.concurrency.counted(context.caller, 1, limits=services.limits):
            async with limit.enforced():
                results = await prefill(prefill_request)
        answer_record.record_prefilled(prefill_request.model, results)
        return await asyncio.to_thread(encode, results)  # thousands of vectors take a second

    return _PrefillResponse(services, prefill_request.model, answer_record, body)


class _PrefillResponse(Response):
    """Sends embeddings or scores, unless the client disconnects or the server stops first.

    compute_body: computes the body of the response.
    """

    def __init__(
        self,
        services: Services,
        model: str,
        answer_record: AnswerRecord,
        compute_body: Callable[[], Awaitable[bytes]],
    ) -> None:
        super().__init__(media_type="application/json")
        self._services = services
        self._model = model
        self._answer_record = answer_record
        self._compute_body = compute_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute the body and send it."""
        record: RequestRecord = scope[RECORD]
        record.model = self._model

        async def send_answer() -> None:
            self.body = await self._compute_body()
            record.answer = self._answer_record
            self.init_headers()
            await super(_PrefillResponse, self).__call__(scope, receive, send)

        self._services.answers.resumable.pause_lost()  # this answer has a client, so it goes first
        with self._services.answers.active.registered(record) as active:
            try:
                record.is_aborted = not await run_unless_disconnected(receive, send_answer())
            except asyncio.CancelledError:
                raise active.stop_error() from None
            finally:
                self._answer_record.close(record.waited)
