from __future__ import annotations

from holdfast.http.ollama.dialect import ollama_error
from holdfast.http.server.problem import Problem


def test_an_error_is_its_sentence() -> None:
    assert ollama_error(Problem(status=404, code="odd", message="no", field="stop")) == {"error": "no"}
