from __future__ import annotations

import json

import msgspec
import pytest

from holdfast.front.openai.answers import openai_error
from holdfast.front.server.problem import Problem


@pytest.mark.parametrize(
    ("status", "kind", "advice"),
    [
        (404, "invalid_request_error", "fix_request"),
        (429, "rate_limit_error", "wait"),
        (500, "server_error", "wait"),
        (503, "server_error", "wait"),
    ],
)
def test_the_error_type_follows_the_status(status: int, kind: str, advice: str) -> None:
    said = openai_error(Problem(status=status, code="odd", message="no", field="stop"))
    assert json.loads(msgspec.json.encode(said)) == {
        "error": {
            "message": "no",
            "type": kind,
            "param": "stop",
            "code": "odd",
            "advice": advice,
        }
    }


def test_an_error_without_a_field_has_a_null_param() -> None:
    assert openai_error(Problem(status=400, code="odd", message="no")).error.param is None
