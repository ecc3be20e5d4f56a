from __future__ import annotations

import pytest

from holdfast.http.anthropic.dialect import anthropic_error
from holdfast.http.server.problem import Problem


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (421, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_anthropics_kinds_follow_the_status(status: int, kind: str) -> None:
    problem = Problem(status=status, code="odd", message="no", field="stop")
    assert anthropic_error(problem) == {"type": "error", "error": {"type": kind, "message": "no"}}
