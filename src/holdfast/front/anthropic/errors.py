"""Anthropic's form of an error, with the words that its clients look for."""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.errors import PromptTooLong
from holdfast.front.server.problem import Problem

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
STATUSES = {"queue_full": 529}  # of problems that Anthropic gives another status


class MessagesErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong."""

    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success, and the event that ends a stream that fails."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | msgspec.UnsetType = msgspec.UNSET


def anthropic_error(problem: Problem) -> MessagesError:
    """The body of an answer that says what went wrong.

    Clients choose the exception by the status, and show type and message.
    """
    kind = _KINDS.get(
        problem.status, "invalid_request_error" if problem.status < 500 else "api_error"
    )
    return MessagesError(
        error=MessagesErrorDetail(type=kind, message=_message(problem)),
        request_id=problem.request_id or msgspec.UNSET,
    )


def _message(problem: Problem) -> str:
    """Claude Code knows by these words, and the two numbers, that it has to make the conversation
    shorter.
    """
    if isinstance(cause := problem.cause, PromptTooLong):
        most = min(cause.context_tokens, cause.prompt_tokens - 1)  # an answer needs a token too
        return f"prompt is too long: {cause.prompt_tokens} tokens > {most} maximum"
    return problem.message_with_field
