"""OpenAI's form of an error, also that of its Responses."""

from __future__ import annotations

import msgspec

from holdfast.front.server.problem import Problem


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong; `param` names the field of the request, such as messages.0.content."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


def openai_error(problem: Problem) -> ErrorBody:
    """The body of an answer that says what went wrong."""
    kind = (
        "rate_limit_error"
        if problem.status == 429
        else "invalid_request_error"
        if problem.status < 500
        else "server_error"
    )
    return ErrorBody(
        error=ErrorDetail(
            message=problem.message, type=kind, param=problem.field, code=problem.code
        )
    )
