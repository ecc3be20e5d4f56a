from __future__ import annotations

import json

import msgspec
import pytest

from holdfast.front.openai.answers import openai_error
from holdfast.front.server.problem import Problem


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, "invalid_request_error"), (500, "server_error"), (503, "server_error")],
)
def test_whose_fault_it_is_follows_the_status(status: int, kind: str) -> None:
    said = openai_error(Problem(status=status, code="odd", message="no", field="stop"))
    assert json.loads(msgspec.json.encode(said)) == {
        "error": {"message": "no", "type": kind, "param": "stop", "code": "odd"}
    }


def test_no_field_is_null() -> None:
    assert openai_error(Problem(status=400, code="odd", message="no")).error.param is None
