"""The one home of error → status. Every failure of every endpoint becomes an error in its protocol's form here."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import (
    GenerationFailed,
    HoldfastError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    SessionRefused,
    TooLargeForMemory,
    UnknownModel,
    WorkerUnavailable,
)
from holdfast.http.error_forms import ErrorDetail, openai_error
from holdfast.http.paths import meant_path, served_path
from holdfast.http.protocols import error_form, unserved_protocol
from holdfast.messages.sessions import SessionFailure
from holdfast.telemetry.request_log import RequestRecord

_log = logging.getLogger(__name__)
_CLIENT_FAULT = "invalid_request_error"
_SERVER_FAULT = "server_error"
_RETRY_WHEN_UNAVAILABLE_SECONDS = 1
_SESSION_FAILURES = {
    SessionFailure.NOT_FOUND: (404, "session_not_found"),
    SessionFailure.EXISTS: (409, "session_exists"),
    SessionFailure.OVER_QUOTA: (409, "session_over_quota"),
    SessionFailure.NO_ROOM: (507, "session_no_room"),
    SessionFailure.TOO_MANY: (409, "too_many_sessions"),
    SessionFailure.INVALID: (400, "invalid_value"),
    SessionFailure.BUSY: (503, "session_transfers_busy"),
    SessionFailure.OFF: (409, "sessions_off"),
    SessionFailure.BAD_FILE: (400, "session_file_damaged"),
    SessionFailure.OTHER_MODEL: (400, "session_of_another_model"),
    SessionFailure.FAILED: (500, "session_failed"),
}
RECORD = "holdfast.record"  # key of a request's RequestRecord in its ASGI scope
_LONGEST_PATH = 100
_SERVED = "It serves OpenAI's chat completions and completions: /v1/chat/completions, /v1/completions, /v1/models"


class RequestRefused(InvalidRequest):
    """A request that the HTTP front itself turns down, with the status and code to say so."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_value", field: str = "", shown: str = "") -> None:
        super().__init__(message, field=field, shown=shown)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error as the client sees it."""

    status: int
    detail: ErrorDetail
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """The JSON body in OpenAI's form."""
        return openai_error(self.status, self.detail)

    def body_on(self, path: str) -> bytes:
        """The JSON body in the form of the protocol to which a path belongs."""
        return error_form(path)(self.status, self.detail)

    def response(self, path: str) -> Response:
        """The whole answer on a path."""
        return Response(self.body_on(path), status_code=self.status, headers=self.headers, media_type="application/json")


def answer_of(error: Exception, scope: Scope) -> Response:
    """The answer to a request that failed; its record, if it has one, gets the reason for the log."""
    path = served_path(scope["path"])
    problem = problem_of(refused_path(path, scope, error) if isinstance(error, HTTPException) else error)
    record: RequestRecord | None = scope.get(RECORD)
    if record is not None:
        note_problem(record, problem, error)
    return problem.response(path)


def note_problem(record: RequestRecord, problem: Problem, error: BaseException) -> None:
    """Tell the log why a request failed."""
    loggable = error.loggable if isinstance(error, InvalidRequest) else problem.detail.message
    record.fail(code=problem.detail.code or problem.detail.type, message=loggable)


def refused_path(path: str, scope: Scope, error: HTTPException) -> Exception:
    """What to say in place of the framework's own error about a path or a method."""
    method = scope["method"]
    protocol = unserved_protocol(path)
    if protocol is not None and error.status_code in (404, 405):
        message = f"{protocol.name} is not served by this version of Holdfast yet ({method} {path}). {_SERVED}"
        return RequestRefused(message, status=protocol.unserved_status, code="protocol_not_served")
    if error.status_code == 404:
        meant = meant_path(path)
        hint = f". {_SERVED}" if meant is None else f"; did you mean {meant}?"
        return RequestRefused(f"this server has no path {path[:_LONGEST_PATH]}{hint}", status=404, code="unknown_path")
    if error.status_code == 405:
        return HTTPException(405, headers={"Allow": ", ".join(_methods(scope))})
    return error


def _methods(scope: Scope) -> list[str]:
    """All methods that a path has; the framework names those of one route only."""
    matching = (route for route in scope["app"].routes if route.matches(scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in getattr(route, "methods", None) or ()})


def problem_of(error: BaseException) -> Problem:
    """The status and body for any error. What is not ours is logged with its traceback and shown as a bare 500."""
    match error:
        case InvalidRequest():
            return _client_problem(error)
        case QueueFull():
            retry = str(max(1, math.ceil(error.retry_after_seconds)))
            return _problem(503, str(error), _SERVER_FAULT, code="queue_full", headers={"retry-after": retry})
        case WorkerUnavailable():
            headers = {"retry-after": str(_RETRY_WHEN_UNAVAILABLE_SECONDS)}
            return _problem(503, str(error), _SERVER_FAULT, code="model_unavailable", headers=headers)
        case GenerationFailed():
            return _problem(500, str(error), _SERVER_FAULT, code="generation_failed")
        case HTTPException():
            return _framework_problem(error)
        case HoldfastError():
            _log.error("unexpected %s: %s", type(error).__name__, error)
            return _problem(500, str(error), _SERVER_FAULT, code="internal_error")
        case _:
            _log.error("unexpected error in a request", exc_info=error)
            message = f"internal error ({type(error).__name__}); the server's log has the details"
            return _problem(500, message, _SERVER_FAULT, code="internal_error")


def _client_problem(error: InvalidRequest) -> Problem:
    status, code = 400, "invalid_value"
    match error:
        case RequestRefused():
            status, code = error.status, error.code
        case UnknownModel():
            status, code = 404, "model_not_found"
        case PromptTooLong():
            code = "context_length_exceeded"
        case TooLargeForMemory():
            code = "request_too_large_for_memory"
        case SessionRefused():
            status, code = _SESSION_FAILURES[error.failure]
    headers = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": str(_RETRY_WHEN_UNAVAILABLE_SECONDS)}}.get(status, {})
    kind = _CLIENT_FAULT if status < 500 else _SERVER_FAULT
    return _problem(status, str(error), kind, code=code, param=error.field or None, headers=headers)


def _framework_problem(error: HTTPException) -> Problem:
    message, code = str(error.detail), "http_error"
    if error.status_code == 405:
        message, code = f"this path takes {(error.headers or {}).get('Allow', 'other methods')}", "method_not_allowed"
    kind = _CLIENT_FAULT if error.status_code < 500 else _SERVER_FAULT
    return _problem(error.status_code, message, kind, code=code, headers=dict(error.headers or {}))


def _problem(
    status: int, message: str, kind: str, *, code: str, param: str | None = None, headers: dict[str, str] | None = None
) -> Problem:
    return Problem(status=status, detail=ErrorDetail(message=message, type=kind, param=param, code=code), headers=headers or {})


class ErrorBoundary:
    """ASGI middleware that turns whatever escapes an endpoint into an answer, as long as none has been started."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            record: RequestRecord | None = scope.get(RECORD)
            if record is not None:
                record.is_aborted = True
        except Exception as error:
            if started:
                _log.error("error after the answer was begun", exc_info=error)
                return
            await answer_of(error, scope)(scope, receive, send)


async def _answer(request: Request, error: Exception) -> Response:
    return answer_of(error, request.scope)


def install(app: FastAPI) -> None:
    """Make the framework's own errors (unknown path, wrong method) and ours come out in one shape."""
    handlers: dict[Any, Any] = {HTTPException: _answer, HoldfastError: _answer}
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(ErrorBoundary)
