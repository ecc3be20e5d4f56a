"""Maps errors to HTTP statuses. No other module decides which status and code a failure gets.

Each protocol puts the resulting `Problem` into its own format.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from holdfast.errors import (
    GenerationFailed,
    HoldfastError,
    ImagesRefused,
    ImageTooLarge,
    ImageUnresolved,
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
    UnusableModel,
    WorkerUnavailable,
)
from holdfast.front.telemetry.request_log import RequestRecord

_log = logging.getLogger(__name__)
Advice: TypeAlias = Literal["compact", "shrink_image", "wait", "fix_request", "pull_model", "none"]
_NO_RETRY = {"x-should-retry": "false"}  # otherwise the SDKs of OpenAI and Anthropic retry
_OVERFLOW = "context_length_exceeded"
# Words in a 400 that agents such as Goose and Hermes take for a context overflow; they then compact
# the conversation. tests/fakes/agent_rules.py has their rules.
_OVERFLOW_WORDS = re.compile(
    r"too long|exceeds|max_tokens|max_model_len|too many tokens|reduce the length"
    r"|context (length|size|window|limit)|maximum context|token (limit|count)"
    r"|(input|prompt) length|maximum (model|prompt) length|input token|maximum number of tokens"
    r"|context_length_exceeded|truncating input|slot context|n_ctx",
    re.IGNORECASE,
)
_PROBLEMS: Mapping[type[BaseException], tuple[int, str]] = {  # the most specific class applies
    InvalidRequest: (400, "invalid_value"),
    PromptTooLong: (400, _OVERFLOW),
    TooLargeForMemory: (400, "request_too_large_for_memory"),
    ImageTooLarge: (400, "image_too_large"),
    ImagesRefused: (400, "unsupported_content"),
    UnknownModel: (404, "model_not_found"),
    ModelPinned: (409, "model_pinned"),
    ModelInUse: (409, "model_in_use"),
    QueueFull: (503, "queue_full"),
    ServerStopping: (503, "server_stopping"),
    WorkerUnavailable: (503, "model_unavailable"),
    ModelLoadError: (503, "model_unavailable"),
    UnusableModel: (422, "model_unusable"),
    NoSuchModel: (404, "model_not_found"),
    ResponsesUnavailable: (503, "responses_unavailable"),
    TimeLimitExceeded: (504, "time_limit_exceeded"),
    TemplateOverrun: (500, "chat_template_overrun"),
    ImageUnresolved: (500, "image_unresolved"),
    GenerationFailed: (500, "generation_failed"),
}
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
# What a client can do about a problem, if that does not follow from the status.
_ADVICE: Mapping[str, Advice] = {
    _OVERFLOW: "compact",
    "body_too_large": "compact",  # large bodies are long histories with images
    "image_too_large": "shrink_image",
    "model_not_found": "pull_model",
    "model_unusable": "pull_model",  # again, or in another format
    "model_in_use": "wait",
    "previous_response_in_progress": "wait",
    "response_elsewhere": "wait",
    "request_timeout": "wait",
    "internal_error": "none",
    "session_failed": "none",
    "session_no_room": "none",
    "pull_failed": "none",
}
_ADVICE_OF_STATUS: Mapping[int, Advice] = {401: "none", 403: "none", 421: "none", 429: "wait"}


class RequestRefused(InvalidRequest):
    """The error for a request that the front refuses, with its HTTP status and error code."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        field: str = "",
        shown: str = "",
        retry_after_seconds: float = 1,
    ) -> None:
        """message: for the client. field: the request field at fault; empty if it is none.
        shown: the end of the message that quotes the value, which the log leaves out.
        """
        super().__init__(message, field=field, shown=shown)
        self.status = status
        self.code = code
        self.retry_after_seconds = retry_after_seconds


def invalid_field(
    field: str, reason: str, *, code: str = "invalid_value", shown: str = ""
) -> RequestRefused:
    """The error for an invalid field (400).

    shown: the end of the message, which quotes the value and is omitted in the log.
    """
    return RequestRefused(f"`{field}`: {reason}", code=code, field=field, shown=shown)


