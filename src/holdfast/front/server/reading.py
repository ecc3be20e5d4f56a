"""Answers to requests whose prompts are only read: vectors and scores, sent whole.

The work ends when its client goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.front.server.access import caller_of
from holdfast.front.server.in_progress import unless_disconnected
from holdfast.front.server.request import read_body, service_in, tenant_in, time_limit_in
from holdfast.front.server.services import Services
from holdfast.front.server.streams import TimeLimit
from holdfast.telemetry.request_log import RECORD, RequestRecord
from holdfast.telemetry.requests import AnswerRecord
from holdfast.wire.output import Embedding, Relevance, TextRead
from holdfast.wire.requests import EmbeddingRequest, RankRequest

SESSION_FIELDS: Mapping[str, tuple[Any, ...]] = {"session_id": (), "prompt_cache_key": ()}
"""Refused where nothing is generated, as an UnsupportedFields has them: vectors and scores belong
to no session.
"""
Asked = TypeVar("Asked", EmbeddingRequest, RankRequest)
Read = TypeVar("Read", bound=TextRead)


@dataclass(frozen=True, kw_only=True)  # no slots: `Generic` writes into it
class ReadingPlan(Generic[Asked, Read]):
    """A checked request, and what its answer looks like."""

    request: Asked
    form: Callable[[Sequence[Read]], bytes]  # the body
    cache_salt: str = ""


EmbeddingPlan: TypeAlias = ReadingPlan[EmbeddingRequest, Embedding]
RankPlan: TypeAlias = ReadingPlan[RankRequest, Relevance]


async def embed(
    request: Request, services: Services, plan_of: Callable[[bytes], EmbeddingPlan]
) -> Response:
    """The answer to a request for embeddings.

    `plan_of` makes a plan of its body, or raises RequestRefused.
    """
    return await _read(request, services, plan_of, services.embed)


async def rank(
    request: Request, services: Services, plan_of: Callable[[bytes], RankPlan]
) -> Response:
    """The answer to a request for the order of documents."""
    return await _read(request, services, plan_of, services.rank)


async def _read(
    request: Request,
    services: Services,
    plan_of: Callable[[bytes], ReadingPlan[Asked, Read]],
    call: Callable[[Asked], Awaitable[tuple[Read, ...]]],
) -> Response:
    answer = AnswerRecord(services.metrics)
    plan = plan_of(await read_body(request, limit_bytes=services.limits.max_body_bytes))
    tenant = tenant_in(request, cache_salt=plan.cache_salt)
    asked = msgspec.structs.replace(plan.request, tenant=tenant, service=service_in(request))
    limit = TimeLimit(time_limit_in(request.headers, limits=services.limits))

    async def worked() -> bytes:
        with services.at_once.counted(caller_of(request), 1, limits=services.limits):
            read = await limit.of(call(asked))
        answer.has_read(asked.model, read)
        return await asyncio.to_thread(plan.form, read)  # thousands of vectors take a second

    return ReadingResponse(services, asked.model, answer, worked)


class ReadingResponse(Response):
    """The answer that some work gives, unless the client goes away before, or the server stops.

    Nothing is sent until then.
    """

    def __init__(
        self,
        services: Services,
        model: str,
        answer: AnswerRecord,
        work: Callable[[], Coroutine[Any, Any, bytes]],
    ) -> None:
        super().__init__(media_type="application/json")
        self._active, self._held = services.active, services.held
        self._model, self._answer, self._work = model, answer, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work and send."""
        record: RequestRecord = scope[RECORD]
        record.model = self._model

        async def answered() -> None:
            self.body = await self._work()
            record.answer = self._answer
            self.init_headers()
            await super(ReadingResponse, self).__call__(scope, receive, send)

        self._held.make_way()
        with self._active.entered(record) as active:
            try:
                record.is_aborted = not await unless_disconnected(receive, answered())
            except asyncio.CancelledError:
                raise active.ended_by() from None
            finally:
                self._answer.close()
