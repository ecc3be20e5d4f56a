"""Answers to requests that only prefill: embeddings and relevance scores, sent in one piece.

The work is cancelled when the client disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from holdfast.telemetry.request_log import RECORD, AnswerRecord, RequestRecord
from holdfast.wire.output import Embedding, Relevance, TextRead
from holdfast.wire.requests import EmbeddingRequest, RankRequest

# Unsupported where nothing is generated (see `UnsupportedFields`): there is no session to extend.
SESSION_FIELDS: Mapping[str, tuple[Any, ...]] = {"session_id": (), "prompt_cache_key": ()}
Asked = TypeVar("Asked", EmbeddingRequest, RankRequest)
Read = TypeVar("Read", bound=TextRead)


@dataclass(frozen=True, kw_only=True)  # no slots: `Generic` sets attributes
class ReadingPlan(Generic[Asked, Read]):
    """A checked request and the format of its answer."""

    request: Asked
    form: Callable[[Sequence[Read]], bytes]  # the body
    cache_salt: str = ""


EmbeddingPlan: TypeAlias = ReadingPlan[EmbeddingRequest, Embedding]
RankPlan: TypeAlias = ReadingPlan[RankRequest, Relevance]


async def embed(
    request: Request, services: Services, plan_of: Callable[[bytes], EmbeddingPlan]
) -> Response:
    """The answer to a request for embeddings.

    plan_of: turns the body into a plan, or raises RequestRefused.
    """
    return await _read(request, services, plan_of, services.embed)


async def rank(
    request: Request, services: Services, plan_of: Callable[[bytes], RankPlan]
) -> Response:
    """The answer to a request to rank documents. plan_of: as for `embed`."""
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

    async def body() -> bytes:
        with services.at_once.counted(caller_of(request), 1, limits=services.limits):
            async with limit.enforced():
                read = await call(asked)
        answer.has_read(asked.model, read)
        return await asyncio.to_thread(plan.form, read)  # thousands of vectors take a second

    return _ReadingResponse(services, asked.model, answer, body)


class _ReadingResponse(Response):
    """Sends what some work returns, unless the client disconnects or the server stops first."""

    def __init__(
        self,
        services: Services,
        model: str,
        answer: AnswerRecord,
        work: Callable[[], Awaitable[bytes]],
    ) -> None:
        super().__init__(media_type="application/json")
        self._services = services
        self._model = model
        self._answer = answer
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Work and send."""
        record: RequestRecord = scope[RECORD]
        record.model = self._model

        async def answered() -> None:
            self.body = await self._work()
            record.answer = self._answer
            self.init_headers()
            await super(_ReadingResponse, self).__call__(scope, receive, send)

        self._services.held.make_way()
        with self._services.active.entered(record) as active:
            try:
                record.is_aborted = not await unless_disconnected(receive, answered())
            except asyncio.CancelledError:
                raise active.ended_by() from None
            finally:
                self._answer.close()
