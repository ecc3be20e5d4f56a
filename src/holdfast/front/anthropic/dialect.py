"""Anthropic's dialect."""

from __future__ import annotations

from holdfast.front.anthropic.errors import STATUSES, MessagesError, anthropic_error
from holdfast.front.anthropic.messages import count_message_tokens, create_message
from holdfast.front.anthropic.models import ANTHROPIC_MODELS
from holdfast.front.server.dialect import Dialect

ANTHROPIC = Dialect(
    name="Anthropic's Messages API",
    error=anthropic_error,
    error_shape=MessagesError,
    prefixes=("/v1/messages", "/v1/complete"),
    is_spoken=lambda headers: "anthropic-version" in headers,
    models=ANTHROPIC_MODELS,
    statuses=STATUSES,
    serves="Anthropic's messages: /v1/messages",
    operations=(create_message, count_message_tokens),
)
