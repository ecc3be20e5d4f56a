"""How an error looks in each protocol. What it says and its status are decided in `errors`; here it only gets its form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong; `param` names the field of the request, such as messages.0.content."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class AnthropicDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Anthropic's kind of error, and the message."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True):
    """An error as clients of Anthropic's API expect it."""

    type: Literal["error"] = "error"
    error: AnthropicDetail


class OllamaError(msgspec.Struct, frozen=True, kw_only=True):
    """An error as clients of Ollama expect it."""

    error: str


ErrorForm: TypeAlias = Callable[[int, ErrorDetail], bytes]

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def openai_error(status: int, detail: ErrorDetail) -> bytes:
    """OpenAI's form, also that of its Responses."""
    return msgspec.json.encode(ErrorBody(error=detail))


def anthropic_error(status: int, detail: ErrorDetail) -> bytes:
    """Anthropic's form. Its clients choose the exception by the status, and show type and message."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode(AnthropicError(error=AnthropicDetail(type=kind, message=detail.message)))


def ollama_error(status: int, detail: ErrorDetail) -> bytes:
    """Ollama's form."""
    return msgspec.json.encode(OllamaError(error=detail.message))