def missing_field(field: str) -> RequestRefused:
    """The error for a required field that is missing (400)."""
    return RequestRefused(f"`{field}` is required", code="missing_required_parameter", field=field)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What went wrong with a request. If `status` is 500 or more, the server is at fault."""

    status: int
    code: str  # for programs, such as model_not_found
    message: str  # for people
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    field: str | None = None  # the field at fault in the request, such as messages.0.content
    cause: HoldfastError | None = None  # the error itself, for protocols with their own wording
    request_id: str = ""  # the id in the answer's header

    @property
    def advice(self) -> Advice:
        """What a client program can do; docs/reference/errors.md explains the values."""
        if self.headers.get("x-should-retry") == "false":
            return "none"
        by_status = _ADVICE_OF_STATUS.get(
            self.status, "wait" if self.status >= 500 else "fix_request"
        )
        return _ADVICE.get(self.code, by_status)

    @property
    def message_with_field(self) -> str:
        """The message, preceded by the name of the field at fault unless it contains that name.

        Used by protocols whose error format has no separate place for the name.
        """
        if self.field and self.field not in self.message:
            return f"`{self.field}`: {self.message}"
        return self.message


def problem_of(error: BaseException) -> Problem:
    """Convert any error to a `Problem`.

    Unexpected errors are logged with their traceback; clients get status 500 and the error's type.
    """
    status, code = _status_of(error)
    message = str(error)
    if not isinstance(error, HoldfastError):
        _log.error("unexpected error in a request", exc_info=error)
        message = f"internal error ({type(error).__name__}); the server's log has the details"
    elif code == "internal_error":
        _log.error("unexpected %s: %s", type(error).__name__, error)
    invalid_request = error if isinstance(error, InvalidRequest) else None
    field = invalid_request.field if invalid_request else ""
    if (
        invalid_request is not None
        and code != _OVERFLOW
        and _OVERFLOW_WORDS.search(f"{message} {field}")
    ):
        # The words come from the request itself. A quoted value is left out. If the name of a field
        # has them, the status is 422, because agents search only a 400 for these words.
        message = invalid_request.loggable
        if status == 400 and _OVERFLOW_WORDS.search(f"{message} {field}"):
            status = 422
    return Problem(
        status=status,
        code=code,
        message=message,
        headers=_headers(status, error),
        field=field or None,
        cause=invalid_request,
    )


def record_problem(record: RequestRecord, problem: Problem, error: BaseException) -> None:
    """Note in a request's record why the request failed, for the log."""
    message = error.loggable if isinstance(error, InvalidRequest) else problem.message
    record.fail(code=problem.code, message=message)


def _status_of(error: BaseException) -> tuple[int, str]:
    """The HTTP status and the error code."""
    if isinstance(error, RequestRefused):
        return error.status, error.code
    if isinstance(error, SessionRefused):
        return _SESSION_FAILURES[error.failure]
    by_class = (_PROBLEMS[each] for each in type(error).__mro__ if each in _PROBLEMS)
    return next(by_class, (500, "internal_error"))


def _headers(status: int, error: BaseException) -> Mapping[str, str]:
    """The headers that tell clients whether and when to try again, and what is accepted."""
    if status in (429, 503):
        seconds = getattr(error, "retry_after_seconds", 1)
        return {"retry-after": str(max(1, math.ceil(seconds)))}
    if status == 401:
        # Claude Code would retry a wrong key eleven times in three minutes.
        return {"www-authenticate": "Bearer", **_NO_RETRY}
    if status == 415:
        return {"accept-encoding": "gzip, deflate"}
    # After a time limit, the client or administrator who set it decides about a retry; a chat
    # template that overran, or that left out an image, would do so again.
    is_final = isinstance(error, TimeLimitExceeded | TemplateOverrun | ImageUnresolved)
    # a request that has killed several workers would kill the next one, too
    is_deadly = isinstance(error, GenerationFailed) and error.is_deadly
    return _NO_RETRY if is_final or is_deadly else {}
