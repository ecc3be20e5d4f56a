"""The one home of error → status: every failure becomes a problem here, which each dialect then
puts into its own form.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping

from holdfast.errors import (
    GenerationFailed,
    HoldfastError,
    InvalidRequest,
    ModelInUse,
    ModelLoadError,
    ModelPinned,
    NoSuchModel,
    PromptTooLong,
    QueueFull,
    ResponsesUnavailable,
    ServerStopping,
    SessionFailure,
    SessionRefused,
    TemplateOverrun,
    TimeLimitExceeded,
    TooLargeForMemory,
    UnknownModel,
    WorkerUnavailable,
)
from holdfast.telemetry.request_log import RequestRecord

_log = logging.getLogger(__name__)
_RETRY_WHEN_UNAVAILABLE_SECONDS = 1
_NO_RETRY = {"x-should-retry": "false"}  # the SDKs of OpenAI and Anthropic retry a 5xx otherwise
_SESSION_FAILURES = {
    SessionFailure.NOT_FOUND: (404, "session_not_found"),
    SessionFailure.EXISTS: (409, "session_exists"),
    SessionFailure.OVER_QUOTA: (409, "session_over_quota"),
    SessionFailure.NOT_KEPT: (409, "session_not_kept"),
    SessionFailure.NO_ROOM: (507, "session_no_room"),
    SessionFailure.TOO_MANY: (409, "too_many_sessions"),
    SessionFailure.INVALID: (400, "invalid_value"),
    SessionFailure.BUSY: (503, "session_transfers_busy"),
    SessionFailure.OFF: (409, "sessions_off"),
    SessionFailure.BAD_FILE: (400, "session_file_damaged"),
    SessionFailure.OTHER_MODEL: (400, "session_of_another_model"),
    SessionFailure.FAILED: (500, "session_failed"),
}


class RequestRefused(InvalidRequest):
    """A request that the HTTP front itself turns down, with the status and code to say so."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        field: str = "",
        shown: str = "",
        retry_after_seconds: int = _RETRY_WHEN_UNAVAILABLE_SECONDS,
    ) -> None:
        super().__init__(message, field=field, shown=shown)
        self.status, self.code, self.retry_after_seconds = status, code, retry_after_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What went wrong with a request. From 500 on it is the server's fault, below the client's."""

    status: int
    code: str
    message: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    field: str | None = None  # of the request, such as messages.0.content
    cause: HoldfastError | None = None  # for dialects that have words of their own for it
    request_id: str = ""  # as the answer's header has it

    @property
    def message_with_field(self) -> str:
        """For forms that have no place of its own for the field: the message, which names it in any
        case.
        """
        return (
            f"`{self.field}`: {self.message}"
            if self.field and self.field not in self.message
            else self.message
        )


def problem_of(error: BaseException) -> Problem:
    """The problem that any error is.

    What is not ours is logged with its traceback and shown as a bare 500.
    """
    match error:
        case InvalidRequest():
            return _client_problem(error)
        case QueueFull() | ServerStopping():
            code = "queue_full" if isinstance(error, QueueFull) else "server_stopping"
            return Problem(
                status=503, code=code, message=str(error), headers=_later(error.retry_after_seconds)
            )
        case WorkerUnavailable():
            return Problem(
                status=503,
                code="model_unavailable",
                message=str(error),
                headers=_later(error.retry_after_seconds),
            )
        case NoSuchModel():
            return Problem(status=404, code="model_not_found", message=str(error))
        case ModelLoadError():
            return Problem(
                status=503, code="model_unavailable", message=str(error), headers=_headers(503)
            )
        case ResponsesUnavailable():
            return Problem(
                status=503, code="responses_unavailable", message=str(error), headers=_headers(503)
            )
        case TimeLimitExceeded():
            # Whoever has set the limit knows better than a client's library whether to go on.
            return Problem(
                status=504, code="time_limit_exceeded", message=str(error), headers=_NO_RETRY
            )
        case TemplateOverrun():  # it would take as much of the next try
            return Problem(
                status=500, code="chat_template_overrun", message=str(error), headers=_NO_RETRY
            )
        case GenerationFailed():
            headers = _NO_RETRY if error.is_deadly else {}
            return Problem(
                status=500, code="generation_failed", message=str(error), headers=headers
            )
        case HoldfastError():
            _log.error("unexpected %s: %s", type(error).__name__, error)
            return Problem(status=500, code="internal_error", message=str(error))
        case _:
            _log.error("unexpected error in a request", exc_info=error)
            message = f"internal error ({type(error).__name__}); the server's log has the details"
            return Problem(status=500, code="internal_error", message=message)


def record_problem(record: RequestRecord, problem: Problem, error: BaseException) -> None:
    """Write into a request's record, for the log, why it failed."""
    record.fail(
        code=problem.code,
        message=error.loggable if isinstance(error, InvalidRequest) else problem.message,
    )


def _client_problem(error: InvalidRequest) -> Problem:
    status, code, retry_seconds = 400, "invalid_value", _RETRY_WHEN_UNAVAILABLE_SECONDS
    match error:
        case RequestRefused():
            status, code, retry_seconds = error.status, error.code, error.retry_after_seconds
        case UnknownModel():
            status, code = 404, "model_not_found"
        case ModelPinned():
            status, code = 409, "model_pinned"
        case ModelInUse():
            status, code = 409, "model_in_use"
        case PromptTooLong():
            code = "context_length_exceeded"
        case TooLargeForMemory():
            code = "request_too_large_for_memory"
        case SessionRefused():
            status, code = _SESSION_FAILURES[error.failure]
    headers = _headers(status, retry_seconds=retry_seconds)
    return Problem(
        status=status,
        code=code,
        message=str(error),
        field=error.field or None,
        headers=headers,
        cause=error,
    )


def _later(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def _headers(
    status: int, *, retry_seconds: int = _RETRY_WHEN_UNAVAILABLE_SECONDS
) -> dict[str, str]:
    # Claude Code asks eleven times, over three minutes, before it says that the key is wrong,
    # unless it is told not to.
    refused = {"www-authenticate": "Bearer", **_NO_RETRY}
    later = {"retry-after": str(retry_seconds)}
    return {401: refused, 415: {"accept-encoding": "gzip, deflate"}, 429: later, 503: later}.get(
        status, {}
    )
