"""The one home of error → status. Every failure of every endpoint becomes OpenAI's error object here."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
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
from holdfast.session_messages import SessionFailure

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
_FRAMEWORK_MESSAGES = {
    404: ("this server has no such path", "unknown_path"),
    405: ("this path does not know this method", "method_not_allowed"),
}


class RequestRefused(InvalidRequest):
    """A request that the HTTP front itself turns down, with the status and code to say so."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_value", field: str = "") -> None:
        super().__init__(message, field=field)
        self.status, self.code = status, code


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong; `param` names the field of the request, such as messages.0.content."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error as the client sees it."""

    status: int
    detail: ErrorDetail
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """The JSON body."""
        return msgspec.json.encode(ErrorBody(error=self.detail))

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.body, status_code=self.status, headers=self.headers, media_type="application/json")


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
    message, code = _FRAMEWORK_MESSAGES.get(error.status_code, (str(error.detail), "http_error"))
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
            _log.debug("client gone before it had sent its request")
        except Exception as error:
            if started:
                _log.error("error after the answer was begun", exc_info=error)
                return
            await problem_of(error).response()(scope, receive, send)


async def _answer(_: Request, error: Exception) -> Response:
    return problem_of(error).response()


def install(app: FastAPI) -> None:
    """Make the framework's own errors (unknown path, wrong method) and ours come out in one shape."""
    handlers: dict[Any, Any] = {HTTPException: _answer, HoldfastError: _answer}
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(ErrorBoundary)
