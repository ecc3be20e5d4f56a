from __future__ import annotations

import json

import pytest

from holdfast.http.error_forms import ErrorDetail, anthropic_error, ollama_error, openai_error

DETAIL = ErrorDetail(message="no", type="server_error", param="stop", code="odd")


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
    assert json.loads(anthropic_error(status, DETAIL)) == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_the_other_forms_carry_the_same_message() -> None:
    assert json.loads(ollama_error(404, DETAIL)) == {"error": "no"}
    assert json.loads(openai_error(404, DETAIL)) == {
        "error": {"message": "no", "type": "server_error", "param": "stop", "code": "odd"}
    }
