"""/admin/requests: the requests under way, and how to end one."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.server.dialect import answers_of, operation
from holdfast.front.server.in_progress import ActiveRequest, RequestState
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.request import json_response
from holdfast.front.server.services import Services

REQUESTS_PATH = "/admin/requests"


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is being answered.

    state: waiting (for its model, or to be taken), reading (in the queue, or its prompt is read),
    writing, or abandoned (its client is gone and may come back for the answer). key: the name of
    the API key that it came with, empty for none. client: its address. prefilled_tokens: how much
    of a prompt that takes long is read, 0 as long as nothing is known.
    """

    id: str
    model: str
    state: RequestState
    path: str
    key: str
    client: str
    session_id: str
    age_seconds: float
    prompt_tokens: int
    prefilled_tokens: int
    answer_tokens: int


class RunningRequests(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, the oldest first."""

    requests: list[RunningRequest]


class CancelledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was ended. Its client gets an error that says so."""

    id: str
    cancelled: bool = True


@operation(
    "GET",
    REQUESTS_PATH,
    answers_of(RunningRequests),
    summary="what is being answered, for whom",
    needs_admin=True,
)
async def list_requests(request: Request, services: Services) -> Response:
    """The requests that are being answered.

    Needs an admin's key, or without any keys a connection from this machine.
    """
    return json_response(RunningRequests(requests=[_shown(active) for active in services.active]))


@operation("DELETE", REQUESTS_PATH + "/{id}", answers_of(CancelledRequest), needs_admin=True)
async def cancel_request(request: Request, services: Services) -> Response:
    """Cancel a request; its client gets an error that says so.

    What was read of its prompt stays in memory.
    """
    request_id: str = request.path_params["id"]
    if services.active.cancel(request_id) is None:
        raise RequestRefused(
            f"no request {request_id[:200]!r} is being answered",
            status=404,
            code="request_not_found",
            field="id",
        )
    return json_response(CancelledRequest(id=request_id))


def _shown(active: ActiveRequest) -> RunningRequest:
    record, answer = active.record, active.record.answer
    return RunningRequest(
        id=active.id,
        model=record.model,
        state=active.state,
        path=record.path,
        key=record.key,
        client=record.client,
        session_id=record.asked.session_id if record.asked is not None else "",
        age_seconds=round(record.seconds, 3),
        prompt_tokens=0 if answer is None else answer.prompt_tokens,
        prefilled_tokens=0 if answer is None else answer.prefilled_tokens,
        answer_tokens=0 if answer is None else answer.tokens,
    )
