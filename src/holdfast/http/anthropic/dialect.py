"""Anthropic's dialect. It is not served yet: its clients are told so in its form."""

from __future__ import annotations

from typing import Any

from holdfast.http.server.dialect import Dialect
from holdfast.http.server.problem import Problem

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(problem: Problem) -> dict[str, Any]:
    """Anthropic's form. Its clients choose the exception by the status, and show type and message."""
    kind = _KINDS.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


ANTHROPIC = Dialect(
    name="Anthropic's Messages API",
    error=anthropic_error,
    prefixes=("/v1/messages", "/v1/complete"),
    unserved_status=400,  # of a 404 Claude Code says that something is wrong with the model's name
)
