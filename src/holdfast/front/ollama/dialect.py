"""Ollama's dialect: its form of errors, and what of it is served."""

from __future__ import annotations

from holdfast.front.ollama.answer import OllamaError
from holdfast.front.ollama.embed import ollama_embed, ollama_embeddings
from holdfast.front.ollama.generation import ollama_chat, ollama_generate
from holdfast.front.ollama.library import REFUSED, ollama_delete, ollama_pull
from holdfast.front.ollama.models import ollama_ps, ollama_show, ollama_tags, ollama_version
from holdfast.front.server.dialect import Dialect
from holdfast.front.server.problem import Problem


def ollama_error(problem: Problem) -> OllamaError:
    """Ollama's form."""
    return OllamaError(error=problem.message_with_field)


OLLAMA = Dialect(
    name="Ollama's API",
    error=ollama_error,
    error_shape=OllamaError,
    prefixes=("/api",),
    serves="Ollama's API: /api/chat, /api/generate, /api/embed, /api/tags, /api/show",
    operations=(
        ollama_chat,
        ollama_generate,
        ollama_embed,
        ollama_embeddings,
        ollama_tags,
        ollama_show,
        ollama_ps,
        ollama_version,
        ollama_pull,
        ollama_delete,
        *REFUSED,
    ),
)
