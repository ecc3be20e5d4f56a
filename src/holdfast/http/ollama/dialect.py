"""Ollama's dialect. It is not served yet: its clients are told so in its form."""

from __future__ import annotations

from holdfast.http.server.dialect import Dialect
from holdfast.http.server.problem import Problem


def ollama_error(problem: Problem) -> dict[str, str]:
    """Ollama's form."""
    return {"error": problem.message}


OLLAMA = Dialect(
    name="Ollama's API",
    error=ollama_error,
    prefixes=("/api",),
    unserved_status=400,  # a 404 means that a model has to be pulled
)
